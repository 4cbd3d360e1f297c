"""Captured graphs on disk, so that thousands of ranks need not each capture.

The key of a graph is a digest of all that it depends on: the model (classes, modules, attributes, names and shapes of
parameters and buffers, which of them are tied), the text of the files that the model's code is in and of those that
they import, the batch's shapes, the loss function, registered rules, versions, and Planloom's own text. What is
installed (site-packages, the standard library) counts by its version, everything else by its text. Values of
parameters do not count, nor does the device.

Something without a description (a lambda typed into a shell, an object of a C library) makes the graph uncacheable:
then it is captured every time, which is slow but never wrong.

A file holds the graph as JSON and a checksum. It is written beside its place and renamed, so several processes may
write the same; one that cannot be read is captured again.
"""

import hashlib
import importlib.metadata
import inspect
import os
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from planloom.capture.batch import Batch, batch_spec
from planloom.capture.capture import LossFunction, capture
from planloom.capture.rules.custom import registered, registered_targets
from planloom.graph import Graph

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.memory_format)
_MODULE_FIELDS = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = tuple(sorted(name for name in _MODULE_FIELDS if name.endswith("_hooks")))
_LARGEST_TENSOR = 1 << 14  # of an attribute: translate.py refuses larger constants
_INSTALLED = tuple(str(Path(sysconfig.get_paths()[name]).resolve()) for name in ("purelib", "platlib"))
_HUGGING_FACE_HASH = "_original_object_hash"  # of a GenerationConfig: another number in every process
_OWN_PACKAGES = ("capture", "graph")


def cached_capture(model: nn.Module, batch: Batch, *, folder: Path | str, loss: LossFunction | None = None) -> Graph:
    """`capture(model, batch, loss=loss)`, or the same from a file that an earlier call has left in `folder`."""
    key = capture_key(model, batch, loss)
    path = Path(folder) / f"{key}.json"
    graph = _read(path) if key is not None else None
    if graph is None:
        graph = capture(model, batch, loss=loss)
        if key is not None:
            _write(path, graph)
    return graph


def capture_key(model: nn.Module, batch: Batch, loss: LossFunction | None = None) -> str | None:
    """A digest of all that the graph depends on; None where something has no description."""
    describe = _Description()
    try:
        described = [
            ["versions", str(torch.__version__), list(sys.version_info[:2]), _own_text()],
            ["modes", str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")],
            ["batch", describe(batch_spec(batch, model))],
            ["loss", describe(loss)],
            ["rules", [[target, describe(registered(target))] for target in sorted(registered_targets())]],
            ["model", describe.model(model)],
            ["text", describe.text()],
        ]
    except _NoDescriptionError:
        return None
    return hashlib.sha256(msgspec.json.encode(described)).hexdigest()


class _NoDescriptionError(Exception):
    """Something whose meaning cannot be written down."""


class _Description:
    """Values as JSON, the same in every process; the Python modules of classes and functions are noted on the way."""

    def __init__(self) -> None:
        self.python_modules: set[str] = set()
        self._places: dict[int, int] = {}  # of objects on the way: cycles, ties and shared objects are numbers
        self._kept: list[Any] = []  # so that no id is used twice

    def model(self, model: nn.Module) -> Any:
        return [[path, self._module(module)] for path, module in model.named_modules(remove_duplicate=False)]

    def _module(self, module: nn.Module) -> Any:
        place = self._place(module)
        if place is not None:
            return place
        if any(vars(module).get(name) for name in _HOOKS):
            hooks = [[self(f) for f in vars(module)[name].values()] for name in _HOOKS]
        else:
            hooks = []
        attributes = {k: v for k, v in vars(module).items() if k not in _MODULE_FIELDS}
        return [
            self._code(type(module)),
            [[name, self._stored(value)] for name, value in module._parameters.items()],
            [
                [name, self._stored(value), name in module._non_persistent_buffers_set]
                for name, value in module._buffers.items()
            ],
            self(attributes),
            hooks,
        ]

    def _stored(self, tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        place = self._place(tensor)
        described = [list(tensor.shape), list(tensor.stride()), str(tensor.dtype), tensor.requires_grad]
        return place if place is not None else described

    def _place(self, thing: Any) -> list[Any] | None:
        """Where this object was met before; None the first time."""
        if id(thing) in self._places:
            return ["again", self._places[id(thing)]]
        self._places[id(thing)] = len(self._places)
        self._kept.append(thing)
        return None

    def __call__(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return [type(value).__name__, repr(value)]
        if isinstance(value, torch.device):
            return ["device"]  # the graph is the same on all
        if isinstance(value, Enum | type | ModuleType):
            return [self._code(value if isinstance(value, type | ModuleType) else type(value)), str(value)]
        if isinstance(value, list | tuple):
            return [type(value).__name__, [self(item) for item in value]]
        if isinstance(value, set | frozenset):
            return [type(value).__name__, sorted(msgspec.json.encode(self(item)).decode() for item in value)]
        if isinstance(value, BuiltinFunctionType):
            return [str(value.__module__), value.__qualname__]
        place = self._place(value)
        if place is not None:
            return place
        if isinstance(value, dict):
            return [type(value).__name__, [[self(k), self(v)] for k, v in value.items()]]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return [self(value.__func__), self(value.__self__)]
        if isinstance(value, partial):
            return ["partial", self(value.func), self(value.args), self(value.keywords)]
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if is_dataclass(value):
            return [self._code(type(value)), [[f.name, self(getattr(value, f.name, None))] for f in fields(value)]]
        if hasattr(value, "__dict__") and not any("__reduce__" in vars(cls) for cls in type(value).__mro__[:-1]):
            inside = {k: v for k, v in vars(value).items() if k != _HUGGING_FACE_HASH}
            return [self._code(type(value)), self(inside)]
        raise _NoDescriptionError(type(value).__qualname__)

    def _code(self, thing: type | ModuleType) -> str:
        for each in thing.__mro__ if isinstance(thing, type) else (thing,):
            self.python_modules.add(each.__module__ if isinstance(each, type) else each.__name__)
        return f"{thing.__module__}.{thing.__qualname__}" if isinstance(thing, type) else thing.__name__

    def _function(self, function: Callable[..., Any]) -> Any:
        self.python_modules.add(function.__module__)
        try:
            text = inspect.getsource(function)
        except (OSError, TypeError):
            raise _NoDescriptionError(function.__qualname__) from None
        inside = [cell.cell_contents for cell in function.__closure__ or ()]
        default = [function.__defaults__, function.__kwdefaults__]
        return [function.__module__, function.__qualname__, text, self(default), self(inside)]

    def _tensor(self, value: Tensor) -> Any:
        """A tensor that is a plain attribute: its values may be written into the graph."""
        if value.is_meta or value.numel() > _LARGEST_TENSOR:
            raise _NoDescriptionError("a large tensor as an attribute")
        return [list(value.shape), str(value.dtype), repr(value.tolist())]

    def text(self) -> Any:
        """The text of all noted Python modules and of those that they refer to; installed ones by name and version."""
        waiting, seen, described = sorted(self.python_modules), set(self.python_modules), set()
        while waiting:
            name = waiting.pop()
            module, path = sys.modules.get(name), getattr(sys.modules.get(name), "__file__", None)
            version = _version(name.partition(".")[0], path)
            if version is not None:
                described.add((name.partition(".")[0], version))
                continue
            if path is None or not Path(path).is_file():
                raise _NoDescriptionError(f"the text of {name}")
            described.add((name, hashlib.sha256(Path(path).read_bytes()).hexdigest()))
            found = {_home(value) for value in vars(module).values()} - seen
            waiting += found
            seen |= found
        return sorted(described)


def _home(value: Any) -> str:
    """The Python module in which a module's global was written."""
    if isinstance(value, ModuleType):
        return value.__name__
    return str((value if isinstance(value, type | FunctionType) else type(value)).__module__)


@cache
def _version(package: str, path: str | None) -> str | None:
    """The version of an installed package; None for what is not installed, or not known by a version."""
    if package in sys.builtin_module_names or package in sys.stdlib_module_names:
        return "python" if package != "__main__" else None
    if path is None or not str(Path(path).resolve()).startswith(_INSTALLED):
        return None
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules[package], "__version__", None)


def _own_text() -> str:
    """Planloom's own code that makes graphs: in development it changes without its version."""
    root = Path(__file__).parent.parent
    files = sorted(path for package in _OWN_PACKAGES for path in (root / package).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


# --- files -----------------------------------------------------------------------------------------------------------


class _File(msgspec.Struct, frozen=True):
    sha256: str
    graph: msgspec.Raw


def _read(path: Path) -> Graph | None:
    """The graph of a file; None if there is none, or not a whole one."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
        if hashlib.sha256(file.graph).hexdigest() == file.sha256:
            return msgspec.json.decode(file.graph, type=Graph)
    except (OSError, msgspec.MsgspecError):
        pass
    return None


def _write(path: Path, graph: Graph) -> None:
    text = msgspec.json.encode(graph)
    if msgspec.json.decode(text, type=Graph) != graph:
        return  # an argument that JSON does not give back as it was
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.stem[:8]}-", delete=False) as beside:
            try:
                content = _File(sha256=hashlib.sha256(text).hexdigest(), graph=msgspec.Raw(text))
                beside.write(msgspec.json.encode(content))
                beside.close()
                os.replace(beside.name, path)
            except BaseException:
                Path(beside.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        warnings.warn(f"the captured graph is not kept: {path}: {error}", RuntimeWarning, stacklevel=3)

"""Captured graphs on disk, so that thousands of ranks need not each capture.

The key of a graph is a digest of all that it depends on: the model (classes, modules, attributes, names and shapes of
parameters and buffers, which of them are tied), the text of the files that the model's code is in and of those that
they import, the batch's shapes, the loss function, registered rules, versions, and Planloom's own text. Values of
parameters do not count, nor does the device.

Text is not all: a class may have been made by a function, changed after its definition, or read a global that was
changed. So the live code counts too. Of every class in the model these are its functions (bytecode, constants,
defaults, what they close over), its attributes, and the globals that the functions name, with the same of all
functions and classes among these. A name counts as a global, or as an attribute of a module that is a global, wherever
it stands in the code; only names that are put together while the code runs are not seen.

What is installed (site-packages, the standard library) counts by its version instead of its text. Its classes in the
model count by their functions, attributes and readable globals, so that a patch is seen there and in the functions of
the same Python module; further away it is not, and of torch nothing but the functions of the modules' classes counts.

Something without a description (a model typed into a shell, an object of a C library) makes the graph uncacheable:
then it is captured every time, which is slow but never wrong.

A file holds the graph as JSON and a checksum. It is written beside its place and renamed, so several processes may
write the same; one that cannot be read is captured again.
"""

import dis
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, cached_property, partial, partialmethod
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from planloom.capture.batch import Batch, batch_spec
from planloom.capture.capture import LossFunction, capture
from planloom.capture.guards import refuse_backward_hooks
from planloom.capture.rules.custom import registered, registered_targets
from planloom.graph import Graph

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.memory_format)
_MODULE_FIELDS = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = tuple(sorted(name for name in _MODULE_FIELDS if name.endswith("_hooks")))
_LARGEST_TENSOR = 1 << 14  # of an attribute: translate.py refuses larger constants
_INSTALLED = tuple(str(Path(sysconfig.get_paths()[name]).resolve()) for name in ("purelib", "platlib"))
_HUGGING_FACE_HASH = "_original_object_hash"  # of a GenerationConfig: another number in every process
_OWN_PACKAGES = ("capture", "graph")
_OF_C = (MethodDescriptorType, WrapperDescriptorType, GetSetDescriptorType, MemberDescriptorType)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_LRU_CACHE = type(cache(lambda: None))
_IMPORT = dis.opmap["IMPORT_NAME"]
_GLOBAL_HOOKS = ("_global_forward_pre_hooks", "_global_forward_hooks")


def cached_capture(model: nn.Module, batch: Batch, *, folder: Path | str, loss: LossFunction | None = None) -> Graph:
    """`capture(model, batch, loss=loss)`, or the same from a file that an earlier call has left in `folder`."""
    refuse_backward_hooks(model, loss)
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
            ["hooks", [describe(dict(getattr(nn.modules.module, name))) for name in _GLOBAL_HOOKS]],
            ["text", describe.text()],
        ]
    except (_NoDescriptionError, RecursionError):
        return None
    return hashlib.sha256(msgspec.json.encode(described)).hexdigest()


class _NoDescriptionError(Exception):
    """Something whose meaning cannot be written down."""


class _Description:
    """Values as JSON, the same in every process; the Python modules of classes and functions are noted on the way."""

    def __init__(self) -> None:
        self.python_modules: set[str] = set()
        self._places: dict[Hashable, int] = {}  # of objects on the way: cycles, ties and shared objects are numbers
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
            self._class(type(module), part_of_model=True),
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

    def _place(self, thing: Any, key: Hashable = None) -> list[Any] | None:
        """Where this object was met before; None the first time."""
        key = id(thing) if key is None else key
        if key in self._places:
            return ["again", self._places[key]]
        self._places[key] = len(self._places)
        self._kept.append(thing)
        return None

    def __call__(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return [type(value).__name__, repr(value)]
        if isinstance(value, torch.device):
            return ["device"]  # the graph is the same on all
        if isinstance(value, Enum):
            return [self._class(type(value)), str(value)]
        if isinstance(value, type) and not isinstance(value, GenericAlias):
            return self._class(value)
        if isinstance(value, ModuleType):
            self.python_modules.add(value.__name__)
            return value.__name__
        if isinstance(value, list | tuple):
            return [type(value).__name__, [self(item) for item in value]]
        if isinstance(value, set | frozenset):
            return [type(value).__name__, sorted(msgspec.json.encode(self(item)).decode() for item in value)]
        if isinstance(value, BuiltinFunctionType):
            owner = value.__self__
            held = None if owner is None or isinstance(owner, type | ModuleType) else self(owner)
            return [str(value.__module__), value.__qualname__, held]
        if isinstance(value, _OPERATORS):
            return ["operator", str(value)]
        if isinstance(value, GenericAlias | UnionType) or type(value).__module__ == "typing":
            return ["typing", repr(value)]
        if isinstance(value, logging.Logger):
            return ["logger", value.name]
        if isinstance(value, MethodWrapperType):
            return [value.__name__, self(value.__self__)]
        if isinstance(value, _OF_C):
            return [value.__objclass__.__qualname__, value.__name__]
        place = self._place(value)
        return place if place is not None else self._first(value)

    def _first(self, value: Any) -> Any:
        """An object that was not met before."""
        if isinstance(value, dict):
            return [type(value).__name__, [[self(k), self(v)] for k, v in value.items()]]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return [self(value.__func__), self(value.__self__)]
        if isinstance(value, staticmethod | classmethod):
            return [type(value).__name__, self(value.__func__)]
        if isinstance(value, property):
            return ["property", self(value.fget), self(value.fset), self(value.fdel)]
        if isinstance(value, cached_property):
            return ["cached property", self(value.func)]
        if isinstance(value, _LRU_CACHE):
            return ["cache", self(value.__wrapped__)]
        if isinstance(value, partial | partialmethod):
            return ["partial", self(value.func), self(value.args), self(value.keywords)]
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        inside = {k: v for k, v in getattr(value, "__dict__", {}).items() if k != _HUGGING_FACE_HASH}
        if is_dataclass(value):
            found = {f.name: getattr(value, f.name, None) for f in fields(value)}
            return [self._class(type(value)), self(inside | found)]
        if hasattr(value, "__dict__") and not any(
            "__reduce__" in vars(cls) or vars(cls).get("__slots__") for cls in type(value).__mro__[:-1]
        ):
            return [self._class(type(value)), self(inside)]
        raise _NoDescriptionError(type(value).__qualname__)

    # --- code ---

    def _class(self, cls: type, *, part_of_model: bool = False) -> Any:
        """A class by name, and what its code is: of an installed one only where modules of the model are of it.

        Modules of the model exist already, so that their `__init__` does not count.
        """
        name = f"{cls.__module__}.{cls.__qualname__}"
        self.python_modules |= {each.__module__ for each in cls.__mro__}
        if not part_of_model and _is_installed(cls.__module__):
            return name
        place = self._place(cls, key=(id(cls), part_of_model))
        if place is not None:
            return place
        described = []
        for each in cls.__mro__:
            if each is cls or not _is_installed(each.__module__) or part_of_model:
                described.append(self._class_itself(each, part_of_model=part_of_model))
        return [name, described, None if _is_installed(type(cls).__module__) else self._class(type(cls))]

    def _class_itself(self, cls: type, *, part_of_model: bool) -> Any:
        package = cls.__module__.partition(".")[0]
        if package in sys.stdlib_module_names:
            return cls.__qualname__
        place = self._place(cls, key=(id(cls), part_of_model, "itself"))
        if place is not None:
            return place
        inside = {k: v for k, v in vars(cls).items() if k != "_abc_impl"}
        if part_of_model:
            inside.pop("__init__", None)
        if package == "torch":
            return [cls.__qualname__, [[k, _digest(v.__code__)] for k, v in inside.items() if type(v) is FunctionType]]
        describe = self._if_possible if _is_installed(cls.__module__) else self
        return [
            cls.__qualname__,
            [[k, describe(v)] for k, v in inside.items() if not k.startswith("__") or callable(v)],
        ]

    def _if_possible(self, value: Any) -> Any:
        """Something of installed code, whose version is in the key: what has no description is left to that."""
        num_places = len(self._places)
        try:
            return self(value)
        except _NoDescriptionError:
            while len(self._places) > num_places:
                self._places.popitem()
            return ["of its version", type(value).__qualname__]

    def _function(self, function: FunctionType) -> Any:
        home = function.__globals__.get("__name__", "")  # not __module__, which functools.wraps changes
        self.python_modules.add(home)
        code, installed = function.__code__, _is_installed(home)
        described = [home, function.__qualname__, _digest(code)]
        if home.partition(".")[0] in sys.stdlib_module_names | {"torch"}:
            pass
        elif installed:
            names = set(_names(code)) & function.__globals__.keys()
            described.append(
                [[name, self._installed_global(function.__globals__[name], home)] for name in sorted(names)]
            )
        else:
            described.append(self._named(list(_names(code)), function.__globals__, set()))
            described += [self._imported(each, function) for each in _codes(code)]
        describe = self._if_possible if installed else self
        inside = [_content(cell) for cell in function.__closure__ or ()]
        described += [describe(x) for x in (function.__defaults__, function.__kwdefaults__, vars(function), *inside)]
        return described

    def _named(self, names: list[str], namespace: dict[str, Any], seen: set[int]) -> Any:
        """What names of a function may mean in its module, and in the modules that are named there."""
        found = []
        for name in names:
            if name not in namespace or (name.startswith("__") and name.endswith("__")):
                continue
            value = namespace[name]
            if not isinstance(value, ModuleType):
                found.append([name, self(value)])
                continue
            found.append([name, value.__name__])
            self.python_modules.add(value.__name__)
            if id(value) not in seen and not _is_installed(value.__name__):
                seen.add(id(value))
                found.append([name, self._named(names, vars(value), seen)])
        return found

    def _imported(self, code: CodeType, function: FunctionType) -> Any:
        """What a function imports while it runs."""
        if _IMPORT not in code.co_code[::2]:
            return None
        instructions = [each for each in dis.get_instructions(code) if each.opname != "EXTENDED_ARG"]
        found = []
        for i, instruction in enumerate(instructions):
            if instruction.opcode == _IMPORT:
                level, taken = (
                    instructions[i - 2].argval,
                    instructions[i - 1].argval or (),
                )  # what the compiler puts there
                parents = str(function.__globals__.get("__package__") or "").split(".")
                above = parents[: len(parents) - level + 1] if level else []
                name = ".".join([*above, *filter(None, [instruction.argval])])
                found.append([name, self._imported_module(name, taken, list(_names(code)))])
        return found

    def _imported_module(self, name: str, taken: tuple[str, ...], names: list[str]) -> Any:
        module, package = sys.modules.get(name), name.partition(".")[0]
        if module is not None:
            self.python_modules.add(name)
            if _is_installed(name):
                return None
            if not vars(module).keys() >= set(taken):
                raise _NoDescriptionError(f"{taken} of {name}, which are not imported yet")
            return self._named(names, vars(module), set())
        try:
            spec = importlib.util.find_spec(package)
        except ValueError:
            spec = None
        if spec is None:
            return "not there"
        if _version(package, spec.origin) is None:
            raise _NoDescriptionError(f"{name}, which is not imported yet")
        return _version(package, spec.origin)

    def _installed_global(self, value: Any, reader: str) -> Any:
        """A global of installed code: a patch or a registration (an attention of the user's own) is seen.

        Functions of the Python module that reads it are followed, others only looked at.
        """
        if isinstance(value, _PLAIN):
            return self(value)
        if isinstance(value, FunctionType):
            home = value.__globals__.get("__name__", "")
            if home == reader:
                return self._if_possible(value)
            return [home, value.__qualname__, _digest(value.__code__)] if _is_installed(home) else self(value)
        if isinstance(value, type | ModuleType):
            home = value.__module__ if isinstance(value, type) else value.__name__
            return [home, getattr(value, "__qualname__", "")] if _is_installed(home) else self(value)
        if isinstance(value, Mapping):
            items = dict.items(value) if isinstance(value, dict) else value.items()
            return [
                [k if isinstance(k, str) else type(k).__name__, self._installed_global(v, reader)] for k, v in items
            ]
        return type(value).__qualname__ if _is_installed(type(value).__module__) else self(value)

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


def _digest(code: CodeType) -> str:
    """What a function does, without the names of files and the numbers of lines."""

    def constant(value: Any) -> Any:
        if isinstance(value, CodeType):
            return _digest(value)
        if isinstance(value, tuple):
            return [constant(item) for item in value]
        return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)

    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    described = [names, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
    described += [[constant(value) for value in code.co_consts], code.co_exceptiontable.hex()]
    return hashlib.sha256(code.co_code + msgspec.json.encode(described)).hexdigest()


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, CodeType):
            yield from _codes(value)


def _names(code: CodeType) -> dict[str, None]:
    """All names in a function, in order: of globals, of attributes, and those that are written as strings."""
    names: dict[str, None] = {}
    for each in _codes(code):
        names |= dict.fromkeys((*each.co_names, *(value for value in each.co_consts if isinstance(value, str))))
    return names


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None  # a name that was never set


def _is_installed(name: str) -> bool:
    return _version(name.partition(".")[0], getattr(sys.modules.get(name), "__file__", None)) is not None


@cache
def _version(package: str, path: str | None) -> str | None:
    """The version of an installed package; None for what is not installed, or not known by a version."""
    if package in sys.builtin_module_names or package in sys.stdlib_module_names:
        return "python" if package != "__main__" else None
    if path is None or not (str(Path(path).resolve()).startswith(_INSTALLED) or _is_beside_metadata(package, path)):
        return None
    return _stated_version(package)


@cache
def _stated_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", None)


def _is_beside_metadata(package: str, path: str) -> bool:
    """Is it in a folder that pip installs into, though not this interpreter's own? One on PYTHONPATH, for instance."""
    folders = [Path(folder).resolve().parent for folder in getattr(sys.modules.get(package), "__path__", ())]
    return any(Path(path).resolve().is_relative_to(f) and next(f.glob("*.dist-info"), None) for f in folders)


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

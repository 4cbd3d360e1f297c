"""Models by name on the command line, with an example batch: a preset, a Hugging Face configuration, or a function.

llama3-8b?num_hidden_layers=4&seq=4096&batch=8    a preset; what follows the question mark overrides its settings
path/to/config.json?batch=8                       a configuration of Hugging Face transformers
path/to/file.py:factory                           a function that returns (model, batch)
"""

import ast
import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from planloom.capture.batch import keyword_arguments
from planloom.capture.models.presets import build_config_file, build_preset
from planloom.errors import CaptureError, PlanloomError
from planloom.graph.catalog import preset_names

FORMS = "a preset, path/to/config.json, or path/to/file.py:factory, where factory() returns (model, batch)"


def load_model(source: str, *, device: str = "meta") -> tuple[nn.Module, dict[str, Any]]:
    """The model that a source names and an example batch.

    Presets and configurations are built on `device`: on `meta` without memory, elsewhere with initial weights and a
    random batch. A function's model is where the function puts it.
    """
    name, _, query = source.partition("?")
    if name in preset_names():
        return build_preset(name, query, device)
    if name.endswith(".json") and Path(name).is_file():
        return build_config_file(Path(name), query, device)
    if source.removesuffix(":").endswith(".py") and Path(source.removesuffix(":")).is_file():
        raise _without_factory(source.removesuffix(":"))
    path_text, _, factory = source.rpartition(":")
    path = Path(path_text)
    if not path_text or not path.is_file():
        near = difflib.get_close_matches(name, preset_names())
        raise CaptureError(
            f"no model {source!r}",
            given=f"{name!r}, which is neither a preset nor a file here",
            required=f"{FORMS}; presets: {', '.join(preset_names())}",
            todo=f"did you mean {' or '.join(near)}?" if near else "name a file, as in examples/models/gpt.py:small",
        )
    return _from_factory(source, path, factory)


def _without_factory(path: str) -> CaptureError:
    """The error of a file that is named alone, with the functions that it has."""
    try:
        body = ast.parse(Path(path).read_text()).body
    except (SyntaxError, UnicodeDecodeError):
        body = []
    names = [
        f"{path}:{item.name}"
        for item in body
        if isinstance(item, ast.FunctionDef)
        and not item.name.startswith("_")
        and len(item.args.posonlyargs) + len(item.args.args) == len(item.args.defaults)
    ]
    return CaptureError(
        f"{path} is a file, and the function in it that makes the model is not named",
        given=path,
        required="path/to/file.py:factory, where factory() returns (model, batch)",
        todo=f"use one of {', '.join(names)}" if names else "write a function without arguments that returns them",
    )


def _run_users(source: str, path: Path, what: Callable[[], Any]) -> Any:
    """Run the user's code; what it raises becomes an error with its line."""
    try:
        return what()
    except PlanloomError:
        raise
    except Exception as error:  # the user's code may raise anything
        here = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path.resolve()]
        line = error.lineno if isinstance(error, SyntaxError) else here[-1] if here else None
        raise CaptureError(
            f"{source} raises {type(error).__name__}",
            given=f"{type(error).__name__}: {error} ({path}{f', line {line}' if line else ''})",
            required="a file that can be imported, and a function without arguments that returns (model, batch)",
            todo="correct it; the same error comes when the file is run in Python",
        ) from error


def _from_factory(source: str, path: Path, factory: str) -> tuple[nn.Module, dict[str, Any]]:
    name = f"planloom_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise CaptureError(f"{path} is not a Python file", given=str(path), required=FORMS)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader = spec.loader
    _run_users(source, path, lambda: loader.exec_module(module))
    function = getattr(module, factory, None)
    if not callable(function):
        names = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == name]
        raise CaptureError(f"{path} has no {factory!r}", given=factory, required=f"one of {names}")
    built = _run_users(source, path, function)
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module)):
        raise CaptureError(
            f"{source} does not return a model and a batch",
            given=type(built).__name__,
            required="(nn.Module, dict of tensors)",
        )
    model, batch = built
    if not isinstance(batch, Mapping | Tensor | tuple | list):
        raise CaptureError(
            f"{source} does not return a batch with its model",
            given=type(batch).__name__,
            required="a dict, tuple or list of arguments, or a tensor",
        )
    return model, keyword_arguments(model, batch)

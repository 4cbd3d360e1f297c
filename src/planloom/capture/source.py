"""Models by name on the command line: `file.py:factory`, a function that returns (model, example batch)."""

import importlib.util
import sys
from pathlib import Path

import torch
from torch import nn

from planloom.errors import CaptureError


def load_model(source: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and example batch that `path/to/file.py:factory` returns."""
    path_text, _, factory = source.rpartition(":")
    path = Path(path_text)
    if not path_text or not path.is_file():
        raise CaptureError(
            f"no model {source!r}",
            given=f"{path_text or source!r}, which is not a file here",
            required="path/to/file.py:factory, where factory() returns (model, batch)",
            todo="name a file, as in examples/models/gpt.py:small",
        )
    name = f"planloom_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    function = getattr(module, factory, None)
    if function is None:
        names = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == name]
        raise CaptureError(f"{path} has no {factory!r}", given=factory, required=f"one of {names}")
    built = function()
    if not (isinstance(built, tuple) and len(built) == 2 and isinstance(built[0], nn.Module)):
        raise CaptureError(
            f"{source} does not return a model and a batch",
            given=type(built).__name__,
            required="(nn.Module, dict of tensors)",
        )
    return built[0], dict(built[1])

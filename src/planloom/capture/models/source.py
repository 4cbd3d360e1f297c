"""Models by name on the command line, with an example batch: a preset, a Hugging Face configuration, or a function.

llama3-8b?num_hidden_layers=4&seq=4096&batch=8    a preset; what follows the question mark overrides its settings
path/to/config.json?batch=8                       a configuration of Hugging Face transformers
path/to/file.py:factory                           a function that returns (model, batch)
"""

import difflib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from torch import nn

from planloom.capture.models.presets import build_config_file, build_preset
from planloom.errors import CaptureError
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


def _from_factory(source: str, path: Path, factory: str) -> tuple[nn.Module, dict[str, Any]]:
    name = f"planloom_model_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise CaptureError(f"{path} is not a Python file", given=str(path), required=FORMS)
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

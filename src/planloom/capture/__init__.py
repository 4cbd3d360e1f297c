"""From an unchanged `nn.Module` and an example batch to a `Graph` with every rule attached."""

import sys
from types import ModuleType
from typing import Any

from planloom.capture.batch import Batch, batch_spec, tensors_of
from planloom.capture.cache import cached_capture
from planloom.capture.capture import capture, capture_from_spec
from planloom.capture.models import load_model
from planloom.capture.rules import dimension_rule
from planloom.graph import Graph

__all__ = [
    "Batch",
    "batch_spec",
    "cached_capture",
    "capture",
    "capture_from_spec",
    "dimension_rule",
    "load_model",
    "tensors_of",
]


class _CallableModule(ModuleType):
    """`planloom.capture(model, batch)` and `planloom.capture.load_model` are both meant: one name, two things."""

    def __call__(self, *args: Any, **kwargs: Any) -> Graph:
        return capture(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule

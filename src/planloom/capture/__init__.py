"""From an unchanged `nn.Module` and an example batch to a `Graph` with every rule attached."""

from planloom.capture.batch import Batch, batch_spec, tensors_of
from planloom.capture.cache import cached_capture
from planloom.capture.capture import capture, capture_from_spec
from planloom.capture.source import load_model

__all__ = ["Batch", "batch_spec", "cached_capture", "capture", "capture_from_spec", "load_model", "tensors_of"]

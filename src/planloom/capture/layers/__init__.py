"""Layers that are alike are traced twice and stamped."""

from planloom.capture.layers.stamping import expand_stamps
from planloom.capture.layers.stubs import stamping_layers

__all__ = ["expand_stamps", "stamping_layers"]

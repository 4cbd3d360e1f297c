"""Models by name, from a Hugging Face configuration, or from a function."""

from planloom.capture.models.source import load_model

__all__ = ["load_model"]

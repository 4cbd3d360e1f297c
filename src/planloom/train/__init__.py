"""A `Program` under `torchrun`: state, optimizer, steps."""

from planloom.train.trainer import Trainer, parallelize
from planloom.train.watch import Watch

__all__ = ["Trainer", "Watch", "parallelize"]

"""A `Program` under `torchrun`: state, optimizer, steps."""

from planloom.train.planning import Planned, plan_model
from planloom.train.trainer import Trainer, parallelize
from planloom.train.watch import Watch

__all__ = ["Planned", "Trainer", "Watch", "parallelize", "plan_model"]

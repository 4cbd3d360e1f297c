"""Every error of the user's making: one small hierarchy.

An error says what was given, what was required and what to do; `str()` of it is that sentence, so the command
line prints it as it is and exits with 2. `facts` are the same for machines, where there are more than sentences.
Anything that is not a `PlanloomError` is a bug of ours.
"""

from collections.abc import Mapping
from typing import Any


class PlanloomError(Exception):
    """Base of all errors that a user can cause and can repair."""

    def __init__(
        self,
        what: str,
        *,
        given: str = "",
        required: str = "",
        todo: str = "",
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.what, self.given, self.required, self.todo = what, given, required, todo
        self.facts = dict(facts or {})
        lines = [what]
        lines += [f"  given:    {given}"] if given else []
        lines += [f"  required: {required}"] if required else []
        lines += [f"  to do:    {todo}"] if todo else []
        super().__init__("\n".join(lines))


class ClusterError(PlanloomError):
    """A cluster description that cannot be read or contradicts itself."""


class LayoutError(PlanloomError):
    """Axes, placements or layouts that do not fit the devices or each other."""


class CaptureError(PlanloomError):
    """A model that cannot be turned into a graph."""


class PlanError(PlanloomError):
    """A plan that does not fit the model, the batch or the cluster."""


class VerificationError(PlanloomError):
    """A program that does not compute what the model computes."""


class PriceError(PlanloomError):
    """Something without a known price."""


class TrainingError(PlanloomError):
    """A training process that cannot go on: a dead peer, a wrong batch, a wrong world size."""

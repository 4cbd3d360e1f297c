"""The steps of a collective program.

A step acts at once on all its groups (ordered tuples of devices) and on every device's local array, seen with one dim a
factor. With n the size of a group and p a device's position in it:

| kind           | before                        | after                                              |
|----------------|-------------------------------|----------------------------------------------------|
| all_reduce     | contributions                 | their combination, on every member                 |
| reduce_scatter | contributions                 | piece p of the combination, cut along `into`       |
| all_gather     | pieces along `along`          | all pieces, in the group's order                   |
| all_to_all     | pieces along `along`          | all of `along`, piece p along `into`               |
| slice          | the same array on every member| piece p along `into`; nothing is sent              |
| mask           | the same array on every member| kept at position 0, zero elsewhere; nothing is sent|
"""

from dataclasses import dataclass
from typing import Literal

from planloom.layout import Combine

StepKind = Literal["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice", "mask"]
LOCAL_KINDS: tuple[StepKind, ...] = ("slice", "mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One collective on all its groups at once; `along` and `into` are factors of the tensor."""

    kind: StepKind
    groups: tuple[tuple[int, ...], ...]
    along: int = -1
    into: int = -1
    combine: Combine = "sum"

    @property
    def is_local(self) -> bool:
        return self.kind in LOCAL_KINDS

    @property
    def group_size(self) -> int:
        return len(self.groups[0])

    def group_of(self, device: int) -> tuple[int, ...]:
        for group in self.groups:
            if device in group:
                return group
        raise KeyError(device)

    def __str__(self) -> str:
        where = (f" along {self.along}" if self.along >= 0 else "") + (f" into {self.into}" if self.into >= 0 else "")
        return f"{self.kind}{where} over {' '.join(map(str, self.groups))}"


def local_sizes_after(step: Step, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The factor sizes of a local array after the step."""
    result = list(sizes)
    if step.kind in ("all_gather", "all_to_all"):
        result[step.along] *= step.group_size
    if step.kind in ("reduce_scatter", "all_to_all", "slice"):
        result[step.into] //= step.group_size
    return tuple(result)

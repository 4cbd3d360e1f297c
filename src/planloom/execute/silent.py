"""A wire that communicates with nobody: one device's part of a program, run alone.

Every collective returns at once an array of the right shape, made of what this device holds itself: its own array where
the real one would be a sum over all, its own piece in every place where the pieces of others would be. Values are wrong
and of the right kind (no zeros, no infinities), so that products take the time that they take in training. What is
measured over it is the time of computation alone.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from planloom.collective import Step, local_sizes_after
from planloom.execute.pieces import cut, join
from planloom.execute.wire import Finish, Result, Wire
from planloom.program import Transfer


class SilentWire(Wire):
    """Stands in for a `Wire`; nothing is copied where an array can be returned as it is."""

    def __init__(self, device: int) -> None:
        super().__init__(device, timeout_seconds=0.0)

    def create_groups(self, groups: Iterable[tuple[int, ...]]) -> None:
        """There are none."""

    def close(self) -> None:
        """There is nothing to give back."""

    def run_steps(self, steps: tuple[Step, ...], local: Tensor, sizes: tuple[int, ...]) -> Finish:
        """Carry out a program on a local array with these dims, at once."""
        array = local.reshape(sizes) if local.numel() == prod(sizes) else local
        for step in steps:
            array = self.start_step(step, array, sizes, 0)()
            sizes = local_sizes_after(step, sizes)
        return lambda: array

    def run_coalesced(
        self, parts: Sequence[tuple[tuple[Step, ...], Tensor, tuple[int, ...]]]
    ) -> Callable[[], list[Tensor]]:
        """Carry out several programs (steps, local array, its dims), each by itself."""
        arrays = [self.run_steps(steps, array, sizes)() for steps, array, sizes in parts]
        return lambda: arrays

    def start_step(
        self, step: Step, array: Tensor, sizes: tuple[int, ...], tag: int, *, is_own: bool = False
    ) -> Finish:
        """One step; `sizes` are the dims of the arrays that take part in it."""
        group = step.group_of(self.device)
        if group is None or step.is_local:
            return super().start_step(step, array, sizes, tag)
        result = self._alone(step, array, sizes, group)
        return lambda: result

    def _alone(self, step: Step, array: Tensor, sizes: tuple[int, ...], group: tuple[int, ...]) -> Tensor:
        position = group.index(self.device)
        holds = tuple(array.shape) == tuple(sizes)
        match step.kind:
            case "all_reduce" | "reduce":
                return array.contiguous()  # as what arrives is
            case "rotate":
                return array.clone(memory_format=torch.contiguous_format)
            case "broadcast":
                return array.contiguous() if holds else array.new_ones(sizes)
            case "all_gather":
                return join(array.expand(len(group), *array.shape), step)
            case "gather":
                return join(array.expand(len(group), *array.shape), step) if position == 0 else array
            case "scatter":
                whole = array if holds else array.new_ones(sizes)
                return cut(whole, step)[position].clone()
            case "reduce_scatter":
                return cut(array, step)[position].clone()
            case _:  # all_to_all
                return join(cut(array, step), step)

    def _start(
        self, steps: tuple[Step, ...], at: torch.device, carry_out: Callable[[], Callable[[], Result]]
    ) -> Callable[[], Result]:
        """At once: there is nothing to wait for."""
        return carry_out()

    def _exchanged_rows(self, parts: list[Tensor], counts: list[int], group: tuple[int, ...]) -> list[Tensor]:
        """As many rows as the others would send, of this device's own."""
        return [_with_rows(part, count) for part, count in zip(parts, counts, strict=True)]

    def send(self, local: Tensor, sizes: tuple[int, ...], transfers: tuple[Transfer, ...], tag: int) -> Finish:
        """Nothing is sent."""
        return lambda: local

    def receive(
        self, dtype: torch.dtype, sizes: tuple[int, ...], transfers: tuple[Transfer, ...], tag: int, at: torch.device
    ) -> Finish:
        """An array as if it had arrived."""
        result = torch.ones(sizes, dtype=dtype, device=at)
        return lambda: result


def _with_rows(rows: Tensor, count: int) -> Tensor:
    if len(rows) >= count:
        return rows[:count]
    return torch.cat([rows, rows.new_ones(count - len(rows), *rows.shape[1:])])

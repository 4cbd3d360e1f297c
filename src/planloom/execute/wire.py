"""Collective programs and exchanges on `torch.distributed`.

torch sorts the ranks of a group, and a layout's order is a tuple: the wire keeps one process group a set of ranks and
permutes pieces into the order that the program gives. On gloo, reduce-scatter and all-gather are made of messages: two
rings (`rings`), or for small arrays an exchange of all with all. A collective never writes into a tensor that a run
produced: gloo's writes do not bump versions, and autograd would not notice.

Programs on arrays of a CPU are carried out in the background, one after the other; on a GPU, torch's streams do that.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from planloom.collective import Step, local_sizes_after, rings_from_bytes
from planloom.execute.background import Background, Task
from planloom.execute.bundle import pack, step_on_rows, unpack
from planloom.execute.pieces import cut, join
from planloom.execute.rings import Rings
from planloom.layout import Box
from planloom.program import Transfer

# Messages of rings are told from those of exchanges, whose tags are small, and from each other while they can meet.
_FIRST_RING_TAG, _NUM_RING_TAGS = 1 << 24, 1 << 20
_TAGS_OF_A_GROUP = 1 << 12

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}

Result = TypeVar("Result")
Finish = Callable[[], Tensor]
"""Waits for what was started, and returns the result."""


class PeerLostError(RuntimeError):
    """Communication failed: a peer is gone, or did not answer in time."""


@contextmanager
def _on_the_wire() -> Iterator[None]:
    """What `torch.distributed` raises here is a lost peer; what computation raises elsewhere is not."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(str(error)) from error


class Wire:
    """The process groups of a program, and its communication on them. Devices are ranks."""

    def __init__(self, device: int, *, timeout_seconds: float) -> None:
        self.device = device
        self.timeout = timedelta(seconds=timeout_seconds)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._num_started = 0
        self._started_by: dict[tuple[int, ...], int] = {}
        """Steps started by group: its members start theirs in one order, whatever other groups they are in."""
        self._to_self: dict[int, list[Tensor]] = {}
        """By tag: parts of exchanges that this device sends to itself."""
        self._background = Background()
        self.last_task: Task[object] | None = None
        """What was last given to the background."""

    def create_groups(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Create all groups, in one order on every rank; each set of ranks once."""
        for ranks in sorted({tuple(sorted(group)) for group in groups}):
            if len(ranks) > 1 and ranks not in self._groups:
                with _on_the_wire():
                    self._groups[ranks] = dist.new_group(list(ranks), timeout=self.timeout)

    def close(self) -> None:
        """Destroy the groups; every rank must do so."""
        self._background.close()
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()

    def reserve_tags(self, count: int) -> int:
        """The first of `count` numbers by which messages are told apart; all ranks of a program ask in one order."""
        first = self._num_started
        self._num_started += count
        return first

    def _tags(self, steps: Sequence[Step]) -> list[int]:
        """For every step a number by which its messages are told apart, the same on all of its group's members."""
        tags = []
        for step in steps:
            ranks = tuple(sorted(step.group_of(self.device) or ()))
            number = self._started_by[ranks] = self._started_by.get(ranks, -1) + 1
            place = list(self._groups).index(ranks) if ranks in self._groups else 0
            tags.append(place * _TAGS_OF_A_GROUP + number % _TAGS_OF_A_GROUP)
        return tags

    def run_steps(self, steps: tuple[Step, ...], local: Tensor, sizes: tuple[int, ...]) -> Finish:
        """Carry out a program on a local array with these dims; the last collective may still be under way.

        A device that holds nothing, before a broadcast or scatter to it, still gives an array of the right dtype.
        """
        if local.dtype == torch.bool:  # gloo has no bool
            finish_bytes = self.run_steps(steps, local.to(torch.uint8), sizes)
            return lambda: finish_bytes().bool()
        if local.is_complex():  # as pairs of real numbers, which have one more dim
            finish_real = self.run_steps(steps, torch.view_as_real(local.reshape(sizes)), (*sizes, 2))
            return lambda: torch.view_as_complex(finish_real())
        array = local.reshape(sizes) if local.numel() == prod(sizes) else local
        tags = self._tags(steps)
        return self._start(steps, array.device, lambda: self._carry_out(steps, array, sizes, tags))

    def run_coalesced(
        self, parts: Sequence[tuple[tuple[Step, ...], Tensor, tuple[int, ...]]]
    ) -> Callable[[], list[Tensor]]:
        """Carry out several programs (steps, local array, its dims) of equal kinds and groups as one.

        The arrays are copied before this returns. The result holds one array for each.
        """
        programs, given = [steps for steps, *_ in parts], [array.reshape(sizes) for _, array, sizes in parts]
        tags = self._tags(programs[0])
        first = tuple(steps[0] for steps in programs)
        sizes = [tuple(array.shape) for array in given]
        packed = None if first[0].is_local else pack(given, first)
        at = given[0].device
        if packed is not None:
            given.clear()  # in the copy now

        def carry_out() -> Callable[[], list[Tensor]]:
            arrays = given
            finish: Callable[[], list[Tensor]] = lambda: arrays  # noqa: E731
            for i, steps in enumerate(zip(*programs, strict=True)):
                finish = self._coalesced_step(steps, finish(), sizes, packed if i == 0 else None, tags[i])
                sizes[:] = [local_sizes_after(step, before) for step, before in zip(steps, sizes, strict=True)]
            return finish

        return self._start(programs[0], at, carry_out)

    def _coalesced_step(
        self,
        steps: tuple[Step, ...],
        arrays: list[Tensor],
        sizes: Sequence[tuple[int, ...]],
        packed: Tensor | None,
        tag: int,
    ) -> Callable[[], list[Tensor]]:
        if steps[0].is_local:
            parts = [self.start_step(s, a, tuple(a.shape), tag)() for s, a in zip(steps, arrays, strict=True)]
            return lambda: parts
        rows, before = pack(arrays, steps) if packed is None else packed, list(sizes)
        finish = self.start_step(step_on_rows(steps[0]), rows, tuple(rows.shape), tag, is_own=True)
        return lambda: unpack(finish(), steps, before)

    def _start(
        self, steps: tuple[Step, ...], at: torch.device, carry_out: Callable[[], Callable[[], Result]]
    ) -> Callable[[], Result]:
        """On a CPU in the background, and all of it; elsewhere here, until the last step has started."""
        if at.type != "cpu" or all(step.is_local for step in steps):
            return carry_out()
        task = self._background.start(lambda: carry_out()())
        self.last_task = task  # type: ignore[assignment]
        return task.result

    def _carry_out(self, steps: tuple[Step, ...], array: Tensor, sizes: tuple[int, ...], tags: Sequence[int]) -> Finish:
        finish: Finish = lambda: array  # noqa: E731
        for i, step in enumerate(steps):
            finish = self.start_step(step, finish(), sizes, tags[i])
            sizes = local_sizes_after(step, sizes)
        return finish

    def start_step(
        self, step: Step, array: Tensor, sizes: tuple[int, ...], tag: int, *, is_own: bool = False
    ) -> Finish:
        """Start one step; `sizes` are the dims of the arrays that take part in it.

        `is_own`: the array is a copy that the wire made, which may be written into.
        """
        group = step.group_of(self.device)
        if group is None:  # it holds nothing, and waits for a broadcast or scatter
            return lambda: array
        position = group.index(self.device)
        match step.kind:
            case "slice":
                part = cut(array, step)[position]
                return lambda: part
            case "mask":
                masked = array if position == 0 else torch.zeros_like(array)
                return lambda: masked
            case "all_reduce":
                return self._all_reduce(step, array, group, is_own=is_own)
            case "reduce":
                return self._reduce(step, array, group)
            case "broadcast":
                return self._broadcast(array if position == 0 else array.new_empty(sizes), group)
            case "all_gather":
                return self._all_gather(step, array, group, tag)
            case "gather":
                return self._gather(step, array, group)
            case "scatter":
                return self._scatter(step, array, sizes, group)
            case "reduce_scatter":
                return self._reduce_scatter(step, array, group, tag)
            case "all_to_all":
                return self._all_to_all(step, array, group)
            case "rotate":
                return self._rotate(array, group, tag)

    def move_rows(
        self, steps: tuple[Step, ...], local: Tensor, mask: Tensor, sizes: tuple[int, ...], num_row_dims: int
    ) -> Finish:
        """Carry out a program on a ragged tensor, of which a device holds the rows where its mask is true."""
        tags = self._tags(steps)

        def carry_out() -> Finish:
            held = mask.reshape(sizes[:num_row_dims]).bool()
            rows = local.reshape(local.shape[1], *sizes[num_row_dims:])
            for i, step in enumerate(steps):
                held, rows = self._row_step(step, held, rows, tags[i])
            return lambda: rows.reshape(1, rows.shape[0], prod(rows.shape[1:]))

        return self._start(steps, local.device, carry_out)

    def _row_step(self, step: Step, held: Tensor, rows: Tensor, tag: int) -> tuple[Tensor, Tensor]:
        group, num_row_dims = step.group_of(self.device), held.dim()
        dims = (*step.along, *step.into)
        if group is None or step.kind in ("broadcast", "reduce", "scatter", "gather"):
            raise NotImplementedError(f"{step.kind} of the rows of experts")
        if all(dim >= num_row_dims for dim in dims):  # the same rows: a step like any other
            along, into = (tuple(dim - num_row_dims + 1 for dim in of) for of in (step.along, step.into))
            plain = replace(step, along=along, into=into)
            return held, self.start_step(plain, rows, tuple(rows.shape), tag)()
        if any(dim >= num_row_dims for dim in dims):
            raise NotImplementedError(f"{step.kind} of rows into features, {dims}")
        position, numbers = group.index(self.device), _numbered(held)
        match step.kind:
            case "slice":
                own = cut(numbers, step)[position]
                return own >= 0, rows[own[own >= 0]]
            case "reduce_scatter":
                pieces = cut(numbers, step)
                own = pieces[position] >= 0
                parts = self._exchanged_rows([rows[p[p >= 0]] for p in pieces], [int(own.sum())] * len(group), group)
                return own, torch.stack(parts).sum(0, dtype=rows.dtype)
            case _:  # all_gather, all_to_all
                after = self.start_step(step, held.to(torch.uint8), tuple(held.shape), tag)().bool()
                pieces = cut(numbers, step) if step.into else numbers.expand(len(group), *numbers.shape)
                places = [p[p >= 0] for p in cut(_numbered(after), replace(step, into=step.along))]
                parts = self._exchanged_rows([rows[p[p >= 0]] for p in pieces], [len(p) for p in places], group)
                result = rows.new_empty(int(after.sum()), *rows.shape[1:])
                for place, part in zip(places, parts, strict=True):
                    result[place] = part
                return after, result

    def _exchanged_rows(self, parts: list[Tensor], counts: list[int], group: tuple[int, ...]) -> list[Tensor]:
        """Part q goes to the member q, which knows how many rows to expect; in the order of the group."""
        order = [group.index(rank) for rank in sorted(group)]
        sent = torch.cat([parts[i] for i in order])
        received = sent.new_empty(sum(counts), *sent.shape[1:])
        expected = [counts[i] for i in order]
        with _on_the_wire():
            work = dist.all_to_all_single(
                received,
                sent,
                output_split_sizes=expected,
                input_split_sizes=[len(parts[i]) for i in order],
                group=self.process_group(group),
                async_op=True,
            )
        _wait(work)
        found = dict(zip(order, received.split(expected), strict=True))
        return [found[i] for i in range(len(group))]

    def _all_reduce(self, step: Step, array: Tensor, group: tuple[int, ...], *, is_own: bool) -> Finish:
        result = array if is_own else array.clone(memory_format=torch.contiguous_format)
        with _on_the_wire():
            work = dist.all_reduce(result, _OPS[step.combine], group=self.process_group(group), async_op=True)
        return _after(work, lambda: result)

    def _reduce(self, step: Step, array: Tensor, group: tuple[int, ...]) -> Finish:
        result = array.clone(memory_format=torch.contiguous_format)
        with _on_the_wire():
            work = dist.reduce(result, group[0], _OPS[step.combine], group=self.process_group(group), async_op=True)
        return _after(work, lambda: result)

    def _broadcast(self, array: Tensor, group: tuple[int, ...]) -> Finish:
        result = array.clone(memory_format=torch.contiguous_format)
        with _on_the_wire():
            work = dist.broadcast(result, group[0], group=self.process_group(group), async_op=True)
        return _after(work, lambda: result)

    def _all_gather(self, step: Step, array: Tensor, group: tuple[int, ...], tag: int) -> Finish:
        array = array.contiguous()
        if self.by_rings(step, array.nbytes, group, array.device):
            with _on_the_wire():
                found = self._rings(group, tag).all_gather(array)
            return lambda: join(_from_sorted(found, group), step)
        pieces = array.new_empty((len(group), *array.shape))
        with _on_the_wire():
            work = dist.all_gather(list(pieces.unbind()), array, group=self.process_group(group), async_op=True)
        return _after(work, lambda: join(_from_sorted(pieces, group), step))

    def _gather(self, step: Step, array: Tensor, group: tuple[int, ...]) -> Finish:
        array, is_root = array.contiguous(), self.device == group[0]
        pieces = array.new_empty((len(group) if is_root else 0, *array.shape))
        with _on_the_wire():
            parts = list(pieces.unbind()) if is_root else None
            work = dist.gather(array, parts, dst=group[0], group=self.process_group(group), async_op=True)
        return _after(work, lambda: join(_from_sorted(pieces, group), step) if is_root else array)

    def _scatter(self, step: Step, array: Tensor, sizes: tuple[int, ...], group: tuple[int, ...]) -> Finish:
        part = array.new_empty(local_sizes_after(step, sizes))
        with _on_the_wire():
            pieces = _to_sorted(cut(array, step), group).contiguous() if self.device == group[0] else None
            parts = None if pieces is None else list(pieces.unbind())
            work = dist.scatter(part, parts, src=group[0], group=self.process_group(group), async_op=True)
        return _after(work, lambda: part)

    def _reduce_scatter(self, step: Step, array: Tensor, group: tuple[int, ...], tag: int) -> Finish:
        pieces = _to_sorted(cut(array, step), group).contiguous()
        if self.by_rings(step, array.nbytes, group, array.device):
            combine = torch.add if step.combine == "sum" else torch.maximum
            with _on_the_wire():
                result = self._rings(group, tag).reduce_scatter(pieces, combine)
            return lambda: result
        if self._is_gloo(group):
            received = self._exchanged(pieces, group)
            if step.combine == "max":
                return lambda: received().amax(0)
            return lambda: received().sum(0, dtype=pieces.dtype)
        part = torch.empty_like(pieces[0])
        with _on_the_wire():
            work = dist.reduce_scatter(
                part, list(pieces.unbind()), _OPS[step.combine], group=self.process_group(group), async_op=True
            )
        return _after(work, lambda: part)

    def _all_to_all(self, step: Step, array: Tensor, group: tuple[int, ...]) -> Finish:
        received = self._exchanged(_to_sorted(cut(array, step), group).contiguous(), group)
        return lambda: join(_from_sorted(received(), group), step)

    def _rotate(self, array: Tensor, group: tuple[int, ...], tag: int) -> Finish:
        """To the next member, from the one before: messages where gloo takes them, else an exchange that is empty but
        for two of its parts."""
        array, place = array.contiguous(), group.index(self.device)
        after, before = group[(place + 1) % len(group)], group[place - 1]
        received = torch.empty_like(array)
        if array.device.type == "cpu" and self._is_gloo(group):
            number = _FIRST_RING_TAG + 2 * (tag % _NUM_RING_TAGS)
            with _on_the_wire():
                works = [dist.irecv(received, before, tag=number), dist.isend(array, after, tag=number)]

            def finish() -> Tensor:
                for work in works:
                    _wait(work)
                return received

            return finish
        order, count = sorted(group), array.numel()
        with _on_the_wire():
            exchanged = dist.all_to_all_single(
                received.view(-1),
                array.view(-1),
                output_split_sizes=[count if rank == before else 0 for rank in order],
                input_split_sizes=[count if rank == after else 0 for rank in order],
                group=self.process_group(group),
                async_op=True,
            )
        return _after(exchanged, lambda: received)

    def _exchanged(self, pieces: Tensor, group: tuple[int, ...]) -> Finish:
        """Piece q of every member goes to the member q, in the order of ranks."""
        received = torch.empty_like(pieces)
        with _on_the_wire():
            work = dist.all_to_all_single(received, pieces, group=self.process_group(group), async_op=True)
        return _after(work, lambda: received)

    def by_rings(self, step: Step, num_bytes: int, group: tuple[int, ...], at: torch.device) -> bool:
        """Whether a step is carried out by messages of its own, which need no order among those of other steps.

        gloo takes tensors of a GPU in collectives, not in single messages (seen with torch 2.11).
        """
        if step.is_local or at.type != "cpu" or not self._is_gloo(group):
            return False
        start = rings_from_bytes("gloo", step.kind, len(group))
        return start is not None and num_bytes >= start

    def _rings(self, group: tuple[int, ...], tag: int) -> Rings:
        def wait(work: "dist.Work | None") -> None:
            assert work is not None
            work.wait(self.timeout)

        return Rings(sorted(group), self.device, _FIRST_RING_TAG + 2 * (tag % _NUM_RING_TAGS), wait)

    def _is_gloo(self, group: tuple[int, ...]) -> bool:
        return str(dist.get_backend(self.process_group(group))) == "gloo"

    def process_group(self, group: tuple[int, ...]) -> dist.ProcessGroup:
        """torch's group of these ranks, which `create_groups` made."""
        return self._groups[tuple(sorted(group))]

    # -- exchanges between stages

    def send(self, local: Tensor, sizes: tuple[int, ...], transfers: tuple[Transfer, ...], tag: int) -> Finish:
        """Start all messages of this device; the result is the tensor itself."""
        array, works = local.reshape(sizes), []
        if array.is_complex():
            array = torch.view_as_real(array)
        for transfer in transfers:
            if transfer.source == self.device:
                part = _narrow(array, transfer.source_box).contiguous()
                if transfer.target == self.device:
                    self._to_self.setdefault(tag, []).append(part)
                    continue
                with _on_the_wire():
                    works.append((dist.isend(part, transfer.target, tag=tag), part))

        def finish() -> Tensor:
            for work, _ in works:
                _wait(work)
            if tag in self._to_self:  # not taken yet, and the array may change now
                self._to_self[tag] = [part.clone() for part in self._to_self[tag]]
            return local

        return finish

    def receive(
        self, dtype: torch.dtype, sizes: tuple[int, ...], transfers: tuple[Transfer, ...], tag: int, at: torch.device
    ) -> Finish:
        """Start all messages to this device; the result is the array that they fill.

        A message whose elements lie side by side in it arrives there; others arrive beside it and are copied.
        """
        result = torch.empty(sizes, dtype=dtype, device=at)
        works, own = [], list[Tensor]()
        for transfer in transfers:
            if transfer.target == self.device:
                place = _narrow(result, transfer.target_box)
                part = (
                    place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)
                )
                held = torch.view_as_real(part) if part.is_complex() else part
                if transfer.source == self.device:
                    own.append(torch.view_as_real(place) if place.is_complex() else place)
                    continue
                with _on_the_wire():
                    works.append((dist.irecv(held, transfer.source, tag=tag), part, place))

        def finish() -> Tensor:
            for work, part, place in works:
                _wait(work)
                if part is not place:
                    place.copy_(part)
            for place, sent in zip(own, self._to_self.pop(tag, ()), strict=True):
                place.copy_(sent)
            return result

        return finish


def _after(work: "dist.Work | None", result: Finish) -> Finish:
    def finish() -> Tensor:
        _wait(work)
        return result()

    return finish


def _wait(work: "dist.Work | None") -> None:
    assert work is not None
    with _on_the_wire():
        work.wait()


def _numbered(held: Tensor) -> Tensor:
    """The number of every row where a mask is true, -1 elsewhere."""
    numbers = held.to(torch.int64).flatten().cumsum(0).reshape(held.shape) - 1
    return torch.where(held, numbers, -1)


def _from_sorted(pieces: Tensor, group: tuple[int, ...]) -> Tensor:
    """Pieces in the order of sorted ranks → in the order of the group."""
    order = sorted(group)
    return pieces if order == list(group) else pieces[[order.index(rank) for rank in group]]


def _to_sorted(pieces: Tensor, group: tuple[int, ...]) -> Tensor:
    """Pieces in the order of the group → in the order of sorted ranks."""
    order = sorted(group)
    return pieces if order == list(group) else pieces[[group.index(rank) for rank in order]]


def _narrow(array: Tensor, box: Box) -> Tensor:
    for i, (start, stop) in enumerate(box):
        array = array.narrow(i, start, stop - start)
    return array

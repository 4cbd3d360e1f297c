"""Loops: the scopes of time axes, unrolled into the body of their stage.

From outside, a scope is one run. What enters is in the layout of the whole, all its pieces together; so is what leaves:

| over time     | entering                 | leaving                                                             |
|---------------|--------------------------|---------------------------------------------------------------------|
| split         | `Take`, a local slice    | `Put`: each piece is written to its place                           |
| partial       |                          | `Accumulate`: the sum over the pieces                               |
| neither       | as it is, for all pieces |                                                                     |

and cotangents are dual. Inside, every run is carried out once a piece, and what communicates are pieces:

    pieces    for each piece all runs, one after another: what only a piece needs is freed before the next begins. If
              the axis recomputes, the forward saves nothing, and the backward is, piece by piece, forward again and
              backward
    runs      for each run all pieces: what a piece communicates starts behind its run and is awaited before the run
              that reads it, while the run goes on with other pieces

A change of layout inside moves what the devices hold of one piece, so it cannot move elements from one piece to
another: a factor that time splits is split alike on both sides.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planloom.errors import PlanError
from planloom.layout import Box, Digit, Layout
from planloom.plan.times import Scope
from planloom.program.bodies import Use
from planloom.program.connect import Connections
from planloom.program.gradients import junction
from planloom.program.transform import Splits
from planloom.program.values import (
    Accumulate,
    Backward,
    Buffer,
    Forward,
    Instruction,
    Put,
    Run,
    Slot,
    Take,
    Wait,
)

AtMoment = Callable[[Run, int], Run]
"""From a run in its first moment to the same on the present group in another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A scope: its runs in their first moment, and the one run that it is from outside.

    `entering[i]`: for input i from outside the place of the run inside and that of its input.
    """

    scope: Scope
    runs: tuple[Run, ...]
    outside: Run
    entering: tuple[tuple[int, int], ...]

    def input_of(self, run: int, slot: int) -> int | None:
        """The input from outside that an input of a run inside is a piece of; None if it is made inside."""
        return self.entering.index((run, slot)) if (run, slot) in self.entering else None


def find_loops(splits: Splits, runs: Sequence[Run]) -> tuple[dict[int, Loop], tuple[Run, ...]]:
    """The loops of a plan by the index of their first run, and all runs with each loop as one."""
    groups: dict[int, list[Run]] = {}
    for run in runs:
        scope = splits.scope_of.get(run.blocks[0].block)
        if scope is not None:
            groups.setdefault(scope.start, []).append(run)
    loops = {members[0].index: _loop(splits, members) for members in groups.values()}
    outside = {run.index: run for run in runs if run.blocks[0].block not in splits.scope_of}
    outside.update((index, loop.outside) for index, loop in loops.items())
    return loops, tuple(outside[index] for index in sorted(outside))


def _loop(splits: Splits, members: Sequence[Run]) -> Loop:
    scope = splits.scope_of[members[0].blocks[0].block]
    times, graph = frozenset({scope.axis.digit}), splits.blocks.graph
    made = {slot.tensor for run in members for slot in run.outputs}
    entering = [(r, i) for r, run in enumerate(members) for i, slot in enumerate(run.inputs) if slot.tensor not in made]
    outputs = [
        slot
        for run in members
        for slot in run.outputs
        if slot.tensor == graph.loss
        or any(splits.scope_of.get(c) != scope for c in splits.blocks.consumers.get(slot.tensor, ()))
    ]
    outside = replace(
        members[0],
        blocks=tuple(block for run in members for block in run.blocks),
        inputs=tuple(_whole(members[r].inputs[i], times) for r, i in entering),
        outputs=tuple(_whole(slot, times) for slot in outputs),
        moment=(),
    )
    return Loop(scope=scope, runs=tuple(members), outside=outside, entering=tuple(entering))


def _whole(slot: Slot, times: frozenset[Digit]) -> Slot:
    """A slot as it is outside of a scope: all pieces together."""
    cotangent = None if slot.cotangent is None else slot.cotangent.without(times)
    return replace(slot, layout=slot.layout.without(times), cotangent=cotangent)


def piece_box(layout: Layout, sizes: tuple[int, ...], moment: Mapping[Digit, int]) -> Box:
    """The piece at a moment of what a device holds of all pieces, in the index of its array: time is minor to space."""
    box = []
    for local, split in zip(layout.local_sizes(sizes), layout.splits, strict=True):
        place = 0
        for digit in split:
            place = place * digit.size + moment[digit] if digit in moment else place
        box.append((place * local, (place + 1) * local))
    return tuple(box)


@dataclass(kw_only=True)
class LoopWriter:
    """Writes one loop on the present group into a body, in one direction."""

    loop: Loop
    connections: Connections
    group: int
    with_backward: frozenset[int]
    """The runs through which a cotangent comes back, by their indices in the first moment."""
    at: AtMoment
    inputs: Sequence[Buffer]
    """What enters, as the run from outside has it."""
    body: list[Instruction] = field(default_factory=list)
    _values: dict[tuple[int, Use], Buffer] = field(default_factory=dict)
    """(piece, tensor and layout) → the buffer of this piece."""
    _later: dict[Buffer, list[Instruction]] = field(default_factory=dict)
    """What is still to be done for a buffer whose making was started early."""
    _cotangents: dict[tuple[int, str], list[tuple[Layout, Buffer]]] = field(default_factory=dict)
    _started: dict[tuple[int, str], Buffer] = field(default_factory=dict)
    _carried: range | list[int] = field(init=False)
    """The runs whose forward is carried out here."""

    def __post_init__(self) -> None:
        self.digit = self.loop.scope.axis.digit
        self._makers = {slot.tensor: slot for run in self.loop.runs for slot in run.outputs}
        self._carried = range(len(self.loop.runs))

    # -- forward

    def forward(self, leaving: Mapping[str, Buffer], *, saves: bool, again: bool = False) -> list[Instruction]:
        """All pieces; `leaving`: by tensor, where what leaves is put together or summed."""
        for r, piece in self._sequence(range(len(self.loop.runs))):
            self._forward(r, piece, saves=saves, again=again)
            for slot in self.loop.runs[r].outputs:
                if slot.tensor in leaving:
                    made = self._values[piece, (slot.tensor, slot.layout)]
                    self._leave(slot, slot.layout, made, piece, leaving[slot.tensor])
        assert not self._later, "what was started is awaited where it is read"
        return self.body

    def _forward(self, r: int, piece: int, *, saves: bool, again: bool) -> None:
        run = self.loop.runs[r]
        inputs = tuple(self._input(r, i, piece, again=again) for i in range(len(run.inputs)))
        outputs = tuple(self._named(f"{slot.tensor}:", piece, again=again) for slot in run.outputs)
        self.body.append(
            Forward(
                run=self.at(run, piece).index,
                inputs=inputs,
                outputs=outputs,
                saves=saves and run.index in self.with_backward,
                again=again,
            )
        )
        for slot, buffer in zip(run.outputs, outputs, strict=True):
            self._values[piece, (slot.tensor, slot.layout)] = buffer
        for slot, buffer in zip(run.outputs, outputs, strict=True):
            for reader in (other for other in self._carried if other > r):
                for read in self.loop.runs[reader].inputs:
                    if read.tensor == slot.tensor:
                        self._bring(slot, buffer, read.layout, piece)

    def _bring(self, slot: Slot, buffer: Buffer, after: Layout, piece: int) -> None:
        """Start to bring a piece into the layout in which a later run reads it."""
        use = (slot.tensor, after)
        if (piece, use) in self._values:
            return
        name = f"{buffer.name}@{after}"
        self._values[piece, use] = self._early(lambda body: self._change(body, slot, buffer, slot.layout, after, name))

    def _input(self, r: int, i: int, piece: int, *, again: bool) -> Buffer:
        """An input of a run: a piece that was made inside, one of what enters, or what enters itself."""
        slot, outside = self.loop.runs[r].inputs[i], self.loop.input_of(r, i)
        key = (piece, (slot.tensor, slot.layout))
        if outside is not None and key not in self._values:
            name = self._named(f"{slot.tensor}:", piece, again=again).name
            self._values[key] = self._take(slot, slot.layout, self.inputs[outside], piece, f"{name}@{slot.layout}")
        return self._finished(self._values[key])

    # -- backward

    def backward(self, cotangents: Sequence[Buffer | None], outputs: Sequence[Buffer | None]) -> list[Instruction]:
        """All pieces, runs from last to first; `outputs`: the whole cotangents of what enters."""
        wholes = {slot.tensor: buffer for slot, buffer in zip(self.loop.outside.outputs, cotangents, strict=True)}
        recomputed = -1
        self._carried = self._needed_again()
        for r, piece in self._sequence(range(len(self.loop.runs))[::-1]):
            if self.loop.scope.axis.recompute and piece != recomputed:
                recomputed = piece
                for needed in self._carried:
                    self._forward(needed, piece, saves=True, again=True)
            self._backward(r, piece, wholes, outputs)
        assert not self._later, "what was started is awaited where it is read"
        return self.body

    def _needed_again(self) -> list[int]:
        """The runs that a piece's backwards need: those that have one, and what makes their inputs."""
        wanted, found = set[str](), list[int]()
        for r, run in reversed(list(enumerate(self.loop.runs))):
            if run.index in self.with_backward or any(slot.tensor in wanted for slot in run.outputs):
                found.append(r)
                wanted.update(slot.tensor for slot in run.inputs)
        return found[::-1]

    def _backward(
        self, r: int, piece: int, wholes: Mapping[str, Buffer | None], outputs: Sequence[Buffer | None]
    ) -> None:
        run = self.loop.runs[r]
        if run.index not in self.with_backward:
            return
        cotangents = tuple(self._output_cotangent(slot, piece, wholes) for slot in run.outputs)
        made = tuple(
            self._named(f"{slot.tensor}:d{run.index}.{i}.", piece) if slot.cotangent is not None else None
            for i, slot in enumerate(run.inputs)
        )
        self.body.append(Backward(run=self.at(run, piece).index, cotangents=cotangents, outputs=made))
        for i, (slot, buffer) in enumerate(zip(run.inputs, made, strict=True)):
            if buffer is None:
                continue
            assert slot.cotangent is not None
            outside = self.loop.input_of(r, i)
            if outside is None:
                self._cotangents.setdefault((piece, slot.tensor), []).append((slot.cotangent, buffer))
                if not self._is_read_before(slot.tensor, r):
                    self._start_junction(slot.tensor, piece, wholes)
            else:
                whole = outputs[outside]
                assert whole is not None
                self._leave(slot, slot.cotangent, buffer, piece, whole)

    def _is_read_before(self, tensor: str, r: int) -> bool:
        """Does a run before this one, whose backward is still to come, give a cotangent of a tensor, too?"""
        return any(
            slot.tensor == tensor and slot.cotangent is not None
            for run in self.loop.runs[:r]
            if run.index in self.with_backward
            for slot in run.inputs
        )

    def _start_junction(self, tensor: str, piece: int, wholes: Mapping[str, Buffer | None]) -> None:
        """All cotangents of a tensor are there: start to sum them in the layout in which its run takes it."""
        if (piece, tensor) not in self._started:
            self._started[piece, tensor] = self._early(lambda body: self._junction(body, tensor, piece, wholes))

    def _output_cotangent(self, slot: Slot, piece: int, wholes: Mapping[str, Buffer | None]) -> Buffer | None:
        if slot.cotangent is None or not (
            self._cotangents.get((piece, slot.tensor)) or wholes.get(slot.tensor) is not None
        ):
            return None
        self._start_junction(slot.tensor, piece, wholes)
        return self._finished(self._started[piece, slot.tensor])

    def _junction(
        self, body: list[Instruction], tensor: str, piece: int, wholes: Mapping[str, Buffer | None]
    ) -> Buffer:
        """What came from inside, with the piece of what comes from outside."""
        slot = self._makers[tensor]
        target = slot.cotangent
        assert target is not None
        parts, whole = list(self._cotangents.get((piece, tensor), ())), wholes.get(tensor)
        if whole is not None:
            name = self._named(f"{tensor}:taken", piece).name
            parts.insert(0, (target, self._take(slot, target, whole, piece, name, body=body)))

        def change(total: Buffer, layout: Layout, name: str) -> Buffer:
            return self._change(body, slot, total, layout, target, name)

        return junction(body, tensor, parts, change, self._named(" ", piece).name)

    # -- pieces

    def _sequence(self, runs: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The runs and pieces in the order of the axis."""
        pieces = range(self.digit.size)
        if self.loop.scope.axis.order == "pieces":
            return ((run, piece) for piece in pieces for run in runs)
        return ((run, piece) for run in runs for piece in pieces)

    def _named(self, name: str, piece: int, *, again: bool = False) -> Buffer:
        """A buffer of one piece. Other scopes may read the same tensor, and with other axes."""
        of = f"{self.digit.axis}{self.loop.scope.start}.{piece}"
        return Buffer(name=f"{name}{of}{' again' if again else ''}", indexed=True)

    def _take(
        self,
        slot: Slot,
        layout: Layout,
        whole: Buffer,
        piece: int,
        name: str,
        body: list[Instruction] | None = None,
    ) -> Buffer:
        """A piece of a whole buffer, or that itself if all pieces are alike."""
        if self.digit not in layout.split_digits:
            return whole
        target = Buffer(name=name, indexed=True)
        box = piece_box(layout, slot.sizes, {self.digit: piece})
        sizes = layout.without({self.digit}).local_sizes(slot.sizes)
        (self.body if body is None else body).append(
            Take(tensor=slot.tensor, source=whole, target=target, box=box, sizes=sizes)
        )
        return target

    def _leave(self, slot: Slot, layout: Layout, buffer: Buffer, piece: int, whole: Buffer) -> None:
        """Put a piece to its place in the whole, or add it."""
        if self.digit in layout.split_digits:
            box = piece_box(layout, slot.sizes, {self.digit: piece})
            sizes = layout.without({self.digit}).local_sizes(slot.sizes)
            self.body.append(Put(tensor=slot.tensor, target=whole, source=buffer, box=box, sizes=sizes))
        else:
            assert self.digit.size == 1 or self.digit in layout.partial, "checked with the plan"
            self.body.append(Accumulate(tensor=slot.tensor, target=whole, source=buffer))

    def _early(self, write: Callable[[list[Instruction]], Buffer]) -> Buffer:
        """Write what makes a buffer now as far as nothing is awaited; the rest is left to `_finished`."""
        written: list[Instruction] = []
        buffer = write(written)
        first = next((at for at, instruction in enumerate(written) if isinstance(instruction, Wait)), len(written))
        self.body += written[:first]
        if written[first:]:
            self._later[buffer] = written[first:]
        return buffer

    def _finished(self, buffer: Buffer) -> Buffer:
        self.body += self._later.pop(buffer, ())
        return buffer

    def _change(
        self, body: list[Instruction], slot: Slot, source: Buffer, before: Layout, after: Layout, name: str
    ) -> Buffer:
        """Bring a piece into another layout."""
        time = self.digit
        for old, new in zip(before.splits, after.splits, strict=True):
            if old != new and time in (*old, *new):
                self._refuse(slot, before, after)
        if (time in before.partial) != (time in after.partial):
            self._refuse(slot, before, after)
        sizes = tuple(
            size // time.size if time in split else size for size, split in zip(slot.sizes, before.splits, strict=True)
        )
        own, times = replace(slot, sizes=sizes), {time}
        return self.connections.change(body, self.group, own, source, before.without(times), after.without(times), name)

    def _refuse(self, slot: Slot, before: Layout, after: Layout) -> None:
        raise PlanError(
            f"{slot.tensor} cannot be brought from its producer to its consumer piece by piece",
            given=f"layout {before} in a scope of the time axis {self.digit.axis!r}",
            required=f"layout {after}: elements of other pieces",
            todo="split the blocks of the scope alike over time, and the dims that it splits alike over space",
        )

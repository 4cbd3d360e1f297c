"""Rings: the turns of attention whose keys and values go round the devices that split its sequence.

Of n devices, device r carries out turn t of a block with the keys and values of device (r − t) mod n:

    open       what is done before attention, with the device's own part: queries, keys and values are made
    forward    turn t = 0 … n − 1; while it computes, keys and values go on to the next device
    backward   turn t = n − 1 … 0, the other way round: keys and values come to a device again, and with them goes the
               sum of their cotangents. In turn 0 it is at home, so it moves n − 1 times and not n

Turns are runs, and what lies at their boundaries are tensors of the graph: the first makes the device's own keys and
values, each turn reads those that have come, the last makes what the block makes. What a ring holds between its turns
(queries, results and logarithms of sums so far, the cotangent of queries) belongs to none of them, as what autograd
saves does not: it is known by the block and the micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planloom.collective import Step
from planloom.layout import Mesh
from planloom.program.transform import Splits
from planloom.program.values import (
    Backward,
    Buffer,
    Collective,
    Forward,
    Instruction,
    Run,
    Slot,
    Sum,
    Turn,
    Wait,
)

Pair = tuple[Buffer, ...]
"""Buffers of keys and of values."""


def open_rings(splits: Splits, runs: Sequence[Run]) -> tuple[list[Run], dict[int, tuple[Run, ...]]]:
    """The runs, with rings in the place of blocks that go round; and by the number of such a run, all of its own.

    What opens a ring has the number of the run; its turns are added behind all runs.
    """
    found, rings = list(runs), dict[int, tuple[Run, ...]]()
    for run in runs:
        if splits.goes_round(splits.blocks.blocks[run.blocks[0].block]):
            own = _ring_of(splits, run, first=len(found))
            found[run.index] = own[0]
            found += own[1:]
            rings[run.index] = own
    return found, rings


def _ring_of(splits: Splits, run: Run, *, first: int) -> tuple[Run, ...]:
    (part,) = run.blocks
    ring = splits.blocks.blocks[part.block].ring
    assert ring is not None
    digits = dict(part.splits)[ring.dim.name]
    rotated = tuple(_slot(splits, run, tensor) for tensor in ring.rotated)
    opening = replace(part, turn=Turn(number=-1, digits=digits))
    found = [replace(run, blocks=(opening,), outputs=rotated)]
    for number in range(Turn(number=0, digits=digits).count):
        turn = Turn(number=number, digits=digits)
        reads = {tensor: i for i, tensor in enumerate(ring.rotated)}
        found.append(
            replace(
                run,
                index=first + number,
                blocks=(replace(part, turn=turn, reads=reads),),
                inputs=rotated,
                outputs=run.outputs if turn.is_last else (),
            )
        )
    return tuple(found)


def _slot(splits: Splits, run: Run, tensor: str) -> Slot:
    """Keys or values at the boundary of a turn."""
    block = splits.blocks.blocks[run.blocks[0].block]
    cotangent = splits.consumed_cotangent(block, tensor) if splits.is_differentiable(tensor) else None
    return Slot(
        tensor=tensor, layout=splits.layout(block, tensor), cotangent=cotangent, sizes=splits.sizes(block, tensor)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RingWriter:
    """Writes a ring into bodies; `name` tells its buffers from those of other rings, and of a recomputation."""

    runs: tuple[Run, ...]
    mesh: Mesh
    name: str

    @property
    def own(self) -> Pair:
        """The device's own keys and values, as the ring makes them."""
        return self._pair("own")

    def forward(
        self, body: list[Instruction], inputs: Pair, outputs: Pair, *, saves: bool, again: bool = False
    ) -> None:
        """From what the block reads to what it makes."""
        opening, *turns = self.runs
        body.append(Forward(run=opening.index, inputs=inputs, outputs=self.own, saves=saves, again=again))
        held = self.own
        for run in turns:
            turn = _turn(run)
            coming = () if turn.is_last else self._pair(f"turn {turn.number + 1}")
            made = outputs if turn.is_last else ()
            body += self._rotated(held, coming)
            body.append(Forward(run=run.index, inputs=held, outputs=made, saves=saves, again=again))
            body += [Wait(buffer=buffer) for buffer in coming]
            held = coming

    def backward(
        self, body: list[Instruction], cotangents: tuple[Buffer | None, ...], outputs: tuple[Buffer | None, ...]
    ) -> Pair:
        """From the cotangents of what the block makes to those of what it reads; what may be started early."""
        opening, *turns = self.runs
        with_cotangent = [i for i, slot in enumerate(opening.outputs) if slot.cotangent is not None]
        held = early = self._pair(f"back {len(turns) - 1}")
        moved: Pair = ()
        body += self._rotated(self.own, held, back=True)
        body += [Wait(buffer=buffer) for buffer in held]
        for run in reversed(turns):
            turn = _turn(run)
            before: Pair = ()
            if turn.number > 1:
                before = self._pair(f"back {turn.number - 1}")
                body += self._rotated(held, before, back=True)
            made = self._pair(f"cotangent {turn.number}")
            given = tuple(buffer if i in with_cotangent else None for i, buffer in enumerate(made))
            of_results = cotangents if turn.is_last else ()
            body.append(Backward(run=run.index, cotangents=of_results, outputs=given, again=held))
            total = made
            if not turn.is_last:
                total = self._pair(f"sum {turn.number}")
                for i in with_cotangent:
                    body.append(Wait(buffer=moved[i]))
                    body.append(Sum(tensor=opening.outputs[i].tensor, target=total[i], sources=(moved[i], made[i])))
            if turn.number > 0:
                moved = self._pair(f"moved {turn.number - 1}")
                body += self._rotated(total, moved, back=True, only=with_cotangent)
            body += [Wait(buffer=buffer) for buffer in before]
            held = before or self.own
        home = tuple(buffer if i in with_cotangent else None for i, buffer in enumerate(total))
        body.append(Backward(run=opening.index, cotangents=home, outputs=outputs))
        return early

    def _pair(self, what: str) -> Pair:
        return tuple(Buffer(name=f"{slot.tensor}:{what}{self.name}", indexed=True) for slot in self.runs[0].outputs)

    def _rotated(
        self, sources: Pair, targets: Pair, *, back: bool = False, only: Sequence[int] | None = None
    ) -> list[Collective]:
        """Start what brings buffers to the next device, or back to the one before; nothing without targets."""
        digits = _turn(self.runs[0]).digits
        groups = tuple(group[::-1] if back else group for group in self.mesh.groups(digits))
        step = Step(kind="rotate", groups=groups, shape=tuple(digit.size for digit in digits))
        return [
            Collective(
                tensor=slot.tensor,
                source=sources[i],
                target=targets[i],
                steps=(step,),
                factors=tuple((size,) for size in slot.sizes),
                sizes=slot.layout.local_sizes(slot.sizes),
            )
            for i, slot in enumerate(self.runs[0].outputs)
            if targets and (only is None or i in only)
        ]


def _turn(run: Run) -> Turn:
    assert run.turn is not None
    return run.turn

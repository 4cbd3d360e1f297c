"""The bodies of one stage: lists while they are written, then finished: overlapped, freed, and called.

Whatever the backward reads that the forward of the same micro-batch made is *kept* between them: the masks of rows of
experts, and the inputs of segments that are recomputed. The backward frees it after its last use.
"""

from collections.abc import Sequence
from dataclasses import replace

from planloom.layout import Layout
from planloom.program.free import free_after_last_use, reads, writes
from planloom.program.overlap import prefetch, reduce_during
from planloom.program.schedule import ENTER, EXIT, LAST_BACKWARD, RECEIVES, with_receives_ahead
from planloom.program.values import BodyCall, Buffer, Coalesced, Collective, Free, Instruction, Receive, Wait

Use = tuple[str, Layout]
"""A tensor in a layout."""


class StageBodies:
    """The bodies of one stage while they are written."""

    def __init__(self) -> None:
        self.enter: list[Instruction] = []
        self.forward: list[Instruction] = []
        self.backward: list[Instruction] = []
        self.exit: list[Instruction] = []
        self.values: dict[Use, Buffer] = {}
        self.cotangents: dict[str, list[tuple[Layout, Buffer]]] = {}
        self.gradients: dict[str, dict[Layout, Buffer]] = {}
        self.imported_gradients: dict[str, list[Buffer]] = {}
        self.gathers: dict[str, set[Buffer]] = {}
        self.held: dict[Use, tuple[Buffer, int]] = {}
        """Parameters that were gathered for a recomputation, each with the run whose backward is the last to use it."""
        self.delayed: list[Instruction] = []
        """The end of a reduction of gradients that goes on during the next run's backward."""
        self.buckets: list[Collective | Coalesced] = []

    def finished(self, calls: tuple[BodyCall, ...]) -> tuple[dict[str, tuple[Instruction, ...]], tuple[BodyCall, ...]]:
        """The finished bodies, and the calls of them."""
        gathered = frozenset(b for found in self.gathers.values() for b in found)
        received, forward = _without_receives(prefetch(self.forward, gathered))
        received_back, backward = _without_receives(prefetch(self.backward, gathered))
        kept = _kept((*received, *forward), backward)
        backward = [_without_free(instruction, kept) for instruction in backward]
        inherited = kept | {receive.target for receive in received_back}
        bodies = {
            ENTER: tuple(_receives_first(self.enter)),
            RECEIVES["forward"]: received,
            "forward": free_after_last_use(forward, kept=kept, inherited=frozenset(r.target for r in received)),
            RECEIVES["backward"]: received_back,
            "backward": free_after_last_use(backward, inherited=inherited),
            EXIT: tuple(_receives_first(self.exit)),
        }
        if self.buckets:
            last = reduce_during(backward, self.buckets)
            bodies[LAST_BACKWARD] = free_after_last_use(last, inherited=inherited)
            calls = _with_last_backward(calls)
        bodies = {name: body for name, body in bodies.items() if body or name not in RECEIVES.values()}
        return bodies, with_receives_ahead(calls, bodies)


def _kept(forward: Sequence[Instruction], backward: Sequence[Instruction]) -> frozenset[Buffer]:
    """What the forward makes in a micro-batch and the backward computes with."""
    made = {buffer for instruction in forward for buffer in writes(instruction) if buffer.indexed}
    users = (instruction for instruction in backward if not isinstance(instruction, Wait | Free))
    return frozenset(buffer for instruction in users for buffer in reads(instruction) if buffer in made)


def _without_free(instruction: Instruction, kept: frozenset[Buffer]) -> Instruction:
    """A send that was awaited does not free what is read once more."""
    if isinstance(instruction, Wait) and instruction.free and instruction.buffer in kept:
        return replace(instruction, free=False)
    return instruction


def _with_last_backward(calls: tuple[BodyCall, ...]) -> tuple[BodyCall, ...]:
    last = max(i for i, call in enumerate(calls) if call.body == "backward")
    return (*calls[:last], replace(calls[last], body=LAST_BACKWARD), *calls[last + 1 :])


def _receives_first(body: list[Instruction]) -> list[Instruction]:
    """Start all receives of a body before anything else: they depend on nothing, and messages then travel at once."""
    return sorted(body, key=lambda instruction: not isinstance(instruction, Receive))


def _without_receives(body: Sequence[Instruction]) -> tuple[tuple[Receive, ...], list[Instruction]]:
    """The receives of a body, and the rest of it."""
    receives = tuple(instruction for instruction in body if isinstance(instruction, Receive))
    return receives, [instruction for instruction in body if not isinstance(instruction, Receive)]

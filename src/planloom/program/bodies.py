"""The bodies of one device group: lists while they are written, then finished: overlapped, freed, and called.

A micro-batch goes through the bodies of its parts: the forwards of a group's stages, then their backwards in the
opposite order, then, where they are apart, weight-gradients. What one of them makes and a later one reads (an
activation that another stage of the group reads, the inputs of segments that are recomputed, the masks of rows of
experts) lives until its last use on this way.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planloom.layout import Layout
from planloom.plan.orders import Call, Phase
from planloom.program.free import free_after_last_use
from planloom.program.overlap import prefetch, reduce_during
from planloom.program.schedule import ENTER, EXIT, Part, Ways, last_of, receives_of, with_receives_ahead
from planloom.program.shared import marked, put_together
from planloom.program.values import BodyCall, Buffer, Coalesced, Collective, Instruction, Receive

Use = tuple[str, Layout]
"""A tensor in a layout."""
Bodies = dict[str, tuple[Instruction, ...]]


@dataclass(eq=False, slots=True, kw_only=True)
class PartBodies:
    """The bodies of one part while they are written; without a split backward, all of it is in `backward`."""

    part: Part
    phases: frozenset[Phase]
    forward: list[Instruction] = field(default_factory=list)
    backward: list[Instruction] = field(default_factory=list)
    weight: list[Instruction] = field(default_factory=list)
    values: dict[Use, Buffer] = field(default_factory=dict)
    """Activations in layouts into which this part alone has brought them."""
    held: dict[Use, tuple[Buffer, int]] = field(default_factory=dict)
    """Parameters that were gathered for a recomputation, each with the run whose backward is the last to use it."""
    delayed: list[Instruction] = field(default_factory=list)
    """The end of a reduction of gradients that goes on during the next run's backward."""

    @property
    def is_split(self) -> bool:
        return "input-gradient" in self.phases

    @property
    def gradient_body(self) -> list[Instruction]:
        """Where gradients of parameters are made."""
        return self.weight if self.is_split else self.backward


class StageBodies:
    """The bodies of one device group while they are written."""

    def __init__(self) -> None:
        self.enter: list[Instruction] = []
        self.exit: list[Instruction] = []
        self.parts: dict[Part, PartBodies] = {}
        self.arrived: dict[int, dict[Use, Buffer]] = {}
        """By way: activations as they were made here, completed for others, or received."""
        self.used: dict[Use, Buffer] = {}
        """Parameters in layouts into which they are brought once a step."""
        self.cotangents: dict[int, dict[str, list[tuple[Layout, Buffer]]]] = {}
        self.gradients: dict[str, dict[Layout, Buffer]] = {}
        self.imported_gradients: dict[str, list[Buffer]] = {}
        self.gathers: dict[str, set[Buffer]] = {}
        self.early: set[Buffer] = set()
        """What else is started one run before the run that reads it."""
        self.buckets: dict[int, list[Collective | Coalesced]] = {}
        """By stage: reductions of gradients that its last backward starts."""

    def finished(self, order: Sequence[Call], ways: Ways) -> tuple[Bodies, tuple[BodyCall, ...]]:
        """The finished bodies, and the body of every call of this group's stages."""
        bodies: Bodies = {ENTER: tuple(_receives_first(self.enter))}
        for way in sorted(self.arrived.keys() | {part.way for part in self.parts}):
            bodies.update(self._finished_way(way, ways))
        bodies = {name: body for name, body in bodies.items() if body or " receives" not in name}
        calls = [(ways.part(call), call) for call in order]
        last: dict[int, int] = {}
        for at, (part, call) in enumerate(calls):
            if call.phase in ("backward", "weight-gradient"):
                last[part.stage] = at
        names = {(part, phase): f"{phase}{ways.suffix(part)}" for part, phase in {(p, c.phase) for p, c in calls}}
        named = []
        for at, (part, call) in enumerate(calls):
            name = names[part, call.phase]
            if last.get(part.stage) == at and self.buckets.get(part.stage):
                bodies[last_of(name)] = tuple(reduce_during(bodies[name], self.buckets[part.stage]))
                name = last_of(name)
            named.append(BodyCall(body=name, micro=call.micro))
        bodies[EXIT] = tuple(_receives_first(self.exit))
        return bodies, tuple(named)

    def _finished_way(self, way: int, ways: Ways) -> Bodies:
        """The bodies that the micro-batches of one way go through."""
        gathered = frozenset(b for found in self.gathers.values() for b in found) | self.early
        parts = sorted((body for part, body in self.parts.items() if part.way == way), key=lambda b: b.part.stage)
        written: dict[tuple[Part, Phase], Sequence[Instruction]] = {}
        for part in parts:
            written[part.part, "forward"] = prefetch(part.forward, gathered)
        for part in reversed(parts):
            if part.phases != {"forward"}:
                phase: Phase = "input-gradient" if part.is_split else "backward"
                written[part.part, phase] = prefetch(part.backward, gathered)
        for part in parts:
            if part.is_split:
                written[part.part, "weight-gradient"] = part.weight
        freed = dict(zip(written, free_after_last_use(list(written.values())), strict=True))
        return _named(freed, {part.part: (part, ways.suffix(part.part)) for part in parts})


def of_role(
    order: Sequence[Call], parts: Sequence[tuple[int, Sequence[Call], Bodies, Sequence[BodyCall]]]
) -> tuple[Bodies, tuple[BodyCall, ...]]:
    """The bodies and calls of a role: its own and those of the groups that it shares, each `(group, calls, finished)`.

    The group of its own is -1: its buffers need no mark.
    """
    bodies: Bodies = {}
    ends: dict[str, list[tuple[Instruction, ...]]] = {ENTER: [], EXIT: []}
    names: dict[Call, BodyCall] = {}
    for group, calls, found, named in parts:
        names.update(zip(calls, named, strict=True))
        for name, body in found.items():
            own = body if group < 0 else tuple(marked(instruction, group) for instruction in body)
            if name in ends:
                ends[name].append(own)
            else:
                bodies[name] = own
    bodies = {ENTER: put_together(ends[ENTER]), **bodies, EXIT: put_together(ends[EXIT])}
    called = (BodyCall(body=ENTER), *(names[call] for call in order), BodyCall(body=EXIT))
    return bodies, with_receives_ahead(called, bodies)


def _named(
    freed: Mapping[tuple[Part, Phase], tuple[Instruction, ...]], parts: Mapping[Part, tuple[PartBodies, str]]
) -> Bodies:
    """Bodies by name, receives apart; a backward that is called whole though others are split is both halves."""
    bodies: Bodies = {}
    for (part, phase), body in freed.items():
        written, suffix = parts[part]
        received = tuple(instruction for instruction in body if isinstance(instruction, Receive))
        rest = tuple(instruction for instruction in body if not isinstance(instruction, Receive))
        if phase in written.phases:
            bodies[receives_of(f"{phase}{suffix}")] = received
            bodies[f"{phase}{suffix}"] = rest
        if phase == "input-gradient" and "backward" in written.phases:
            bodies[receives_of(f"backward{suffix}")] = received
            bodies[f"backward{suffix}"] = (*rest, *freed[part, "weight-gradient"])
    return bodies


def _receives_first(body: list[Instruction]) -> list[Instruction]:
    """Start all receives of a body before anything else: they depend on nothing, and messages then travel at once."""
    return sorted(body, key=lambda instruction: not isinstance(instruction, Receive))

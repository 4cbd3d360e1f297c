"""Schedule: the calls of every device group, in the order that the plan gives them.

A stage's phases are bodies of a device group. Where a group has several stages, or a stage has several homes, bodies
are those of a *part*: one stage for the micro-batches that go one way through the groups.

`interleave` is the way in which interpreters of a whole program walk through it: each role goes on as far as it can.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from planloom.plan import Plan
from planloom.plan.orders import Call
from planloom.program.values import BodyCall, Instruction, Program, Send

ENTER, EXIT = "enter", "exit"
_RECEIVES, _LAST = " receives", "last "


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Part:
    """A stage on a device group, for the micro-batches of one way."""

    way: int
    stage: int
    group: int


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How micro-batches go through the groups: `homes[w][s]` is the group of stage s on way w."""

    homes: tuple[tuple[int, ...], ...]
    way_of: tuple[int, ...]
    """For every micro-batch."""
    num_roles: int
    """Groups with a higher number are shared."""

    def part(self, call: Call) -> Part:
        return self._table[self.way_of[call.micro]][call.stage]

    def parts(self) -> tuple[Part, ...]:
        """All parts, way by way, in the order of stages."""
        return tuple(part for parts in self._table for part in parts)

    def suffix(self, part: Part) -> str:
        """What tells the bodies of a part from others of its group; nothing if there are none."""
        return self._suffixes[part]

    @cached_property
    def _table(self) -> tuple[tuple[Part, ...], ...]:
        return tuple(
            tuple(Part(way=way, stage=stage, group=group) for stage, group in enumerate(homes))
            for way, homes in enumerate(self.homes)
        )

    @cached_property
    def _suffixes(self) -> dict[Part, str]:
        here: dict[int, list[int]] = {}
        for part in self.parts():
            here.setdefault(part.group, []).append(part.stage)
        found = {}
        for part in self.parts():
            stages = here[part.group]
            by_way = f" by way {part.way}" if stages.count(part.stage) > 1 else ""
            found[part] = f" of stage {part.stage}{by_way}" if len(stages) > 1 or part.group >= self.num_roles else ""
        return found


def find_ways(plan: Plan) -> Ways:
    """The ways of a plan's micro-batches, those of stages' own groups first."""
    own = tuple(map(plan.group_of, range(len(plan.meshes))))
    members = [plan.members(group) for group in own]
    homes = [list(own) for _ in range(plan.num_micro_batches)]
    for group, order in enumerate(plan.orders):
        for call in order:
            if group not in members[call.stage]:
                homes[call.micro][call.stage] = group
    ways = sorted(set(map(tuple, homes)), key=lambda way: (way != own, way))
    numbers = {way: number for number, way in enumerate(ways)}
    return Ways(homes=tuple(ways), way_of=tuple(numbers[tuple(way)] for way in homes), num_roles=len(plan.roles))


def receives_of(body: str) -> str:
    """The body that starts what a body receives from other groups: it is called ahead, see `with_receives_ahead`."""
    phase, _, rest = body.removeprefix(_LAST).partition(" ")
    return phase + _RECEIVES + (f" {rest}" if rest else "")


def last_of(body: str) -> str:
    """The variant of a body in which gradients that are complete then are reduced."""
    return _LAST + body


def is_last(body: str) -> bool:
    return body.startswith(_LAST)


def with_receives_ahead(
    calls: tuple[BodyCall, ...], bodies: Mapping[str, tuple[Instruction, ...]]
) -> tuple[BodyCall, ...]:
    """The calls of a group, with what each receives started before the last call before it that exchanges anything.

    A message travels once both ends have started, and gloo's answer that a receiver is ready waits behind whatever the
    receiver itself sends: so it must not be started behind what an earlier call sends. A weight-gradient exchanges
    nothing.

    [Empirical] Four stages over 50 and 150 Mbit/s, small GPT, zb-h1, 2 vCPU, 2026-11-19: a step takes 2.75 s with
    receives started one call ahead, be it a weight-gradient, and 2.23 s so; simulated 1.96 s both times.
    """
    receives = {name: receives_of(name) for name in {call.body for call in calls} if receives_of(name) in bodies}
    exchanges = {name for name, body in bodies.items() if any(isinstance(i, Send) for i in body)} | receives.keys()
    ahead: list[list[BodyCall]] = [[] for _ in calls]
    last = 0
    for i, call in enumerate(calls):
        if call.body in receives:
            ahead[last].append(BodyCall(body=receives[call.body], micro=call.micro))
        if call.body in exchanges:
            last = i
    return tuple(each for before, call in zip(ahead, calls, strict=True) for each in (*before, call))


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One instruction of a role's script: where it stands and for which micro-batch it is carried out."""

    stage: int
    body: str
    index: int
    instruction: Instruction
    micro: int


def interleave(program: Program, step: Callable[[Line], bool]) -> tuple[Line, ...]:
    """Carry out all roles together; `step` says whether a line could be done. Returns the lines that all wait at."""
    scripts = [
        [
            Line(stage=s, body=call.body, index=i, instruction=instruction, micro=call.micro)
            for call in stage.calls
            for i, instruction in enumerate(stage.bodies[call.body])
        ]
        for s, stage in enumerate(program.stages)
    ]
    at = [0] * len(scripts)
    moved = True
    while moved:
        moved = False
        for s, script in enumerate(scripts):
            while at[s] < len(script) and step(script[at[s]]):
                at[s] += 1
                moved = True
    return tuple(script[at[s]] for s, script in enumerate(scripts) if at[s] < len(script))

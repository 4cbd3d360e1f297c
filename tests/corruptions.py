"""Corruptions of a program: each changes one random place in the bodies of all stages, or returns None where it cannot.

A corruption may happen to be neutral (ranks swapped in a sum, copies of a box that nobody reads): what it does to the
meaning is the oracle's to say. `FAMILIES` groups them as the errors that a planner could make. `respell` is no
corruption: it writes collectives in longer ways that mean the same, so that every kind of step occurs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from random import Random
from typing import NamedTuple, TypeVar

from planloom.collective import Step, StepKind, local_sizes_after
from planloom.layout import Box
from planloom.program import (
    Accumulate,
    Coalesced,
    Collective,
    Free,
    Instruction,
    Program,
    Receive,
    Send,
    Sum,
    Transfer,
    Wait,
    collectives_in,
)

Corruption = Callable[[Program, Random], Program | None]
Kind = TypeVar("Kind", bound=Instruction)
Item = TypeVar("Item")


class Spot(NamedTuple):
    """An instruction's place in a program."""

    stage: int
    body: str
    index: int


# -- finding and changing instructions


def find(program: Program, kind: type[Kind]) -> list[tuple[Spot, Kind]]:
    """All instructions of a kind in all bodies, with their places."""
    return [
        (Spot(s, body, i), instruction)
        for s, stage in enumerate(program.stages)
        for body, instructions in stage.bodies.items()
        for i, instruction in enumerate(instructions)
        if isinstance(instruction, kind)
    ]


def change(program: Program, spot: Spot, *instructions: Instruction) -> Program:
    """The program with other instructions at a place."""
    body = program.stages[spot.stage].bodies[spot.body]
    return with_body(program, spot, (*body[: spot.index], *instructions, *body[spot.index + 1 :]))


def with_body(program: Program, spot: Spot, body: tuple[Instruction, ...]) -> Program:
    """The program with another body where the place is."""
    stage = program.stages[spot.stage]
    stages = list(program.stages)
    stages[spot.stage] = replace(stage, bodies={**stage.bodies, spot.body: body})
    return replace(program, stages=tuple(stages))


def choose(random: Random, items: Sequence[Item]) -> Item | None:
    return random.choice(items) if items else None


def _exchanged(items: Sequence[Item], i: int, j: int) -> tuple[Item, ...]:
    result = list(items)
    result[i], result[j] = result[j], result[i]
    return tuple(result)


# -- steps of collective programs


class _StepAt(NamedTuple):
    spot: Spot
    collective: Collective
    member: int
    """Among the collectives that its instruction starts."""
    number: int
    step: Step
    sizes: tuple[int, ...]
    """The dims of a device's array before the step."""


def _steps(program: Program, *kinds: str) -> list[_StepAt]:
    found = []
    for spot, instruction in [*find(program, Collective), *find(program, Coalesced)]:
        for member, collective in enumerate(collectives_in(instruction)):
            sizes = collective.sizes
            for number, step in enumerate(collective.steps):
                if not kinds or step.kind in kinds:
                    found.append(_StepAt(spot, collective, member, number, step, sizes))
                sizes = local_sizes_after(step, sizes)
    return found


def _change_step(program: Program, at: _StepAt, *steps: Step) -> Program:
    """Other steps in the place of one; collectives that are carried out as one change in kind and groups together."""

    def changed(collective: Collective, new: Sequence[Step]) -> Collective:
        before, after = collective.steps[: at.number], collective.steps[at.number + 1 :]
        return replace(collective, steps=(*before, *new, *after))

    instruction = program.stages[at.spot.stage].bodies[at.spot.body][at.spot.index]
    if isinstance(instruction, Collective):
        return change(program, at.spot, changed(instruction, steps))
    assert isinstance(instruction, Coalesced)
    members = [
        changed(c, steps if i == at.member else [_alike(c.steps[at.number], step) for step in steps])
        for i, c in enumerate(instruction.collectives)
    ]
    return change(program, at.spot, replace(instruction, collectives=tuple(members)))


def _alike(own: Step, other: Step) -> Step:
    """One's own dims with another's kind and groups."""
    into, along = own.into if other.into else (), own.along if other.along else ()
    return replace(own, kind=other.kind, groups=other.groups, combine=other.combine, into=into, along=along)


def swap_ranks_in_group(program: Program, random: Random) -> Program | None:
    at = choose(random, _steps(program))
    if at is None:
        return None
    number = random.randrange(len(at.step.groups))
    group = at.step.groups[number]
    i, j = random.sample(range(len(group)), 2)
    groups = (*at.step.groups[:number], _exchanged(group, i, j), *at.step.groups[number + 1 :])
    return _change_step(program, at, replace(at.step, groups=groups))


def swap_ranks_between_groups(program: Program, random: Random) -> Program | None:
    at = choose(random, [at for at in _steps(program) if len(at.step.groups) > 1])
    if at is None:
        return None
    groups = [list(group) for group in at.step.groups]
    first, second = random.sample(groups, 2)
    i, j = random.randrange(len(first)), random.randrange(len(second))
    first[i], second[j] = second[j], first[i]
    return _change_step(program, at, replace(at.step, groups=tuple(map(tuple, groups))))


def leave_out_reduction(program: Program, random: Random) -> Program | None:
    """An all-reduce is left out, a reduce-scatter becomes the slice that has the same size."""
    at = choose(random, _steps(program, "all_reduce", "reduce_scatter"))
    if at is None:
        return None
    return _change_step(program, at, *([replace(at.step, kind="slice")] if at.step.kind == "reduce_scatter" else []))


def leave_out_summand(program: Program, random: Random) -> Program | None:
    found = choose(random, [(spot, s) for spot, s in find(program, Sum) if len(s.sources) > 1])
    if found is None:
        return None
    spot, junction = found
    i = random.randrange(len(junction.sources))
    return change(program, spot, replace(junction, sources=junction.sources[:i] + junction.sources[i + 1 :]))


def leave_out_accumulation(program: Program, random: Random) -> Program | None:
    """One of several additions to the same buffer, or, as good, the only one."""
    found = find(program, Accumulate)
    several = [(spot, a) for spot, a in found if sum(b.target == a.target for _, b in found) > 1]
    chosen = choose(random, several if several and random.random() < 0.5 else found)
    return None if chosen is None else change(program, chosen[0])


def repeat_reduction(program: Program, random: Random) -> Program | None:
    """What an all-reduce or a reduce-scatter reduces is reduced once more."""
    at = choose(random, _steps(program, "all_reduce", "reduce_scatter"))
    if at is None:
        return None
    return _change_step(program, at, replace(at.step, kind="all_reduce", into=()), at.step)


def repeat_summand(program: Program, random: Random) -> Program | None:
    found = choose(random, find(program, Sum))
    if found is None:
        return None
    spot, junction = found
    return change(program, spot, replace(junction, sources=(*junction.sources, random.choice(junction.sources))))


def repeat_accumulation(program: Program, random: Random) -> Program | None:
    found = choose(random, find(program, Accumulate))
    return None if found is None else change(program, found[0], found[1], found[1])


def combine_otherwise(program: Program, random: Random) -> Program | None:
    """A sum becomes a maximum, or a maximum a sum; in steps that combine nothing this is neutral.

    Not behind a mask: the largest of positive numbers and zeros is their sum, for some data.
    """
    at = choose(random, [at for at in _steps(program) if all(step.kind != "mask" for step in at.collective.steps)])
    if at is None:
        return None
    return _change_step(program, at, replace(at.step, combine="max" if at.step.combine == "sum" else "sum"))


def permute_slice(program: Program, random: Random) -> Program | None:
    """The pieces that a step cuts go to the wrong devices."""
    at = choose(random, _steps(program, "slice") or _steps(program, "reduce_scatter", "all_to_all"))
    if at is None:
        return None
    number = random.randrange(len(at.step.groups))
    group = at.step.groups[number]
    permuted = tuple(random.sample(group, len(group)))
    groups = (*at.step.groups[:number], permuted, *at.step.groups[number + 1 :])
    return _change_step(program, at, replace(at.step, groups=groups))


def cut_elsewhere(program: Program, random: Random) -> Program | None:
    """Pieces are cut, or put together, along another factor that can be divided as often."""
    at = choose(random, _steps(program, "slice", "reduce_scatter", "all_to_all", "all_gather"))
    if at is None:
        return None
    field = "along" if at.step.kind == "all_gather" else "into"
    i = random.randrange(len(at.step.shape))
    dims = [d for d in range(len(at.sizes)) if d not in (*at.step.into, *at.step.along)]
    before = getattr(at.step, field)
    if field == "into":
        dims = [d for d in dims if at.sizes[d] % at.step.shape[i] == 0]

    def pieces(dim: int) -> list[int]:
        return [size // at.step.shape[i] if field == "into" and d == dim else size for d, size in enumerate(at.sizes)]

    # With nothing between the two dims, pieces come to lie in the same order: that would be the same program.
    dims = [d for d in dims if prod(pieces(d)[min(d, before[i]) : max(d, before[i])]) > 1]
    dim = choose(random, dims)
    if dim is None:
        return None
    return _change_step(program, at, replace(at.step, **{field: (*before[:i], dim, *before[i + 1 :])}))


# -- transfers of exchanges


class _Pair(NamedTuple):
    """Both halves of an exchange."""

    send_spot: Spot
    send: Send
    receive_spot: Spot
    receive: Receive


def _pairs(program: Program) -> list[_Pair]:
    receives = {receive.channel: (spot, receive) for spot, receive in find(program, Receive)}
    return [_Pair(spot, send, *receives[send.channel]) for spot, send in find(program, Send)]


def _change_pair(
    program: Program, pair: _Pair, sent: Sequence[Transfer] | None = None, received: Sequence[Transfer] | None = None
) -> Program:
    if sent is not None:
        program = change(program, pair.send_spot, replace(pair.send, transfers=tuple(sent)))
    if received is not None:
        program = change(program, pair.receive_spot, replace(pair.receive, transfers=tuple(received)))
    return program


def _shifted(random: Random, box: Box, sizes: tuple[int, ...]) -> Box | None:
    """The box moved by as much as fits along one factor."""
    moves = [
        (factor, by)
        for factor, ((start, stop), size) in enumerate(zip(box, sizes, strict=True))
        for by in range(-start, size - stop + 1)
        if by
    ]
    move = choose(random, moves)
    if move is None:
        return None
    factor, by = move
    return tuple((s + by, e + by) if i == factor else (s, e) for i, (s, e) in enumerate(box))


def shift_box(program: Program, random: Random) -> Program | None:
    """A message is cut from the wrong place, or put there; or the copy of a box is moved that nobody reads."""
    spots = []
    for pair in _pairs(program):
        for i, t in enumerate(pair.send.transfers):
            for half in ("send", "receive"):
                for field, sizes in (("source_box", pair.send.sizes), ("target_box", pair.receive.sizes)):
                    if any(length < size for length, size in zip(_lengths(getattr(t, field)), sizes, strict=True)):
                        spots.append((pair, half, i, field, sizes))
    chosen = choose(random, spots)
    if chosen is None:
        return None
    pair, half, i, field, sizes = chosen
    transfers = list(pair.send.transfers if half == "send" else pair.receive.transfers)
    box = _shifted(random, getattr(transfers[i], field), sizes)
    assert box is not None
    transfers[i] = replace(transfers[i], **{field: box})
    return _change_pair(program, pair, **{"sent" if half == "send" else "received": transfers})


def repeat_message(program: Program, random: Random) -> Program | None:
    """One part of what a device receives arrives twice, another never."""
    spots = [
        (pair, i, j)
        for pair in _pairs(program)
        for i, first in enumerate(pair.send.transfers)
        for j, second in enumerate(pair.send.transfers)
        if i != j and first.target == second.target
    ]
    chosen = choose(random, spots)
    if chosen is None:
        return None
    pair, i, j = chosen
    transfers = list(pair.send.transfers)
    transfers[i] = transfers[j]
    return _change_pair(program, pair, sent=transfers, received=transfers)


def stretch_message(program: Program, random: Random) -> Program | None:
    """A message holds more than its receiver's array has room for."""
    spots = [
        (pair, i, factor)
        for pair in _pairs(program)
        for i, t in enumerate(pair.send.transfers)
        for factor, ((_, stop), (_, high)) in enumerate(zip(t.source_box, t.target_box, strict=True))
        if stop < pair.send.sizes[factor] and high == pair.receive.sizes[factor]
    ]
    chosen = choose(random, spots)
    if chosen is None:
        return None
    pair, i, factor = chosen

    def longer(box: Box) -> Box:
        return tuple((s, e + 1) if f == factor else (s, e) for f, (s, e) in enumerate(box))

    transfers = list(pair.send.transfers)
    old = transfers[i]
    transfers[i] = replace(old, source_box=longer(old.source_box), target_box=longer(old.target_box))
    return _change_pair(program, pair, sent=transfers, received=transfers)


def _lengths(box: Box) -> list[int]:
    return [stop - start for start, stop in box]


def swap_transfers(program: Program, random: Random) -> Program | None:
    """Two transfers exchange senders, receivers or a box: in one half of the exchange or in both."""
    pair = choose(random, [pair for pair in _pairs(program) if len(pair.send.transfers) > 1])
    if pair is None:
        return None
    i, j = random.sample(range(len(pair.send.transfers)), 2)
    field, half = random.choice(["source", "target", "source_box", "target_box"]), random.choice(["sent", "both"])
    transfers = list(pair.send.transfers)
    first, second = transfers[i], transfers[j]
    transfers[i] = replace(first, **{field: getattr(second, field)})
    transfers[j] = replace(second, **{field: getattr(first, field)})
    return _change_pair(program, pair, sent=transfers, received=transfers if half == "both" else None)


def swap_order_of_transfers(program: Program, random: Random) -> Program | None:
    """The messages of one half of an exchange in another order."""
    pair = choose(random, [pair for pair in _pairs(program) if len(pair.send.transfers) > 1])
    if pair is None:
        return None
    i, j = random.sample(range(len(pair.send.transfers)), 2)
    return _change_pair(program, pair, sent=_exchanged(pair.send.transfers, i, j))


def swap_sends(program: Program, random: Random) -> Program | None:
    """Two sends of a stage that are of the same size send each other's buffer."""
    sends = find(program, Send)
    chosen = choose(
        random,
        [
            (first, second)
            for i, first in enumerate(sends)
            for second in sends[i + 1 :]
            if first[0].stage == second[0].stage and first[1].sizes == second[1].sizes
        ],
    )
    if chosen is None:
        return None
    (first_spot, first), (second_spot, second) = chosen
    program = change(program, first_spot, replace(first, source=second.source))
    return change(program, second_spot, replace(second, source=first.source))


# -- frees


def free_earlier(program: Program, random: Random) -> Program | None:
    """A free, or a wait that frees, at a random earlier place of its body."""
    found = [spot for spot, _ in find(program, Free)]
    found += [spot for spot, wait in find(program, Wait) if wait.free]
    spot = choose(random, [spot for spot in found if spot.index > 0])
    if spot is None:
        return None
    body = list(program.stages[spot.stage].bodies[spot.body])
    # Half of them go a few places only: that is where an error of one comes to lie.
    earliest = max(0, spot.index - 6) if random.random() < 0.5 else 0
    body.insert(random.randrange(earliest, spot.index), body.pop(spot.index))
    return with_body(program, spot, tuple(body))


# -- waits


def _arrivals(program: Program) -> list[Spot]:
    """The waits for what a collective or a receive brings."""
    brought = [(spot.stage, receive.target) for spot, receive in find(program, Receive)]
    for kind in (Collective, Coalesced):
        brought += [(spot.stage, c.target) for spot, i in find(program, kind) for c in collectives_in(i)]
    return [spot for spot, wait in find(program, Wait) if (spot.stage, wait.buffer) in brought and not wait.free]


def wait_later(program: Program, random: Random) -> Program | None:
    """What arrives is awaited at a random later place of the body."""
    spots = [s for s in _arrivals(program) if s.index + 1 < len(program.stages[s.stage].bodies[s.body])]
    spot = choose(random, spots)
    if spot is None:
        return None
    body = list(program.stages[spot.stage].bodies[spot.body])
    latest = min(len(body) - 1, spot.index + 6) if random.random() < 0.5 else len(body) - 1
    body.insert(random.randint(spot.index + 1, latest), body.pop(spot.index))
    return with_body(program, spot, tuple(body))


def leave_out_wait(program: Program, random: Random) -> Program | None:
    spot = choose(random, _arrivals(program))
    return None if spot is None else change(program, spot)


FAMILIES: dict[str, tuple[Corruption, ...]] = {
    "ranks swapped in a group": (swap_ranks_in_group, swap_ranks_between_groups),
    "a reduction left out": (leave_out_reduction, leave_out_summand, leave_out_accumulation),
    "a reduction done twice": (repeat_reduction, repeat_summand, repeat_accumulation),
    "a wrong slice": (permute_slice, cut_elsewhere, shift_box, repeat_message, stretch_message),
    "swapped sends": (swap_transfers, swap_order_of_transfers, swap_sends),
    "an early free": (free_earlier,),
    "a wrong combination": (combine_otherwise,),
    "a late wait": (wait_later, leave_out_wait),
}


# -- longer spellings


def respell(program: Program, random: Random) -> Program:
    """The same program with collectives written in longer ways that mean the same."""
    for spot, collective in find(program, Collective):
        steps: list[Step] = []
        sizes = collective.sizes
        for step in collective.steps:
            steps += _respelled(step, sizes, random)
            sizes = local_sizes_after(step, sizes)
        program = change(program, spot, replace(collective, steps=tuple(steps)))
    return program


def _respelled(step: Step, sizes: tuple[int, ...], random: Random) -> list[Step]:
    after, n = local_sizes_after(step, sizes), step.group_size
    if step.kind not in ("all_reduce", "all_gather"):
        return [step]

    def other(kind: StepKind, along: int = -1, into: int = -1) -> Step:
        dims = {"along": (along,) if along >= 0 else (), "into": (into,) if into >= 0 else ()}
        return Step(kind=kind, groups=step.groups, shape=(n,), combine=step.combine, **dims)

    spellings = [[step]]
    if step.kind == "all_reduce":
        spellings.append([other("reduce"), other("broadcast")])
    else:
        spellings.append([replace(step, kind="gather"), other("broadcast")])
    if step.combine == "sum":  # a mask makes a partial sum, and a maximum has none
        spellings.append([step, other("mask"), other("all_reduce")])
    divided = [dim for dim, size in enumerate(after) if size % n == 0]
    for dim in divided:
        if dim in step.along:
            continue  # a slice that undoes a gather at once would hide whatever was gathered
        if step.kind == "all_reduce" and step.combine == "sum":
            spellings.append([other("reduce_scatter", into=dim), other("all_gather", along=dim)])
            spellings.append([other("reduce"), other("scatter", into=dim), other("all_gather", along=dim)])
        cut = other("slice", into=dim)
        spellings.append([step, cut, other("all_gather", along=dim)])
        spellings.append([step, cut, other("gather", along=dim), other("broadcast")])
        for turned in divided:
            if turned != dim:
                turn = other("all_to_all", along=dim, into=turned)
                spellings.append([step, cut, turn, other("all_gather", along=turned)])
    return random.choice(spellings)

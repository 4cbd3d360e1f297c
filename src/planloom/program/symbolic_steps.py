"""What the steps of collective programs and the messages of exchanges do to symbols."""

from collections.abc import Sequence
from math import prod

from planloom.collective import Step
from planloom.layout import Box, Combine, intersect, volume
from planloom.layout.boxes import coarsened, refined, subtract, whole
from planloom.program.symbols import Symbol, added
from planloom.program.values import Collective


class StepError(Exception):
    """A step that would put together what does not belong together."""

    def __init__(self, what: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(what)
        self.ranks = ranks


def apply_steps(collective: Collective, symbols: dict[int, Symbol], combine: Combine) -> dict[int, Symbol]:
    """The symbols of all devices after a collective program; `combine` is how this tensor's parts combine.

    Inside, boxes have one interval a sub-factor, and a device that holds nothing, after a reduce or a gather to another
    one, has no symbol.
    """
    windows = {device: _window(symbol.box, collective) for device, symbol in symbols.items()}
    held: dict[int, Symbol | None] = {d: _refined(symbol, collective, windows[d], d) for d, symbol in symbols.items()}
    for step in collective.steps:
        for group in step.groups:
            others = {windows[device] for device in group if device in windows}
            if len(others) > 1:
                raise StepError(f"{step.kind}: the devices hold parts of different micro-batches or pieces", group)
        held = _apply(step, held, combine)
    idle = tuple(device for device, symbol in held.items() if symbol is None)
    if idle:
        raise StepError("a device holds nothing at the end", idle)
    return {d: _coarsened(symbol, collective, windows[d], d) for d, symbol in held.items() if symbol is not None}


def _window(box: Box, collective: Collective) -> tuple[int, ...]:
    """Where the part of the tensor begins that the program is about: one micro-batch of several, or one piece.

    Devices that hold different parts of it take no part in one group.
    """
    sizes = map(prod, collective.factors)
    return tuple(start // size * size for (start, _), size in zip(box, sizes, strict=True))


def _refined(symbol: Symbol, collective: Collective, window: tuple[int, ...], device: int) -> Symbol:
    inside = tuple((start - base, stop - base) for (start, stop), base in zip(symbol.box, window, strict=True))
    if any(stop > prod(subs) for (_, stop), subs in zip(inside, collective.factors, strict=True)):
        raise StepError(f"{symbol} lies outside {collective.factors}", (device,))
    box = refined(inside, collective.factors)
    if box is None or tuple(stop - start for start, stop in box) != collective.sizes:
        raise StepError(f"{symbol} is not of local size {collective.sizes}", (device,))
    return Symbol(symbol.kind, symbol.tensor, box, symbol.parts)


def _coarsened(symbol: Symbol, collective: Collective, window: tuple[int, ...], device: int) -> Symbol:
    box = coarsened(symbol.box, collective.factors)
    if box is None:
        raise StepError(f"{symbol} is not one piece of the tensor", (device,))
    placed = tuple((start + base, stop + base) for (start, stop), base in zip(box, window, strict=True))
    return Symbol(symbol.kind, symbol.tensor, placed, symbol.parts)


def _apply(step: Step, held: dict[int, Symbol | None], combine: Combine) -> dict[int, Symbol | None]:
    after: dict[int, Symbol | None] = {}
    for group in step.groups:
        if len(set(group)) != len(group) or len(group) != step.group_size:
            raise StepError(f"{step.kind}: a group is not of {step.group_size} different devices", group)
        if any(device not in held for device in group):
            raise StepError(f"{step.kind}: a group holds a device of another stage", group)
        results = _of_group(step, [held[device] for device in group], group, combine)
        for device, result in zip(group, results, strict=True):
            if device in after:
                raise StepError(f"{step.kind}: a device is in two groups", (device,))
            after[device] = result
    left = tuple(sorted(device for device in held.keys() - after.keys() if held[device] is not None))
    if left:
        raise StepError(f"{step.kind}: a device is in no group", left)
    return {device: after.get(device) for device in held}


def _of_group(
    step: Step, members: list[Symbol | None], group: tuple[int, ...], combine: Combine
) -> Sequence[Symbol | None]:
    """What every member holds after a step."""
    first = members[0]
    if step.kind in ("broadcast", "scatter"):
        if first is None:
            raise StepError(f"{step.kind} from a device that holds nothing", group)
        return [first] * len(group) if step.kind == "broadcast" else _pieces(first, step, group)
    own = [member for member in members if member is not None]
    if len(own) < len(members):
        raise StepError(f"{step.kind} of a device that holds nothing", group)
    match step.kind:
        case "slice":
            return [_pieces(member, step, group)[position] for position, member in enumerate(own)]
        case "rotate":
            return [own[-1], *own[:-1]]
        case "mask":
            return [own[0], *(Symbol(m.kind, m.tensor, m.box, frozenset()) for m in own[1:])]
        case "all_reduce":
            return [_reduced(step, own, group, combine)] * len(group)
        case "reduce":
            return [_reduced(step, own, group, combine), *([None] * (len(group) - 1))]
        case "reduce_scatter":
            return _pieces(_reduced(step, own, group, combine), step, group)
        case "all_gather":
            return [_gathered(step, own, group)] * len(group)
        case "gather":
            return [_gathered(step, own, group), *([None] * (len(group) - 1))]
        case "all_to_all":
            return _pieces(_gathered(step, own, group), step, group)
    raise AssertionError(step.kind)


def _reduced(step: Step, members: list[Symbol], group: tuple[int, ...], combine: Combine) -> Symbol:
    """The combination of a group's symbols. One without parts is zero: nothing to a sum, but not to a maximum."""
    first, contributing = members[0], [member for member in members if member.parts]
    if step.combine == "max" and all(member == first for member in members):
        return first  # the maximum of equal values
    if step.combine != combine and not (step.combine == "sum" and len(contributing) <= 1):
        raise StepError(f"{step.kind} combines by {step.combine} what combines by {combine}", group)
    if step.combine == "max" and len(contributing) < len(members):
        raise StepError(f"{step.kind} takes the maximum with zero", group)
    total = first
    for member in members[1:]:
        if step.combine == "max" and (member.kind, member.tensor, member.box) == (total.kind, total.tensor, total.box):
            total = Symbol(total.kind, total.tensor, total.box, total.parts | member.parts)  # may count twice
            continue
        try:
            total = added(total, member)
        except ValueError as error:
            raise StepError(f"{step.kind}: {error}", group) from None
    return total


def _gathered(step: Step, members: list[Symbol], group: tuple[int, ...]) -> Symbol:
    """The pieces of a group put together: a member's point says where its piece must lie."""
    first = members[0]
    if len(step.along) != len(step.shape) or any(dim >= len(first.box) for dim in step.along):
        raise StepError(f"{step.kind} along {step.along} does not fit its groups of {step.shape}", group)
    for member, point in zip(members, step.points, strict=True):
        if (member.kind, member.tensor, member.parts) != (first.kind, first.tensor, first.parts):
            raise StepError(f"{step.kind} puts {first} and {member} together", group)
        expected = list(first.box)
        for dim, index in zip(step.along, point, strict=True):
            start, stop = first.box[dim]
            expected[dim] = (start + index * (stop - start), stop + index * (stop - start))
        if member.box != tuple(expected):
            raise StepError(f"{step.kind} puts {member} where {expected} belongs", group)
    box = list(first.box)
    for dim, count in zip(step.along, step.shape, strict=True):
        start, stop = first.box[dim]
        box[dim] = (start, start + count * (stop - start))
    return Symbol(first.kind, first.tensor, tuple(box), first.parts)


def _pieces(symbol: Symbol, step: Step, group: tuple[int, ...]) -> list[Symbol]:
    """A symbol cut into as many pieces as a group has members, in their order."""
    if len(step.into) != len(step.shape) or any(dim >= len(symbol.box) for dim in step.into):
        raise StepError(f"{step.kind} into {step.into} does not fit its groups of {step.shape}", group)
    for dim, count in zip(step.into, step.shape, strict=True):
        start, stop = symbol.box[dim]
        if (stop - start) % count:
            raise StepError(f"{symbol} cannot be cut into {count} pieces", group)
    pieces = []
    for point in step.points:
        box = list(symbol.box)
        for dim, count, index in zip(step.into, step.shape, point, strict=True):
            start, stop = symbol.box[dim]
            length = (stop - start) // count
            box[dim] = (start + index * length, start + (index + 1) * length)
        pieces.append(Symbol(symbol.kind, symbol.tensor, tuple(box), symbol.parts))
    return pieces


def extract(symbol: Symbol, local: Box, sizes: tuple[int, ...]) -> Symbol:
    """The part of a symbol that a box in the index of its local array holds."""
    if tuple(stop - start for start, stop in symbol.box) != sizes:
        raise StepError(f"{symbol} is not of local size {sizes}")
    if any(start < 0 or stop > size or start >= stop for (start, stop), size in zip(local, sizes, strict=True)):
        raise StepError(f"the box {list(local)} lies outside {symbol}")
    box = tuple((base + start, base + stop) for (base, _), (start, stop) in zip(symbol.box, local, strict=True))
    return Symbol(symbol.kind, symbol.tensor, box, symbol.parts)


def join_messages(arrived: list[tuple[Symbol, Box]], sizes: tuple[int, ...]) -> Symbol:
    """Messages put at their places in a local array: they must fill it and lie as they do in the tensor."""
    if not arrived:
        raise StepError("nothing arrives")
    first = arrived[0][0]
    origin = tuple(s - t for (s, _), (t, _) in zip(first.box, arrived[0][1], strict=True))
    for symbol, place in arrived:
        shifted = tuple((s + o, e + o) for (s, e), o in zip(place, origin, strict=True))
        if (symbol.kind, symbol.tensor, symbol.parts) != (first.kind, first.tensor, first.parts):
            raise StepError(f"{first} and {symbol} arrive as one tensor")
        if any(start < 0 or stop > size for (start, stop), size in zip(place, sizes, strict=True)):
            raise StepError(f"{symbol} arrives at {list(place)}, outside an array of sizes {sizes}")
        if symbol.box != shifted:
            raise StepError(f"{symbol} arrives where {list(shifted)} belongs")
    missing: list[Box] = [whole(sizes)]
    for _, place in arrived:
        missing = [rest for box in missing for rest in subtract(box, place)]
    if missing:
        raise StepError(f"nothing arrives at {list(missing[0])}")
    box = tuple((o, o + size) for o, size in zip(origin, sizes, strict=True))
    return Symbol(first.kind, first.tensor, box, first.parts)


def join_pieces(pieces: list[tuple[Symbol, Box]], sizes: tuple[int, ...]) -> Symbol | None:
    """Pieces at their places in a local array, of which no two may meet; None while some are missing."""
    for i, (_, box) in enumerate(pieces):
        if any(start < 0 or stop > size or start >= stop for (start, stop), size in zip(box, sizes, strict=True)):
            raise StepError(f"a piece is written at {list(box)}, outside an array of sizes {sizes}")
        if any(intersect(box, other) is not None for _, other in pieces[:i]):
            raise StepError(f"a piece is written at {list(box)}, where another one lies")
    if sum(volume(box) for _, box in pieces) < prod(sizes):
        return None
    return join_messages(pieces, sizes)

"""What the steps of collective programs and the messages of exchanges do to symbols."""

from collections.abc import Sequence

from planloom.collective import Step
from planloom.layout import Box, Combine
from planloom.layout.boxes import subtract, whole
from planloom.program.symbols import Symbol, added


class StepError(Exception):
    """A step that would put together what does not belong together."""

    def __init__(self, what: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(what)
        self.ranks = ranks


def apply_steps(steps: Sequence[Step], symbols: dict[int, Symbol], combine: Combine) -> dict[int, Symbol]:
    """The symbols of all devices after a collective program; `combine` is how this tensor's parts combine."""
    for step in steps:
        after: dict[int, Symbol] = {}
        for group in step.groups:
            if len(set(group)) != len(group):
                raise StepError(f"{step.kind}: a device is in a group twice", group)
            if any(device not in symbols for device in group):
                raise StepError(f"{step.kind}: a group holds a device of another stage", group)
            for position, device in enumerate(group):
                if device in after:
                    raise StepError(f"{step.kind}: a device is in two groups", (device,))
                after[device] = _one(step, [symbols[member] for member in group], group, position, combine)
        if after.keys() != symbols.keys():
            raise StepError(f"{step.kind}: a device is in no group", tuple(sorted(symbols.keys() - after.keys())))
        symbols = after
    return symbols


def _one(step: Step, members: list[Symbol], group: tuple[int, ...], position: int, combine: Combine) -> Symbol:
    own = members[position]
    match step.kind:
        case "slice":
            return _piece(own, step.into, position, len(group), group)
        case "mask":
            return own if position == 0 else Symbol(own.kind, own.tensor, own.box, frozenset())
        case "all_reduce":
            return _reduced(step, members, group, combine)
        case "reduce_scatter":
            return _piece(_reduced(step, members, group, combine), step.into, position, len(group), group)
        case "all_gather":
            return _gathered(step, members, group)
        case "all_to_all":
            return _piece(_gathered(step, members, group), step.into, position, len(group), group)


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
    first, stop = members[0], members[0].box[step.along][1]
    for member in members[1:]:
        same = (member.kind, member.tensor, member.parts) == (first.kind, first.tensor, first.parts)
        if not same or _without(member.box, step.along) != _without(first.box, step.along):
            raise StepError(f"{step.kind} puts {first} and {member} together", group)
        if member.box[step.along][0] != stop:
            raise StepError(
                f"{step.kind} puts pieces together out of order: one ends at {stop}, the next starts at "
                f"{member.box[step.along][0]}",
                group,
            )
        stop = member.box[step.along][1]
    box = tuple((s, stop) if i == step.along else (s, e) for i, (s, e) in enumerate(first.box))
    return Symbol(first.kind, first.tensor, box, first.parts)


def _without(box: Box, factor: int) -> Box:
    return box[:factor] + box[factor + 1 :]


def _piece(symbol: Symbol, factor: int, position: int, count: int, group: tuple[int, ...]) -> Symbol:
    start, stop = symbol.box[factor]
    if (stop - start) % count:
        raise StepError(f"{symbol} cannot be cut into {count} pieces", group)
    length = (stop - start) // count
    interval = (start + position * length, start + (position + 1) * length)
    box = tuple(interval if i == factor else pair for i, pair in enumerate(symbol.box))
    return Symbol(symbol.kind, symbol.tensor, box, symbol.parts)


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

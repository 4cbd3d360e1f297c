"""Exchanges between stages: which device sends which box to which device.

Both sides are layouts without partial digits. Every receiver needs its own box; its parts are taken from senders that
hold them: from itself, where it is one of them. Where several senders hold the same part, receivers are spread over
them in order, so that two replicated stages of n devices exchange n messages and not n².

Stages have thousands of devices, so a receiver asks only senders whose box meets its own. They are found by their
intervals of each factor, of which there are few; and equal boxes are one object.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from math import prod

from planloom.layout import Box, Layout, Mesh, intersect
from planloom.layout.boxes import relative, subtract
from planloom.program.values import Transfer

Message = tuple[int, int, int]
"""(sender, receiver, number between these two)."""


def plan_transfers(
    sizes: tuple[int, ...], source: Layout, source_mesh: Mesh, target: Layout, target_mesh: Mesh
) -> tuple[Transfer, ...]:
    """The messages that bring a tensor from one stage's layout to another's."""
    assert not source.partial
    assert not target.partial
    if source == target and source_mesh.axes == target_mesh.axes:  # each device has what one of the others needs
        box = tuple((0, size) for size in source.local_sizes(sizes))
        pairs = zip(source_mesh.devices, target_mesh.devices, strict=True)
        return tuple(Transfer(source=a, target=b, source_box=box, target_box=box) for a, b in pairs)
    held = _boxes(sizes, source, source_mesh)
    own = {device: place for place, device in enumerate(source_mesh.devices)}
    holders, seen = _Holders(held), dict[Box, Box]()
    transfers = []
    for position, needed in enumerate(_boxes(sizes, target, target_mesh)):
        missing = [needed]
        first = own.get(target_mesh.devices[position], position % len(held))
        for place in holders.asked(needed, first=first):
            rest = []
            for box in missing:
                common = intersect(box, held[place])
                if common is None:
                    rest.append(box)
                    continue
                sent, received = relative(common, held[place]), relative(common, needed)
                transfers.append(
                    Transfer(
                        source=source_mesh.devices[place],
                        target=target_mesh.devices[position],
                        source_box=seen.setdefault(sent, sent),
                        target_box=seen.setdefault(received, received),
                    )
                )
                rest.extend(subtract(box, common))
            missing = rest
            if not missing:
                break
        assert not missing, "the layout of a stage covers the whole tensor"
    return tuple(transfers)


def numbered(transfers: Sequence[Transfer]) -> Iterator[tuple[Message, Transfer]]:
    """Messages as the wire tells them apart: by sender, receiver, and their order between these two."""
    counts: dict[tuple[int, int], int] = {}
    for transfer in transfers:
        pair = (transfer.source, transfer.target)
        counts[pair] = counts.get(pair, -1) + 1
        yield (*pair, counts[pair]), transfer


def _boxes(sizes: tuple[int, ...], layout: Layout, mesh: Mesh) -> list[Box]:
    """What each device of a mesh holds, in its order: `layout.box` of its coordinates."""
    digits = mesh.digits
    strides = {digit: prod(d.size for d in digits[i + 1 :]) for i, digit in enumerate(digits)}
    columns: list[list[tuple[int, int]]] = []
    for local, split in zip(layout.local_sizes(sizes), layout.splits, strict=True):
        pieces = [0] * len(mesh.devices)
        for digit in split:
            stride = strides[digit]
            pieces = [piece * digit.size + i // stride % digit.size for i, piece in enumerate(pieces)]
        intervals = {piece: (piece * local, (piece + 1) * local) for piece in set(pieces)}
        columns.append([intervals[piece] for piece in pieces])
    return list(zip(*columns, strict=True)) if columns else [()] * len(mesh.devices)


class _Holders:
    """Who holds a part of a box."""

    def __init__(self, held: Sequence[Box]) -> None:
        self._count = len(held)
        self._by_interval: list[dict[tuple[int, int], set[int]]] = [{} for _ in held[0]]
        for place, box in enumerate(held):
            for found, interval in zip(self._by_interval, box, strict=True):
                found.setdefault(interval, set()).add(place)
        self._places: dict[Box, Sequence[int]] = {}

    def asked(self, needed: Box, *, first: int) -> Iterator[int]:
        """The places of all that hold some of it, from a first place on and around."""
        if needed not in self._places:
            self._places[needed] = self._holding(needed)
        places = self._places[needed]
        start = bisect_left(places, first)
        for i in range(len(places)):
            yield places[(start + i) % len(places)]

    def _holding(self, needed: Box) -> Sequence[int]:
        places: set[int] | None = None
        for found, (start, stop) in zip(self._by_interval, needed, strict=True):
            meeting = [holders for (low, high), holders in found.items() if start < high and low < stop]
            if len(meeting) < len(found):
                here = set[int]().union(*meeting)
                places = here if places is None else places & here
        return range(self._count) if places is None else sorted(places)

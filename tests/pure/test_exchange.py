"""Exchanges between stages: the messages found by intervals are those of asking everybody."""

from itertools import product

import pytest

from planloom.layout import Digit, Layout, Mesh, intersect
from planloom.layout.boxes import relative, subtract
from planloom.program.exchange import plan_transfers
from planloom.program.values import Transfer

SIZES = (8, 4, 6)
DP, TP, CP = (Digit(axis=name, index=0, size=2) for name in ("dp", "tp", "cp"))
LAYOUTS = (
    Layout.replicated(3),
    Layout(splits=((DP,), (), ())),
    Layout(splits=((DP,), (TP,), ())),
    Layout(splits=((DP, TP), (), ())),
    Layout(splits=((TP, DP), (), (CP,))),
    Layout(splits=((), (TP, CP), (DP,))),
)


def asked_everybody(source: Layout, source_mesh: Mesh, target: Layout, target_mesh: Mesh) -> tuple[Transfer, ...]:
    """Every receiver asks every sender, from its own place on and around."""
    held = {device: source.box(SIZES, source_mesh.coordinates(device)) for device in source_mesh.devices}
    transfers = []
    for position, receiver in enumerate(target_mesh.devices):
        needed = target.box(SIZES, target_mesh.coordinates(receiver))
        missing = [needed]
        for i in range(len(source_mesh.devices)):
            sender = source_mesh.devices[(position + i) % len(source_mesh.devices)]
            rest = []
            for box in missing:
                common = intersect(box, held[sender])
                if common is None:
                    rest.append(box)
                    continue
                boxes = {
                    "source_box": relative(common, held[sender]),
                    "target_box": relative(common, needed),
                }
                transfers.append(Transfer(source=sender, target=receiver, **boxes))
                rest.extend(subtract(box, common))
            missing = rest
    return tuple(transfers)


@pytest.mark.parametrize(("source", "target"), [(a, b) for a, b in product(LAYOUTS, repeat=2) if a != b])
def test_only_those_who_hold_something_are_asked(source: Layout, target: Layout) -> None:
    source_mesh = Mesh.of((3, 1, 0, 2, 7, 5, 4, 6), dp=2, tp=2, cp=2)
    target_mesh = Mesh.of(range(8, 16), cp=2, dp=2, tp=2)
    found = plan_transfers(SIZES, source, source_mesh, target, target_mesh)
    assert found == asked_everybody(source, source_mesh, target, target_mesh)


def test_stages_may_have_different_numbers_of_devices() -> None:
    wide, narrow = Mesh.of(range(8), dp=2, tp=2, cp=2), Mesh.of((9, 8), dp=2)
    for source, target in ((wide, narrow), (narrow, wide)):
        for layouts in product(LAYOUTS[:2], repeat=2):
            found = plan_transfers(SIZES, layouts[0], source, layouts[1], target)
            assert {t.target for t in found} == set(target.devices)
            if layouts[0] != layouts[1] or source.axes != target.axes:
                assert found == asked_everybody(layouts[0], source, layouts[1], target)


def test_equal_boxes_are_one_object() -> None:
    source, target = Mesh.of(range(8), dp=2, tp=2, cp=2), Mesh.of(range(8, 16), dp=2, tp=2, cp=2)
    found = plan_transfers(SIZES, LAYOUTS[1], source, LAYOUTS[0], target)
    assert len({id(t.source_box) for t in found}) == len({t.source_box for t in found}) == 1

"""Exchanges between stages: which device sends which box to which device.

Both sides are layouts without partial digits, on meshes with disjoint devices. Every receiver needs its own box; its
parts are taken from senders that hold them. Where several senders hold the same part, receivers are spread over them
in order, so that two replicated stages of n devices exchange n messages and not n².
"""

from planloom.layout import Layout, Mesh, intersect
from planloom.layout.boxes import relative, subtract
from planloom.program.values import Transfer


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
    held = {device: source.box(sizes, source_mesh.coordinates(device)) for device in source_mesh.devices}
    transfers = []
    for position, receiver in enumerate(target_mesh.devices):
        needed = target.box(sizes, target_mesh.coordinates(receiver))
        missing = [needed]
        for i in range(len(source_mesh.devices)):
            sender = source_mesh.devices[(position + i) % len(source_mesh.devices)]
            rest = []
            for box in missing:
                common = intersect(box, held[sender])
                if common is None:
                    rest.append(box)
                    continue
                transfers.append(
                    Transfer(
                        source=sender,
                        target=receiver,
                        source_box=relative(common, held[sender]),
                        target_box=relative(common, needed),
                    )
                )
                rest.extend(subtract(box, common))
            missing = rest
        assert not missing, "the layout of a stage covers the whole tensor"
    return tuple(transfers)

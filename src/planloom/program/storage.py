"""Stored parameters: their home, the layout between steps, and the layout of gradients and optimizer states."""

from math import prod

from planloom.errors import PlanError
from planloom.layout import Layout, Mesh
from planloom.plan import Plan, Storage
from planloom.program.transform import Splits
from planloom.program.values import Buffer, StoredParameter


def store_parameters(splits: Splits) -> dict[str, StoredParameter]:
    """Every parameter at the device group of its first consumer, in that consumer's layout or in shards of it."""
    blocks, plan = splits.blocks, splits.plan
    stored = {}
    for name in blocks.graph.parameters:
        block = blocks.blocks[blocks.consumers[name][0]]
        group, used = plan.group_of(plan.stages[block.index]), splits.layout(block, name).without(splits.all_times)
        sizes = blocks.graph.tensors[name].sizes
        storage = plan.storage.get(name)
        sharded = used
        if storage is not None and storage.kind != "replicated":
            sharded = _shard(used, sizes, plan.groups[group], storage.over, name)
        stored[name] = StoredParameter(
            name=name,
            stage=group,
            sizes=sizes,
            layout=sharded if storage is not None and storage.kind == "zero3" else used,
            optimizer_layout=sharded,
            buffer=Buffer(name=name),
        )
    return stored


def is_gathered(plan: Plan, home: StoredParameter, stage: int) -> bool:
    """Does a stage gather a parameter for every use? Other stages than its home are sent it once, whole."""
    return home.stage == stage and plan.storage.get(home.name, Storage()).kind == "zero3"


def is_scattered(plan: Plan, home: StoredParameter, stage: int) -> bool:
    """Does a stage reduce a parameter's gradient to shards at every use?"""
    return home.stage == stage and plan.storage.get(home.name, Storage()).kind in ("zero2", "zero3")


def _shard(layout: Layout, sizes: tuple[int, ...], mesh: Mesh, axis: str, name: str) -> Layout:
    """Split the largest factor that the axis divides further; a parameter that none fits stays whole."""
    digits = mesh.axis(axis).digits
    if any(digit in layout.split_digits for digit in digits):
        raise PlanError(
            f"parameter {name} is already split over {axis!r}",
            given=f"layout {layout}",
            required="ZeRO over an axis that does not split the parameter",
        )
    local = layout.local_sizes(sizes)
    for factor in sorted(range(len(sizes)), key=lambda i: -local[i]):
        if local[factor] % prod(d.size for d in digits) == 0:
            splits = tuple(s + digits if i == factor else s for i, s in enumerate(layout.splits))
            return Layout(splits=splits)
    return layout

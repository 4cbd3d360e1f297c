"""Context parallel: the sequence is split over devices everywhere, and attention goes round a ring of them.

`context:cp=2,dp=2,tp=2`: the plan that is named by the other words, with an axis `cp` more. It splits the sequence of all
blocks (embedding, norms, maps, loss), so parameters are replicated over it and their gradients are reduced over it; and
attention by its dim `context`, whose keys and values go round. Without `dp`, parameters stored in shards (`zero1` …) are
shards over `cp`.
"""

from collections.abc import Mapping
from dataclasses import replace

from planloom.blocks import Block, BlockGraph
from planloom.blocks.rings import CONTEXT_DIM, lacks_ring, with_one_sequence
from planloom.errors import PlanError
from planloom.layout import Mesh
from planloom.plan.checks import require_plan
from planloom.plan.library import axis_sizes, named_plan, parse_named
from planloom.plan.values import Plan, Storage

AXIS = "cp"
SEQUENCE_DIM = "sequence"


def context(
    blocks: BlockGraph,
    options: Mapping[str, str],
    *,
    batch: dict[str, tuple[tuple[int, ...], str]],
    mesh: Mesh | None = None,
) -> Plan:
    """The plan on a mesh with axes pp, dp, cp, tp, tp2 (row-major over devices 0… if none is given)."""
    degree = options.get(AXIS, "")
    if not (degree.isascii() and degree.isdigit() and int(degree) > 1):
        raise PlanError(
            "context parallel needs the number of devices that split the sequence",
            given=f"{AXIS}={degree}",
            required=f"{AXIS}=2 or more",
            todo=f"write context:{AXIS}=2",
        )
    others = [f"{key}={value}" if value else key for key, value in options.items() if key != AXIS]
    named = parse_named(",".join(others))
    if mesh is None:
        sizes = axis_sizes(named)
        sizes = {"pp": sizes["pp"], "dp": sizes["dp"], AXIS: int(degree), "tp": sizes["tp"], "tp2": sizes["tp2"]}
        mesh = Mesh.of(range(named.num_devices * int(degree)), **sizes)
    plan = named_plan(blocks, named, batch=batch, mesh=mesh)
    strategies = tuple(
        _with_context(blocks, block, strategy) for block, strategy in zip(blocks.blocks, plan.strategies, strict=True)
    )
    if all(CONTEXT_DIM not in strategy for strategy in strategies):
        raise PlanError("the model has no attention whose keys could go round", given=f"{AXIS}={degree}", required="one")
    storage = plan.storage
    if named.storage != "replicated" and named.dp == 1:
        storage = dict.fromkeys(blocks.graph.parameters, Storage(kind=named.storage, over=AXIS))
    name = ",".join((f"context:{AXIS}={degree}", *(() if str(named) == "single" else (str(named),))))
    plan = replace(plan, name=name, strategies=strategies, storage=storage)
    require_plan(plan, blocks)
    return plan


def _with_context(blocks: BlockGraph, block: Block, strategy: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """A block's strategy with its sequence split over cp, before what else splits it."""
    if block.ring is not None:
        return {**strategy, CONTEXT_DIM: (AXIS,)}
    if block.dim(SEQUENCE_DIM) is not None:
        return {**strategy, SEQUENCE_DIM: (AXIS, *strategy.get(SEQUENCE_DIM, ()))}
    if any("attention" in blocks.graph.ops[i].target for i in block.ops):
        raise PlanError(
            f"the attention of block {block.name} cannot go round a ring: "
            f"{lacks_ring(with_one_sequence(blocks.graph), block.ops)}",
            given=f"{AXIS} for every block",
            required="self-attention without dropout, causal, with a window of our own or unmasked",
            todo="split its heads instead (tp=N,sequence), or give the attention no mask",
        )
    return strategy

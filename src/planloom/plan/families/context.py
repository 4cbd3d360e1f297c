"""Context parallel: the sequence is split over devices everywhere, and attention goes round a ring of them.

`context:cp=2,dp=2,tp=2` splits the sequence of all blocks (embedding, norms, maps, loss) over the axis `cp`, so
parameters are replicated over it and their gradients are reduced over it; and attention by its dim `context`, whose
keys and values go round (Liu, Zaharia, Abbeel 2023, "Ring attention with blockwise transformers for near-infinite
context"). Grouped queries stay grouped: it is the keys and values of their few heads that are sent.
"""

from dataclasses import replace

from planloom.blocks import Block, BlockGraph
from planloom.blocks.rings import CONTEXT_DIM, why_no_ring
from planloom.errors import PlanError
from planloom.layout import Mesh
from planloom.plan.draft import Draft
from planloom.plan.families.recipe import BatchSpec, Family, Options
from planloom.plan.parallel import pipelined, recompute_layers, tensor_parallel

_SEQUENCE_DIM = "sequence"


def context_parallel(written: Draft, axis: str = "cp") -> Draft:
    """Split the sequence of every block over an axis, before what else splits it; attention goes round a ring."""
    blocks = written.blocks
    strategies = tuple(
        _with_context(blocks, block, strategy, axis)
        for block, strategy in zip(blocks.blocks, written.strategies, strict=True)
    )
    if all(CONTEXT_DIM not in strategy for strategy in strategies):
        raise PlanError(
            "the model has no attention whose keys and values could go round",
            given=f"{axis}={written.meshes[0].axis(axis).size}",
            required="self-attention as one operator",
        )
    return replace(written, strategies=strategies)


def _with_context(
    blocks: BlockGraph, block: Block, strategy: dict[str, tuple[str, ...]], axis: str
) -> dict[str, tuple[str, ...]]:
    if block.ring is not None:
        return {**strategy, CONTEXT_DIM: (axis,)}
    if block.dim(_SEQUENCE_DIM) is not None:
        return {**strategy, _SEQUENCE_DIM: (axis, *strategy.get(_SEQUENCE_DIM, ()))}
    if any("attention" in blocks.graph.ops[i].target for i in block.ops):
        raise PlanError(
            f"the keys of block {block.name} cannot go round a ring: {why_no_ring(blocks.graph, block.ops)}",
            given=f"its sequence over {axis}",
            required="self-attention without dropout; causal, with a window of attention with sinks, or with no mask",
            todo="split its heads instead, or leave its mask to is_causal",
        )
    return strategy


def _context(blocks: BlockGraph, options: Options, *, mesh: Mesh, batch: BatchSpec) -> Draft:
    written = pipelined(blocks, mesh, batch=batch, micro_batches=int(options["micro"]))
    written = context_parallel(tensor_parallel(written, "tp", vocab=True))
    is_split = mesh.axis("dp").size > 1
    written = written.split("*", batch="dp") if is_split else written
    if options["zero1"] or options["zero3"]:
        written = written.store("*", "zero3" if options["zero3"] else "zero1", over="dp" if is_split else "cp")
    return recompute_layers(written) if options["recompute"] else written


CONTEXT = (
    Family(
        name="context",
        about="the sequence split everywhere, keys and values of attention go round a ring",
        axes=("pp", "dp", "cp", "tp"),
        options={
            "cp": 2, "tp": 1, "pp": 1, "dp": 1, "micro": 1, "zero1": False, "zero3": False, "recompute": False,
        },
        write=_context,
    ),
)  # fmt: skip

"""Runs written by hand: blocks on whole tensors, or one block on its pieces, without any plan."""

from collections.abc import Mapping, Sequence

from planloom.blocks import Block, BlockGraph
from planloom.execute import LocalRun
from planloom.layout import Digit, Layout
from planloom.program import Run, RunBlock, Slot

Splits = Mapping[str, Digit]
"""Block dim → the digit that splits it."""


def hand_run(blocks: BlockGraph, members: Sequence[Block], outputs: Sequence[str], splits: Splits) -> Run:
    """One run of these blocks, all split alike; it reads every tensor that they do not make, and makes `outputs`."""
    made = {tensor for block in members for tensor in block.outputs}
    read = {t: block for block in reversed(members) for t in (*block.inputs, *block.parameters) if t not in made}
    makers = {tensor: block for block in members for tensor in block.outputs}
    slots = {tensor: i for i, tensor in enumerate(read)}
    differentiable = any(map(blocks.graph.is_differentiable, outputs))
    return Run(
        index=0,
        stage=0,
        blocks=tuple(
            RunBlock(
                block=block.index,
                splits=tuple((dim, (digit,)) for dim, digit in splits.items()),
                timed_dim="",
                reads={t: slots[t] for t in (*block.inputs, *block.parameters) if t in slots},
                passes_partial=False,
            )
            for block in members
        ),
        inputs=tuple(_slot(blocks, block, tensor, splits, differentiable) for tensor, block in read.items()),
        outputs=tuple(_slot(blocks, makers[tensor], tensor, splits, True) for tensor in outputs),
    )


def _slot(blocks: BlockGraph, block: Block, tensor: str, splits: Splits, differentiable: bool) -> Slot:
    sizes = blocks.graph.tensors[tensor].sizes
    factors: list[tuple[Digit, ...]] = [()] * len(sizes)
    others: list[Digit] = []
    for name, digit in splits.items():
        dim = block.dim(name)
        assert dim is not None
        if tensor in dim.shards:
            factors[dim.shards[tensor]] += (digit,)
        else:
            others.append(digit)
    is_output = tensor in block.outputs
    layout = Layout(splits=tuple(factors), partial=tuple(others) if is_output else ())
    cotangent = Layout(splits=tuple(factors), partial=() if is_output else tuple(others))
    has_cotangent = differentiable and blocks.graph.is_differentiable(tensor)
    return Slot(tensor=tensor, layout=layout, cotangent=cotangent if has_cotangent else None, sizes=sizes)


def whole_model(blocks: BlockGraph) -> LocalRun:
    """The model as one run on one device: parameters in, loss out."""
    run = hand_run(blocks, blocks.blocks, (blocks.graph.loss,), {})
    return LocalRun(blocks, run, {}, num_micro=1)

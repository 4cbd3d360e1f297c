"""Recompute: which runs are carried out again in the backward, and which of them save for it.

The activations of a segment that a plan recomputes are not kept between forward and backward. Its runs save nothing in
the forward; before the first of their backwards, what these need is carried out again from what entered the segment:

    saving     a run with a backward that needs values: carried out again, and saves
    again      what a saving run reads, made inside the segment: carried out again
    neither    what only made values that leave the segment: such a run may save in the forward, for it keeps nothing,
               or nothing but what leaves

The last kind matters where a device splits features: the reduction at the end of a layer, and the sum and the norm's
statistics behind it, are not repeated. A segment that is cut by a stage is recomputed in each stage by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planloom.blocks import BlockGraph, find_segments
from planloom.graph import Graph
from planloom.program.operations import executed
from planloom.program.transform import Splits
from planloom.program.values import Run

_KEEPS_NOTHING = frozenset(
    {
        "aten.add.Tensor",
        "aten.sub.Tensor",
        "aten.neg.default",
        "aten.sum.dim_IntList",
        "aten.sum.default",
        "aten.mean.dim",
        "aten.view.default",
        "aten.reshape.default",
        "aten.permute.default",
        "aten.transpose.int",
        "aten.t.default",
        "aten.expand.default",
        "aten.select.int",
        "aten.slice.Tensor",
        "aten.unsqueeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
    }
)
"""Operators whose backward needs sizes only. A test holds this against what autograd keeps."""

_KEEPS_ITS_INPUT = frozenset({"aten.pow.Tensor_Scalar", "aten.layer_norm.default", "aten.rms_norm.default"})
"""Operators whose backward needs their first input, parameters, and statistics that are small beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recomputation:
    """One recomputed segment of one stage: the runs that are carried out again, in order, and which of them save."""

    segment: int
    runs: tuple[int, ...]
    saving: frozenset[int]

    def name(self, tensor: str) -> str:
        """A tensor as it is made again here. Another segment may bring the same tensor into the same layout again."""
        return f"{tensor}:again{self.segment}"

    @property
    def first_backward(self) -> int:
        """The run before whose backward the recomputation must be done."""
        return max(self.saving)


def runs_with_backward(graph: Graph, runs: Sequence[Run]) -> frozenset[int]:
    """The runs through which a cotangent comes back from the loss."""
    found, given = set(), {graph.loss}
    for run in reversed(runs):
        if any(slot.cotangent is not None and slot.tensor in given for slot in run.outputs):
            found.add(run.index)
            given.update(slot.tensor for slot in run.inputs if slot.cotangent is not None)
    return frozenset(found)


def find_recomputations(
    splits: Splits, runs: Sequence[Run], with_backward: frozenset[int]
) -> tuple[Recomputation, ...]:
    """What every stage recomputes, segment by segment."""
    blocks, chosen = splits.blocks, set(splits.plan.recompute)
    segment_of = [number for number, s in enumerate(find_segments(blocks)) for _ in range(s.start, s.stop)]
    groups: dict[tuple[int, int], list[Run]] = {}
    for run in runs:
        segment = segment_of[run.blocks[0].block]  # a run ends where a segment does
        if segment in chosen:
            groups.setdefault((splits.plan.stages[run.blocks[0].block], segment), []).append(run)
    found, masks = [], masks_of(blocks.graph)
    for (_, segment), members in groups.items():
        inside = {slot.tensor: run for run in members for slot in run.outputs}
        saving = {r.index for r in members if r.index in with_backward and not _keeps_little(blocks, r, members)}
        if saving:
            needed = _needed(members, saving, inside, masks)
            found.append(Recomputation(segment=segment, runs=tuple(sorted(needed)), saving=frozenset(saving)))
    return tuple(found)


def masks_of(graph: Graph) -> frozenset[str]:
    """The masks of rows of experts: they are kept from the forward, for cotangents are moved by them, too."""
    return frozenset(tensor.rows for tensor in graph.tensors.values() if tensor.rows)


def _needed(members: Sequence[Run], saving: set[int], inside: Mapping[str, Run], kept: frozenset[str]) -> set[int]:
    """The saving runs and, run by run from the last, those that make what they read."""
    needed = set(saving)
    for run in reversed(members):
        if run.index in needed:
            read = (slot.tensor for slot in run.inputs if slot.tensor not in kept)
            needed.update(inside[tensor].index for tensor in read if tensor in inside)
    return needed


def _keeps_little(blocks: BlockGraph, run: Run, members: Sequence[Run]) -> bool:
    """Does the backward of a run need nothing, or nothing but what leaves the segment and is alive anyway?"""
    graph, own = blocks.graph, {part.block for member in members for part in member.blocks}
    leaving = {s.tensor for s in run.outputs if any(c not in own for c in blocks.consumers.get(s.tensor, ()))}
    for item in executed(blocks, run):
        op = graph.ops[item.op]
        target = graph.expansions[op.expansion].target if item.is_original else op.target
        inputs = graph.expansions[op.expansion].args if item.is_original else op.args
        if target in _KEEPS_ITS_INPUT and str(inputs[0])[1:] in leaving:
            continue
        if target not in _KEEPS_NOTHING:
            return False
    return True

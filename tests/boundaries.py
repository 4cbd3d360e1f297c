"""Two-stage plans whose boundary tensors have a chosen layout on either side, on any ordered devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planloom.blocks import Block, BlockGraph
from planloom.layout import Mesh
from planloom.plan import Draft, Plan, draft, named_plan, parse_named

AXES = ("a", "b")
SPLITS = ("replicated", "batch", "sequence", "features", "batch and sequence")
"""How a stage splits the tensors that cross its boundary, over all of its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a boundary: ordered devices, and the split of what crosses it."""

    devices: tuple[int, ...]
    split: str

    def __str__(self) -> str:
        return f"{self.split} on {','.join(map(str, self.devices))}"

    @property
    def mesh(self) -> Mesh:
        """Two axes of equal size, or nearly: 2 = 2 × 1, 4 = 2 × 2."""
        return Mesh.of(self.devices, a=2, b=len(self.devices) // 2)


def boundary_plan(
    blocks: BlockGraph, batch: Mapping[str, tuple[tuple[int, ...], str]], first: Side, second: Side
) -> Plan:
    """Stage 0 as `first` says, stage 1 as `second` says; two micro-batches, 1F1B."""
    stages = named_plan(blocks, parse_named("pp=2"), batch=dict(batch)).stages
    later = "|".join(block.name for block in blocks.blocks if stages[block.index] == 1)
    written = draft(blocks, first.mesh, batch=batch).assign(later, stage=1, mesh=second.mesh)
    for block in blocks.blocks:
        written = _split(written, block, (first, second)[stages[block.index]].split)
    return written.order("1f1b", micro_batches=2).plan(f"{first} → {second}")


def _split(written: Draft, block: Block, split: str) -> Draft:
    kinds = {dim.name.split(".")[0] for dim in block.dims}
    wanted: dict[str, str | Sequence[str]] = {}
    if split == "batch and sequence":
        wanted = {"batch": "a", "sequence": "b"}
    elif split == "features":
        wanted = {_feature_dim(kinds): AXES}
    elif split != "replicated":
        wanted = {split: AXES}
    for dim, axes in wanted.items():
        if dim in kinds:
            written = written.split(block.name, **{dim: axes})
    return written


def _feature_dim(kinds: set[str]) -> str:
    """The dim of a block that the features of the residual stream are, of what it reads or else of what it makes."""
    if "vocab" in kinds:
        return "out"
    return next((dim for dim in ("in", "features", "heads") if dim in kinds), "")

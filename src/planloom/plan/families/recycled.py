"""3F1B for models that recycle: run several times over the same parameters, differentiated through the last time only.

Stages g, g + G, g + 2G … are one slice of the model in all passes, on device group g: a parameter has one home, and
nothing of it is ever sent. The passes but the last are called forward only (SuperScaler, Lin et al. 2023; AlphaFold 2).

    passes    the model's own: most parameters are read once in each; one begins at the first of these reads
    cuts      in the last pass, where few bytes cross, as near as possible to equal work; in the others before the reads
              of the same parameters
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

from planloom.blocks import BlockGraph
from planloom.errors import PlanError
from planloom.layout import Mesh
from planloom.plan.draft import Draft, draft
from planloom.plan.families.axial import split_axially
from planloom.plan.families.recipe import BatchSpec, Family, Options
from planloom.plan.parallel import block_work, recompute_layers, sharded, slices, tensor_parallel

_NEARLY_FEWEST = 1.25
"""Cuts that so many times the fewest bytes cross are as good as any: work should be even."""


def recycled_pipeline(blocks: BlockGraph, options: Options, *, mesh: Mesh, batch: BatchSpec) -> Draft:
    """`3f1b:pp=4,micro=8`: a pipeline through which every micro-batch goes once a pass, and once back."""
    meshes, reads = slices(mesh, "pp"), reads_by_pass(blocks)
    num_passes = len(next(iter(reads.values())))
    stages = recycled_stages(blocks, reads, len(meshes))
    written = draft(blocks, meshes[0], batch=batch)
    written = replace(written, meshes=tuple(meshes * num_passes), stages=stages)
    written = tensor_parallel(written, "tp") if mesh.axis("tp").size > 1 else written
    written = split_axially(written, "dap") if mesh.axis("dap").size > 1 else written
    if mesh.axis("dp").size > 1:
        written = written.split("*", batch="dp")
        written = sharded(written, "zero1") if options["zero1"] else written
    written = recompute_layers(written) if options["recompute"] else written
    return written.order("3f1b", micro_batches=int(options["micro"]))


def reads_by_pass(blocks: BlockGraph) -> Mapping[str, Sequence[int]]:
    """For every parameter of a model that recycles, the block that reads it first in each pass."""
    readers = {name: blocks.consumers.get(name, ()) for name in blocks.graph.parameters}
    (num_passes, _), *_ = Counter(map(len, readers.values())).most_common()
    if num_passes < 2:
        raise PlanError(
            "the model does not recycle: its parameters are read once",
            given=f"{len(blocks.blocks)} blocks, most parameters read by {num_passes}",
            required="a model that runs several times over the same parameters, as evoformer?num_recycles=2",
            todo="use another schedule, as 1f1b",
        )
    return {name: found for name, found in readers.items() if len(found) == num_passes}


def recycled_stages(blocks: BlockGraph, reads: Mapping[str, Sequence[int]], num_groups: int) -> tuple[int, ...]:
    """For every block its stage: pass times the number of groups, and its group."""
    starts = [0, *map(min, list(zip(*reads.values(), strict=True))[1:])]
    first = starts[-1]
    cuts = [[start] for start in starts]
    for cut in _even_cuts(blocks, first, max(found[-1] for found in reads.values()), num_groups):
        name = min((name for name in reads if reads[name][-1] >= cut), key=lambda name: reads[name][-1])
        for of_pass, at in zip(cuts, reads[name], strict=True):
            of_pass.append(at - (reads[name][-1] - cut))
    places = [cut for of_pass in cuts for cut in of_pass]
    stages = tuple(sum(1 for cut in places[1:] if cut <= block.index) for block in blocks.blocks)
    for name, found in reads.items():
        if len({stages[block] % num_groups for block in found}) > 1 or places != sorted(places):
            raise PlanError(
                "the passes of the model cannot be cut alike",
                given=f"{name} is read in stages {', '.join(str(stages[block]) for block in found)}",
                required=f"the same of {num_groups} groups in every pass",
                todo="assign the stages by hand: Draft.assign",
            )
    return stages


def _even_cuts(blocks: BlockGraph, first: int, last: int, num_groups: int) -> list[int]:
    """Where to cut the blocks from one on: before one that is no later than the last."""
    graph, count = blocks.graph, len(blocks.blocks)
    work = [block_work(graph, block) for block in blocks.blocks]
    crossing = [0] * (count + 1)
    for name, readers in blocks.consumers.items():
        for cut in range(blocks.producer.get(name, count) + 1, max(readers) + 1):
            crossing[cut] += prod(graph.tensors[name].shape) * graph.tensors[name].item_bytes
    whole, cuts = sum(work[first:]), list[int]()
    for group in range(1, num_groups):
        off = {
            c: abs(sum(work[first:c]) - whole * group / num_groups) for c in range((cuts or [first])[-1] + 1, last + 1)
        }
        near = [c for c in off if off[c] <= whole / num_groups / 2]
        if not near:
            raise PlanError(
                "the model cannot be cut into that many stages",
                given=f"{num_groups} stages for {last - first} blocks of a pass",
                required=f"at most {len(cuts) + 1}",
            )
        fewest = min(crossing[c] for c in near)
        cuts.append(min((c for c in near if crossing[c] <= _NEARLY_FEWEST * fewest), key=lambda c: (off[c], c)))
    return cuts


RECYCLED = Family(
    name="3f1b",
    about="pipeline for a model that recycles: every pass forward, the last one backward",
    axes=("pp", "dp", "dap", "tp"),
    options={"pp": 2, "dp": 1, "dap": 1, "tp": 1, "micro": 4, "zero1": False, "recompute": False},
    write=recycled_pipeline,
)

"""The interlaced pipeline (SuperScaler, Lin et al. 2024): layers in a pipeline, the vocabulary over all devices.

A large embedding is as much memory, and a head as much work, as many layers: the group that has them is full, and all
others wait for it. Here embeddings, head and loss are split along the vocabulary over *all* devices, as two shared
stages before and behind those of layers, and the schedule `interlaced` calls them between the layers' rounds.
"""

from collections.abc import Sequence
from dataclasses import replace

from planloom.blocks import Block, BlockGraph, find_segments
from planloom.errors import PlanError
from planloom.layout import Mesh
from planloom.plan.draft import Draft, draft
from planloom.plan.families.recipe import BatchSpec, Family, Options
from planloom.plan.parallel import block_work, is_head, recompute_layers, sharded, slices, tensor_parallel


def interlaced(blocks: BlockGraph, options: Options, *, mesh: Mesh, batch: BatchSpec) -> Draft:
    """Embeddings in the first stage, head and loss in the last, both on all devices of a mesh with axes pp, dp and tp.

    On them the axis pp is named `groups`: there, it is no pipeline.
    """
    groups, (first, last) = slices(mesh, "pp"), shared_ends(blocks)
    layers = [block.index for block in blocks.blocks if block.index not in first | last]
    stage_of = dict.fromkeys(first, 0) | _in_stages(blocks, layers, len(groups)) | dict.fromkeys(last, len(groups) + 1)
    stages = tuple(stage_of[block.index] for block in blocks.blocks)
    every = replace(mesh, axes=tuple(replace(a, name="groups") if a.name == "pp" else a for a in mesh.axes))
    written = replace(draft(blocks, every, batch=batch), meshes=(every, *groups, every), stages=stages)
    written = tensor_parallel(written, "tp")
    over = tuple(name for name in ("groups", "tp") if every.axis(name).size > 1)
    for block in (blocks.blocks[index] for index in sorted(first | last)):
        dim = next((dim.name for dim in block.dims if dim.name in ("vocab", "out")), "")
        written = written.split(block.name, **{dim: over}) if dim and over else written
    if mesh.axis("dp").size > 1:
        written = written.split("*", batch="dp")
        written = sharded(written, "zero1") if options["zero1"] else written
    written = recompute_layers(written) if options["recompute"] else written
    return written.order("interlaced", micro_batches=int(options["micro"]))


def shared_ends(blocks: BlockGraph) -> tuple[set[int], set[int]]:
    """The embeddings of tokens, encoder's and decoder's; the head and the loss."""
    from_inputs = blocks.graph.given_from_inputs
    first = {b.index for b in blocks.blocks if "vocab" in _kinds(b) and b.is_source and from_inputs & set(b.given)}
    last = {block.index for block in blocks.blocks if block.name.startswith("loss") or is_head(blocks, block)}
    if not first or not last:
        raise PlanError(
            "the model has no vocabulary to split over all devices",
            given=f"{len(first)} embeddings of tokens, {len(last)} blocks of head and loss",
            required="a model with embeddings, a linear head and a loss over its vocabulary",
            todo="use a pipeline whose stages are disjoint, as megatron",
        )
    return first, last


def _kinds(block: Block) -> set[str]:
    return {dim.name.split(".")[0] for dim in block.dims}


def _in_stages(blocks: BlockGraph, layers: Sequence[int], num_stages: int) -> dict[int, int]:
    """Cut the blocks of layers into about equal work: all groups take their turns together, so the largest counts."""
    work = {index: block_work(blocks.graph, blocks.blocks[index]) for index in layers}
    places = [layers[0], *_places(blocks, layers, num_stages)]
    behind = [sum(work[i] for i in layers if i < place) for place in places]
    done = [*behind, sum(work.values())]
    best: list[dict[int, tuple[tuple[int, int], int]]] = [{0: ((0, 0), -1)}]
    """By number of stages: where they may end → the largest and the sum of squares, and where the last one begins."""
    for stage in range(1, num_stages + 1):
        ends = range(stage, len(done) - num_stages + stage)
        best.append({end: min((_with(best[-1][start][0], done[end] - done[start]), start)
                              for start in best[-1] if start < end) for end in ends})  # fmt: skip
    starts, end = list[int](), len(done) - 1
    for found in reversed(best[1:]):
        end = found[end][1]
        starts.append(places[end])
    return {index: sum(start <= index for start in starts) for index in layers}


def _with(load: tuple[int, int], work: int) -> tuple[int, int]:
    return max(load[0], work), load[1] + work * work


def _places(blocks: BlockGraph, layers: Sequence[int], num_stages: int) -> list[int]:
    """Where stages may begin: of every segment the blocks before which the fewest tensors cross."""
    own, crossing = set(layers), dict.fromkeys(layers, 0)
    for tensor, users in blocks.consumers.items():
        made, used = blocks.producer.get(tensor, -1), max((user for user in users if user in own), default=-1)
        if made in own:
            for index in range(made + 1, used + 1):
                crossing[index] = crossing.get(index, 0) + 1
    spans = [[i for i in layers[1:] if segment.start <= i < segment.stop] for segment in find_segments(blocks)]
    found = [i for span in spans for i in span if crossing[i] == min(crossing[other] for other in span)]
    return found if len(found) >= num_stages else list(layers[1:])


INTERLACED = Family(
    name="interlaced",
    about="layers in a pipeline, embeddings, head and loss split over all devices",
    axes=("pp", "dp", "tp"),
    options={"pp": 2, "dp": 1, "tp": 1, "micro": 4, "zero1": True, "recompute": False},
    write=interlaced,
)

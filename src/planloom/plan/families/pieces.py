"""The family of plans whose blocks are carried out piece by piece.

coshard    what a device has of attention and MLPs, one piece of heads and features after another, each recomputed in
           the backward (SuperScaler, Lin et al. 2024): activations of one piece at a time
"""

from planloom.blocks import BlockGraph
from planloom.layout import Mesh
from planloom.plan.draft import Draft
from planloom.plan.families.recipe import BatchSpec, Family, Options
from planloom.plan.parallel import pipelined, sharded, tensor_parallel
from planloom.plan.pieces import co_sharded, split_rows


def _co_shard(blocks: BlockGraph, options: Options, *, mesh: Mesh, batch: BatchSpec) -> Draft:
    written = pipelined(blocks, mesh, batch=batch, micro_batches=int(options["micro"]))
    written = split_rows(tensor_parallel(written, "tp", vocab=True), "tp")
    if mesh.axis("dp").size > 1:
        written = sharded(written.split("*", batch="dp"), "zero1")
    samples, recompute = bool(options["samples"]), bool(options["recompute"])
    return co_sharded(written, pieces=int(options["pieces"]), samples=samples, recompute=recompute)


PIECES = (
    Family(
        name="coshard",
        about="attention and MLPs one piece after another on each device",
        axes=("pp", "dp", "tp"),
        options={"tp": 1, "dp": 1, "pp": 1, "micro": 1, "pieces": 4, "samples": False, "recompute": True},
        write=_co_shard,
    ),
)

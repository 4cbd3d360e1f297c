"""Families of the usual kind: Megatron, FSDP and HSDP, ATP, expert parallel, looped and zero-bubble pipelines.

megatron    tensor, sequence, pipeline and data parallel with a distributed optimizer (Narayanan et al. 2021,
            Korthikanti et al. 2022)
fsdp, hsdp  every parameter in shards and gathered for its use; hsdp: shards inside a group, groups replicate
atp         2-D tensor parallel on a mesh d1 × d2, column- and row-first in turn (Cheng et al. 2023); one of several
            chunks is reduced while the next is computed
experts     data parallel everywhere but between dispatch and combine, where the experts are split
looped      breadth-first pipelines, several stages a group, with parameters in shards (Lamy-Poirier 2023)
zb          1F1B with weight gradients apart, which fill the drain (Qi et al. 2023)
"""

from planloom.blocks import BlockGraph
from planloom.layout import Mesh
from planloom.plan.draft import Draft, draft
from planloom.plan.families.recipe import BatchSpec, Family, Options
from planloom.plan.parallel import expert_parallel, pipelined, recompute_layers, sharded, tensor_parallel
from planloom.plan.pieces import in_chunks


def _megatron(blocks: BlockGraph, options: Options, *, mesh: Mesh, batch: BatchSpec) -> Draft:
    chunks, micro = int(options["chunks"]), int(options["micro"])
    schedule = "interleaved" if chunks > 1 else "1f1b"
    written = pipelined(blocks, mesh, batch=batch, schedule=schedule, micro_batches=micro, per_group=chunks)
    written = tensor_parallel(written, "tp", sequence=bool(options["sequence"]), vocab=True)
    if mesh.axis("dp").size > 1:
        written = written.split("*", batch="dp")
        written = sharded(written, "zero1") if options["zero1"] else written
    return recompute_layers(written) if options["recompute"] else written


def _fsdp(blocks: BlockGraph, options: Options, *, mesh: Mesh, batch: BatchSpec) -> Draft:
    written = draft(blocks, mesh, batch=batch).split("*", batch="dp").store("*", "zero3", over="dp")
    return recompute_layers(written) if options["recompute"] else written


def _hsdp(blocks: BlockGraph, options: Options, *, mesh: Mesh, batch: BatchSpec) -> Draft:
    written = draft(blocks, mesh, batch=batch).split("*", batch=("replicas", "shards"))
    written = written.store("*", "zero3", over="shards")
    return recompute_layers(written) if options["recompute"] else written


def _atp(blocks: BlockGraph, options: Options, *, mesh: Mesh, batch: BatchSpec) -> Draft:
    written = tensor_parallel(draft(blocks, mesh, batch=batch), "d1", "d2", vocab=bool(options["vocab"]))
    written = written.split("*", batch="dp") if mesh.axis("dp").size > 1 else written
    return in_chunks(written, chunks=int(options["chunks"])) if int(options["chunks"]) > 1 else written


def _experts(blocks: BlockGraph, options: Options, *, mesh: Mesh, batch: BatchSpec) -> Draft:
    written = tensor_parallel(draft(blocks, mesh, batch=batch), "tp", vocab=True).split("*", batch="ep")
    return sharded(expert_parallel(written, "ep"), "zero1", "ep")


def _looped(blocks: BlockGraph, options: Options, *, mesh: Mesh, batch: BatchSpec) -> Draft:
    per_group, micro = int(options["chunks"]), int(options["micro"])
    written = pipelined(blocks, mesh, batch=batch, schedule="looped", micro_batches=micro, per_group=per_group)
    return sharded(written.split("*", batch="dp"), "zero3") if mesh.axis("dp").size > 1 else written


def _zero_bubble(blocks: BlockGraph, options: Options, *, mesh: Mesh, batch: BatchSpec) -> Draft:
    schedule = "zb-v" if options["v"] else "zb-h1"
    written = pipelined(blocks, mesh, batch=batch, schedule=schedule, micro_batches=int(options["micro"]))
    written = tensor_parallel(written, "tp", vocab=True)
    return sharded(written.split("*", batch="dp"), "zero1") if mesh.axis("dp").size > 1 else written


USUAL = (
    Family(
        name="megatron",
        about="tensor, sequence, pipeline and data parallel, distributed optimizer",
        axes=("pp", "dp", "tp"),
        options={
            "tp": 1, "pp": 1, "dp": 1, "micro": 1, "chunks": 1, "sequence": True, "zero1": True, "recompute": False,
        },
        write=_megatron,
    ),
    Family(
        name="fsdp",
        about="every parameter in shards, gathered for its use",
        axes=("dp",),
        options={"dp": 2, "recompute": False},
        write=_fsdp,
    ),
    Family(
        name="hsdp",
        about="parameters in shards inside a group, groups replicate",
        axes=("replicas", "shards"),
        options={"replicas": 2, "shards": 2, "recompute": False},
        write=_hsdp,
    ),
    Family(
        name="atp",
        about="2-D tensor parallel, column- and row-first in turn; layers in chunks",
        axes=("dp", "d1", "d2"),
        options={"d1": 2, "d2": 2, "dp": 1, "vocab": True, "chunks": 1},
        write=_atp,
    ),
    Family(
        name="experts",
        about="experts split between dispatch and combine, data parallel elsewhere",
        axes=("ep", "tp"),
        options={"ep": 2, "tp": 1},
        write=_experts,
    ),
    Family(
        name="looped",
        about="breadth-first pipeline of several stages a group, parameters in shards",
        axes=("pp", "dp"),
        options={"pp": 2, "dp": 2, "micro": 4, "chunks": 2},
        write=_looped,
    ),
    Family(
        name="zb",
        about="pipeline without bubbles: weight gradients apart; v: stages down and up again",
        axes=("pp", "dp", "tp"),
        options={"pp": 2, "dp": 1, "tp": 1, "micro": 4, "v": False},
        write=_zero_bubble,
    ),
)  # fmt: skip

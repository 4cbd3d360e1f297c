"""Overlap: what communicates is started early, awaited late, and several small collectives are started as one.

buckets    the gradients that are reduced once a step are reduced during the last backward, a bucket as soon as the
           last of its gradients is complete; the exit only awaits them
gathers    parameters that are stored in shards are gathered one run ahead of the run that uses them
scatters   gradients that are reduced at every use are awaited one run after the one that made them (`gradients`)
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod

from planloom.graph import Graph
from planloom.program.free import reads, writes
from planloom.program.values import (
    Accumulate,
    Backward,
    Buffer,
    Coalesced,
    Collective,
    Forward,
    Instruction,
    Wait,
    collectives_in,
    signature,
)

NUM_BUCKETS = 3
MIN_BUCKET_BYTES, MAX_BUCKET_BYTES = 1 << 18, 32 << 20
"""A stage's gradients go in three buckets or so: fewer hide less of their reduction, more pay its latency more often.
[Empirical] Four ranks on two cores, dp=4 over DDP, in one run each, 2026-11-19: four buckets 1.034 and 1.035 (Llama),
1.045 and 1.049 (GPT); three 1.016 and 1.017, 1.034 and 1.043; two 1.01 to 1.02 (GPT). A bucket wakes four threads of
every rank.
The limits keep a bucket large enough for a network and its copy small beside the parameters."""

_COALESCED_KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "slice", "mask")


def may_be_coalesced(collective: Collective) -> bool:
    """In a reduction to masters, some devices hold nothing at times: such programs stay alone."""
    return all(step.kind in _COALESCED_KINDS for step in collective.steps) and collective.rows is None


def bucket_bytes(graph: Graph, collectives: Iterable[Collective]) -> int:
    """The size at which a bucket is full."""
    total = sum(array_bytes(graph, collective) for collective in collectives)
    return min(MAX_BUCKET_BYTES, max(MIN_BUCKET_BYTES, total // NUM_BUCKETS))


def array_bytes(graph: Graph, collective: Collective) -> int:
    """Bytes of a device's array before a collective."""
    return prod(collective.sizes) * graph.tensors[collective.tensor].item_bytes


def coalesce(
    graph: Graph, collectives: Sequence[Collective], *, max_bytes: int | None = None, takes_sources: bool = False
) -> list[Collective | Coalesced]:
    """Collectives of equal kinds and groups as one, in their order, until one is as large as `max_bytes`."""
    full: list[list[Collective]] = []
    filling: dict[object, list[Collective]] = {}
    for collective in collectives:
        key = (signature(collective), graph.tensors[collective.tensor].dtype, may_be_coalesced(collective))
        bucket = filling.setdefault(key, [])
        bucket.append(collective)
        is_full = max_bytes is not None and sum(array_bytes(graph, c) for c in bucket) >= max_bytes
        if is_full or not may_be_coalesced(collective):
            full.append(filling.pop(key))
    full += filling.values()
    place = {id(collective): i for i, collective in enumerate(collectives)}
    full.sort(key=lambda bucket: place[id(bucket[-1])])  # a bucket starts when its last member is ready
    return [
        Coalesced(collectives=tuple(bucket), takes_sources=takes_sources)
        if takes_sources or len(bucket) > 1
        else bucket[0]
        for bucket in full
    ]


def reduce_during(body: Sequence[Instruction], buckets: Sequence[Collective | Coalesced]) -> list[Instruction]:
    """The last backward: every bucket is started behind the last addition to its gradients."""
    last = {i.target: at for at, i in enumerate(body) if isinstance(i, Accumulate)}
    starts: dict[int, list[Instruction]] = {}
    for bucket in buckets:
        starts.setdefault(max(last[c.source] for c in collectives_in(bucket)), []).append(bucket)
    result: list[Instruction] = []
    for at, instruction in enumerate(body):
        result.append(instruction)
        result += starts.get(at, ())
    return result


def prefetch(body: Sequence[Instruction], gathered: Mapping[Buffer, object] | frozenset[Buffer]) -> list[Instruction]:
    """Start every gather of these buffers before the run that comes before the one that reads them."""
    result: list[Instruction] = []
    for instruction in body:
        collectives = collectives_in(instruction)
        if collectives and all(collective.target in gathered for collective in collectives):
            result.insert(_one_run_before(result, collectives), instruction)
        else:
            result.append(instruction)
    return result


def _one_run_before(body: Sequence[Instruction], collectives: Sequence[Collective]) -> int:
    """The place before the last run of a body, or behind what touches the targets or brings the sources after it."""
    targets, sources = ({getattr(c, end) for c in collectives} for end in ("target", "source"))
    for at in reversed(range(len(body))):
        instruction = body[at]
        brought = (instruction.buffer,) if isinstance(instruction, Wait) else writes(instruction)
        if targets.intersection((*reads(instruction), *writes(instruction))) or sources.intersection(brought):
            return at + 1
        if isinstance(instruction, Forward | Backward):
            return at
    return len(body)

"""Named plans: each a few lines of split, assign and order.

A named plan is written `dp=2,tp=2,sequence,vocab,zero1,pp=2,micro=4,1f1b`: degrees of data, tensor (one or two axes)
and pipeline parallelism with their switches; with `recompute` no activations of layers are kept. A pipeline of `pp`
device groups has a schedule (`schedules`) and, where that may be chosen, `chunks` stages a group. `library` lists the
combinations that a number of devices allows.
"""

from dataclasses import dataclass, replace
from math import prod

from planloom.blocks import Block, BlockGraph, find_segments, repeated_segments
from planloom.errors import PlanError
from planloom.graph import Graph
from planloom.layout import Mesh, Placement, mesh_of
from planloom.plan.checks import BATCH_DIM
from planloom.plan.draft import Draft, draft
from planloom.plan.schedules import ORDERS, OTHER_NAMES, home_groups, orders_of, schedule_name, stages_per_group
from planloom.plan.values import Plan, StorageKind


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPlan:
    """Degrees and switches of the usual plans; `tp2` is the second axis of 2-D tensor parallel (ATP's d2)."""

    dp: int = 1
    tp: int = 1
    tp2: int = 1
    pp: int = 1
    sequence: bool = False
    vocab: bool = False
    experts: bool = False
    storage: StorageKind = "replicated"
    recompute: bool = False
    micro: int = 1
    schedule: str = "1f1b"
    chunks: int = 0
    """Stages a device group; 0: as the schedule has it."""

    @property
    def num_stages(self) -> int:
        return self.pp * (stages_per_group(self.schedule, self.chunks) if self.pp > 1 else 1)

    @property
    def num_devices(self) -> int:
        return self.dp * self.tp * self.tp2 * self.pp

    def __str__(self) -> str:
        degrees = [f"{name}={getattr(self, name)}" for name in ("dp", "tp", "tp2", "pp") if getattr(self, name) > 1]
        switches = [name for name in ("sequence", "vocab", "experts") if getattr(self, name)]
        switches += [self.storage] if self.storage != "replicated" else []
        switches += ["recompute"] if self.recompute else []
        switches += [f"micro={self.micro}"] if self.micro > 1 else []
        switches += [self.schedule] if self.pp > 1 or self.schedule == "inference" else []
        switches += [f"chunks={self.chunks}"] if self.chunks else []
        return ",".join(degrees + switches) or "single"


def parse_named(text: str) -> NamedPlan:
    """`dp=2,tp=2,vocab` → `NamedPlan`."""
    plan = NamedPlan()
    for word in filter(None, text.split(",")):
        key, _, value = word.partition("=")
        if (
            key in ("dp", "tp", "tp2", "pp", "micro", "chunks")
            and value.isascii()
            and value.isdigit()
            and int(value) > 0
        ):
            plan = replace(plan, **{key: int(value)})  # type: ignore[arg-type]
        elif word in ("sequence", "vocab", "experts", "recompute"):
            plan = replace(plan, **{word: True})  # type: ignore[arg-type]
        elif word in ("zero1", "zero2", "zero3"):
            plan = replace(plan, storage=word)  # type: ignore[arg-type]
        elif word in ORDERS or word in OTHER_NAMES:
            plan = replace(plan, schedule=schedule_name(word))
        elif word != "single":
            raise PlanError(
                f"unknown word {word!r} in a named plan",
                given=text,
                required="dp=N tp=N tp2=N pp=N micro=N chunks=N sequence vocab experts zero1 zero2 zero3 recompute "
                f"{' '.join(ORDERS)}, joined by commas",
            )
    return plan


def named_plan(
    blocks: BlockGraph,
    named: NamedPlan,
    *,
    batch: dict[str, tuple[tuple[int, ...], str]],
    mesh: Mesh | None = None,
    placement: Placement | None = None,
) -> Plan:
    """Resolve a named plan on a mesh with axes pp, dp, tp, tp2 (row-major over devices 0… if none is given)."""
    if mesh is None:
        mesh = mesh_of(placement) if placement is not None else Mesh.of(range(named.num_devices), **axis_sizes(named))
    meshes, num_stages = _stage_meshes(mesh, named.pp), named.num_stages
    written = draft(blocks, meshes[0], batch=batch)
    if named.pp > 1:
        orders = orders_of(named.schedule, num_stages, named.micro, per_group=num_stages // named.pp)
        homes = home_groups(orders, num_stages)
        written = replace(written, meshes=tuple(meshes[group] for group in homes))
    written = replace(written, stages=_cut_into_stages(blocks, num_stages))
    written = _tensor_parallel(written, named)
    if named.dp > 1:
        written = written.split("*", batch="dp")
        if named.experts:
            written = _expert_parallel(written)
        if named.storage != "replicated":
            written = _stored_split(written, named.storage)
    if named.recompute:
        written = replace(written, recomputed=_layers(blocks))
    return written.order(named.schedule, micro_batches=named.micro).plan(str(named))


def _layers(blocks: BlockGraph) -> tuple[int, ...]:
    """The segments that repeat."""
    segments = find_segments(blocks)
    repeated = {found.first.fingerprint for found in repeated_segments(segments) if found.count > 1}
    if not repeated:
        raise PlanError(
            "the model has no layers that repeat, so it has none to recompute",
            given="recompute",
            required=f"two equal segments or more; this model has {len(segments)}, all different",
            todo="choose segments by the names of their blocks: Draft.recompute",
        )
    return tuple(i for i, segment in enumerate(segments) if segment.fingerprint in repeated)


def _expert_parallel(written: Draft) -> Draft:
    """Between dispatch and combine, split the experts over the axis that splits the batch everywhere else."""
    graph, strategies = written.blocks.graph, list(written.strategies)
    found = False
    for block in written.blocks.blocks:
        if block.dim("experts") is not None and any(graph.tensors[t].rows for t in block.inputs) and any(
            graph.tensors[t].rows for t in block.outputs
        ):  # fmt: skip
            others = {dim: axes for dim, axes in strategies[block.index].items() if dim != BATCH_DIM}
            strategies[block.index] = {**others, "experts": ("dp",)}
            found = True
    if not found:
        raise PlanError("the model has no experts to split", given="experts", required="a mixture of experts")
    return replace(written, strategies=tuple(strategies))


def _stored_split(written: Draft, kind: StorageKind) -> Draft:
    """Store parameters split over dp, except those that dp splits already: experts."""
    taken = {
        name
        for block in written.blocks.blocks
        for dim, axes in written.strategies[block.index].items()
        if "dp" in axes and dim != BATCH_DIM
        for name in block.parameters
    }
    written = written.store("*", kind, over="dp")
    return replace(written, storage={name: how for name, how in written.storage.items() if name not in taken})


def axis_sizes(named: NamedPlan) -> dict[str, int]:
    """The axes of a named plan, outermost first."""
    return {"pp": named.pp, "dp": named.dp, "tp": named.tp, "tp2": named.tp2}


def _tensor_parallel(written: Draft, named: NamedPlan) -> Draft:
    """Linear maps alternate column-first (out → tp, in → tp2) and row-first (in → tp, out → tp2).

    The residual stream is *outer*: a map that reads it is column-first and makes inner tensors; a map that reads inner
    tensors is row-first and returns to the stream. With tp2 = 1 this is Megatron's tensor parallelism, else ATP's.
    """
    for block, is_inner in zip(written.blocks.blocks, _inner_blocks(written.blocks), strict=True):
        axes = _block_axes(written.blocks, block, is_inner, named)
        for dim, axis in axes.items():
            size = getattr(named, axis)
            if size > 1 and any(d.name.split(".")[0] == dim and d.size % size == 0 for d in block.dims):
                written = written.split(block.name, **{dim: axis})
    return written


def _block_axes(blocks: BlockGraph, block: Block, is_inner: bool, named: NamedPlan) -> dict[str, str]:
    """dim → axis for one block."""
    kinds = {dim.name.split(".")[0] for dim in block.dims}
    if block.name.startswith("loss") or _is_head(blocks, block):
        whole = {"sequence": "tp"} if named.sequence else {}
        return {"out": "tp", "vocab": "tp", "in": "tp2"} if named.vocab else {**whole, "in": "tp2"}
    if {"in", "out"} <= kinds:
        return {"out": "tp", "in": "tp2"} if is_inner else {"in": "tp", "out": "tp2"}
    if "vocab" in kinds:
        reads_tokens = "batch" in kinds
        first = {"vocab": "tp"} if named.vocab else {"sequence": "tp"} if named.sequence else {}
        return {**(first if reads_tokens else {}), "out": "tp2"}
    if is_inner:
        return {"heads": "tp"} if "heads" in kinds else {"features": "tp"}
    return {"features": "tp2", **({"sequence": "tp"} if named.sequence else {})}


def _inner_blocks(blocks: BlockGraph) -> list[bool]:
    """For every block: does it make inner tensors?"""
    inner: list[bool] = []
    for block in blocks.blocks:
        reads_inner = bool(block.inputs) and all(inner[blocks.producer[t]] for t in block.inputs)
        inner.append(reads_inner != _is_map(block))
    return inner


def _is_map(block: Block) -> bool:
    return {"in", "out"} <= {dim.name.split(".")[0] for dim in block.dims}


def _is_head(blocks: BlockGraph, block: Block) -> bool:
    """Does a block make the logits of a loss over a vocabulary?"""
    readers = [blocks.blocks[c] for t in block.outputs for c in blocks.consumers.get(t, ())]
    return _is_map(block) and any(b.name.startswith("loss") and b.dim("vocab") is not None for b in readers)


def _stage_meshes(mesh: Mesh, num_stages: int) -> list[Mesh]:
    """One mesh a stage: the slices of a mesh along its axis `pp`."""
    if num_stages == 1 and all(axis.name != "pp" for axis in mesh.axes):
        return [mesh]
    order = mesh.axis("pp").digits
    rest = tuple(axis for axis in mesh.axes if axis.name != "pp")
    stages: dict[tuple[int, ...], list[int]] = {}
    for device in mesh.devices:
        coordinates = mesh.coordinates(device)
        stages.setdefault(tuple(coordinates[digit] for digit in order), []).append(device)
    return [Mesh(axes=rest, devices=tuple(devices)) for _, devices in sorted(stages.items())]


def _cut_into_stages(blocks: BlockGraph, num_stages: int) -> tuple[int, ...]:
    """Cut the sequence of blocks where few tensors cross, as near as possible to equal work."""
    work = [sum(_op_work(blocks.graph, i) for i in block.ops) for block in blocks.blocks]
    count, total = len(work), sum(work)
    crossing = [
        sum(1 for t, users in blocks.consumers.items()
            if t in blocks.producer and blocks.producer[t] < cut <= max(users))
        for cut in range(1, count)
    ]  # fmt: skip
    fewest = [cut for cut in range(1, count) if crossing[cut - 1] == min(crossing)]
    candidates = fewest  # between layers, if there are enough of these places; else also inside
    if len(fewest) < 2 * num_stages:
        candidates = [cut for cut in range(1, count) if crossing[cut - 1] <= max(2, min(crossing))]
    cuts: list[int] = []
    for stage in range(1, num_stages):
        open_cuts = [c for c in candidates if not cuts or c > cuts[-1]]
        if not open_cuts:
            raise PlanError(
                "the model cannot be cut into that many stages",
                given=f"{num_stages} stages for {count} blocks",
                required=f"at most {len(candidates) + 1}",
            )
        cuts.append(min(open_cuts, key=lambda c: (abs(sum(work[:c]) - total * stage / num_stages), c)))
    return tuple(sum(1 for cut in cuts if i >= cut) for i in range(count))


def _op_work(graph: Graph, index: int) -> int:
    rule = graph.ops[index].rule
    assert rule is not None
    return prod(rule.sizes.values())


def library(num_devices: int, *, max_micro: int = 4, experts: bool = False) -> tuple[NamedPlan, ...]:
    """The named plans that a number of devices allows, simplest first; with those for a mixture of experts if asked."""
    found = []
    for pp in (1, 2):
        for tp, tp2 in ((t, u) for t in _divisors(num_devices // pp) for u in _divisors(num_devices // pp // t)):
            if num_devices % (pp * tp * tp2) or (tp == 1 and tp2 > 1):
                continue
            dp = num_devices // (pp * tp * tp2)
            base = NamedPlan(dp=dp, tp=tp, tp2=tp2, pp=pp, micro=max_micro if pp > 1 else 1, vocab=tp > 1)
            found.append(base)
            if dp > 1 and experts:
                found.append(replace(base, experts=True))
            if pp == 1 and dp > 1:
                found += [replace(base, storage="zero1"), replace(base, storage="zero3")]
            if tp > 1 and tp2 == 1 and pp == 1:
                found.append(replace(base, sequence=True))
            if pp > 1 and tp == tp2 == 1:
                found.append(replace(base, schedule="gpipe"))
    return tuple(found)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]

"""Named plans of the usual kind, by degrees and switches; those with a name of their own are in `families`.

A named plan is written `dp=2,tp=2,sequence,vocab,zero1,pp=2,micro=4,1f1b`: degrees of data, tensor (one or two axes)
and pipeline parallelism with their switches; with `recompute` no activations of layers are kept. A pipeline of `pp`
device groups has a schedule (`schedules`) and, where that may be chosen, `chunks` stages a group. `library` lists the
combinations that a number of devices allows.
"""

from dataclasses import dataclass, replace

from planloom.blocks import BlockGraph
from planloom.errors import PlanError
from planloom.layout import Mesh, Placement, mesh_of
from planloom.plan.families import FAMILIES, parse_recipe
from planloom.plan.families.recipe import Recipe
from planloom.plan.parallel import expert_parallel, pipelined, recompute_layers, sharded, tensor_parallel
from planloom.plan.schedules import ORDERS, OTHER_NAMES, schedule_name, stages_per_group
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


Named = NamedPlan | Recipe


def find_named(text: str) -> Named:
    """`dp=2,tp=2,vocab` → `NamedPlan`; `megatron:tp=2,pp=2` → `Recipe`."""
    return parse_recipe(text) if ":" in text or text in FAMILIES else parse_named(text)


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
                f"{' '.join(ORDERS)}, joined by commas; or one of {', '.join(FAMILIES)}, with : and its options",
            )
    return plan


def named_plan(
    blocks: BlockGraph,
    named: Named,
    *,
    batch: dict[str, tuple[tuple[int, ...], str]],
    mesh: Mesh | None = None,
    placement: Placement | None = None,
) -> Plan:
    """Resolve a named plan on a mesh with its axes: pp, dp, tp, tp2 (row-major over devices 0… if none is given)."""
    if isinstance(named, Recipe):
        mesh = mesh_of(placement) if mesh is None and placement is not None else mesh
        return named.draft(blocks, batch=batch, mesh=mesh).plan(str(named))
    if mesh is None:
        mesh = mesh_of(placement) if placement is not None else Mesh.of(range(named.num_devices), **axis_sizes(named))
    written = pipelined(
        blocks, mesh, batch=batch, schedule=named.schedule, micro_batches=named.micro, per_group=named.chunks
    )
    written = tensor_parallel(written, "tp", "tp2", sequence=named.sequence, vocab=named.vocab)
    if named.dp > 1:
        written = written.split("*", batch="dp")
        if named.experts:
            written = expert_parallel(written)
        if named.storage != "replicated":
            written = sharded(written, named.storage)
    if named.recompute:
        written = recompute_layers(written)
    return written.plan(str(named))


def axis_sizes(named: NamedPlan) -> dict[str, int]:
    """The axes of a named plan, outermost first."""
    return {"pp": named.pp, "dp": named.dp, "tp": named.tp, "tp2": named.tp2}


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

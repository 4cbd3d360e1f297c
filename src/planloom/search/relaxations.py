"""Nothing fits: after which single relaxation of what was pinned something does, and how fast that is.

What is tried, one at a time, everything else as it was:

    recomputation allowed; a ZeRO, a degree, the number of micro-batches or a pin left open; --memory or --max-devices
    lifted
    all of what was pinned left open, if that is more than one thing
    other hardware: more memory on every device; more devices, doubled until the smallest plan fits

Each has a process and a number of seconds of its own. It first finds the smallest plan, then the best one, simulated;
what it knows when its time is over stands. Of those that fit, one thing that gives way comes first, the fastest first;
then all of them; then other hardware.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from planloom.cluster import Cluster, format_bytes, format_seconds
from planloom.cost import Prices
from planloom.errors import PlanError
from planloom.search.best import find_best
from planloom.search.infeasible import NothingFitsError, least_memory
from planloom.search.planner import Planner
from planloom.search.processes import within_seconds
from planloom.search.space import Wishes

BatchSpec = Mapping[str, tuple[tuple[int, ...], str]]
Progress = Callable[[str, int, int], None]
Kind = Literal["one", "all", "memory", "devices"]
Outcome = Literal["fits", "smallest", "no", "undecided"]

SECONDS = 60.0
"""That each relaxation has, if nothing else is said."""
_DOUBLINGS = 10
_MORE_MEMORY = (1.0, 1.1, 1.25, 1.5, 2.0)
"""Times the smallest plan's bytes by the estimate; the simulator's may be more."""
_DEGREES = ("dp", "tp", "tp2", "pp", "micro")
_NUM_FINALISTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxation:
    """One thing that gives way: in words, and the wishes and the cluster then."""

    words: str
    wishes: Wishes
    cluster: Cluster
    kind: Kind = "one"

    def __str__(self) -> str:
        return self.words


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """What came of a relaxation.

    `fits`: a plan of it was simulated and fits. `smallest`: its smallest plan fits by the estimate, and there was no
    time for more. `no`: nothing fits, and `why`. `undecided`: there was no time for anything.
    """

    words: str
    kind: Kind
    outcome: Outcome
    plan: str = ""
    step_seconds: float | None = None
    memory_bytes: float | None = None
    num_devices: int = 0
    why: str = ""

    @property
    def sentence(self) -> str:
        if self.outcome == "fits":
            assert self.step_seconds is not None
            assert self.memory_bytes is not None
            step, held = format_seconds(self.step_seconds), format_bytes(self.memory_bytes)
            return f"{self.words}: {step} a step with {self.plan}, {held} a device"
        if self.outcome == "smallest":
            assert self.memory_bytes is not None
            held = format_bytes(self.memory_bytes)
            return f"{self.words}: by the estimate {self.plan} holds {held} a device; its step is not known"
        return f"{self.words}: {self.why}"


def relaxations(planner: Planner, wishes: Wishes, whole: Cluster) -> Iterator[Relaxation]:
    """Everything that is tried. `whole`: the cluster without a limit of devices."""
    here = planner.cluster
    pinned = list(_unpinned(wishes))
    for words, open_wishes in pinned:
        yield Relaxation(words=words, wishes=open_wishes, cluster=here)
    if whole.num_devices > here.num_devices:
        yield Relaxation(words=f"use all {whole.num_devices} devices (no --max-devices)", wishes=wishes, cluster=whole)
    if len(pinned) > 1:
        yield Relaxation(
            words="leave open all that is pinned", wishes=Wishes(variants=wishes.variants), cluster=here, kind="all"
        )
    yield Relaxation(words="more memory a device", wishes=wishes, cluster=here, kind="memory")
    yield Relaxation(words="more devices", wishes=wishes, cluster=whole, kind="devices")


def _unpinned(wishes: Wishes) -> Iterator[tuple[str, Wishes]]:
    if not wishes.recompute:
        yield "allow recomputation (no --no-recompute)", replace(wishes, recompute=True)
    if wishes.storage is not None:
        number = wishes.storage.removeprefix("zero") if wishes.storage != "replicated" else "0"
        yield f"leave the storage of parameters open (no --zero {number})", replace(wishes, storage=None)
    if wishes.memory_bytes is not None:
        words = f"use what a device has (no --memory {format_bytes(wishes.memory_bytes)})"
        yield words, replace(wishes, memory_bytes=None)
    for name in _DEGREES:
        if (value := getattr(wishes, name)) is not None:
            yield f"leave --{name} open (it is {value})", _opened(wishes, name)
    if wishes.schedule is not None:
        yield f"leave the schedule open (no --schedule {wishes.schedule})", replace(wishes, schedule=None)
    for pin in wishes.pins:
        others = tuple(other for other in wishes.pins if other is not pin)
        yield f"no --pin {pin.pattern}={pin.dim}:{pin.axis}", replace(wishes, pins=others)


def _opened(wishes: Wishes, name: str) -> Wishes:
    given: dict[str, Any] = {name: None}
    return replace(wishes, **given)


def try_relaxations(
    planner: Planner,
    prices: Prices,
    batch: BatchSpec,
    wishes: Wishes,
    *,
    whole: Cluster | None = None,
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> tuple[Relaxed, ...]:
    """All of them, the cheapest that fits first."""
    tried = list(relaxations(planner, wishes, whole or planner.cluster))

    def attempt(own: Relaxation, tell: Callable[[Relaxed], None]) -> None:
        _attempt(own, planner, prices, batch, tell)

    told = within_seconds(attempt, tried, seconds, progress=progress)
    found = [
        result or _relaxed(own, "undecided", why=f"not known after {seconds:g} s")
        for own, result in zip(tried, told, strict=True)
    ]
    return tuple(sorted(found, key=_rank))


def _rank(own: Relaxed) -> tuple[int, int, float]:
    order: tuple[Outcome, ...] = ("fits", "smallest", "undecided", "no")
    kinds = {"one": 0, "all": 1, "memory": 2, "devices": 2}
    return order.index(own.outcome), kinds[own.kind], own.step_seconds or float("inf")


def _relaxed(own: Relaxation, outcome: Outcome, *, words: str = "", **others: Any) -> Relaxed:
    others.setdefault("num_devices", own.cluster.num_devices)
    return Relaxed(words=words or own.words, kind=own.kind, outcome=outcome, **others)


def _attempt(
    own: Relaxation, planner: Planner, prices: Prices, batch: BatchSpec, tell: Callable[[Relaxed], None]
) -> None:
    try:
        if own.kind == "memory":
            _more_memory(own, planner, prices, batch, tell)
        elif own.kind == "devices":
            _more_devices(own, planner, prices, batch, tell)
        else:
            there = _on(planner, own.cluster)
            if _smallest_fits(own, there, own.wishes, tell):
                _best(own, there, prices, batch, own.wishes, tell)
    except PlanError as error:
        tell(_relaxed(own, "no", why=error.what))


def _on(planner: Planner, cluster: Cluster) -> Planner:
    """The same model and prices on another cluster."""
    works = planner.works
    if cluster == planner.cluster:
        return planner
    return Planner(planner.blocks, cluster, fused=works.fused, by_volume=works.by_volume, measured=works.measured)


def _smallest_fits(
    own: Relaxation, planner: Planner, wishes: Wishes, tell: Callable[[Relaxed], None], *, words: str = ""
) -> bool:
    limit = planner.device_bytes(wishes)
    least = least_memory(planner, wishes, enough=limit)
    count = planner.cluster.num_devices
    if least is None:
        tell(_relaxed(own, "no", words=words, why="still no plan divides the model and the batch", num_devices=count))
    elif least.num_bytes > limit:
        why = f"the smallest plan still holds {format_bytes(least.num_bytes)} of {format_bytes(limit)} a device"
        tell(_relaxed(own, "no", words=words, why=why, memory_bytes=least.num_bytes, num_devices=count))
    else:
        plan = f"{least.shape}, {least.num_micro} micro-batches"
        tell(_relaxed(own, "smallest", words=words, plan=plan, memory_bytes=least.num_bytes, num_devices=count))
        return True
    return False


def _best(
    own: Relaxation,
    planner: Planner,
    prices: Prices,
    batch: BatchSpec,
    wishes: Wishes,
    tell: Callable[[Relaxed], None],
    *,
    words: str = "",
) -> None:
    there = prices if planner.cluster == prices.cluster else replace(prices, cluster=planner.cluster)
    winner = find_best(planner, there, batch, wishes, num_finalists=_NUM_FINALISTS).winner
    tell(
        _relaxed(
            own,
            "fits",
            words=words,
            plan=winner.plan.name,
            step_seconds=winner.step_seconds,
            memory_bytes=winner.memory_bytes,
            num_devices=planner.cluster.num_devices,
        )
    )


def _more_memory(
    own: Relaxation, planner: Planner, prices: Prices, batch: BatchSpec, tell: Callable[[Relaxed], None]
) -> None:
    least = least_memory(planner, own.wishes)
    if least is None:
        tell(_relaxed(own, "no", why="still no plan divides the model and the batch"))
        return
    for times in _MORE_MEMORY:
        num_bytes = max(round(times * least.num_bytes), 1)
        if num_bytes <= planner.device_bytes(own.wishes):
            continue
        words, more = f"{format_bytes(num_bytes)} usable on each device", replace(own.wishes, memory_bytes=num_bytes)
        plan = f"{least.shape}, {least.num_micro} micro-batches"
        tell(_relaxed(own, "smallest", words=words, plan=plan, memory_bytes=least.num_bytes))
        try:
            _best(own, planner, prices, batch, more, tell, words=words)
        except NothingFitsError as error:
            tell(_relaxed(own, "no", words=words, why=error.what))
            continue
        return


def _more_devices(
    own: Relaxation, planner: Planner, prices: Prices, batch: BatchSpec, tell: Callable[[Relaxed], None]
) -> None:
    """The nodes doubled until something fits. The last that does not says why."""
    for doubling in range(1, _DOUBLINGS + 1):
        first, *others = own.cluster.levels
        larger = replace(own.cluster, levels=(replace(first, count=first.count << doubling), *others))
        there, words = _on(planner, larger), f"{larger.num_devices} devices"
        if not _smallest_fits(own, there, own.wishes, tell, words=words):
            continue
        try:
            _best(own, there, prices, batch, own.wishes, tell, words=words)
        except NothingFitsError as error:
            tell(_relaxed(own, "no", words=words, why=error.what, num_devices=larger.num_devices))
            continue
        return


def with_relaxations(error: NothingFitsError, found: Sequence[Relaxed]) -> NothingFitsError:
    """The same error with what would do: the cheapest first, and what would not."""
    if not found:
        return error
    fitting = [own for own in found if own.outcome in ("fits", "smallest")]
    others = [own for own in found if own not in fitting]
    lines = [f"the cheapest that fits: {fitting[0].sentence}"] if fitting else ["no single change was found to do"]
    lines += [f"or {own.sentence}" for own in fitting[1:]]
    lines += [f"not {own.sentence}" if own.outcome == "no" else f"perhaps {own.sentence}" for own in others]
    return NothingFitsError(
        error.what,
        given=error.given,
        required=error.required,
        todo="\n            ".join(lines),
        facts=error.facts | {"relaxations": [facts_of(own) for own in found]},
    )


def facts_of(own: Relaxed) -> dict[str, Any]:
    """A relaxation for machines."""
    return {
        "relaxation": own.words,
        "outcome": own.outcome,
        "fits": {"fits": True, "no": False}.get(own.outcome),
        "kind": own.kind,
        "plan": own.plan or None,
        "step_seconds": own.step_seconds,
        "memory_bytes": own.memory_bytes,
        "devices": own.num_devices,
        "why": own.why or None,
    }

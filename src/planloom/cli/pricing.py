"""What commands take prices from: a cluster's figures, a profile that was measured, or what is measured on the way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from planloom.blocks import BlockGraph
from planloom.cli.output import progress_bar
from planloom.cluster import Cluster
from planloom.cost import Prices, Profile, find_profile, is_one_machine, require_serves, serves
from planloom.errors import PriceError
from planloom.plan import Plan
from planloom.program import Program
from planloom.search import Candidate, LazyPlans, plan_lazily

if TYPE_CHECKING:
    from planloom.execute.processes import Launch

StoreOption = Annotated[Path, typer.Option("--store", help="Where measured prices are kept.")]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help="Use a measured profile: a file that was exported, or words in its device's name in the store.",
    ),
]
CompiledOption = Annotated[
    bool | None, typer.Option("--compiled/--eager", help="Are runs compiled? Without it: as profiled, or on GPUs yes.")
]
LinksOption = Annotated[
    bool | None,
    typer.Option(
        "--measured-links/--cluster-links",
        help="Collectives as measured, or from the cluster's links. Without it: measured where it has one node.",
    ),
]
DEFAULT_STORE = Path(".planloom/prices.sqlite")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """Prices, and what they assume: which profile was taken, or that figures are measured on the way."""

    prices: Prices
    profile: Profile | None = None

    def document(self) -> dict[str, Any]:
        found = {"device": self.profile.device, "software": self.profile.software} if self.profile is not None else None
        links = "measured" if self.prices.measured_links else "cluster"
        return {"compiled": self.prices.fused, "profile": found, "links": links}

    def words(self) -> str:
        """The assumptions, for people."""
        how = "compiled, as by parallelize(…, compile=True)" if self.prices.fused else "eager, as by parallelize(…)"
        links = "as measured" if self.prices.measured_links else "the cluster's"
        whose = f"; figures of {self.profile.device} ({self.profile.software})" if self.profile is not None else ""
        return f"[dim]assumed: runs {how}; links {links}{escape(whose)}[/dim]"


def pricing_of(
    blocks: BlockGraph,
    cluster: Cluster,
    *,
    profile: str | None,
    store: Path,
    compiled: bool | None,
    links: bool | None,
    measuring: bool = False,
) -> Pricing:
    """The prices that options ask for; `measuring`: figures will be measured."""
    found = find_profile(profile, store) if profile is not None else None
    if found is None:
        fused = cluster.library == "nccl" if compiled is None else compiled
        if links and not measuring:
            raise PriceError("no links are measured", given="--measured-links", required="--profile with it")
        use_links = measuring and (is_one_machine(cluster) if links is None else links)
        return Pricing(prices=Prices(blocks=blocks, cluster=cluster, fused=fused, measured_links=use_links))
    if measuring:
        raise PriceError("a profile and measuring at once", given="--profile and --measure", required="one of them")
    require_serves(found.device, cluster)
    if compiled is not None and compiled != found.is_compiled:
        raise PriceError(
            "the profile is of runs that are made otherwise",
            given=f"{found.software}, and --{'compiled' if compiled else 'eager'}",
            required="both compiled or both eager",
        )
    use_links = is_one_machine(cluster) if links is None else links
    prices = Prices(blocks=blocks, cluster=cluster, fused=found.is_compiled, measured_links=use_links)
    return Pricing(prices=with_figures(prices, found.figures), profile=found)


def with_figures(prices: Prices, figures: Mapping[str, tuple[float, float]]) -> Prices:
    """The same prices with measured figures, each with its spread."""
    measured = {key: value for key, (value, _) in figures.items()}
    return replace(prices, measured=measured, spreads={key: spread for key, (_, spread) in figures.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """Where runs and links are measured: on so many processes, by `launch`; None: local ones, under torchrun.

    `label` tells what was measured under a quota from what was not; `with_links`: what is sent is measured, too.
    """

    store: Path
    num_processes: int
    device: str = "cpu"
    compiled: bool = False
    with_links: bool = True
    label: str = ""
    launch: "Launch | None" = None
    budget_seconds: float = 0.1

    def figures(self) -> dict[str, tuple[float, float]]:
        """All that is known: values with their spreads."""
        from planloom.profile import local_store

        found = local_store(
            self.store, self.num_processes, device=self.device, compiled=self.compiled, label=self.label
        )
        return found.load_with_spread()

    def measure(self, model: str, plans: Sequence[Plan]) -> None:
        """Measure what these plans use and is not known."""
        from planloom.profile import profile_locally

        with progress_bar(f"measuring distinct runs on {self.num_processes} processes") as bar:
            profile_locally(
                model,
                plans,
                self.store,
                num_processes=self.num_processes,
                progress=bar.update,
                device=self.device,
                compiled=self.compiled,
                label=self.label,
                with_links=self.with_links,
                budget_seconds=self.budget_seconds,
                **({"launch": self.launch} if self.launch is not None else {}),
            )

    def measure_segments(self, model: str, plans: Sequence[Plan]) -> None:
        """Measure the segments of these plans as a whole, on a process for each of their devices."""
        from planloom.train.segments import measure_segments_locally

        with progress_bar(f"measuring segments of plans on {self.num_processes} processes") as bar:
            measure_segments_locally(
                model,
                plans,
                self.store,
                num_processes=self.num_processes,
                progress=bar.update,
                device=self.device,
                compiled=self.compiled,
                label=self.label,
                **({"launch": self.launch} if self.launch is not None else {}),
            )


def lab_for(prices: Prices, store: Path) -> Lab:
    """Where this machine measures for a cluster: on a process for each device of a CPU cluster, or on its GPUs.

    With fewer GPUs than devices one process measures runs: shards are symmetric.
    """
    cluster = prices.cluster
    if cluster.library == "gloo":
        return Lab(
            store=store,
            num_processes=cluster.num_devices,
            compiled=prices.fused,
            with_links=prices.measured_links,
        )
    from planloom.profile import local_gpus

    gpus = local_gpus()
    if not gpus or not serves(gpus[0], cluster):
        raise PriceError(
            f"{cluster.device.name} cannot be measured here",
            given=f"this machine has {', '.join(sorted(set(gpus))) or 'no GPU'}",
            required="a machine with this device, or a profile of it",
            todo=f"there: planloom profile MODEL --cluster {cluster.name} --device cuda"
            + (" --compiled" if prices.fused else "")
            + " --export FILE; here: --profile FILE in place of --measure",
        )
    has_all = prices.measured_links and len(gpus) >= cluster.num_devices
    return Lab(
        store=store,
        num_processes=cluster.num_devices if has_all else 1,
        device="cuda",
        compiled=prices.fused,
        with_links=has_all,
    )


def measure_lazily(model: str, candidates: Sequence[Candidate], prices: Prices, lab: Lab) -> LazyPlans:
    """Rank from what is known, measure what the best use, and rank again, until the best are measured."""

    def current() -> Prices:
        return with_figures(prices, lab.figures())

    def measure(programs: Sequence[Program]) -> int:
        wanted = {id(program) for program in programs}
        before = _num_runs(lab.figures())
        plans = [c.plan for c in candidates if id(c.program) in wanted and c.plan is not None]
        lab.measure(model, plans)
        if lab.with_links:
            lab.measure_segments(model, [plan for plan in plans if len(plan.devices) == lab.num_processes])
        return _num_runs(lab.figures()) - before

    return plan_lazily(candidates, current, measure)


def _num_runs(figures: Mapping[str, object]) -> int:
    """How many distinct runs were measured."""
    return len({key.split("/")[1] for key in figures if key.startswith("run/")})

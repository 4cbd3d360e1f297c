"""`planloom plan`, `verify`, `simulate`: find a plan, prove it, time it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planloom.cli.models import CapturedModel, ModelArgument, capture_model
from planloom.cli.output import JsonOption, messages, progress_bar, screen, show, write_file
from planloom.cluster import Cluster, cluster_from_yaml, cluster_to_yaml, format_seconds, load_cluster
from planloom.cost import Prices, PriceStore
from planloom.errors import PlanError
from planloom.plan import Plan, load_plan, named_plan, parse_named, save_plan
from planloom.program import Program, build_program, verify_program
from planloom.report import candidates_table, chrome_trace, plan_tables, summary_tables, timeline_svg
from planloom.search import Candidate, LazyPlans, candidate_plans, plan_lazily, price_plans
from planloom.simulate import Timeline, simulate

if TYPE_CHECKING:
    from planloom.execute.processes import Launch

ClusterOption = Annotated[str, typer.Option("--cluster", help="A preset (see `planloom cluster`) or a YAML file.")]
NodesOption = Annotated[int | None, typer.Option("--nodes", help="The number of outermost members of the cluster.")]
StoreOption = Annotated[Path, typer.Option("--store", help="Where measured prices are kept.")]
PlanArgument = Annotated[Path, typer.Argument(help="A plan file.")]
DEFAULT_STORE = Path(".planloom/prices.sqlite")


def register(app: typer.Typer) -> None:
    example = "Example: planloom plan examples/models/gpt.py:small --cluster two-by-two --out plan.json"
    app.command(name="plan", epilog=example)(plan_command)
    app.command(name="verify", epilog="Example: planloom verify plan.json examples/models/gpt.py:small")(verify_command)
    example = "Example: planloom simulate plan.json --trace trace.json"
    app.command(name="simulate", epilog=example)(simulate_command)


def plan_command(
    model: ModelArgument,
    cluster: ClusterOption,
    nodes: NodesOption = None,
    named: Annotated[str | None, typer.Option(help="One named plan, as dp=2,tp=2,vocab; without it, all.")] = None,
    measure: Annotated[
        bool, typer.Option(help="Measure what the best plans use on local processes, until the best are measured.")
    ] = False,
    store: StoreOption = DEFAULT_STORE,
    out: Annotated[Path | None, typer.Option(help="Write the best plan here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Price the named plans for a model on a cluster, and show the best."""
    captured, machine = capture_model(model), load_cluster(cluster, num_outer=nodes)
    candidates = find_candidates(captured, machine, named)
    prices = Prices(blocks=captured.blocks, cluster=machine, fused=is_fused(machine))
    if measure:
        ranked = measure_lazily(model, candidates, prices, Lab(store=store, num_processes=machine.num_devices)).ranked
    else:
        ranked = rank(candidates, prices)
    best = ranked[0]
    if best.plan is None or best.program is None:
        reasons = sorted({candidate.refused for candidate in ranked})
        raise PlanError("no plan fits", given="; ".join(reasons), required="a plan that divides model and batch")
    verify_program(captured.blocks, best.program)
    if out is not None:
        save_plan(replace(best.plan, source=model), out)
    document = {"best": best.name, "plans": [candidate_document(c) for c in ranked], "out": str(out) if out else None}
    show(document, candidates_table(ranked, cluster=machine.name), as_json=as_json)
    if not as_json:
        screen.print(f"best: [bold]{best.label}[/bold], verified" + (f", written to {out}" if out else ""))


def find_candidates(captured: CapturedModel, cluster: Cluster, named: str | None = None) -> tuple[Candidate, ...]:
    """All candidates, or the one that is named."""
    with progress_bar("building programs"):
        if named is None:
            return candidate_plans(captured.blocks, cluster, captured.spec)
        wanted = parse_named(named)
        if wanted.num_devices != cluster.num_devices:
            raise PlanError(
                f"plan {named!r} does not fill the cluster",
                given=f"{wanted.num_devices} devices",
                required=f"{cluster.num_devices} devices of {cluster.name}",
                todo="change the degrees or --nodes",
            )
        plan = named_plan(captured.blocks, wanted, batch=captured.spec)
        plan = replace(plan, cluster=cluster_to_yaml(cluster))
        program = build_program(captured.blocks, plan)
        return (Candidate(name=plan.name, placement="devices in order", plan=plan, program=program),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lab:
    """Where runs and links are measured: on so many processes, by `launch`; None: local ones, under torchrun.

    `label` tells what was measured under a quota from what was not.
    """

    store: Path
    num_processes: int
    label: str = ""
    launch: "Launch | None" = None
    budget_seconds: float = 0.1

    def figures(self) -> dict[str, tuple[float, float]]:
        """All that is known: values with their spreads."""
        from planloom.profile import local_store

        return local_store(self.store, self.num_processes, label=self.label).load_with_spread()

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
                label=self.label,
                budget_seconds=self.budget_seconds,
                **({"launch": self.launch} if self.launch is not None else {}),  # type: ignore[arg-type]
            )


def measure_lazily(model: str, candidates: Sequence[Candidate], prices: Prices, lab: Lab) -> LazyPlans:
    """Rank from what is known, measure what the best use, and rank again, until the best are measured."""

    def current() -> Prices:
        return with_figures(prices, lab.figures())

    def measure(programs: Sequence[Program]) -> int:
        wanted = {id(program) for program in programs}
        before = num_runs(lab.figures())
        lab.measure(model, [c.plan for c in candidates if id(c.program) in wanted and c.plan is not None])
        return num_runs(lab.figures()) - before

    return plan_lazily(candidates, current, measure)


def with_figures(prices: Prices, figures: Mapping[str, tuple[float, float]]) -> Prices:
    """The same prices with measured figures, each with its spread."""
    measured = {key: value for key, (value, _) in figures.items()}
    return replace(prices, measured=measured, spreads={key: spread for key, (_, spread) in figures.items()})


def num_runs(figures: Mapping[str, object]) -> int:
    """How many distinct runs were measured."""
    return len({key.split("/")[1] for key in figures if key.startswith("run/")})


def rank(candidates: Sequence[Candidate], prices: Prices) -> tuple[Candidate, ...]:
    """Candidates by simulated step time."""
    with progress_bar("simulating", total=len(candidates)) as bar:
        return price_plans(candidates, prices, progress=bar.update)


def candidate_document(candidate: Candidate) -> dict[str, Any]:
    if candidate.timeline is None:
        return {"name": candidate.name, "placement": candidate.placement, "refused": candidate.refused}
    return {
        "name": candidate.name,
        "placement": candidate.placement,
        "step_seconds": candidate.step_seconds,
        "price_sources": list(candidate.timeline.sources),
    }


def verify_command(plan: PlanArgument, model: ModelArgument, as_json: JsonOption = False) -> None:
    """Prove that a plan computes what the model computes on one device."""
    loaded, captured = load_plan(plan), capture_model(model)
    program = build_program(captured.blocks, loaded)
    with progress_bar("verifying"):
        proof = verify_program(captured.blocks, program)
    document = {
        "plan": loaded.name,
        "verified": True,
        "devices": proof.num_devices,
        "instructions": proof.num_instructions,
        "collectives": proof.num_collectives,
        "messages": proof.num_messages,
        "parameters": proof.num_parameters,
    }
    text = (
        f"[green]proven[/green]: {loaded.name} on {proof.num_devices} devices: {proof.num_instructions} instructions, "
        f"{proof.num_collectives} collectives, {proof.num_messages} messages; the loss and all {proof.num_parameters} "
        "gradients are complete, every part counted once, nothing deadlocks"
    )
    show(document, text, as_json=as_json)


def simulate_command(
    plan: PlanArgument,
    model: Annotated[
        str | None, typer.Argument(help="The model, as for `planloom plan`; without it, as the plan names it.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="A preset or a YAML file; without it, the plan's own cluster.")
    ] = None,
    nodes: NodesOption = None,
    profile: Annotated[
        str | None, typer.Option(help="Use the measured profile of the device in the store that has these words.")
    ] = None,
    store: StoreOption = DEFAULT_STORE,
    compiled: Annotated[
        bool | None, typer.Option("--compiled/--eager", help="Are runs compiled? Without it: on GPUs yes.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Write the timeline as an SVG picture here.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for chrome://tracing or Perfetto here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time a plan on a cluster without running it: step, bubble, exposed communication, memory."""
    loaded = load_plan(plan)
    captured, machine = capture_model(_model_of(loaded, model)), _cluster_of(loaded, cluster, nodes)
    prices = Prices(blocks=captured.blocks, cluster=machine, fused=is_fused(machine, compiled))
    if profile is not None:
        prices = with_figures(prices, PriceStore.choose(store, profile).load_with_spread())
    timeline = simulate_plan(loaded, captured, prices)
    if picture is not None:
        write_file(timeline_svg({f"{loaded.name}: {format_seconds(timeline.step_seconds)}": timeline}), picture)
        messages.print(f"timeline written to {picture}")
    if trace is not None:
        write_file(chrome_trace(timeline), trace)
        messages.print(f"trace written to {trace}")
    show(timeline_document(timeline), *plan_tables(loaded, None), *summary_tables(timeline, machine), as_json=as_json)


def is_fused(cluster: Cluster, compiled: bool | None = None) -> bool:
    """Are runs compiled? Where nobody says: on GPUs."""
    return cluster.library == "nccl" if compiled is None else compiled


def timeline_document(timeline: Timeline) -> dict[str, Any]:
    """A simulated step for machines."""
    summary = timeline.summary
    assert summary is not None
    return {
        "step_seconds": summary.step_seconds,
        "uncertainty": summary.uncertainty,
        "mfu": summary.mfu,
        "bubble": summary.bubble,
        "exposed_communication": summary.exposed_communication,
        "peak_memory_bytes": summary.peak_memory_bytes,
        "memory": [
            {"devices": list(role.devices), "peak_bytes": role.peak_bytes, "parts": role.parts, "when": role.when}
            for role in summary.memory
        ],
        "simulate_seconds": summary.simulate_seconds,
        "price_sources": list(timeline.sources),
        "compute_seconds": {str(d): timeline.busy_seconds(d, "compute") for d in timeline.devices},
        "communication_seconds": {str(d): timeline.busy_seconds(d, "communication") for d in timeline.devices},
    }


def _model_of(plan: Plan, model: str | None) -> str:
    if model is None and not plan.source:
        raise PlanError(
            f"plan {plan.name!r} does not say how its model is named",
            given="a plan that was not written by `planloom plan`",
            required="the model as second argument",
            todo="planloom simulate plan.json path/to/file.py:factory",
        )
    return model or plan.source


def _cluster_of(plan: Plan, cluster: str | None, nodes: int | None) -> Cluster:
    if cluster is not None:
        return load_cluster(cluster, num_outer=nodes)
    if not plan.cluster:
        raise PlanError(
            f"plan {plan.name!r} names no cluster", given="no --cluster", required="--cluster with a preset or a file"
        )
    return cluster_from_yaml(plan.cluster, name=f"of plan {plan.name!r}")


def simulate_plan(plan: Plan, captured: CapturedModel, prices: Prices) -> Timeline:
    """The simulated timeline of a plan, refused if the cluster is too small for it."""
    cluster = prices.cluster
    if max(plan.devices) >= cluster.num_devices:
        raise PlanError(
            f"plan {plan.name!r} needs more devices than the cluster has",
            given=f"{cluster.num_devices} devices of {cluster.name}",
            required=f"{max(plan.devices) + 1} devices",
            todo="add --nodes, or plan for this cluster",
        )
    with progress_bar("simulating"):
        return simulate(build_program(captured.blocks, plan), prices)

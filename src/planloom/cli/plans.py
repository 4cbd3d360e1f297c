"""`planloom plan`, `verify`, `simulate`: find a plan, prove it, time it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from planloom.blocks import BlockGraph
from planloom.cli.models import CapturedModel, ModelArgument, capture_model
from planloom.cli.output import JsonOption, messages, progress_bar, screen, show
from planloom.cluster import Cluster, cluster_to_yaml, format_seconds, load_cluster
from planloom.cost import Prices
from planloom.errors import PlanError
from planloom.plan import Plan, load_plan, named_plan, parse_named, save_plan
from planloom.program import build_program, verify_program
from planloom.report import candidates_table, plan_tables, timeline_svg
from planloom.search import Candidate, candidate_plans, price_plans
from planloom.simulate import Timeline, simulate

ClusterOption = Annotated[str, typer.Option("--cluster", help="A preset (see `planloom cluster`) or a YAML file.")]
NodesOption = Annotated[int | None, typer.Option("--nodes", help="The number of outermost members of the cluster.")]
StoreOption = Annotated[Path, typer.Option("--store", help="Where measured prices are kept.")]
PlanArgument = Annotated[Path, typer.Argument(help="A plan file.")]
DEFAULT_STORE = Path(".planloom/prices.sqlite")


def register(app: typer.Typer) -> None:
    example = "Example: planloom plan examples/models/gpt.py:small --cluster two-by-two --out plan.json"
    app.command(name="plan", epilog=example)(plan_command)
    app.command(name="verify", epilog="Example: planloom verify plan.json examples/models/gpt.py:small")(verify_command)
    example = "Example: planloom simulate plan.json examples/models/gpt.py:small --cluster two-by-two --picture t.svg"
    app.command(name="simulate", epilog=example)(simulate_command)


def plan_command(
    model: ModelArgument,
    cluster: ClusterOption,
    nodes: NodesOption = None,
    named: Annotated[str | None, typer.Option(help="One named plan, as dp=2,tp=2,vocab; without it, all.")] = None,
    measure: Annotated[bool, typer.Option(help="Measure every distinct run on local processes first.")] = False,
    store: StoreOption = DEFAULT_STORE,
    out: Annotated[Path | None, typer.Option(help="Write the best plan here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Price the named plans for a model on a cluster, and show the best."""
    captured, machine = capture_model(model), load_cluster(cluster, num_outer=nodes)
    candidates = find_candidates(captured, machine, named)
    measured: Mapping[str, float] = {}
    if measure:
        measured = measure_candidates(model, captured.blocks, candidates, store, machine.num_devices)
    ranked = rank(candidates, Prices(blocks=captured.blocks, cluster=machine, measured=measured))
    best = ranked[0]
    if best.plan is None or best.program is None:
        reasons = sorted({candidate.refused for candidate in ranked})
        raise PlanError("no plan fits", given="; ".join(reasons), required="a plan that divides model and batch")
    verify_program(captured.blocks, best.program)
    if out is not None:
        save_plan(best.plan, out)
    document = {"best": best.name, "plans": [candidate_document(c) for c in ranked], "out": str(out) if out else None}
    show(document, candidates_table(ranked, {}, cluster=machine.name), as_json=as_json)
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


def measure_candidates(
    model: str, blocks: BlockGraph, candidates: Sequence[Candidate], store: Path, num_processes: int
) -> dict[str, float]:
    """Measure what the candidates use and the store lacks; all measured prices."""
    from planloom.profile import is_measured, local_store, profile_locally

    known = local_store(store, num_processes).load()
    if is_measured(blocks, [c.program for c in candidates if c.program is not None], known):
        return known
    plans = [candidate.plan for candidate in candidates if candidate.plan is not None]
    with progress_bar(f"measuring distinct runs on {num_processes} local processes") as bar:
        profile_locally(model, plans, store, num_processes=num_processes, progress=bar.update)
    return local_store(store, num_processes).load()


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
    model: ModelArgument,
    cluster: ClusterOption,
    nodes: NodesOption = None,
    picture: Annotated[Path | None, typer.Option(help="Write the timeline as an SVG picture here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time a plan on a cluster without running it."""
    loaded, captured, machine = load_plan(plan), capture_model(model), load_cluster(cluster, num_outer=nodes)
    timeline = simulate_plan(loaded, captured, machine)
    if picture is not None:
        picture.write_text(timeline_svg({f"{loaded.name}: {format_seconds(timeline.step_seconds)}": timeline}))
        messages.print(f"timeline written to {picture}")
    document = {
        "step_seconds": timeline.step_seconds,
        "price_sources": list(timeline.sources),
        "compute_seconds": {str(d): timeline.busy_seconds(d, "compute") for d in timeline.devices},
        "communication_seconds": {str(d): timeline.busy_seconds(d, "communication") for d in timeline.devices},
    }
    show(document, *plan_tables(loaded, timeline), as_json=as_json)


def simulate_plan(plan: Plan, captured: CapturedModel, cluster: Cluster) -> Timeline:
    """The simulated timeline of a plan, refused if the cluster is too small for it."""
    if max(plan.devices) >= cluster.num_devices:
        raise PlanError(
            f"plan {plan.name!r} needs more devices than the cluster has",
            given=f"{cluster.num_devices} devices of {cluster.name}",
            required=f"{max(plan.devices) + 1} devices",
            todo="add --nodes, or plan for this cluster",
        )
    prices = Prices(blocks=captured.blocks, cluster=cluster)
    return simulate(build_program(captured.blocks, plan), prices)

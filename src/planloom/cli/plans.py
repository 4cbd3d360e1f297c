"""`planloom verify`, `simulate`: prove a plan, time it; and the named plans of a cluster."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from planloom.cli.models import CapturedModel, ModelArgument, capture_model
from planloom.cli.output import JsonOption, messages, progress_bar, show, write_file
from planloom.cli.pricing import (
    DEFAULT_STORE,
    CompiledOption,
    LinksOption,
    ProfileOption,
    StoreOption,
    pricing_of,
)
from planloom.cluster import Cluster, cluster_from_yaml, cluster_to_yaml, format_seconds, load_cluster
from planloom.cost import Prices
from planloom.errors import PlanError
from planloom.plan import FAMILIES, Plan, find_named, load_plan, named_plan
from planloom.program import build_program, verify_program
from planloom.report import chrome_trace, families_table, plan_tables, summary_tables, timeline_svg
from planloom.search import Candidate, candidate_plans, price_plans
from planloom.simulate import Timeline, simulate

ClusterOption = Annotated[str, typer.Option("--cluster", help="A preset (see `planloom cluster`) or a YAML file.")]
NodesOption = Annotated[int | None, typer.Option("--nodes", help="The number of outermost members of the cluster.")]
PlanArgument = Annotated[Path, typer.Argument(help="A plan file.")]


def register(app: typer.Typer) -> None:
    app.command(name="verify", epilog="Example: planloom verify plan.json examples/models/gpt.py:small")(verify_command)
    example = "Example: planloom simulate plan.json --trace trace.json"
    app.command(name="simulate", epilog=example)(simulate_command)
    app.command(name="plans", epilog="Example: planloom plans")(plans_command)


def plans_command(as_json: JsonOption = False) -> None:
    """List the plans that have a name, with their options: for `planloom plan --plan` and `planloom train --plan`."""
    document = [
        {"name": family.name, "about": family.about, "axes": list(family.axes), "options": dict(family.options)}
        for family in FAMILIES.values()
    ]
    show({"plans": document}, families_table(tuple(FAMILIES.values())), as_json=as_json)


def find_candidates(captured: CapturedModel, cluster: Cluster, named: str | None = None) -> tuple[Candidate, ...]:
    """All candidates, or the one that is named."""
    with progress_bar("building programs"):
        if named is None:
            return candidate_plans(captured.blocks, cluster, captured.spec)
        wanted = find_named(named)
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
        "memory_bytes": candidate.memory_bytes,
        "fits": candidate.fits,
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
    profile: ProfileOption = None,
    store: StoreOption = DEFAULT_STORE,
    compiled: CompiledOption = None,
    links: LinksOption = None,
    picture: Annotated[Path | None, typer.Option(help="Write the timeline as an SVG picture here.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for chrome://tracing or Perfetto here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Time a plan on a cluster without running it: step, bubble, exposed communication, memory."""
    loaded = load_plan(plan)
    captured, machine = capture_model(model_of(loaded, model)), cluster_of(loaded, cluster, nodes)
    pricing = pricing_of(captured.blocks, machine, profile=profile, store=store, compiled=compiled, links=links)
    timeline = simulate_plan(loaded, captured, pricing.prices)
    if picture is not None:
        write_file(timeline_svg({f"{loaded.name}: {format_seconds(timeline.step_seconds)}": timeline}), picture)
        messages.print(f"timeline written to {picture}")
    if trace is not None:
        write_file(chrome_trace(timeline), trace)
        messages.print(f"trace written to {trace}")
    tables = [*plan_tables(loaded, None), *summary_tables(timeline, machine)]
    show(timeline_document(timeline) | pricing.document(), *tables, pricing.words(), as_json=as_json)


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


def model_of(plan: Plan, model: str | None) -> str:
    if model is None and not plan.source:
        raise PlanError(
            f"plan {plan.name!r} does not say how its model is named",
            given="a plan that was not written by `planloom plan`",
            required="the model as second argument",
            todo="planloom simulate plan.json path/to/file.py:factory",
        )
    return model or plan.source


def cluster_of(plan: Plan, cluster: str | None, nodes: int | None) -> Cluster:
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

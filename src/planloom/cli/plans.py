"""`planloom plan`, `verify`, `simulate`: find a plan, prove it, time it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from planloom.cli.models import CapturedModel, ModelArgument, capture_model
from planloom.cli.output import JsonOption, messages, progress_bar, screen, show, write_file
from planloom.cli.pricing import (
    DEFAULT_STORE,
    CompiledOption,
    LinksOption,
    ProfileOption,
    StoreOption,
    lab_for,
    measure_lazily,
    pricing_of,
)
from planloom.cluster import Cluster, cluster_from_yaml, cluster_to_yaml, format_bytes, format_seconds, load_cluster
from planloom.cost import Prices
from planloom.errors import PlanError
from planloom.plan import Plan, load_plan, named_plan, parse_named, save_plan
from planloom.program import build_program, verify_program
from planloom.report import candidates_table, chrome_trace, plan_tables, summary_tables, timeline_svg
from planloom.search import Candidate, candidate_plans, price_plans
from planloom.simulate import Timeline, simulate

ClusterOption = Annotated[str, typer.Option("--cluster", help="A preset (see `planloom cluster`) or a YAML file.")]
NodesOption = Annotated[int | None, typer.Option("--nodes", help="The number of outermost members of the cluster.")]
PlanArgument = Annotated[Path, typer.Argument(help="A plan file.")]


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
        bool, typer.Option(help="Measure what the best plans use on this machine, until the best are measured.")
    ] = False,
    profile: ProfileOption = None,
    store: StoreOption = DEFAULT_STORE,
    compiled: CompiledOption = None,
    links: LinksOption = None,
    out: Annotated[Path | None, typer.Option(help="Write the best plan here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Price the named plans for a model on a cluster, and show the best."""
    captured, machine = capture_model(model), load_cluster(cluster, num_outer=nodes)
    pricing = pricing_of(
        captured.blocks, machine, profile=profile, store=store, compiled=compiled, links=links, measuring=measure
    )
    lab = lab_for(pricing.prices, store) if measure else None
    candidates = find_candidates(captured, machine, named)
    if lab is not None:
        ranked = measure_lazily(model, candidates, pricing.prices, lab).ranked
    else:
        ranked = rank(candidates, pricing.prices)
    best = ranked[0]
    if best.plan is None or best.program is None:
        reasons = sorted({candidate.refused for candidate in ranked})
        raise PlanError("no plan fits", given="; ".join(reasons), required="a plan that divides model and batch")
    verify_program(captured.blocks, best.program)
    if out is not None:
        save_plan(replace(best.plan, source=model), out)
    document = {"best": best.name, "plans": [candidate_document(c) for c in ranked], "out": str(out) if out else None}
    document |= pricing.document()
    show(document, candidates_table(ranked, cluster=machine.name), pricing.words(), as_json=as_json)
    if not as_json:
        screen.print(f"best: [bold]{best.label}[/bold], verified" + (f", written to {out}" if out else ""))
    if not best.fits:
        size = f"{format_bytes(best.memory_bytes)} of {format_bytes(machine.device.memory_bytes)}"
        messages.print(f"[bold red]no plan fits into memory[/bold red]: even this one needs {size} a device")


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
    captured, machine = capture_model(_model_of(loaded, model)), _cluster_of(loaded, cluster, nodes)
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

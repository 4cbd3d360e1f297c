"""`planloom plan`, `fit`, `explain`, `compare`: the search, and what it knows."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer

from planloom.cli.models import CapturedModel, ModelArgument, capture_model, peak_rss_bytes
from planloom.cli.output import Bar, JsonOption, messages, progress_bar, screen, show
from planloom.cli.plans import (
    ClusterOption,
    NodesOption,
    PlanArgument,
    candidate_document,
    cluster_of,
    find_candidates,
    model_of,
    rank,
    simulate_plan,
)
from planloom.cli.pricing import (
    DEFAULT_STORE,
    CompiledOption,
    Lab,
    LinksOption,
    Pricing,
    ProfileOption,
    StoreOption,
    lab_for,
    pricing_of,
    with_figures,
)
from planloom.cluster import Cluster, format_bytes, load_cluster, parse_bytes
from planloom.cost import Prices
from planloom.errors import PlanError
from planloom.plan import load_plan, save_plan
from planloom.program import verify_program
from planloom.report import candidates_table
from planloom.report.searches import alternatives_table, best_tables, comparison_table, shares_table, why_slower
from planloom.search import (
    Best,
    BlockPin,
    Finalist,
    LeastMemory,
    NothingFitsError,
    Planner,
    Wishes,
    find_best_measured,
    least_memory,
    try_relaxations,
    with_relaxations,
)
from planloom.search.explain import explain_block, explain_plan
from planloom.search.relaxations import SECONDS as RELAXATION_SECONDS
from planloom.search.space import VARIANTS

BatchOption = Annotated[int | None, typer.Option("--global-batch", help="Samples a step, over all devices.")]
MemoryOption = Annotated[str | None, typer.Option("--memory", help="Bytes of a device that may be used, as 70GiB.")]
PinOption = Annotated[
    list[str] | None,
    typer.Option("--pin", help='Split matching blocks so, as "layers.*.mlp*=features:tp". May be given often.'),
]
_MAX_DOUBLINGS = 12
_PROVEN_DEVICES = 16
"""A plan on more devices is not proven unless asked for: the proof goes through all devices, one by one."""


def register(app: typer.Typer) -> None:
    example = "Example: planloom plan llama3-70b --cluster dgx-h100 --nodes 16 --global-batch 1024 --out plan.json"
    app.command(name="plan", epilog=example)(plan_command)
    example = "Example: planloom fit llama3-405b --cluster dgx-h100 --nodes 128 --global-batch 512"
    app.command(name="fit", epilog=example)(fit_command)
    app.command(name="explain", epilog="Example: planloom explain plan.json 'model.layers.3.mlp.up_proj'")(
        explain_command
    )
    app.command(name="compare", epilog="Example: planloom compare plan.json other.json")(compare_command)


def plan_command(
    model: ModelArgument,
    cluster: ClusterOption,
    nodes: NodesOption = None,
    global_batch: BatchOption = None,
    dp: Annotated[int | None, typer.Option("--dp", help="The size of the data axis.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", help="The size of the first free axis.")] = None,
    tp2: Annotated[int | None, typer.Option("--tp2", help="The size of the second free axis.")] = None,
    pp: Annotated[int | None, typer.Option("--pp", help="The number of stages.")] = None,
    micro: Annotated[int | None, typer.Option("--micro", help="The number of micro-batches.")] = None,
    schedule: Annotated[str | None, typer.Option("--schedule", help="Only this schedule, as 1f1b.")] = None,
    zero: Annotated[int | None, typer.Option("--zero", min=0, max=3, help="Only this ZeRO, or 0 for none.")] = None,
    recompute: Annotated[bool, typer.Option("--recompute/--no-recompute", help="May layers be recomputed?")] = True,
    pin: PinOption = None,
    variants: Annotated[
        str,
        typer.Option(help=f"Plans tried beside the proven space: all, none, or some of {', '.join(VARIANTS)}."),
    ] = "all",
    memory: MemoryOption = None,
    max_devices: Annotated[int | None, typer.Option(help="Use at most so many devices of the cluster.")] = None,
    relax_seconds: Annotated[
        float, typer.Option(min=0.0, help="If nothing fits: for trying each relaxation of what is pinned; 0: none.")
    ] = RELAXATION_SECONDS,
    pricing_by: Annotated[
        str, typer.Option("--pricing", help="seconds, or volume: bytes moved alone, as Alpa prices.")
    ] = "seconds",
    named: Annotated[
        str | None,
        typer.Option("--plan", "--named", help="No search: this plan, as dp=2,tp=2,vocab or megatron:tp=2,pp=2."),
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="Measure what the best plans use on this machine, until the best are measured.")
    ] = False,
    profile: ProfileOption = None,
    store: StoreOption = DEFAULT_STORE,
    compiled: CompiledOption = None,
    links: LinksOption = None,
    prove: Annotated[
        bool | None, typer.Option("--prove/--no-prove", help="Prove the plan. Without it: on up to 16 devices.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the best plan here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest plan for a model on a cluster: axes, placement, strategies, stages, storage, recomputation."""
    started = time.perf_counter()
    source = with_batch(model, global_batch)
    captured = capture_model(source)
    whole = load_cluster(cluster, num_outer=nodes)
    machine = limited(whole, max_devices)
    pricing = pricing_of(
        captured.blocks, machine, profile=profile, store=store, compiled=compiled, links=links, measuring=measure
    )
    if named is not None:
        _plan_named(source, captured, machine, pricing, named, out, as_json=as_json)
        return
    wishes = Wishes(
        dp=dp, tp=tp, tp2=tp2, pp=pp, micro=micro, schedule=schedule,
        storage=None if zero is None else f"zero{zero}" if zero else "replicated",
        recompute=recompute, memory_bytes=_bytes(memory), pins=tuple(map(parse_pin, pin or ())),
        variants=_variants(variants),
    )  # fmt: skip
    planner = Planner(captured.blocks, machine, fused=pricing.prices.fused, by_volume=_by_volume(pricing_by))
    with progress_bar("searching") as bar:

        def on_progress(text: str, done: int, total: int) -> None:
            bar.say(f"searching {text}")
            bar.update(done, total)

        how = measuring(source, pricing.prices, lab_for(pricing.prices, store)) if measure else None
        try:
            best = find_best_measured(planner, pricing.prices, captured.spec, wishes, measure=how, progress=on_progress)
        except NothingFitsError as error:
            if not relax_seconds:
                raise

            def on_tried(text: str, done: int, total: int) -> None:
                bar.say(f"nothing fits; trying: {text}")
                bar.update(done, total)

            found = try_relaxations(
                planner, pricing.prices, captured.spec, wishes, whole=whole, seconds=relax_seconds, progress=on_tried
            )
            raise with_relaxations(error, found) from None
    winner = best.winner
    is_proven = len(winner.plan.devices) <= _PROVEN_DEVICES if prove is None else prove
    if is_proven:
        with progress_bar("proving"):
            verify_program(captured.blocks, winner.program)
    if out is not None:
        save_plan(replace(winner.plan, source=source), out)
    total = time.perf_counter() - started
    document = best_document(best, captured) | pricing.document() | {"total_seconds": total, "verified": is_proven}
    document["out"] = str(out) if out is not None else None
    show(document, *best_tables(best, machine, tokens=tokens_of(captured)), pricing.words(), as_json=as_json)
    if not as_json:
        proven = "proven" if is_proven else "not proven yet (planloom verify, or --prove)"
        written = f", written to {out}" if out else ""
        screen.print(
            f"[bold]{winner.plan.name}[/bold], {proven}{written}: searched {best.certificate.num_problems} problems in "
            f"{best.certificate.search_seconds:.1f} s, {total:.1f} s in all"
        )
        if any(best.sources.get(kind) for kind in ("measured", "interpolated")):
            counts = ", ".join(f"{count} {kind}" for kind, count in best.sources.items())
            screen.print(f"prices of its blocks in the estimate: {counts}; searched {best.num_rounds} times")


def _plan_named(
    source: str, captured: CapturedModel, machine: Cluster, pricing: Pricing, named: str, out: Path | None, *,
    as_json: bool,
) -> None:  # fmt: skip
    ranked = rank(find_candidates(captured, machine, named), pricing.prices)
    best = ranked[0]
    if best.plan is None or best.program is None:
        raise PlanError("the plan cannot be built", given=best.refused, required="a plan for this model and batch")
    verify_program(captured.blocks, best.program)
    if out is not None:
        save_plan(replace(best.plan, source=source), out)
    document: dict[str, Any] = {"best": best.name, "plans": [candidate_document(c) for c in ranked]}
    document |= {"out": str(out) if out else None} | pricing.document()
    show(document, candidates_table(ranked, cluster=machine.name), pricing.words(), as_json=as_json)
    if not as_json:
        screen.print(f"best: [bold]{best.label}[/bold], verified" + (f", written to {out}" if out else ""))
    if not best.fits:
        size = f"{format_bytes(best.memory_bytes)} of {format_bytes(machine.device.memory_bytes)}"
        messages.print(f"[bold red]no plan fits into memory[/bold red]: even this one needs {size} a device")


def _by_volume(text: str) -> bool:
    if text not in ("seconds", "volume"):
        raise PlanError("unknown prices", given=f"--pricing {text}", required="seconds or volume")
    return text == "volume"


def _variants(text: str) -> tuple[str, ...]:
    """`all`, `none`, or kinds by commas."""
    if text in ("all", "none"):
        return VARIANTS if text == "all" else ()
    return tuple(filter(None, text.split(",")))


def _bytes(text: str | None) -> int | None:
    return None if text is None else parse_bytes(text, key="--memory")


def with_batch(model: str, global_batch: int | None) -> str:
    """The model's name with a batch; files of users bring their own batch."""
    if global_batch is None:
        return model
    if re.search(r"\.py:\w+$", model):
        raise PlanError(
            "the batch of a model from a file is the one that its factory returns",
            given=f"--global-batch {global_batch} for {model}",
            required="no --global-batch",
            todo="change the batch in the factory",
        )
    if re.search(r"[?&]batch=", model):
        raise PlanError("the batch is given twice", given=f"{model} and --global-batch", required="one of them")
    return f"{model}{'&' if '?' in model else '?'}batch={global_batch}"


def parse_pin(text: str) -> BlockPin:
    """`layers.*.mlp*=features:tp` → blocks, dim, axis."""
    pattern, equals, rest = text.partition("=")
    dim, colon, axis = rest.partition(":")
    if not (pattern and equals and dim and colon and axis):
        raise PlanError("a pin cannot be read", given=text, required='blocks=dim:axis, as "layers.*.mlp*=features:tp"')
    return BlockPin(pattern=pattern, dim=dim, axis=axis)


def limited(cluster: Cluster, max_devices: int | None) -> Cluster:
    """The cluster with as many outermost members as the limit allows."""
    if max_devices is None or cluster.num_devices <= max_devices:
        return cluster
    inside = cluster.num_devices // cluster.levels[0].count
    if max_devices < inside:
        raise PlanError(
            "not even one member of the cluster's outermost level may be used",
            given=f"--max-devices {max_devices}", required=f"at least {inside}",
        )  # fmt: skip
    levels = (replace(cluster.levels[0], count=max_devices // inside), *cluster.levels[1:])
    return replace(cluster, levels=levels)


def tokens_of(captured: CapturedModel) -> int:
    """Tokens of a batch: elements of its first whole-number tensor with a sequence."""
    for shape, dtype in captured.spec.values():
        if "int" in dtype and len(shape) == 2:
            return shape[0] * shape[1]
    return 0


def measuring(source: str, prices: Prices, lab: Lab) -> Callable[[Sequence[Finalist]], Prices]:
    """Has measured what finalists use; gives prices from all that is known then."""

    def measure(finalists: Sequence[Finalist]) -> Prices:
        lab.measure(source, [finalist.plan for finalist in finalists])
        return with_figures(prices, lab.figures())

    return measure


def best_document(best: Best, captured: CapturedModel) -> dict[str, Any]:
    """The result for machines."""
    winner, certificate = best.winner, best.certificate
    summary = winner.timeline.summary
    assert summary is not None
    tokens = tokens_of(captured)
    return {
        "name": winner.plan.name,
        "step_seconds": winner.step_seconds,
        "estimate_seconds": _estimate_seconds(winner),
        "variant": winner.variant or None,
        "tokens_per_second": tokens / winner.step_seconds if tokens else None,
        "mfu": summary.mfu,
        "bubble": summary.bubble,
        "exposed_communication": summary.exposed_communication,
        "memory_bytes": winner.memory_bytes,
        "gap": certificate.gap if certificate.has_plans else None,
        "bound_seconds": certificate.bound_seconds if certificate.has_plans else None,
        "best_estimate_seconds": certificate.best_seconds if certificate.has_plans else None,
        "space": certificate.space,
        "num_problems": certificate.num_problems,
        "num_solved": certificate.num_solved,
        "search_seconds": certificate.search_seconds,
        "peak_rss_bytes": peak_rss_bytes(),
        "axes": {axis.name: axis.size for axis in winner.plan.roles[0].axes} | {"pp": len(winner.plan.meshes)},
        "placement": winner.placement,
        "stages": [winner.plan.stages.index(stage) for stage in sorted(set(winner.plan.stages))],
        "schedule": winner.plan.schedule,
        "num_micro_batches": winner.plan.num_micro_batches,
        "recomputed_segments": len(winner.plan.recompute),
        "price_sources": list(winner.timeline.sources),
        "estimate_prices": dict(best.sources),
        "num_rounds": best.num_rounds,
        "alternatives": [
            {
                "name": other.plan.name,
                "placement": other.placement,
                "step_seconds": other.step_seconds,
                "estimate_seconds": _estimate_seconds(other),
                "variant": other.variant or None,
                "memory_bytes": other.memory_bytes,
                "loses": other.step_seconds / winner.step_seconds - 1,
                "because_of": why_slower(other, winner),
            }
            for other in best.finalists[1:]
        ],
        "refused": [{"shape": shape, "why": why} for shape, why in best.refused],
        "variants": {
            "num_tried": len(best.trials.tried),
            "num_waiting": best.trials.num_waiting,
            "seconds": best.trials.seconds,
            "tried": [_plain(trial) for trial in best.trials.tried],
            "left_out": dict(best.trials.left_out),
        },
    }


def _estimate_seconds(finalist: Finalist) -> float | None:
    """None of a variant: it was tried, not estimated."""
    return finalist.estimate.step_seconds if finalist.estimate is not None else None


def fit_command(
    model: ModelArgument,
    cluster: ClusterOption,
    nodes: NodesOption = None,
    global_batch: BatchOption = None,
    recompute: Annotated[bool, typer.Option("--recompute/--no-recompute", help="May layers be recomputed?")] = True,
    memory: MemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Does a model fit on a cluster, and how many of its nodes does it need at least?"""
    captured, machine = capture_model(with_batch(model, global_batch)), load_cluster(cluster, num_outer=nodes)
    wishes = Wishes(recompute=recompute, memory_bytes=_bytes(memory))
    with progress_bar("looking for the smallest plans") as bar:
        bar.say("looking for the smallest plan here")
        here, limit = _least(captured, machine, wishes)
        needed = _fewest(captured, machine, wishes, limit, bar)
    fits = here is not None and here.num_bytes <= limit
    document = {
        "fits": fits,
        "usable_bytes": limit,
        "least_bytes": here.num_bytes if here is not None else None,
        "devices": machine.num_devices,
        "devices_needed": needed[0] if needed is not None else None,
    }
    lines = [
        f"[bold {'green' if fits else 'red'}]{'fits' if fits else 'does not fit'}[/] on {machine.num_devices} devices "
        f"of {machine.name}, {format_bytes(round(limit))} usable on each"
    ]
    if here is not None:
        lines.append(f"the smallest plan needs {format_bytes(round(here.num_bytes))} a device: {here.words}")
    if needed is not None:
        lines.append(f"the fewest devices, doubling the nodes: [bold]{needed[0]}[/bold], with {needed[1].words}")
    show(document, *lines, as_json=as_json)


def _least(
    captured: CapturedModel, machine: Cluster, wishes: Wishes, *, enough: float = 0.0
) -> tuple[LeastMemory | None, float]:
    planner = Planner(captured.blocks, machine, fused=machine.library == "nccl")
    return least_memory(planner, wishes, enough=enough), planner.device_bytes(wishes)


def _fewest(
    captured: CapturedModel, machine: Cluster, wishes: Wishes, limit: float, bar: Bar
) -> tuple[int, LeastMemory] | None:
    """The least number of devices with a plan that fits, the nodes doubled from one on."""
    graph = captured.blocks.graph
    stored = sum(4 * prod(graph.tensors[p].shape) * graph.tensors[p].item_bytes for p in graph.parameters)
    for i in range(_MAX_DOUBLINGS):
        levels = (replace(machine.levels[0], count=2**i), *machine.levels[1:])
        larger = replace(machine, levels=levels)
        if stored / larger.num_devices > limit:  # parameters, gradients and moments, each once
            continue
        bar.say(f"looking for a plan on {larger.num_devices} devices")
        least, _ = _least(captured, larger, wishes, enough=limit)
        if least is not None and least.num_bytes <= limit:
            return larger.num_devices, least
    return None


def explain_command(
    plan: PlanArgument,
    block: Annotated[str | None, typer.Argument(help="The name of a block; without it, all blocks.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Why this strategy for this block, and what others would cost; without a block, what every block does."""
    loaded = load_plan(plan)
    captured, machine = capture_model(model_of(loaded, None)), cluster_of(loaded, None, None)
    planner = Planner(captured.blocks, machine, fused=machine.library == "nccl")
    with progress_bar("explaining"):
        if block is None:
            shares = explain_plan(planner, loaded)
            document: dict[str, Any] = {"plan": loaded.name, "blocks": [_plain(share) for share in shares]}
            show(document, shares_table(shares, loaded.name), as_json=as_json)
            return
        index = next((b.index for b in captured.blocks.blocks if b.name == block), None)
        if index is None:
            names = [b.name for b in captured.blocks.blocks if block in b.name][:8]
            raise PlanError(
                f"the model has no block {block!r}",
                given=block, required="one of " + ", ".join(names) if names else "a name of `planloom blocks`",
            )  # fmt: skip
        alternatives = explain_block(planner, loaded, index)
    document = {"plan": loaded.name, "block": block, "alternatives": [_plain(own) for own in alternatives]}
    show(document, alternatives_table(alternatives, block), as_json=as_json)


def _plain(value: Any) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(value)
    return found


def compare_command(
    first: PlanArgument,
    second: Annotated[Path, typer.Argument(help="Another plan file, of the same model or another cluster.")],
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="Time both on this cluster; without it, each on its own.")
    ] = None,
    nodes: NodesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Two plans side by side, also across clusters: what would two more nodes or a faster network change?"""
    plans, timelines, machines = [load_plan(first), load_plan(second)], [], []
    for plan in plans:
        machine = cluster_of(plan, cluster, nodes)
        captured = capture_model(model_of(plan, None))
        prices = pricing_of(
            captured.blocks, machine, profile=None, store=DEFAULT_STORE, compiled=None, links=None
        ).prices
        timelines.append(simulate_plan(plan, captured, prices))
        machines.append(machine)
    summaries = [timeline.summary for timeline in timelines if timeline.summary is not None]
    labels = [f"{plan.name} on {m.name}" for plan, m in zip(plans, machines, strict=True)]
    counts = [len(plan.devices) for plan in plans]
    document = {
        "plans": [
            {
                "name": plan.name, "cluster": machine.name, "devices": count, "step_seconds": summary.step_seconds,
                "mfu": summary.mfu, "bubble": summary.bubble, "exposed_communication": summary.exposed_communication,
                "memory_bytes": summary.peak_memory_bytes,
            }
            for plan, machine, count, summary in zip(plans, machines, counts, summaries, strict=True)
        ],
        "second_over_first": summaries[1].step_seconds / summaries[0].step_seconds,
    }  # fmt: skip
    show(document, comparison_table(labels, summaries, counts), as_json=as_json)

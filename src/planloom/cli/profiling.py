"""`planloom profile`: measure every distinct run of a model's plans on a device, once."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from planloom.cli.models import GRAPHS, CapturedModel
from planloom.cli.output import JsonOption, messages, progress_bar, show
from planloom.cli.plans import NodesOption, find_candidates
from planloom.cli.pricing import DEFAULT_STORE
from planloom.cluster import format_seconds, load_cluster
from planloom.errors import PlanError, PriceError
from planloom.plan import Plan, find_named, load_plan, named_plan, require_model
from planloom.program import Program, build_program

if TYPE_CHECKING:
    from planloom.cost import PriceStore

EXAMPLE = """Example: planloom profile examples/models/gpt.py:small --device cpu --named dp=2,tp=2 --named tp=4

On a GPU: planloom profile 'llama3-8b?batch=1' --device cuda --compiled --named tp=8 --export h200.json

On a laptop: planloom profile --import h200.json"""


def register(app: typer.Typer) -> None:
    app.command(name="profile", epilog=EXAMPLE)(profile_command)


def profile_command(
    model: Annotated[
        str | None, typer.Argument(help="As in `planloom plan`; may be left out with --import or --export.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    cluster: Annotated[str | None, typer.Option(help="All named plans for this cluster: a preset or a file.")] = None,
    nodes: NodesOption = None,
    plan: Annotated[list[Path] | None, typer.Option(help="A plan file; may be given several times.")] = None,
    named: Annotated[list[str] | None, typer.Option(help="A named plan, as dp=2,tp=2; may be repeated.")] = None,
    processes: Annotated[
        int, typer.Option(min=1, help="Local processes at once; with several, collectives are measured, too.")
    ] = 1,
    store: Annotated[Path, typer.Option(help="Where measured prices are kept.")] = DEFAULT_STORE,
    compiled: Annotated[bool, typer.Option("--compiled", help="Measure compiled runs, as compiled training.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Try again what did not fit into memory before.")] = False,
    budget: Annotated[float, typer.Option(min=0.0, help="Seconds of repetitions for each measurement.")] = 0.5,
    imported: Annotated[Path | None, typer.Option("--import", help="First add the figures of this file.")] = None,
    exported: Annotated[Path | None, typer.Option("--export", help="Write the device's figures to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure seconds and bytes of every distinct run that a model's plans use, on a real device.

    Without plans, the model on one device. What the store has is not measured again; a session that was killed goes on
    where it ended.
    """
    if model is None and imported is None and exported is None:
        raise PriceError("nothing to profile", required="a model, --import FILE or --export FILE")
    if device not in ("cpu", "cuda"):
        raise PriceError(f"no device {device!r}", given=device, required="cpu or cuda")
    from planloom.profile import local_store, require_device

    document: dict[str, Any] = {"store": str(store)}
    if imported is not None:
        document |= _import(imported, store)
    if model is None and exported is None:
        show(document, f"imported {document['imported_figures']} figures into {escape(str(store))}", as_json=as_json)
        return
    require_device(device)
    prices = local_store(store, processes, device=device, compiled=compiled)
    if retry:
        prices.forget_skipped()
    document |= {"device": prices.device, "software": prices.software}
    tables: list[Any] = []
    if model is not None:
        sought = (model, cluster, nodes, plan or [], named or [])
        found = _measure(*sought, prices, processes=processes, device=device, budget_seconds=budget)
        document |= {"model": model, **found}
        tables.append(_table(model, document))
        tables += [f"skipped: {key}: {escape(why)}" for key, why in found["skipped"].items()]
    if exported is not None:
        document |= {"exported": str(exported), "exported_figures": prices.export(exported)}
        tables.append(f"wrote {document['exported_figures']} figures of {prices.device} to {escape(str(exported))}")
    show(document, *tables, as_json=as_json)


def _import(path: Path, store: Path) -> dict[str, Any]:
    from planloom.cost import PriceStore

    names = PriceStore(store, device="", software="").import_(path)
    for name in names:
        messages.print(f"imported {name.num_figures} figures of {escape(name.device)} ({escape(name.software)})")
    return {"imported": str(path), "imported_figures": sum(name.num_figures for name in names)}


def _measure(
    model: str,
    cluster: str | None,
    nodes: int | None,
    files: Sequence[Path],
    named: Sequence[str],
    store: "PriceStore",
    *,
    processes: int,
    device: str,
    budget_seconds: float,
) -> dict[str, Any]:
    """Measure what the store lacks; what there was to do, and what was done."""
    from planloom.profile import missing_work, profile_here, profile_locally, work_of

    compiled = store.software.endswith("compiled")
    built, batch, captured = _capture(model)
    plans, programs = _plans(captured, cluster, nodes, files, named)
    _require_processes(plans, processes)
    work = work_of(captured.blocks, programs, with_links=processes > 1)
    before = missing_work(work, {*store.load(), *store.skipped()})
    start = time.perf_counter()
    with progress_bar(f"measuring on {store.device}", total=before.num_tasks) as bar:
        if processes == 1:
            profile_here(
                captured.blocks,
                built,
                batch,
                programs,
                store,
                device=device,
                compiled=compiled,
                progress=bar.update,
                budget_seconds=budget_seconds,
            )
        else:
            profile_locally(
                model,
                plans,
                store.path,
                num_processes=processes,
                progress=bar.update,
                device=device,
                compiled=compiled,
                budget_seconds=budget_seconds,
            )
    seconds = time.perf_counter() - start
    wanted = set(work.runs)
    skipped = {key: why for key, why in store.skipped().items() if key.split("/")[1] in wanted or key in work.updates}
    return {
        "plans": len(programs),
        "distinct_runs": len(work.runs),
        "measured_runs": len(before.runs) - sum(f"run/{fingerprint}/forward" in skipped for fingerprint in before.runs),
        "known_runs": len(work.runs) - len(before.runs),
        "measured_links": sum(len(link.sizes) for link in before.links.values()),
        "measured_updates": len(before.updates),
        "seconds": seconds,
        "runs_in_plans": sum(len(program.runs) for program in programs),
        "operators_in_plans": len(captured.blocks.graph.ops) * len(programs),
        "skipped": skipped,
    }


def _capture(source: str) -> tuple[Any, Any, CapturedModel]:
    """The model, its batch and its blocks: a profile needs the batch itself, not only its shape."""
    with progress_bar(f"capturing {source}"):
        start = time.perf_counter()
        from planloom.blocks import find_blocks
        from planloom.capture import batch_spec, cached_capture, load_model

        model, batch = load_model(source)
        blocks = find_blocks(cached_capture(model, batch, folder=GRAPHS))
        seconds = time.perf_counter() - start
        return model, batch, CapturedModel(blocks=blocks, spec=batch_spec(batch), capture_seconds=seconds)


def _plans(
    captured: CapturedModel, cluster: str | None, nodes: int | None, files: Sequence[Path], named: Sequence[str]
) -> tuple[list[Plan], list[Program]]:
    plans = [load_plan(path) for path in files]
    for plan in plans:
        require_model(plan, captured.blocks.graph)
    plans += [named_plan(captured.blocks, find_named(text), batch=captured.spec) for text in named]
    programs = [build_program(captured.blocks, plan) for plan in plans]
    if cluster is not None:
        for candidate in find_candidates(captured, load_cluster(cluster, num_outer=nodes)):
            if candidate.plan is not None and candidate.program is not None:
                plans.append(candidate.plan)
                programs.append(candidate.program)
    if cluster is None and not plans:
        plans = [named_plan(captured.blocks, find_named("single"), batch=captured.spec)]
        programs = [build_program(captured.blocks, plans[0])]
    if not plans:
        raise PlanError("no plan fits", required="a plan that divides model and batch", todo="see `planloom plan`")
    return plans, programs


def _require_processes(plans: Sequence[Plan], processes: int) -> None:
    """Several processes measure what is sent between all devices of a plan, so they must be as many."""
    for plan in plans:
        needed = max(plan.devices) + 1
        if processes > 1 and needed > processes:
            raise PlanError(
                f"plan {plan.name!r} needs more processes to measure what it sends",
                given=f"--processes {processes}",
                required=f"--processes {needed}, or 1 to measure runs alone",
            )


def _table(model: str, found: dict[str, Any]) -> Table:
    table = Table(title=f"Profile of {escape(model)}", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.caption_justify = "left"
    table.add_column("what")
    table.add_column("count", justify="right")
    seconds = f" in {format_seconds(found['seconds'])}" if found["measured_runs"] else ""
    table.add_row(f"runs measured now{seconds}", str(found["measured_runs"]))
    table.add_row("distinct runs, known before included", str(found["distinct_runs"]))
    table.add_row(f"runs in all {found['plans']} plans: without segments", str(found["runs_in_plans"]))
    table.add_row("operators in all plans: without blocks and segments", str(found["operators_in_plans"]))
    table.add_row("optimizer steps measured now", str(found["measured_updates"]))
    table.add_row("collectives and exchanges measured now", str(found["measured_links"]))
    if found["skipped"]:
        table.add_row("left out for want of memory", str(len(found["skipped"])))
    table.caption = f"{found['device']}, {found['software']}; in {found['store']}"
    return table

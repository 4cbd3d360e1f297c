"""`planloom demo`: the whole path on this machine, in a few minutes."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planloom.blocks import find_segments
from planloom.cli.models import CapturedModel, capture_model
from planloom.cli.output import JsonOption, progress_bar, screen, show
from planloom.cli.plans import candidate_document, find_candidates
from planloom.cli.pricing import DEFAULT_STORE, Lab, measure_lazily, with_figures
from planloom.cluster import Cluster, format_bytes, format_seconds, load_cluster
from planloom.cost import Prices, run_fingerprint, run_key
from planloom.errors import PlanError
from planloom.graph.catalog import model_preset
from planloom.plan import save_plan
from planloom.program import verify_program
from planloom.report import candidates_table, timeline_svg
from planloom.report.collectives import collectives_of
from planloom.search import Candidate, Planner, as_candidate, find_best
from planloom.simulate import Timeline, simulate

if TYPE_CHECKING:
    from planloom.execute.processes import Launch
    from planloom.train.session import TrainingRun

MODEL = Path("examples/models/gpt.py")
LARGE_MODEL = "llama3-405b"
CLUSTER = Path("testbed/clusters/two-by-two-slow.yaml")
_NUM_SHOWN = 12
_NUM_FINALISTS = 6


def register(app: typer.Typer) -> None:
    app.command(name="demo", epilog="Example: planloom demo --steps 20")(demo_command)


def demo_command(
    steps: Annotated[int, typer.Option(min=3, help="Training steps.")] = 12,
    store: Annotated[Path, typer.Option(help="Where measured prices are kept.")] = DEFAULT_STORE,
    plainly: Annotated[
        bool, typer.Option("--plain", help="Local processes, even where a testbed is possible.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Plan a small GPT for an emulated two-node cluster, prove the plan, train it on local CPU processes."""
    if not MODEL.is_file():
        raise PlanError(
            f"the demo's model {MODEL} is not here",
            given=os.getcwd(),
            required="a checkout of Planloom as current folder",
            todo="clone the repository and run `make demo` in it",
        )
    sys.path.insert(0, os.getcwd())  # the testbed stands beside the package
    from testbed import open_devices
    from testbed.opening import OpenDevices
    from testbed.workers import launcher

    cluster, source = load_cluster(CLUSTER), f"{MODEL}:small"
    captured = capture_model(source)
    large = capture_model(LARGE_MODEL)
    _say(as_json, f"[bold]1.[/bold] Captured a GPT with {_describe(captured)}")
    _say(as_json, f"   (so are models of others, unchanged: {model_preset(LARGE_MODEL).title}, {_describe(large)})")
    with progress_bar("searching"):
        planner = Planner(captured.blocks, cluster, fused=False)
        best_found = find_best(
            planner, Prices(blocks=captured.blocks, cluster=cluster), captured.spec, num_finalists=_NUM_FINALISTS
        )
    searched = [as_candidate(f, name=f"* {f.plan.name}") for f in best_found.finalists]
    certificate = best_found.certificate
    _say(
        as_json,
        f"   searched {certificate.num_shapes} shapes, {certificate.num_problems} problems, in "
        f"{certificate.search_seconds:.1f} s: the best estimate is at most {certificate.gap:.1%} from the best of all",
    )
    candidates = (*searched, *find_candidates(captured, cluster))
    plain = OpenDevices(CLUSTER, None, "plain processes", "asked for with --plain")
    with plain if plainly else open_devices(CLUSTER) as devices:
        _say(as_json, f"[bold]2.[/bold] {cluster.num_devices} devices on this machine, {devices.kind}: {devices.why}")
        has_links = devices.kind != "plain processes"
        launch = launcher(devices) if has_links else None
        lab = Lab(store=store, num_processes=cluster.num_devices, label=devices.kind, launch=launch)
        prices = Prices(blocks=captured.blocks, cluster=cluster, measured_links=has_links)
        found = measure_lazily(source, candidates, prices, lab)
        figures = lab.figures()
        prices = with_figures(prices, figures)
        ranked, best = found.ranked, found.ranked[0]
        programs = [candidate.program for candidate in candidates if candidate.program is not None]
        runs = {run_fingerprint(captured.blocks, program, run) for program in programs for run in program.runs}
        known = [fingerprint for fingerprint in runs if run_key(fingerprint, "forward") in figures]
        total = sum(len(program.runs) for program in programs)
        _say(
            as_json,
            f"   measured {len(known)} of {len(runs)} distinct runs (there are {total} in {len(programs)} "
            f"plans), in {found.num_rounds} rounds: until the best plans were measured",
        )
        if not as_json:
            title = f"{cluster.name}: two nodes, two devices each; * found by the search"
            screen.print(candidates_table(ranked[:_NUM_SHOWN], cluster=title, num_more=len(ranked) - _NUM_SHOWN))
        assert best.plan is not None
        assert best.program is not None
        proof = verify_program(captured.blocks, best.program)
        _say(
            as_json,
            f"[bold]3.[/bold] Proved [bold]{best.label}[/bold] equal to one device: {proof.num_instructions} "
            f"instructions, {proof.num_collectives} collectives, {proof.num_messages} messages",
        )
        collectives = collectives_of(cluster, best.program)
        for words, count in collectives.most_common():
            _say(as_json, f"   {count} × {words}")
        synthesized = _synthesized(ranked, cluster)
        if synthesized is not None and synthesized[1] not in collectives:
            _say(as_json, f"   ({synthesized[0]} reduces by {synthesized[1]})")
        folder = store.parent
        plan_path, picture = folder / "demo-plan.json", folder / "demo-timeline.svg"
        save_plan(replace(best.plan, source=source), plan_path)
        trained = _train(source, plan_path, cluster.num_devices, steps, launch)
    here = simulate(best.program, replace(prices, measured_links=True))
    assert trained.timeline is not None
    assert here.summary is not None
    picture.write_text(timeline_svg({f"{best.label}: predicted": here, "measured": trained.timeline}))
    _say(as_json, _outcome(here, trained, steps, cluster))
    _say(as_json, f"   plan: {plan_path}   timeline: {picture}   more: planloom simulate {plan_path}")
    document = {
        "cluster": cluster.name,
        "devices": devices.kind,
        "captured": {"demo": len(captured.blocks.blocks), LARGE_MODEL: len(large.blocks.blocks)},
        "searched": {"gap": certificate.gap, "search_seconds": certificate.search_seconds},
        "plans": [candidate_document(c) for c in ranked],
        "best": best.name,
        "verified": True,
        "collectives": dict(collectives),
        "synthesized": synthesized,
        "distinct_runs": len(runs),
        "known_runs": len(known),
        "measured_runs": found.num_measured,
        "predicted_step_seconds": here.step_seconds,
        "measured_step_seconds": trained.step_seconds,
        "predicted_peak_bytes": here.summary.peak_memory_bytes,
        "losses": list(trained.losses),
    }
    show(document, as_json=as_json)


def _outcome(predicted: Timeline, trained: "TrainingRun", steps: int, cluster: Cluster) -> str:
    assert predicted.summary is not None
    ratio = predicted.step_seconds / trained.step_seconds
    exposed = ", ".join(
        f"{format_seconds(seconds)} for {axis}" for axis, seconds in predicted.summary.exposed_communication.items()
    )
    return (
        f"[bold]4.[/bold] Trained {steps} steps on {cluster.num_devices} devices: loss {trained.losses[0]:.3f} → "
        f"{trained.losses[-1]:.3f} (with dropout, whose masks are the same on any plan)\n\n"
        f"   one step, predicted {format_seconds(predicted.step_seconds)}   "
        f"measured {format_seconds(trained.step_seconds)}   ratio {ratio:.2f}\n\n"
        f"   of it a device waits {exposed or 'for nothing'}; bubble {predicted.summary.bubble:.0%}; "
        f"peak memory {format_bytes(predicted.summary.peak_memory_bytes)} a device"
    )


def _synthesized(ranked: Sequence[Candidate], cluster: Cluster) -> tuple[str, str] | None:
    """The best plan with a reduction of several steps, and its commonest one."""
    for candidate in ranked:
        if candidate.program is not None:
            for words, _ in collectives_of(cluster, candidate.program).most_common():
                if "→" in words:
                    return candidate.label, words
    return None


def _say(as_json: bool, text: str) -> None:
    if not as_json:
        screen.print(text)


def _describe(captured: CapturedModel) -> str:
    blocks, segments = captured.blocks, find_segments(captured.blocks)
    distinct = len({segment.fingerprint for segment in segments})
    size = captured.num_parameters / 1e6
    words = f"{size:.1f} million" if size < 1e3 else f"{size / 1e3:.1f} billion"
    return (
        f"{words} parameters: {len(blocks.graph.ops):,} operators → {len(blocks.blocks):,} blocks → "
        f"{len(segments)} segments, {distinct} of them distinct"
    )


def _train(model: str, plan: Path, num_processes: int, steps: int, launch: "Launch | None") -> "TrainingRun":
    from planloom.execute.processes import run_workers
    from planloom.train.session import train_locally

    with progress_bar(f"starting {num_processes} processes", total=steps) as bar:

        def on_step(step: int, loss: float, seconds: float) -> None:
            bar.say(f"training: step {step + 1}, loss {loss:.3f}, {format_seconds(seconds)}")
            bar.update(step + 1, steps)

        return train_locally(
            model,
            plan,
            num_processes=num_processes,
            num_steps=steps,
            with_timeline=True,
            launch=launch or run_workers,
            on_step=on_step,
        )

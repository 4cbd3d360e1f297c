"""`planloom demo`: the whole path on this machine, in a few minutes."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planloom.blocks import find_segments
from planloom.cli.models import CapturedModel, capture_model
from planloom.cli.output import JsonOption, progress_bar, screen, show
from planloom.cli.plans import DEFAULT_STORE, candidate_document, find_candidates, measure_candidates, rank
from planloom.cluster import Cluster, format_seconds, load_cluster
from planloom.cost import Prices, run_fingerprint
from planloom.errors import PlanError
from planloom.graph.catalog import model_preset
from planloom.plan import save_plan
from planloom.program import verify_program
from planloom.report import candidates_table, timeline_svg
from planloom.report.collectives import collectives_of
from planloom.search import Candidate
from planloom.simulate import simulate

if TYPE_CHECKING:
    from planloom.train.session import TrainingRun

MODEL = Path("examples/models/gpt.py")
LARGE_MODEL = "llama3-405b"
CLUSTER = "two-by-two"


def register(app: typer.Typer) -> None:
    app.command(name="demo", epilog="Example: planloom demo --steps 20")(demo_command)


def demo_command(
    steps: Annotated[int, typer.Option(min=3, help="Training steps.")] = 20,
    store: Annotated[Path, typer.Option(help="Where measured prices are kept.")] = DEFAULT_STORE,
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
    cluster, source = load_cluster(CLUSTER), f"{MODEL}:small"
    captured = capture_model(source)
    large = capture_model(LARGE_MODEL)
    _say(as_json, f"[bold]1.[/bold] Captured a GPT with {_describe(captured)}")
    _say(as_json, f"   (so are models of others, unchanged: {model_preset(LARGE_MODEL).title}, {_describe(large)})")
    candidates = find_candidates(captured, cluster)
    measured = measure_candidates(source, captured.blocks, candidates, store, cluster.num_devices)
    programs = [candidate.program for candidate in candidates if candidate.program is not None]
    runs = [run_fingerprint(captured.blocks, program, run) for program in programs for run in program.runs]
    _say(as_json, f"[bold]2.[/bold] Measured {len(set(runs))} distinct runs, of {len(runs)} in {len(programs)} plans")
    ranked = rank(candidates, Prices(blocks=captured.blocks, cluster=cluster, measured=measured))
    here = Prices(blocks=captured.blocks, cluster=cluster, measured=measured, measured_links=True)
    local = {c.label: simulate(c.program, here) for c in ranked if c.program is not None}
    local_seconds = {label: timeline.step_seconds for label, timeline in local.items()}
    if not as_json:
        screen.print(candidates_table(ranked, local_seconds, cluster=f"{cluster.name}: two nodes, two devices each"))
    best = ranked[0]
    assert best.plan is not None
    assert best.program is not None
    proof = verify_program(captured.blocks, best.program)
    _say(
        as_json,
        f"[bold]3.[/bold] Proved [bold]{best.label}[/bold] equal to one device: {proof.num_instructions} instructions, "
        f"{proof.num_collectives} collectives, {proof.num_messages} messages",
    )
    collectives = collectives_of(cluster, best.program)
    for words, count in collectives.most_common():
        _say(as_json, f"   {count} × {words}")
    synthesized = _synthesized(ranked, cluster)
    if synthesized is not None and synthesized[1] not in collectives:
        _say(as_json, f"   ({synthesized[0]} reduces by {synthesized[1]})")
    folder = store.parent
    plan_path, picture = folder / "demo-plan.json", folder / "demo-timeline.svg"
    save_plan(best.plan, plan_path)
    trained = _train(source, plan_path, cluster.num_devices, steps)
    predicted, measured_step = local[best.label].step_seconds, trained.step_seconds
    assert trained.timeline is not None
    pictured = {f"{best.label}: predicted": local[best.label], "measured": trained.timeline}
    picture.write_text(timeline_svg(pictured))
    _say(
        as_json,
        f"[bold]4.[/bold] Trained {steps} steps on {cluster.num_devices} processes: loss {trained.losses[0]:.3f} → "
        f"{trained.losses[-1]:.3f} (with dropout, whose masks are the same on any plan)\n\n"
        f"   one step, predicted {format_seconds(predicted)}   "
        f"measured {format_seconds(measured_step)}   ratio {predicted / measured_step:.2f}\n\n"
        "   Both are for local processes over loopback (column *here*); the table ranks by the cluster's own links.\n"
        f"   plan: {plan_path}   timeline: {picture}",
    )
    document = {
        "cluster": cluster.name,
        "captured": {"demo": len(captured.blocks.blocks), LARGE_MODEL: len(large.blocks.blocks)},
        "plans": [candidate_document(c) for c in ranked],
        "best": best.name,
        "verified": True,
        "collectives": dict(collectives),
        "synthesized": synthesized,
        "predicted_step_seconds": predicted,
        "measured_step_seconds": measured_step,
        "losses": list(trained.losses),
    }
    show(document, as_json=as_json)


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


def _train(model: str, plan: Path, num_processes: int, steps: int) -> "TrainingRun":
    from planloom.train.session import train_locally

    with progress_bar(f"starting {num_processes} processes", total=steps) as bar:

        def on_step(step: int, loss: float, seconds: float) -> None:
            bar.say(f"training: step {step + 1}, loss {loss:.3f}, {format_seconds(seconds)}")
            bar.update(step + 1, steps)

        return train_locally(
            model, plan, num_processes=num_processes, num_steps=steps, with_timeline=True, on_step=on_step
        )

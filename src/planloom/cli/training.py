"""`planloom train`: a plan on local CPU processes."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from planloom.cli.models import ModelArgument, capture_model
from planloom.cli.output import JsonOption, progress_bar, screen, show
from planloom.cluster import format_seconds
from planloom.plan import find_named, load_plan, named_plan, save_plan


def register(app: typer.Typer) -> None:
    example = "Example: planloom train examples/models/gpt.py:small --plan plan.json --steps 20"
    app.command(name="train", epilog=example)(train_command)


def train_command(
    model: ModelArgument,
    plan: Annotated[str, typer.Option("--plan", help="A plan file, or a plan by name, as megatron:tp=2,pp=2.")],
    steps: Annotated[int, typer.Option(min=1, help="How many steps.")] = 20,
    learning_rate: Annotated[float, typer.Option(help="AdamW's learning rate.")] = 1e-3,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile every distinct run at its first use.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a model on its example batch under a plan, on as many local CPU processes as the plan has devices.

    On a cluster, start your own script with torchrun and call planloom.parallelize in it.
    """
    from planloom.train.session import train_locally

    with plan_file(plan, model) as path:
        loaded = load_plan(path)
        num_processes = len(loaded.devices)
        with progress_bar(f"starting {num_processes} processes", total=steps) as bar:

            def on_step(step: int, loss: float, seconds: float) -> None:
                bar.say(f"step {step + 1}: loss {loss:.4f}, {format_seconds(seconds)}")
                bar.update(step + 1, steps)

            run = train_locally(
                model,
                path,
                num_processes=num_processes,
                num_steps=steps,
                learning_rate=learning_rate,
                compiled=compiled,
                on_step=on_step,
            )
    document = {
        "plan": loaded.name,
        "compiled": compiled,
        "losses": list(run.losses),
        "step_seconds": run.step_seconds,
    }
    show(document, as_json=as_json)
    if not as_json:
        screen.print(
            f"{loaded.name}: {steps} steps on {num_processes} processes, {format_seconds(run.step_seconds)} a step, "
            f"loss {run.losses[0]:.4f} → {run.losses[-1]:.4f}"
        )


@contextmanager
def plan_file(text: str, model: str) -> Iterator[Path]:
    """The file of a plan that is named by it, or that was written for a plan by name."""
    if Path(text).is_file() or text.endswith(".json"):
        yield Path(text)
        return
    named, captured = find_named(text), capture_model(model)
    with tempfile.TemporaryDirectory(prefix="planloom-plan-") as folder:
        path = Path(folder) / "plan.json"
        save_plan(named_plan(captured.blocks, named, batch=captured.spec), path)
        yield path

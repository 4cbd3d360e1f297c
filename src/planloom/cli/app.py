"""The application: commands, and what becomes of errors."""

import json
import sys

import typer

from planloom.cli import (
    calibration,
    clusters,
    demo,
    models,
    placements,
    plans,
    profiling,
    reductions,
    rules,
    schedules,
    searching,
    training,
)
from planloom.cli.output import messages
from planloom.errors import PlanloomError

app = typer.Typer(
    name="planloom",
    help="From an unchanged PyTorch model and a cluster to the fastest plan, proven correct and run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for module in (
    demo,
    searching,
    plans,
    profiling,
    models,
    rules,
    training,
    clusters,
    placements,
    schedules,
    reductions,
    calibration,
):
    module.register(app)


@app.callback()
def options(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
) -> None:
    """Options of all commands."""


def main() -> None:
    """Run a command. Errors of the user's making: one readable message, exit code 2, no traceback without --debug."""
    try:
        app()
    except PlanloomError as error:
        if "--debug" in sys.argv:
            raise
        if "--json" in sys.argv:
            document = {"what": error.what, "given": error.given, "required": error.required, "todo": error.todo}
            print(json.dumps({"error": document | error.facts}))
        messages.print(f"[bold red]error:[/bold red] {_escaped(str(error))}")
        sys.exit(2)


def _escaped(text: str) -> str:
    return text.replace("[", "\\[")

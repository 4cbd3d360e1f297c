"""What commands print: tables on a terminal, or one JSON document on standard output and nothing else there."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, nothing else.")]

screen = Console(highlight=False)
messages = Console(stderr=True, highlight=False)


def show(document: dict[str, Any], *tables: RenderableType, as_json: bool) -> None:
    """The document for machines, or the tables for people."""
    if as_json:
        json.dump(document, sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        for table in tables:
            screen.print(table)


@contextmanager
def progress_bar(text: str, *, total: int | None = None) -> Iterator["Bar"]:
    """A progress bar on standard error, gone when done; a spinner where the total is not known."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=messages, transient=True) as progress:
        yield Bar(progress, text, total)


class Bar:
    """One line of progress: `update(done, total)`, `say(text)`."""

    def __init__(self, progress: Progress, text: str, total: int | None) -> None:
        self._progress = progress
        self._task = progress.add_task(text, total=total)

    def update(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=text)

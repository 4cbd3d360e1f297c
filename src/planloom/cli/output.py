"""What commands print: tables on a terminal, or one JSON document on standard output and nothing else there."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from planloom.errors import PlanloomError

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


def write_file(text: str, out: Path, *, failing: type[PlanloomError] = PlanloomError) -> None:
    """Write beside the target and rename, so that a full disk leaves no half-written file."""
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(out)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise failing(
            f"{str(out)!r} cannot be written",
            given=str(error),
            required="the path of a file in a folder that exists, with space left",
        ) from None


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

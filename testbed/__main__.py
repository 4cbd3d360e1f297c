"""`python -m testbed`: run a command on a cluster made of network namespaces, or check its links by measurement."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer
from rich.console import Console
from rich.markup import escape

from planloom.errors import PlanloomError
from testbed.checking import check_network
from testbed.reports import check_document, check_table, run_document
from testbed.session import GRACE_SECONDS, Testbed

app = typer.Typer(
    help="A cluster on one machine: devices as network namespaces, links as shaped cables between them. Needs root.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_messages = Console(stderr=True)

_CLUSTER = typer.Argument(help="A cluster file, or the name of a preset.")


@app.command()
def run(
    cluster: str = _CLUSTER,
    command: list[str] = typer.Argument(help="After --: the program and its arguments."),  # noqa: B008
    timeout: float = typer.Option(3600.0, "--timeout", min=0.1, help="Seconds until all ranks are ended."),
    grace: float = typer.Option(
        GRACE_SECONDS, "--grace", min=0.0, help="Seconds that ranks have to end by themselves after one has failed."
    ),
    check: bool = typer.Option(False, "--check", help="Measure the links first; run nothing on links that are off."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document at the end instead of ranks' lines."),
) -> None:
    """Run a command once for each device, inside the device's network namespace.

    Example: python -m testbed run testbed/clusters/torus-4x4.yaml --timeout 60 -- python script.py
    """
    document: dict[str, object] = {}
    with _orderly_end(), Testbed(cluster) as testbed:
        document |= {"cluster": testbed.cluster.name, "build_seconds": testbed.build_seconds}
        if check:
            checked = check_network(testbed)
            document["check"] = check_document(checked)
            _messages.print(check_table(checked, testbed.cluster.name))
            if not checked.ok:
                _finish(document | {"exit_code": 1}, as_json)
        result = testbed.run(
            command, timeout_seconds=timeout, grace_seconds=grace, on_line=None if as_json else _print_line
        )
    exit_code = result.exit_code if result.exit_code >= 0 else 128 - result.exit_code  # a signal, as shells have it
    if result.timed_out:
        _messages.print(f"[bold red]time is up:[/bold red] after {timeout:g} s all ranks were ended")
    _finish(document | {"exit_code": exit_code} | run_document(result), as_json)


@app.command()
def check(
    cluster: str = _CLUSTER,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead of a table."),
) -> None:
    """Build the network and measure its links; exit code 1 if one is more than 10 % off.

    Example: python -m testbed check testbed/clusters/two-level-shared.yaml
    """
    with _orderly_end(), Testbed(cluster) as testbed:
        checked = check_network(testbed)
    document = {"cluster": testbed.cluster.name, "build_seconds": testbed.build_seconds}
    if not as_json:
        Console().print(check_table(checked, testbed.cluster.name))
    _finish(document | {"exit_code": 0 if checked.ok else 1} | check_document(checked), as_json)


def _print_line(rank: int, stream: str, text: str) -> None:
    print(f"[{rank}] {text}", file=sys.stdout if stream == "stdout" else sys.stderr, flush=True)


def _finish(document: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(document, indent=2))
    sys.exit(int(str(document["exit_code"])))


@contextmanager
def _orderly_end() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the ranks and take the testbed down; the exit code is a shell's for that signal."""
    caught = [signal.SIGINT]

    def interrupt(number: int, frame: FrameType | None) -> None:
        caught[0] = signal.Signals(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        _messages.print(f"[bold red]stopped[/bold red] by {caught[0].name}: all ranks were ended")
        sys.exit(128 + caught[0])
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    """Errors of the user's making are one readable message and exit code 2."""
    try:
        app()
    except PlanloomError as error:
        if "--json" in sys.argv:
            document = {"what": error.what, "given": error.given, "required": error.required, "todo": error.todo}
            print(json.dumps({"error": document}))
        _messages.print(f"[bold red]error:[/bold red] {escape(str(error))}")
        sys.exit(2)


if __name__ == "__main__":
    main()

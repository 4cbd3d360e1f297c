"""`python -m testbed`: run a command on a cluster made of network namespaces, or check it by measurement."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer
from rich.console import Console
from rich.markup import escape

from planloom.cluster.units import parse_bytes
from planloom.errors import PlanloomError
from testbed.checking import check_network
from testbed.devices import DeviceLimits
from testbed.reports import check_document, check_table, run_document, speed_document, speed_table
from testbed.session import GRACE_SECONDS, Testbed
from testbed.speed import check_speed

app = typer.Typer(
    help="A cluster on one machine: devices as network namespaces, links as shaped cables between them. Needs root.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_messages = Console(stderr=True)

_DEVICES = typer.Option(
    False, "--devices", help="Hold every rank to a share of a core (the largest that all can have)."
)
_CPU_SHARE = typer.Option(None, "--cpu-share", min=0.001, max=1.0, help="The share of each rank; includes --devices.")
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
    devices: bool = _DEVICES,
    cpu_share: float | None = _CPU_SHARE,
    memory: str | None = typer.Option(
        None, "--memory", help="Memory of each rank in all, as 2 GiB; includes --devices."
    ),
) -> None:
    """Run a command once for each device, inside the device's network namespace.

    Example: python -m testbed run testbed/clusters/torus-4x4.yaml --timeout 60 -- python script.py
    """
    document: dict[str, object] = {}
    limits = _limits(devices, cpu_share, memory)
    with _orderly_end(), Testbed(cluster, devices=limits) as testbed:
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
    for rank in result.ranks:
        if rank.out_of_memory:
            _messages.print(f"[bold red]out of memory:[/bold red] rank {rank.rank}")
    if result.timed_out:
        _messages.print(f"[bold red]time is up:[/bold red] after {timeout:g} s all ranks were ended")
    _finish(document | {"exit_code": exit_code} | run_document(result), as_json)


@app.command()
def check(
    cluster: str = _CLUSTER,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead of a table."),
    devices: bool = _DEVICES,
    cpu_share: float | None = _CPU_SHARE,
) -> None:
    """Build the network and measure its links; exit code 1 if one is more than 10 % off.

    With --devices, the speed of ranks too, while the others idle, compute and send; exit code 1 if it is 5 % off.

    Example: python -m testbed check testbed/clusters/ring-of-4.yaml --devices
    """
    with _orderly_end(), Testbed(cluster, devices=_limits(devices, cpu_share, None)) as testbed:
        checked = check_network(testbed)
        speed = None if testbed.device_plan is None else check_speed(testbed)
    document = {"cluster": testbed.cluster.name, "build_seconds": testbed.build_seconds} | check_document(checked)
    if not as_json:
        Console().print(check_table(checked, testbed.cluster.name))
    if speed is not None:
        document |= {"speed": speed_document(speed), "ok": checked.ok and speed.ok}
        if not as_json:
            Console().print(speed_table(speed, testbed.cluster.name))
    _finish({"exit_code": 0 if document["ok"] else 1} | document, as_json)


def _limits(devices: bool, cpu_share: float | None, memory: str | None) -> DeviceLimits | None:
    if not devices and cpu_share is None and memory is None:
        return None
    return DeviceLimits(
        cpu_share=cpu_share, memory_bytes=None if memory is None else parse_bytes(memory, key="--memory")
    )


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

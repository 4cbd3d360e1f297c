"""Process 1 of the testbed's PID namespace: builds the network, holds its namespaces, runs commands in them.

It is told what to do, and tells what happens, over one channel:

    build   the namespaces, cables, addresses, routes and shaping of a `NetworkScript`     built, or refused
    run     a command, once for each device, in that device's namespace (`testbed.ranks`)  line, exit, ..., done
            and, where devices have limits, in its control groups
    (end)   the other side has closed the channel: the supervisor ends, and with it everything

A namespace has no name and no process of its own: it lives by a descriptor that is open here. Children are told of it
as `/proc/self/fd/N`.
"""

import contextlib
import os
import subprocess
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from testbed import kernel
from testbed.cgroups import Groups
from testbed.messages import Channel, Message
from testbed.ranks import NamespaceRun

SCRATCH = "/run/planloom-testbed"
"""Where the supervisor and its children see a file system of their own that goes with them."""

_COMMAND_SECONDS = 60  # for one batch of ip or tc: they take milliseconds
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin"
_FABRIC = "fabric"


def serve(channel: Channel, groups: Groups | None) -> None:
    """Serve one testbed until it closes the channel; `groups` are those of its ranks, where they have limits."""
    networks: dict[str, int] = {}
    with contextlib.suppress(EOFError):
        while True:
            message = channel.receive(None)
            try:
                if message["op"] == "build":
                    _isolate_files(message["files"])
                    started = time.monotonic()
                    networks.update(_build(message["network"]))
                    channel.send({"event": "built", "seconds": time.monotonic() - started})
                else:
                    NamespaceRun(message, channel, networks, groups).go()
            except (OSError, subprocess.SubprocessError, _CommandFailedError) as error:
                channel.send({"event": "refused", "what": str(error) or repr(error)})
            except EOFError:
                raise
            except Exception:  # a bug of ours: the other side must hear of it and not wait
                channel.send({"event": "refused", "what": traceback.format_exc()})


class _CommandFailedError(Exception):
    """`ip` or `tc` said no."""


def _isolate_files(files: dict[str, str]) -> None:
    """/proc of this PID namespace, a place for files that ends with it, and /etc/hosts with the devices' names."""
    kernel.make_mounts_private()
    kernel.mount("proc", "/proc")
    os.makedirs(SCRATCH, exist_ok=True)
    kernel.mount("tmpfs", SCRATCH)
    for name, text in files.items():
        Path(SCRATCH, name).write_text(text, encoding="utf-8")
    hosts = Path("/etc/hosts")
    if hosts.is_file():
        own = Path(SCRATCH, "hosts")
        own.write_text(f"{hosts.read_text(encoding='utf-8', errors='replace').rstrip()}\n{files['devices']}")
        kernel.bind(str(own), str(hosts))


def _build(network: Message) -> dict[str, int]:
    """The namespaces by name, with everything in them up."""
    networks = {_FABRIC: kernel.this_network()}  # the supervisor's own is the fabric
    for script in network["namespaces"]:
        if script["name"] != _FABRIC:
            networks[script["name"]] = kernel.new_network()
    for script in network["namespaces"]:
        with kernel.inside_network(networks[script["name"]]):
            for name, value in script["settings"].items():
                setting = Path("/proc/sys", name)
                if setting.exists():
                    setting.write_text(value)
    places = {name: f"/proc/self/fd/{descriptor}" for name, descriptor in networks.items()}
    _batch("ip", [line.format_map(places) for line in network["cables"]], keep=list(networks.values()))
    for script in network["namespaces"]:
        with kernel.inside_network(networks[script["name"]]):
            _batch("ip", script["ip"])
            _batch("tc", script["tc"])
    return networks


def _batch(tool: str, lines: Sequence[str], *, keep: Sequence[int] = ()) -> None:
    """Run many commands of `ip` or `tc` in one process, in this thread's network namespace."""
    if not lines:
        return
    finished = subprocess.run(
        [tool, "-batch", "-"],
        input="\n".join(lines) + "\n",
        text=True,
        capture_output=True,
        timeout=_COMMAND_SECONDS,
        pass_fds=keep,
        env={"PATH": _PATH, "LC_ALL": "C"},
        check=False,
    )
    if finished.returncode != 0:
        said = finished.stderr.strip() or finished.stdout.strip()
        raise _CommandFailedError(f"{tool} failed: {_with_line(said, lines)}")


def _with_line(said: str, lines: Sequence[str]) -> str:
    """`Command failed -:7` is followed by the seventh command, so that a reader need not count."""
    number = said.rpartition("-:")[2].strip()
    known = number.isdecimal() and 0 < int(number) <= len(lines)
    return f"{said} ({lines[int(number) - 1]})" if known else said

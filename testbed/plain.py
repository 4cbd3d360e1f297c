"""The same command without a testbed: one plain process a device, all on 127.0.0.1, for machines that allow no more.

Results and variables are those of a testbed (`testbed.results`, `testbed.environment`): a program need not know.
There are no links, no quotas and no memory limits. A rank is the leader of a session: what it starts is ended with it,
unless it makes itself a session of its own. If this process is killed, so are the ranks (Linux), but not what they
started.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from planloom.cluster import Cluster, cluster_to_yaml, load_cluster
from testbed import kernel
from testbed.environment import rank_environment
from testbed.ranks import Run
from testbed.results import LineListener, ResultCollector, RunResult
from testbed.session import GRACE_SECONDS, KILL_SECONDS, require_command

LOOPBACK = "127.0.0.1"
_LOOK_SECONDS = 0.02


def run_plainly(
    cluster: Cluster | str | Path,
    command: Sequence[str],
    *,
    timeout_seconds: float,
    env: Mapping[str, str] | None = None,
    grace_seconds: float = GRACE_SECONDS,
    on_line: LineListener | None = None,
) -> RunResult:
    """Run a command once for each device of a cluster, as plain processes of this machine; as `Testbed.run` does."""
    require_command(command)
    started = time.monotonic()
    on_disk = not isinstance(cluster, Cluster) and Path(cluster).is_file()
    described = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    base = {**os.environ, **(env or {})}
    with tempfile.TemporaryDirectory(prefix="planloom-plain-") as folder:
        path = Path(str(cluster)).resolve() if on_disk else Path(folder, "cluster.yaml")
        if not on_disk:
            path.write_text(cluster_to_yaml(described), encoding="utf-8")
        own = plain_environment(_free_port())
        request = {
            "command": [str(word) for word in command],
            "folder": str(Path.cwd()),
            "environments": [
                base | rank_environment(described, rank, str(path), 0) | own for rank in range(described.num_devices)
            ],
            "timeout_seconds": timeout_seconds,
            "grace_seconds": grace_seconds,
            "kill_seconds": KILL_SECONDS,
        }
        collected = ResultCollector(described.num_devices, on_line)
        PlainRun(request, collected.take).go()
    return collected.result(time.monotonic() - started)


def plain_environment(port: int) -> dict[str, str]:
    """What is different from a testbed's variables."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), names[0])
    return {
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        "TP_SOCKET_IFNAME": loopback,
        "TESTBED_ADDRESS": LOOPBACK,
    }


class PlainRun(Run):
    """A run whose ranks are children of this process, which may have other children and threads."""

    def start_process(self, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.request["command"],
            env=environment,
            cwd=self.request["folder"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=kernel.die_with_parent if sys.platform.startswith("linux") else None,
        )

    def ended_processes(self) -> Iterator[tuple[int, int]]:
        for number, rank in enumerate(self.ranks):
            if rank.exit_code is None and (exit_code := rank.process.poll()) is not None:
                yield number, exit_code

    def kill_left_behind(self) -> None:
        for rank in self.ranks:
            with suppress(ProcessLookupError, PermissionError):  # macOS: of a group whose leader is a zombie
                os.killpg(rank.process.pid, signal.SIGKILL)

    def wait_for_the_killed(self, deadline: float) -> None:
        while any(rank.process.poll() is None for rank in self.ranks) and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)


def _free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port: int = listener.getsockname()[1]
    return port

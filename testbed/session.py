"""What a program uses: a `Testbed` that is built on entering, runs commands, and is gone on leaving.

The testbed itself does nothing but talk to its supervisor (`testbed.supervisor`), with a limit on every wait. However
this process ends, the supervisor, the ranks and the network end with it (`testbed.launcher`).
"""

import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from planloom.cluster import Cluster, cluster_to_yaml, load_cluster
from testbed import requirements
from testbed.cgroups import Groups
from testbed.devices import DeviceLimits, DevicePlan, plan_here
from testbed.environment import device_environment, rank_environment
from testbed.errors import TestbedError
from testbed.messages import Channel, Message
from testbed.network import network_script
from testbed.results import LineListener, ResultCollector, RunResult
from testbed.shaping import COARSE, FINE
from testbed.supervisor import SCRATCH
from testbed.wiring import device_address, device_name

BUILD_LIMIT_SECONDS = 120.0
GRACE_SECONDS = 5.0
KILL_SECONDS = 3.0
_ANSWER_SECONDS = 30.0  # beyond a run's own limits, for a supervisor on a busy machine
_CLOSE_SECONDS = 10.0


class Testbed:
    """A cluster's network on this machine, between `with` and its end."""

    __test__ = False  # not a test class, whatever its name says to pytest

    def __init__(self, cluster: Cluster | str | Path, *, devices: DeviceLimits | None = None) -> None:
        """`cluster` is a cluster, the path of a cluster file, or the name of a preset.

        With `devices`, every rank is held to a share of a core and to its memory; without, ranks share the machine.
        """
        self.cluster = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
        on_disk = not isinstance(cluster, Cluster) and Path(cluster).is_file()
        self.cluster_path = str(Path(str(cluster)).resolve()) if on_disk else f"{SCRATCH}/cluster.yaml"
        self.build_seconds = 0.0
        self.device_plan: DevicePlan | None = None
        self._devices = devices
        self._groups: Groups | None = None
        self._network = network_script(self.cluster, FINE if devices is None else COARSE)
        self._channel: Channel | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._num_runs = 0

    def __enter__(self) -> Self:
        if self._channel is not None:
            raise TestbedError("the testbed is built already", given="a second `with`", required="one at a time")
        requirements.require()
        started = time.monotonic()
        if self._devices is not None:
            self.device_plan, self._groups = plan_here(self.cluster, self._devices)
        self._start_supervisor()
        try:
            self._say(
                {
                    "op": "build",
                    "network": dataclasses.asdict(self._network),
                    "files": {"cluster.yaml": cluster_to_yaml(self.cluster), "devices": self._host_names()},
                }
            )
            self._hear(BUILD_LIMIT_SECONDS)
        except BaseException:
            self.close()
            raise
        self.build_seconds = time.monotonic() - started
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_seconds: float,
        env: Mapping[str, str] | None = None,
        grace_seconds: float = GRACE_SECONDS,
        on_line: LineListener | None = None,
        limited: bool = True,
    ) -> RunResult:
        """Run a command once for each device, in its namespace; return when all have ended.

        `env` is added to this process's environment, and to both what a rank has to know (`testbed.environment`). When
        a rank fails, the others have `grace_seconds` to end by themselves. A run that is not `limited` knows nothing of
        the limits of devices.
        """
        require_command(command)
        started = time.monotonic()
        base = {**os.environ, **(env or {})}
        ranks = range(self.cluster.num_devices)
        self._num_runs += 1
        plan, groups = (self.device_plan, self._groups) if limited else (None, None)
        self._say(
            {
                "op": "run",
                "command": [str(word) for word in command],
                "folder": str(Path.cwd()),
                "environments": [
                    base
                    | rank_environment(self.cluster, rank, self.cluster_path, self._num_runs)
                    | ({} if plan is None or groups is None else device_environment(plan, groups, rank))
                    for rank in ranks
                ],
                "devices": None if plan is None else plan.to_message(),
                "timeout_seconds": timeout_seconds,
                "grace_seconds": grace_seconds,
                "kill_seconds": KILL_SECONDS,
            }
        )
        collected = ResultCollector(self.cluster.num_devices, on_line)
        limit = started + timeout_seconds + grace_seconds + KILL_SECONDS + _ANSWER_SECONDS
        try:
            while not collected.done:
                collected.take(self._hear(limit - time.monotonic()))
        except KeyboardInterrupt:  # let the ranks end in an orderly way; whoever interrupts again goes at once
            self._say({"op": "stop"})
            with suppress(TestbedError, ValueError):  # ValueError: the interrupt tore a message in two
                while not collected.done:
                    collected.take(self._hear(KILL_SECONDS + _CLOSE_SECONDS))
            raise
        return collected.result(time.monotonic() - started)

    def close(self) -> None:
        """Take everything down. Leaving `with` does this too."""
        if self._channel is not None:
            self._channel.close()  # the supervisor ends, and the kernel ends all others
            self._channel = None
        if self._launcher is not None:
            try:
                self._launcher.wait(_CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self._launcher.kill()  # takes the supervisor along
                self._launcher.wait()
            self._launcher = None
        if self._groups is not None:
            self._groups.remove()  # done by the launcher, if it has not been killed
            self._groups = None

    def _host_names(self) -> str:
        """Names in /etc/hosts: torch looks up the name of every address that it connects to, and warns without one."""
        devices = range(self.cluster.num_devices)
        return "".join(f"{device_address(device)} {device_name(device)}\n" for device in devices)

    def _start_supervisor(self) -> None:
        ours, theirs = socket.socketpair()
        root = Path(__file__).resolve().parents[1]
        groups = "" if self._groups is None else self._groups.to_text()
        program = (
            f"import sys; sys.path.insert(0, {str(root)!r}); from testbed.launcher import main; "
            f"main({theirs.fileno()}, {os.getpid()}, {groups!r})"
        )
        with theirs:
            self._launcher = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for us; we tell the ranks
            )
        self._channel = Channel(ours)

    def _say(self, message: Message) -> None:
        if self._channel is None:
            raise TestbedError(
                "the testbed is not built",
                given="a Testbed outside `with`",
                required="`with Testbed(...) as testbed: testbed.run(...)`",
            )
        try:
            self._channel.send(message)
        except OSError as error:
            raise _lost(str(error)) from None

    def _hear(self, limit_seconds: float) -> Message:
        assert self._channel is not None
        try:
            message = self._channel.receive(max(0.0, limit_seconds))
        except TimeoutError:
            raise _lost(f"no word for {limit_seconds:.0f} s") from None
        except (EOFError, OSError) as error:
            raise _lost(str(error) or "it has ended") from None
        if message["event"] == "refused":
            raise TestbedError(
                "the testbed could not do what was asked",
                given=message["what"],
                required="a command that exists; a kernel with namespaces, veth, bridge, htb and u32; free memory",
            )
        return message


def _lost(reason: str) -> TestbedError:
    return TestbedError(
        "the testbed's supervisor is lost",
        given=reason,
        required="a supervisor that lives as long as the testbed",
        todo="run it again; if memory was short, with fewer devices",
    )


def require_command(command: Sequence[str]) -> None:
    if not command:
        raise TestbedError("there is no command to run", given="nothing", required="a program and its arguments")


def run_on_testbed(
    cluster: Cluster | str | Path,
    command: Sequence[str],
    *,
    timeout_seconds: float,
    env: Mapping[str, str] | None = None,
    on_line: LineListener | None = None,
    devices: DeviceLimits | None = None,
) -> RunResult:
    """Build a cluster's network, run a command once for each device, take the network down."""
    with Testbed(cluster, devices=devices) as testbed:
        return testbed.run(command, timeout_seconds=timeout_seconds, env=env, on_line=on_line)

"""Devices by whichever means this machine has, and which these are: for demos, and for benchmarks that must say so.

with open_devices(cluster, DeviceLimits(cpu_share=0.4)) as devices:
    print(devices.kind, devices.why)
    result = devices.run(["python", "script.py"], timeout_seconds=60)
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from planloom.cluster import Cluster, load_cluster
from testbed import requirements
from testbed.devices import DeviceLimits, missing_devices
from testbed.errors import TestbedError
from testbed.plain import run_plainly
from testbed.results import LineListener, RunResult
from testbed.session import GRACE_SECONDS, Testbed

Kind = Literal["testbed with quotas", "testbed without quotas", "plain processes"]


class OpenDevices:
    """Between `with` and its end: commands run once for each device."""

    def __init__(self, cluster: Cluster | str | Path, limits: DeviceLimits | None, kind: Kind, why: str) -> None:
        self.kind: Kind = kind
        self.why = why
        self.cluster = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
        self._given, self._limits = cluster, limits
        self._testbed: Testbed | None = None

    @property
    def testbed(self) -> Testbed | None:
        """The testbed, if there is one."""
        return self._testbed

    def __enter__(self) -> Self:
        if self.kind != "plain processes":
            limits = self._limits or DeviceLimits()
            self._testbed = Testbed(self._given, devices=limits if self.kind == "testbed with quotas" else None)
            self._testbed.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._testbed is not None:
            self._testbed.close()
            self._testbed = None

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_seconds: float,
        env: Mapping[str, str] | None = None,
        grace_seconds: float = GRACE_SECONDS,
        on_line: LineListener | None = None,
    ) -> RunResult:
        """As `Testbed.run`."""
        if self._testbed is not None:
            return self._testbed.run(
                command, timeout_seconds=timeout_seconds, env=env, grace_seconds=grace_seconds, on_line=on_line
            )
        if self.kind != "plain processes":
            raise TestbedError(
                "the devices are not open", given="`open_devices` outside `with`", required="`with open_devices(...)`"
            )
        return run_plainly(
            self._given,
            command,
            timeout_seconds=timeout_seconds,
            env=env,
            grace_seconds=grace_seconds,
            on_line=on_line,
        )


def open_devices(cluster: Cluster | str | Path, limits: DeviceLimits | None = None) -> OpenDevices:
    """The best that this machine allows: a testbed with quotas, one without, or plain processes; `why` says why.

    A cluster that no testbed could have (links too fast) or limits that this machine cannot give are errors as ever.
    """
    reason = requirements.provided()
    if reason:
        return OpenDevices(cluster, limits, "plain processes", f"no shaped links and no quotas: {reason}")
    reason = missing_devices()
    if reason:
        return OpenDevices(cluster, limits, "testbed without quotas", f"shaped links, but no quotas: {reason}")
    return OpenDevices(
        cluster, limits, "testbed with quotas", "shaped links; a share of a core and a memory limit for each rank"
    )

"""A cluster on one machine: devices as network namespaces and control groups, links as shaped cables between them.

from testbed import Testbed, run_on_testbed

with Testbed("testbed/clusters/two-level-shared.yaml") as testbed:  # or a planloom.cluster.Cluster
    result = testbed.run(["python", "script.py"], timeout_seconds=60)
print(result.exit_code, result.ranks[0].stdout)

with Testbed(cluster, devices=DeviceLimits(cpu_share=0.4)) as testbed:  # ranks with a share of a core and of memory
    ...
with open_devices(cluster) as devices:  # whatever this machine allows
    print(devices.kind, devices.why)

`wiring`, `routing`, `shaping` and `network` turn a cluster into commands and are pure; `launcher`, `supervisor` and
`ranks` are the processes that carry them out and hold everything; `session` and `results` are what a program uses;
`trials`, `flows` and `checking` measure whether the links are what the cluster file says. `devices` decides which part
of the machine a rank gets, `cgroups` and `pacing` hold it to that, `limits` is for use inside ranks, `speed` and
`loops` measure it. `plain` runs the same commands where there can be no testbed, `opening` chooses.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testbed.checking import CheckResult, check_network
    from testbed.devices import DeviceLimits, missing_devices
    from testbed.errors import TestbedError
    from testbed.opening import OpenDevices, open_devices
    from testbed.plain import run_plainly
    from testbed.results import RankResult, RunResult
    from testbed.session import Testbed, run_on_testbed
    from testbed.speed import SpeedCheck, check_speed

_WHERE = {
    "CheckResult": "testbed.checking",
    "DeviceLimits": "testbed.devices",
    "OpenDevices": "testbed.opening",
    "RankResult": "testbed.results",
    "RunResult": "testbed.results",
    "SpeedCheck": "testbed.speed",
    "Testbed": "testbed.session",
    "TestbedError": "testbed.errors",
    "check_network": "testbed.checking",
    "check_speed": "testbed.speed",
    "missing_devices": "testbed.devices",
    "open_devices": "testbed.opening",
    "run_on_testbed": "testbed.session",
    "run_plainly": "testbed.plain",
}

__all__ = [
    "CheckResult",
    "DeviceLimits",
    "OpenDevices",
    "RankResult",
    "RunResult",
    "SpeedCheck",
    "Testbed",
    "TestbedError",
    "check_network",
    "check_speed",
    "missing_devices",
    "open_devices",
    "run_on_testbed",
    "run_plainly",
]


def __getattr__(name: str) -> Any:
    """Imported at first use, so that the processes of the testbed itself load nothing of Planloom."""
    if name not in _WHERE:
        raise AttributeError(f"module 'testbed' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)

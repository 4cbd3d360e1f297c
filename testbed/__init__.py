"""A cluster on one machine: its devices as network namespaces, its links as shaped cables between them.

from testbed import Testbed, run_on_testbed

with Testbed("testbed/clusters/two-level-shared.yaml") as testbed:  # or a planloom.cluster.Cluster
    result = testbed.run(["python", "script.py"], timeout_seconds=60)
print(result.exit_code, result.ranks[0].stdout)

`wiring`, `routing`, `shaping` and `network` turn a cluster into commands and are pure; `launcher`, `supervisor` and
`ranks` are the processes that carry them out and hold everything; `session` and `results` are what a program uses;
`trials`, `flows` and `checking` measure whether the links are what the cluster file says.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from testbed.checking import CheckResult, check_network
    from testbed.errors import TestbedError
    from testbed.results import RankResult, RunResult
    from testbed.session import Testbed, run_on_testbed

_WHERE = {
    "CheckResult": "testbed.checking",
    "RankResult": "testbed.results",
    "RunResult": "testbed.results",
    "Testbed": "testbed.session",
    "TestbedError": "testbed.errors",
    "check_network": "testbed.checking",
    "run_on_testbed": "testbed.session",
}

__all__ = ["CheckResult", "RankResult", "RunResult", "Testbed", "TestbedError", "check_network", "run_on_testbed"]


def __getattr__(name: str) -> Any:
    """Imported at first use, so that the processes of the testbed itself load nothing of Planloom."""
    if name not in _WHERE:
        raise AttributeError(f"module 'testbed' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)

"""The network that is built is the cluster's: by the interfaces that messages leave by, and by measurement."""

import dataclasses
import json
import sys
import threading
from pathlib import Path

import pytest

from planloom.cluster import Cluster, load_cluster
from testbed import Testbed, TestbedError, check_network, run_on_testbed
from testbed.checking import judge
from testbed.trials import Trial
from tests.net.clusters import EXAMPLES, TWO_BY_TWO, cluster, level
from tests.net.conftest import Traces

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "testbed" / "clusters"
LIMIT_SECONDS = 60.0
QUICK = ("torus-4x4",)  # and three-level-2x2x2 in test_command_line

pytestmark = pytest.mark.timeout(180)


def interfaces_used(testbed: Testbed, source: int, destination: int) -> dict[int, list[str]]:
    """By rank, the interfaces by which a message of 2 MB between two devices left."""
    command = [sys.executable, str(HERE / "traffic_rank.py"), str(source), str(destination), "2000000"]
    result = testbed.run(command, timeout_seconds=LIMIT_SECONDS)
    assert result.exit_code == 0, result
    return {rank.rank: used for rank in result.ranks if (used := json.loads(rank.stdout))}


def test_messages_leave_by_the_interface_of_the_outermost_level(traces: Traces) -> None:
    three = cluster(level("rack", 2, 100, shared=True), level("node", 2, 100), level("device", 2, 100))
    with Testbed(three) as testbed:
        assert interfaces_used(testbed, 0, 7) == {0: ["l0"]}
        assert interfaces_used(testbed, 5, 6) == {5: ["l1"]}
        assert interfaces_used(testbed, 3, 2) == {3: ["l2"]}


def test_devices_of_a_torus_forward_inner_levels_first(traces: Traces) -> None:
    torus = cluster(level("row", 3, 100, shape="torus"), level("column", 4, 100, shape="torus"))
    with Testbed(torus) as testbed:
        assert interfaces_used(testbed, 0, 6) == {0: ["l1next"], 1: ["l1next"], 2: ["l0next"]}
        assert interfaces_used(testbed, 0, 11) == {0: ["l1prev"], 3: ["l0prev"]}


def test_a_torus_around_routers_reaches_every_device(traces: Traces) -> None:
    mixed = cluster(
        level("torus", 2, 100, shape="torus"),
        level("ring", 3, 100, shape="ring", shared=True),
        level("pair", 2, 100, shape="pairs"),
    )
    with Testbed(mixed) as testbed:
        assert interfaces_used(testbed, 0, 11) == {0: ["l1"], 5: ["l0next"]}
        assert interfaces_used(testbed, 11, 8) == {11: ["l1"]}
        assert interfaces_used(testbed, 2, 3) == {2: ["l2m1"]}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else pytest.mark.slow) for path in EXAMPLES],
)
def test_links_carry_what_the_file_says(path: Path, traces: Traces) -> None:
    with Testbed(path) as testbed:
        checked = check_network(testbed)
    assert checked.results
    assert checked.ok, [(result.trial, result.bytes_per_second) for result in checked.results if not result.ok]


@pytest.mark.slow
@pytest.mark.parametrize("megabits", [10, 1000])
def test_slow_and_fast_links_carry_what_they_should(megabits: float, traces: Traces) -> None:
    with Testbed(cluster(level("node", 2, megabits, shared=True), level("device", 2, megabits))) as testbed:
        checked = check_network(testbed)
    assert checked.ok, [(result.trial, result.bytes_per_second) for result in checked.results if not result.ok]


def test_a_link_that_is_off_is_found(traces: Traces, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("testbed.checking._MEASURE_SECONDS", 0.3)
    with Testbed(cluster(level("device", 2, 100))) as testbed:
        testbed.cluster = cluster(level("device", 2, 120))  # what is expected from now on, not what was built
        assert not check_network(testbed).ok


def test_flows_are_judged_each_or_together() -> None:
    each = Trial(name="t", level="l", flows=((0, 1), (1, 0)), judged="each", bytes_per_second=(100.0, 100.0))
    assert judge(each, [95.0, 109.0]).ok
    assert judge(each, [95.0, 89.0]).deviation == pytest.approx(-0.11)
    together = dataclasses.replace(each, judged="together")
    assert judge(together, [70.0, 35.0]).ok
    assert not judge(together, [100.0, 100.0]).ok


def _gloo(case: Cluster | Path, peers: list[int]) -> tuple[list[bool], dict[int, float]]:
    command = [sys.executable, str(HERE / "gloo_rank.py"), *map(str, peers)]
    result = run_on_testbed(case, command, timeout_seconds=120.0)
    assert result.exit_code == 0, result
    reports = [json.loads(rank.stdout) for rank in result.ranks]
    rates = {int(peer): rate for peer, rate in reports[0]["bytes_per_second"].items()}
    return [report["equal"] for report in reports], rates


def test_gloo_reduces_and_reaches_each_levels_bandwidth(traces: Traces) -> None:
    equal, rates = _gloo(TWO_BY_TWO, [1, 2])
    assert equal == [True] * 4
    assert rates == {1: pytest.approx(50e6, rel=0.1), 2: pytest.approx(12.5e6, rel=0.1)}


@pytest.mark.slow
def test_gloo_reaches_each_of_three_levels_and_of_a_torus(traces: Traces) -> None:
    equal, rates = _gloo(FOLDER / "three-level-2x2x2.yaml", [1, 2, 4])
    assert equal == [True] * 8
    assert rates == {peer: pytest.approx(rate * 125e3, rel=0.1) for peer, rate in ((1, 400), (2, 100), (4, 50))}
    equal, rates = _gloo(FOLDER / "torus-4x4.yaml", [1, 4, 5])
    assert equal == [True] * 16
    assert rates == {peer: pytest.approx(rate * 125e3, rel=0.1) for peer, rate in ((1, 100), (4, 50), (5, 50))}


def test_sixteen_devices_on_three_levels_are_up_within_seconds(traces: Traces) -> None:
    with Testbed(FOLDER / "three-level-2x2x4.yaml") as testbed:
        assert testbed.build_seconds < 10
        traces.note_networks()
        assert len(traces.networks) == 17  # the devices and the fabric


def test_ranks_know_who_they_are(traces: Traces) -> None:
    path = FOLDER / "two-level-shared.yaml"
    program = "import os, json; print(json.dumps(dict(os.environ)))"
    result = run_on_testbed(
        path, [sys.executable, "-c", program], timeout_seconds=LIMIT_SECONDS, env={"MINE": "1", "RANK": "77"}
    )
    for rank in result.ranks:
        told = json.loads(rank.stdout)
        assert told["RANK"] == str(rank.rank)
        assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == (str(rank.rank % 4), "4")
        assert (told["WORLD_SIZE"], told["MASTER_ADDR"], told["OMP_NUM_THREADS"]) == ("8", "10.77.0.1", "1")
        assert (told["TESTBED_CLUSTER"], told["MINE"]) == (str(path), "1")
        assert load_cluster(told["TESTBED_CLUSTER"]).num_devices == 8


def test_a_cluster_without_a_file_is_a_file_to_the_ranks(traces: Traces) -> None:
    program = f"import os, sys; sys.path.insert(0, {str(HERE.parents[1] / 'src')!r})\n"
    program += "from planloom.cluster import load_cluster; print(load_cluster(os.environ['TESTBED_CLUSTER']).name)"
    result = run_on_testbed(TWO_BY_TWO, [sys.executable, "-c", program], timeout_seconds=LIMIT_SECONDS)
    assert [rank.stdout for rank in result.ranks] == ["node-device\n"] * 4


def test_two_testbeds_at_once(traces: Traces) -> None:
    with Testbed(TWO_BY_TWO) as one, Testbed(TWO_BY_TWO) as other:
        assert interfaces_used(one, 0, 3) == interfaces_used(other, 0, 3) == {0: ["l0"]}


def test_a_testbed_outlives_the_thread_that_built_it(traces: Traces) -> None:
    testbed = Testbed(TWO_BY_TWO)
    thread = threading.Thread(target=testbed.__enter__)
    thread.start()
    thread.join()
    try:
        assert testbed.run(["true"], timeout_seconds=LIMIT_SECONDS).exit_code == 0
    finally:
        testbed.close()


def test_misuse_is_explained(traces: Traces) -> None:
    with pytest.raises(TestbedError, match=r"not built[\s\S]*with Testbed"):
        Testbed(TWO_BY_TWO).run(["true"], timeout_seconds=1)
    with Testbed(TWO_BY_TWO) as testbed, pytest.raises(TestbedError, match="built already"):
        testbed.__enter__()
    with Testbed(TWO_BY_TWO) as testbed:
        with pytest.raises(TestbedError, match="no command"):
            testbed.run([], timeout_seconds=1)
        with pytest.raises(TestbedError, match=r"No such file[\s\S]*a command that exists"):
            testbed.run(["no-such-program"], timeout_seconds=1)
        assert testbed.run(["true"], timeout_seconds=LIMIT_SECONDS).exit_code == 0  # and goes on working

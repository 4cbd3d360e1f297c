"""Ranks as devices: a share of a core, a memory limit, and groups that never stay behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed import (
    DeviceLimits,
    Testbed,
    TestbedError,
    check_speed,
    devices,
    missing_devices,
    open_devices,
    run_plainly,
)
from testbed.cgroups import find_places
from testbed.devices import plan_devices
from tests.net.clusters import TWO_BY_TWO, cluster, level
from tests.net.conftest import Traces

ROOT = Path(__file__).parents[2]
PAIR = cluster(level("device", 2, 100))
RUN = [sys.executable, "-m", "testbed", "run", "testbed/clusters/ring-of-4.yaml"]
LIMIT_SECONDS = 60.0
WHERE = "cat /proc/self/cgroup; cat /proc/self/status | grep Cpus_allowed_list; env"

pytestmark = pytest.mark.timeout(120)


def groups_left() -> list[str]:
    tops = {place.top for place in find_places().values()}
    return [
        f"{folder}/{name}" for top in tops for folder, names, _ in os.walk(top) for name in names if "planloom" in name
    ]


def own_groups(pid: int) -> list[str]:
    return [path for path in groups_left() if f"-{pid}-" in path.rpartition("planloom-testbed")[2].partition("/")[0]]


@pytest.fixture
def limited_here(built_here: None) -> Iterator[None]:
    reason = missing_devices()
    if reason:
        pytest.skip(f"no limits for devices here: {reason}")
    yield
    assert own_groups(os.getpid()) == []


def memory_command(*arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "tests/net/memory_rank.py"), *arguments]


@pytest.fixture
def python_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")


def test_ranks_and_what_they_start_are_in_groups_with_their_limits(limited_here: None, traces: Traces) -> None:
    with Testbed(TWO_BY_TWO, devices=DeviceLimits(cpu_share=0.2)) as testbed:
        result = testbed.run(["bash", "-c", WHERE], timeout_seconds=LIMIT_SECONDS)
        free = testbed.run(["bash", "-c", WHERE], timeout_seconds=LIMIT_SECONDS, limited=False)
    cores = plan_devices(4, DeviceLimits(), tuple(sorted(os.sched_getaffinity(0))), float("inf")).core_of_rank
    for rank, core in zip(result.ranks, cores, strict=True):
        assert f"rank{rank.rank}/before" in rank.stdout
        assert "TESTBED_CPU_SHARE=0.2\n" in rank.stdout
        assert "MALLOC_TRIM_THRESHOLD_=65536\n" in rank.stdout
        assert "MKL_NUM_THREADS=1\n" in rank.stdout
        assert f"Cpus_allowed_list:\t{core}\n" in rank.stdout
    assert "planloom" not in free.ranks[0].stdout.partition("Cpus_allowed")[0]


def test_a_quota_too_large_is_refused(limited_here: None) -> None:
    with (
        pytest.raises(TestbedError, match="cannot have 1 of a core each"),
        Testbed(cluster(level("device", 4 * (os.cpu_count() or 1), 100)), devices=DeviceLimits(cpu_share=1.0)),
    ):
        pytest.fail("it was built")


def test_a_rank_dies_at_its_limit_and_the_run_ends(limited_here: None, traces: Traces, python_path: None) -> None:
    started = time.monotonic()
    with Testbed(TWO_BY_TWO, devices=DeviceLimits()) as testbed:
        result = testbed.run(memory_command("100", "300"), timeout_seconds=LIMIT_SECONDS, grace_seconds=0.2)
    assert time.monotonic() - started < 20
    assert [rank.out_of_memory for rank in result.ranks] == [False, True, False, False]
    assert (result.exit_code, result.ranks[1].exit_code) == (-signal.SIGKILL, -signal.SIGKILL)
    assert 98 <= len(result.ranks[1].stdout.splitlines()) <= 100
    assert [rank.ended_by_testbed for rank in result.ranks] == [True, False, True, True]


def test_a_rank_under_its_limit_lives_and_what_it_frees_is_free(
    limited_here: None, traces: Traces, python_path: None
) -> None:
    with Testbed(PAIR, devices=DeviceLimits()) as testbed:
        result = testbed.run(memory_command("100", "97"), timeout_seconds=LIMIT_SECONDS)
    assert result.exit_code == 0, result.ranks[1].stderr
    figures = dict(line.split() for line in result.ranks[1].stdout.splitlines()[-4:])
    assert abs(int(figures["used"]) / (97 << 20) - 1) < 0.02
    assert int(figures["freed"]) < 2 << 20
    assert abs(int(figures["peak"]) / (97 << 20) - 1) < 0.02
    assert int(figures["reset"]) < 2 << 20


@pytest.mark.slow
def test_libraries_in_memory_do_not_count(limited_here: None, traces: Traces, python_path: None) -> None:
    with Testbed(PAIR, devices=DeviceLimits()) as testbed:
        inside = testbed.run(memory_command("200", "197", "torch"), timeout_seconds=LIMIT_SECONDS)
        over = testbed.run(memory_command("200", "300", "torch"), timeout_seconds=LIMIT_SECONDS, grace_seconds=0.2)
    assert inside.exit_code == 0
    assert over.ranks[1].out_of_memory
    assert 196 <= len(over.ranks[1].stdout.splitlines()) <= 200


def test_memory_of_the_whole_process_is_limited(limited_here: None, traces: Traces) -> None:
    program = "x = bytearray(b'1') * (200 << 20)"
    with Testbed(PAIR, devices=DeviceLimits(memory_bytes=100 << 20)) as testbed:
        inside = testbed.run([sys.executable, "-c", "pass"], timeout_seconds=LIMIT_SECONDS)
        result = testbed.run([sys.executable, "-c", program], timeout_seconds=LIMIT_SECONDS)
        child = ["bash", "-c", f'{sys.executable} -c "{program}"; exit $((RANK * 3))']
        started = testbed.run(child, timeout_seconds=LIMIT_SECONDS)
    assert inside.exit_code == 0
    assert [(rank.exit_code, rank.out_of_memory) for rank in result.ranks] == [(-signal.SIGKILL, True)] * 2
    assert [rank.out_of_memory for rank in started.ranks] == [True, True]


@pytest.mark.parametrize("victim", ["testbed", "launcher", "supervisor"])
def test_groups_are_removed_whoever_is_killed(victim: str, limited_here: None, traces: Traces) -> None:
    running = subprocess.Popen(
        [*RUN, "--devices", "--", "bash", "-c", "setsid sleep 300 & echo started; wait"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )
    assert running.stdout is not None
    for _ in range(4):
        running.stdout.readline()
    assert own_groups(running.pid)
    launcher = _child_of(running.pid)
    os.kill({"testbed": running.pid, "launcher": launcher}.get(victim) or _child_of(launcher), signal.SIGKILL)
    running.communicate(timeout=LIMIT_SECONDS)
    deadline = time.monotonic() + 5
    while own_groups(running.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert own_groups(running.pid) == []


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_groups_of_a_testbed_that_crashed_with_its_launcher_go_at_the_next_start(
    limited_here: None, traces: Traces
) -> None:
    places = find_places()
    dead = subprocess.Popen(["true"])
    groups = devices.Groups.of_owner(places, dead.pid)
    groups.make()
    groups.make_rank(0, devices.RankLimits(quota_us=1000, period_us=5000, memory_bytes=None))
    dead.wait()
    assert own_groups(dead.pid)
    with Testbed(PAIR, devices=DeviceLimits()):
        assert own_groups(dead.pid) == []
        assert own_groups(os.getpid())


@pytest.mark.slow
@pytest.mark.parametrize(("num_devices", "megabits"), [(4, 100), (8, 20)])
def test_a_rank_is_as_fast_whatever_the_others_do(
    num_devices: int, megabits: float, limited_here: None, traces: Traces
) -> None:
    with Testbed(cluster(level("device", num_devices, megabits)), devices=DeviceLimits()) as testbed:
        checked = check_speed(testbed)
    assert {result.others for result in checked.results} == {"idle", "compute", "send"}
    assert checked.ok, checked


def test_shares_are_kept_while_others_compute(limited_here: None, traces: Traces) -> None:
    """The default test: only shares, and not narrowly, since other tests may use the machine at the same time."""
    with Testbed(cluster(level("device", 4, 100)), devices=DeviceLimits()) as testbed:
        checked = check_speed(testbed, rounds=1, cpu_seconds=0.1)
    assert testbed.device_plan is not None
    assert all(abs(result.share_deviation) < 0.25 for result in checked.results), checked


def test_plain_processes_have_the_same_results_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, str, str]] = []
    program = "echo $RANK $WORLD_SIZE $MASTER_ADDR $TESTBED_ADDRESS; test -f $TESTBED_CLUSTER"
    result = run_plainly(
        TWO_BY_TWO,
        ["bash", "-c", program],
        timeout_seconds=LIMIT_SECONDS,
        on_line=lambda *line: heard.append(line),
    )
    assert (result.exit_code, result.timed_out) == (0, False)
    assert [rank.stdout for rank in result.ranks] == [f"{rank} 4 127.0.0.1 127.0.0.1\n" for rank in range(4)]
    assert len(heard) == 4
    failed = run_plainly(
        TWO_BY_TWO, ["bash", "-c", "[ $RANK = 2 ] && exit 7; sleep 60"], timeout_seconds=30, grace_seconds=0.1
    )
    assert failed.exit_code == 7
    assert [rank.ended_by_testbed for rank in failed.ranks] == [True, True, False, True]
    late = run_plainly(PAIR, ["sleep", "60"], timeout_seconds=0.2)
    assert (late.exit_code, late.timed_out) == (124, True)


def test_devices_are_opened_by_what_the_machine_allows(
    limited_here: None, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["bash", "-c", "echo ${TESTBED_CPU_SHARE:-none} $TESTBED_ADDRESS"]
    with open_devices(PAIR, DeviceLimits(cpu_share=0.3)) as opened:
        assert opened.kind == "testbed with quotas"
        assert opened.run(command, timeout_seconds=LIMIT_SECONDS).ranks[1].stdout.startswith("0.3 10.")
    monkeypatch.setattr("testbed.opening.missing_devices", lambda: "no control groups of cpu are mounted")
    with open_devices(PAIR) as opened:
        assert (opened.kind, opened.testbed is not None) == ("testbed without quotas", True)
        assert "no control groups of cpu" in opened.why
        assert opened.run(command, timeout_seconds=LIMIT_SECONDS).ranks[1].stdout.startswith("none 10.")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with open_devices(PAIR) as opened:
        assert (opened.kind, opened.testbed) == ("plain processes", None)
        assert "need root" in opened.why
        assert opened.run(command, timeout_seconds=LIMIT_SECONDS).ranks[1].stdout == "none 127.0.0.1\n"

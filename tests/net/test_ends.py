"""However a run ends, nothing is left: no process, no network namespace, no interface."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from testbed import Testbed
from tests.net.clusters import TWO_BY_TWO
from tests.net.conftest import Traces

ROOT = Path(__file__).parents[2]
CLUSTER = "testbed/clusters/three-level-2x2x2.yaml"
NUM_RANKS = 8
LIMIT_SECONDS = 30.0

# A rank that leaves children behind, one of them in a session of its own, and would run for long.
STUBBORN = "setsid sleep 300 & sleep 300 & echo started; wait"
DEAF = "trap '' TERM INT; echo started; while :; do sleep 1; done"

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("built_here")]


def start(*arguments: str) -> subprocess.Popen[str]:
    """`python -m testbed` in a process group of its own, as a shell starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "testbed", "run", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        # What a shell starts in the background, tests included, ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def wait_until_started(running: subprocess.Popen[str]) -> None:
    assert running.stdout is not None
    seen = [running.stdout.readline() for _ in range(NUM_RANKS)]
    assert sorted(seen) == sorted(f"[{rank}] started\n" for rank in range(NUM_RANKS))


def finish(running: subprocess.Popen[str]) -> tuple[str, str]:
    return running.communicate(timeout=LIMIT_SECONDS)


@pytest.mark.parametrize(
    "rank_program", [pytest.param(STUBBORN, id="stubborn"), pytest.param(DEAF, id="deaf", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_testbed_that_is_killed_leaves_nothing(number: signal.Signals, rank_program: str, traces: Traces) -> None:
    running = start(CLUSTER, "--", "bash", "-c", rank_program)
    wait_until_started(running)
    traces.note_networks()
    assert len(traces.networks) == NUM_RANKS + 1
    assert len(traces.processes()) > NUM_RANKS
    os.killpg(running.pid, number)  # as Ctrl-C does: to the whole foreground group
    finish(running)
    assert running.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 128 + number)
    traces.assert_none_left(limit_seconds=5)


@pytest.mark.parametrize("victim", ["launcher", "supervisor"])
def test_a_testbed_whose_own_processes_are_killed_says_so_and_leaves_nothing(victim: str, traces: Traces) -> None:
    running = start(CLUSTER, "--", "bash", "-c", STUBBORN)
    wait_until_started(running)
    traces.note_networks()
    launcher = _child_of(running.pid)
    os.kill(launcher if victim == "launcher" else _child_of(launcher), signal.SIGKILL)
    _, errors = finish(running)
    assert running.returncode == 2
    assert "supervisor is lost" in errors
    traces.assert_none_left(limit_seconds=5)


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_a_testbed_killed_while_it_builds_leaves_nothing(traces: Traces) -> None:
    for delay_seconds in (0.15, 0.25, 0.3, 0.35, 0.4):
        running = start(CLUSTER, "--", "sleep", "300")
        time.sleep(delay_seconds)
        running.kill()
        finish(running)
        traces.assert_none_left(limit_seconds=5)


def test_a_failing_rank_ends_the_others_and_is_the_exit_code(traces: Traces) -> None:
    program = "if [ $RANK = 3 ]; then echo broken >&2; exit 42; fi; sleep 300"
    started = time.monotonic()
    running = start(CLUSTER, "--grace", "0.5", "--", "bash", "-c", program)
    _, errors = finish(running)
    assert running.returncode == 42
    assert "[3] broken" in errors
    assert time.monotonic() - started < 10
    traces.assert_none_left()


def test_a_hanging_rank_ends_with_the_time_limit(traces: Traces) -> None:
    running = start(CLUSTER, "--timeout", "1", "--", "bash", "-c", "[ $RANK = 2 ] && sleep 300; echo done")
    output, errors = finish(running)
    assert running.returncode == 124
    assert output.count("done") == NUM_RANKS - 1
    assert "time is up" in errors
    traces.assert_none_left()


def test_a_rank_deaf_to_sigterm_is_killed(traces: Traces) -> None:
    with Testbed(TWO_BY_TWO) as testbed:
        result = testbed.run(["bash", "-c", DEAF], timeout_seconds=0.5)
        assert (result.exit_code, result.timed_out) == (124, True)
        assert [rank.exit_code for rank in result.ranks] == [-signal.SIGKILL] * 4
        assert all(rank.ended_by_testbed for rank in result.ranks)


def test_what_ranks_leave_behind_does_not_outlive_the_run(traces: Traces) -> None:
    with Testbed(TWO_BY_TWO) as testbed:
        before = len(traces.processes())
        left = "setsid sleep 300 & echo $!"
        result = testbed.run(["bash", "-c", left], timeout_seconds=LIMIT_SECONDS)
        assert result.exit_code == 0
        assert result.seconds < 5
        assert len(traces.processes()) == before


def test_output_comes_by_rank_and_stream_and_as_it_is_written(traces: Traces) -> None:
    heard: list[tuple[int, str, str]] = []
    program = "echo one; echo two >&2; printf 'no end'"
    with Testbed(TWO_BY_TWO) as testbed:
        result = testbed.run(
            ["bash", "-c", program],
            timeout_seconds=LIMIT_SECONDS,
            on_line=lambda rank, stream, text: heard.append((rank, stream, text)),
        )
    for rank in range(4):
        assert [text for number, stream, text in heard if (number, stream) == (rank, "stdout")] == ["one", "no end"]
        assert result.ranks[rank].stdout == "one\nno end\n"
        assert result.ranks[rank].stderr == "two\n"

"""The processes of one run, one for each device: start, listen, end, clear away.

A run goes on until all ranks have ended, and every reason to end one has its limit:

    a rank fails       the others may notice by themselves for `grace_seconds`, then are terminated
    time is up         all are terminated
    stop is asked for  all are terminated

Terminated is SIGTERM, and SIGKILL `kill_seconds` later. When the ranks have ended, what they have started and left
behind is killed too: nothing but the supervisor is left in the PID namespace after a run.

`Run` is the common part; `NamespaceRun` is how the supervisor of a testbed runs ranks, `testbed.plain` has the other.
"""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from testbed import kernel, pacing
from testbed.cgroups import Groups, RankLimits
from testbed.messages import Channel, Message

_TICK_SECONDS = 0.02
_DRAIN_SECONDS = 5.0
_CHUNK_BYTES = 1 << 16


@dataclass(slots=True)
class _Rank:
    process: subprocess.Popen[bytes]
    unfinished: dict[str, bytes] = field(default_factory=lambda: {"stdout": b"", "stderr": b""})
    exit_code: int | None = None
    ended_by_testbed: bool = False


class Run:
    """One run: its ranks, the pipes that are still open, and when the ranks have to end.

    `say` is told what happens; `control`, if there is one, is where a stop is heard.
    """

    def __init__(self, request: Message, say: Callable[[Message], None], control: Channel | None = None) -> None:
        self.request, self.say, self.control = request, say, control
        self.ranks: list[_Rank] = []
        self.pipes = selectors.DefaultSelector()
        self.terminate_at = float("inf")
        self.kill_at = float("inf")
        if control is not None:
            self.pipes.register(control, selectors.EVENT_READ)

    def start_process(self, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        """Start one rank."""
        raise NotImplementedError

    def ended_processes(self) -> Iterator[tuple[int, int]]:
        """The ranks that have ended since the last call, with their exit codes."""
        raise NotImplementedError

    def kill_left_behind(self) -> None:
        """Kill what the ranks have started."""
        raise NotImplementedError

    def out_of_memory(self, rank: int) -> bool:
        """Whether a rank was ended by its memory limit."""
        return False

    def go(self) -> None:
        """From the first start to the last word."""
        timed_out = False
        try:
            self._start()
            deadline = time.monotonic() + self.request["timeout_seconds"]
            while self.running():
                self.listen()
                self._reap()
                if not timed_out and time.monotonic() >= deadline and self.running():
                    timed_out, self.terminate_at = True, min(self.terminate_at, deadline)
                self._end_ranks_that_must()
        finally:
            self._clear_away()
        self.say({"event": "done", "timed_out": timed_out})

    def _start(self) -> None:
        for rank, environment in enumerate(self.request["environments"]):
            process = self.start_process(rank, environment)
            self.ranks.append(_Rank(process))
            for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
                self.pipes.register(pipe, selectors.EVENT_READ, (rank, stream))

    def listen(self) -> None:
        """Pass on what ranks have written, and hear whether to stop."""
        for key, _ in self.pipes.select(_TICK_SECONDS):
            if key.data is None:
                assert self.control is not None
                self.control.receive(1.0)  # the only thing said during a run is stop; EOFError ends all
                self.terminate_at = min(self.terminate_at, time.monotonic())
            else:
                self._read(key.fileobj, *key.data)  # type: ignore[arg-type]

    def _read(self, pipe: IO[bytes], number: int, stream: str) -> None:
        try:
            chunk = os.read(pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return
        rank = self.ranks[number]
        *lines, rest = (rank.unfinished[stream] + chunk).split(b"\n")
        if not chunk:
            self.pipes.unregister(pipe)
            pipe.close()
            lines, rest = ([rest] if rest else []), b""
        rank.unfinished[stream] = rest
        for line in lines:
            text = line.decode(errors="replace")
            self.say({"event": "line", "rank": number, "stream": stream, "text": text})

    def _reap(self) -> None:
        for number, exit_code in self.ended_processes():
            rank = self.ranks[number]
            rank.exit_code = rank.process.returncode = exit_code
            self.say(
                {
                    "event": "exit",
                    "rank": number,
                    "code": exit_code,
                    "ended": rank.ended_by_testbed,
                    "out_of_memory": self.out_of_memory(number),
                }
            )
            if exit_code != 0:
                grace = time.monotonic() + self.request["grace_seconds"]
                self.terminate_at = min(self.terminate_at, grace)

    def running(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.exit_code is None]

    def _end_ranks_that_must(self) -> None:
        now = time.monotonic()
        if now >= self.kill_at:
            self._signal(signal.SIGKILL)
        elif now >= self.terminate_at and self.kill_at == float("inf"):
            self._signal(signal.SIGTERM)
            self.kill_at = now + self.request["kill_seconds"]

    def _signal(self, number: int) -> None:
        for rank in self.running():
            rank.ended_by_testbed = True
            with suppress(ProcessLookupError):
                os.killpg(rank.process.pid, number)

    def _clear_away(self) -> None:
        """Kill what the ranks have left behind, and pass on the rest of what was written."""
        self.kill_left_behind()
        deadline = time.monotonic() + _DRAIN_SECONDS
        num_others = 0 if self.control is None else 1
        while len(self.pipes.get_map()) > num_others and time.monotonic() < deadline:
            self.listen()
        self.wait_for_the_killed(deadline)
        self.pipes.close()

    def wait_for_the_killed(self, deadline: float) -> None:
        """Wait until no process of this run is left."""
        raise NotImplementedError


class NamespaceRun(Run):
    """A run in the network namespaces of devices, and in their control groups where they have limits.

    It belongs to process 1 of a PID namespace, which has no other processes than those of this run.
    """

    def __init__(self, request: Message, channel: Channel, networks: dict[str, int], groups: Groups | None) -> None:
        super().__init__(request, channel.send, channel)
        self.networks, self.groups = networks, groups
        self.plan = request["devices"]
        if groups is not None and self.plan is not None:
            for rank in range(len(request["environments"])):
                groups.make_rank(rank, RankLimits(**self.plan["limits"]))
            pacing.start(self.plan["cores"])

    def start_process(self, rank: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with kernel.inside_network(self.networks[f"device{rank}"]):
            return subprocess.Popen(
                self.request["command"],
                env=environment,
                cwd=self.request["folder"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=None if self.plan is None else lambda: self._become_device(rank),
            )

    def _become_device(self, rank: int) -> None:
        assert self.groups is not None
        self.groups.enter(rank)
        core = self.plan["core_of_rank"][rank]
        if core is not None:
            os.sched_setaffinity(0, {core})

    def out_of_memory(self, rank: int) -> bool:
        return self.groups is not None and self.plan is not None and self.groups.out_of_memory(rank)

    def ended_processes(self) -> Iterator[tuple[int, int]]:
        """Orphans of the ranks are ours too, since we are process 1."""
        by_pid = {rank.process.pid: number for number, rank in enumerate(self.ranks)}
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid in by_pid:
                    yield by_pid[pid], os.waitstatus_to_exitcode(status)

    def kill_left_behind(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # everything in this PID namespace but process 1, which we are

    def wait_for_the_killed(self, deadline: float) -> None:
        with suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(_TICK_SECONDS)

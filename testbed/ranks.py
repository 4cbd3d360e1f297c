"""The processes of one run, one for each device, as the supervisor sees them: start, listen, end, clear away.

A run goes on until all ranks have ended, and every reason to end one has its limit:

    a rank fails       the others may notice by themselves for `grace_seconds`, then are terminated
    time is up         all are terminated
    stop is asked for  all are terminated

Terminated is SIGTERM, and SIGKILL `kill_seconds` later. When the ranks have ended, what they have started and left
behind is killed too: nothing but the supervisor is left in the PID namespace after a run.
"""

import os
import selectors
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

from testbed import kernel
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


class _Run:
    """One run: its ranks, the pipes that are still open, and when the ranks have to end."""

    def __init__(self, channel: Channel, request: Message) -> None:
        self.channel, self.request = channel, request
        self.ranks: list[_Rank] = []
        self.pipes = selectors.DefaultSelector()
        self.pipes.register(channel, selectors.EVENT_READ)
        self.terminate_at = float("inf")
        self.kill_at = float("inf")

    def start(self, networks: dict[str, int]) -> None:
        for rank, environment in enumerate(self.request["environments"]):
            with kernel.inside_network(networks[f"device{rank}"]):
                process = subprocess.Popen(
                    self.request["command"],
                    env=environment,
                    cwd=self.request["folder"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            self.ranks.append(_Rank(process))
            for stream, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
                self.pipes.register(pipe, selectors.EVENT_READ, (rank, stream))

    def listen(self) -> None:
        """Pass on what ranks have written, and hear whether to stop."""
        for key, _ in self.pipes.select(_TICK_SECONDS):
            if key.data is None:
                self.channel.receive(1.0)  # the only thing said during a run is stop; EOFError ends all
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
            self.channel.send({"event": "line", "rank": number, "stream": stream, "text": text})

    def reap(self) -> None:
        """Take note of processes that have ended; orphans of the ranks are ours too, since we are process 1."""
        by_pid = {rank.process.pid: (number, rank) for number, rank in enumerate(self.ranks)}
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid not in by_pid:
                    continue
                number, rank = by_pid[pid]
                rank.exit_code = rank.process.returncode = os.waitstatus_to_exitcode(status)
                self.channel.send(
                    {"event": "exit", "rank": number, "code": rank.exit_code, "ended": rank.ended_by_testbed}
                )
                if rank.exit_code != 0:
                    grace = time.monotonic() + self.request["grace_seconds"]
                    self.terminate_at = min(self.terminate_at, grace)

    def running(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.exit_code is None]

    def end_ranks_that_must(self) -> None:
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

    def clear_away(self) -> None:
        """Kill what the ranks have left behind, and pass on the rest of what was written."""
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # everything in this PID namespace but process 1, which we are
        deadline = time.monotonic() + _DRAIN_SECONDS
        while len(self.pipes.get_map()) > 1 and time.monotonic() < deadline:
            self.listen()
        with suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    time.sleep(_TICK_SECONDS)
        self.pipes.close()


def run_ranks(channel: Channel, request: Message, networks: dict[str, int]) -> None:
    """Run a command once for each device, in the device's network namespace; tell the channel all about it."""
    run = _Run(channel, request)
    timed_out = False
    try:
        run.start(networks)
        deadline = time.monotonic() + request["timeout_seconds"]
        while run.running():
            run.listen()
            run.reap()
            if not timed_out and time.monotonic() >= deadline and run.running():
                timed_out, run.terminate_at = True, min(run.terminate_at, deadline)
            run.end_ranks_that_must()
    finally:
        run.clear_away()
    channel.send({"event": "done", "timed_out": timed_out})

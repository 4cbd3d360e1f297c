"""Local processes under `torchrun`: start them, hear what they report, and say which one failed.

Workers report events as JSON lines behind a mark on standard output; errors of the user's making are reported the same
way by every rank, and torchrun's own summary names the rank that failed first.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from planloom.errors import PlanloomError, TrainingError

_MARK = "@planloom "
_TAIL_LINES = 20

Listener = Callable[[dict[str, Any]], None]
Launch = Callable[[str, list[str], int, Listener], None]
"""(module, arguments, number of processes, what hears their events): runs workers until all have ended."""


def report(event: str, **fields: Any) -> None:
    """Called in a worker: tell the parent. Line and end in one write: all workers share a pipe."""
    sys.stdout.write(f"{_MARK}{json.dumps({'event': event, **fields})}\n")
    sys.stdout.flush()


@contextmanager
def reporting_errors(rank: int) -> Iterator[None]:
    """In a worker: an error of the user's making is reported, and the process ends with 2."""
    try:
        yield
    except PlanloomError as error:
        report("error", rank=rank, what=error.what, given=error.given, required=error.required, todo=error.todo)
        sys.exit(2)


def event_in(line: str) -> dict[str, Any] | None:
    """What a worker reported in a line of its standard output, or None."""
    if not line.startswith(_MARK):
        return None
    event: dict[str, Any] = json.loads(line.removeprefix(_MARK))
    return event


def run_workers(module: str, arguments: list[str], num_processes: int, on_event: Listener) -> None:
    """Run `python -m module …` on local processes until all end; a failure is a `TrainingError` that names the rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    command += ["-m", module, *arguments]
    errors: list[dict[str, Any]] = []
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event = event_in(line)
                if event is None:
                    print(line, end="", file=sys.stderr)
                elif event["event"] == "error":
                    errors.append(event)
                else:
                    on_event(event)
        except BaseException:
            process.terminate()
            raise
        finally:
            process.stdout.close()
            _end(process)
        if process.returncode:
            log.seek(0)
            raise _failure(log.read(), errors)


def _end(process: "subprocess.Popen[str]") -> None:
    try:
        process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _failure(log: str, errors: list[dict[str, Any]]) -> TrainingError:
    """The user's error if there is one, else the rank that torchrun saw fail first and the end of the log."""
    summary = log[log.find("Root Cause") :]
    rank, code = re.search(r"rank\s+: (\d+)", summary), re.search(r"exitcode\s+: (-?\d+)", summary)
    root = int(rank.group(1)) if rank else -1
    for error in sorted(errors, key=lambda e: e["rank"] != root):
        return reported_error(error)
    number = int(code.group(1)) if code else 1
    how = f"was killed by signal {-number}" if number < 0 else f"ended with code {number}"
    tail = "\n".join(deque(log.splitlines(), maxlen=_TAIL_LINES)) if number >= 0 else ""
    return TrainingError(
        f"rank {root} {how}; all others were stopped" if rank else "the worker processes failed",
        given=tail or f"exit code {number}",
        required="all ranks alive until the end",
        todo="signal 9 is often the system out of memory; use smaller batches or more devices" if number == -9 else "",
    )


def reported_error(event: dict[str, Any]) -> TrainingError:
    """The error that a worker has reported."""
    return TrainingError(event["what"], given=event["given"], required=event["required"], todo=event["todo"])

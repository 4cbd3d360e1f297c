"""How a run ended, and how that is gathered from what the supervisor tells."""

from collections.abc import Callable
from dataclasses import dataclass

from testbed.messages import Message

TIMEOUT_EXIT_CODE = 124
"""As timeout(1) has it."""

LineListener = Callable[[int, str, str], None]
"""Called with rank, `stdout` or `stderr`, and a line without its end, as soon as it is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResult:
    """How one rank ended, and what it wrote. Negative exit codes are signals, as in `subprocess`."""

    rank: int
    exit_code: int
    ended_by_testbed: bool  # because of another rank, the time limit, or a stop
    stdout: str
    stderr: str
    out_of_memory: bool = False  # the kernel has killed a process of the rank: its memory limit was reached


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended: its ranks in order, and the exit code of the first that failed by itself (124: time was up)."""

    ranks: tuple[RankResult, ...]
    exit_code: int
    timed_out: bool
    seconds: float


class ResultCollector:
    """What has been heard of a run so far."""

    def __init__(self, num_ranks: int, on_line: LineListener | None) -> None:
        self.done = False
        self._on_line = on_line
        self._lines: dict[tuple[int, str], list[str]] = {
            (rank, stream): [] for rank in range(num_ranks) for stream in ("stdout", "stderr")
        }
        self._exits: dict[int, tuple[int, bool, bool]] = {}  # in the order in which they ended
        self._timed_out = False

    def take(self, message: Message) -> None:
        match message["event"]:
            case "line":
                self._lines[message["rank"], message["stream"]].append(message["text"])
                if self._on_line is not None:
                    self._on_line(message["rank"], message["stream"], message["text"])
            case "exit":
                self._exits[message["rank"]] = (message["code"], message["ended"], message["out_of_memory"])
            case "done":
                self.done, self._timed_out = True, message["timed_out"]

    def result(self, seconds: float) -> RunResult:
        ranks = tuple(
            RankResult(
                rank=rank,
                exit_code=code,
                ended_by_testbed=ended,
                out_of_memory=out_of_memory,
                stdout="".join(f"{line}\n" for line in self._lines[rank, "stdout"]),
                stderr="".join(f"{line}\n" for line in self._lines[rank, "stderr"]),
            )
            for rank, (code, ended, out_of_memory) in sorted(self._exits.items())
        )
        failed = [code for code, ended, _ in self._exits.values() if code != 0 and not ended]
        exit_code = failed[0] if failed else TIMEOUT_EXIT_CODE if self._timed_out else 0
        return RunResult(ranks=ranks, exit_code=exit_code, timed_out=self._timed_out, seconds=seconds)

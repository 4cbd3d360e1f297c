"""The ranks of a topology, started once: the benchmark asks, all ranks do, the first answers.

Requests and answers are files in a folder that both sides see; `plan_quality_rank`, or another module, is the other
side.
"""

import json
import sys
import time
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Self

from planloom.errors import PlanloomError
from testbed import OpenDevices
from testbed.results import RunResult

_LIMIT_SECONDS = 3600.0
_POLL_SECONDS = 0.05


class Ranks:
    """Between `with` and its end: processes on all devices that carry out requests."""

    def __init__(self, devices: OpenDevices, folder: Path, module: str = "benchmarks.plan_quality_rank") -> None:
        self._devices, self._folder, self._number = devices, folder, 0
        self._module = module
        self._result: RunResult | None = None
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            path.unlink()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._write({"do": "end"})
            self._thread.join()

    def ask(self, do: str, **details: Any) -> Any:
        """The first rank's answer when all have done it."""
        self._write({"do": do, **details})
        answer = self._folder / f"{self._number:03}.answer"
        while not answer.is_file():
            if not self._thread.is_alive():
                raise SystemExit(self._why())
            time.sleep(_POLL_SECONDS)
        self._number += 1
        return json.loads(answer.read_text())

    def _write(self, request: dict[str, Any]) -> None:
        partly = self._folder / f"{self._number:03}.request"
        partly.write_text(json.dumps(request))
        partly.rename(self._folder / f"{self._number:03}.json")  # all at once: ranks are waiting for it

    def _run(self) -> None:
        command = [sys.executable, "-m", self._module, str(self._folder)]
        try:
            self._result = self._devices.run(command, timeout_seconds=_LIMIT_SECONDS)
        except (OSError, RuntimeError, PlanloomError) as error:
            self._error = error

    def _why(self) -> str:
        if self._result is None:
            return f"the ranks could not run: {self._error}"
        texts = [f"rank {rank.rank}: {rank.stderr[-3000:]}" for rank in self._result.ranks if rank.exit_code]
        return "\n".join(texts) or f"the ranks ended with {self._result.exit_code}"

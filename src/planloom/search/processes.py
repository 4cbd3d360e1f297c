"""Search shapes in several processes, which tell each other the best estimate so far.

Processes are forked: they have the model, the tables of kernels and whatever was priced before, and send back only what
they found. Where nothing can be forked, or there is little to do, everything happens here.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any, TypeVar

from planloom.errors import PlanError

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[[str, int, int], None]

_FEW = 6
"""Items for which it is not worth to fork."""
_PATIENCE_SECONDS = 600.0
"""A process that says nothing for so long is taken to hang."""


class SharedSeconds:
    """The least number of seconds that any process has found."""

    def __init__(self, context: ForkContext | None = None) -> None:
        self._cell: Any = context.Value("d", float("inf")) if context is not None else None
        self._own = float("inf")

    def __getstate__(self) -> dict[str, Any]:
        return {"_cell": None, "_own": self.value}  # what goes to another process is a number

    @property
    def value(self) -> float:
        return min(self._own, float(self._cell.value)) if self._cell is not None else self._own

    def lower(self, seconds: float) -> None:
        self._own = min(self._own, seconds)
        if self._cell is not None:
            with self._cell.get_lock():
                self._cell.value = min(self._cell.value, seconds)


def in_processes(
    work: Callable[[Item, SharedSeconds], Result],
    items: Sequence[Item],
    shared: SharedSeconds,
    *,
    progress: Progress | None = None,
) -> Iterator[Result]:
    """The results of all items, in any order."""
    count = min(os.cpu_count() or 1, len(items))
    if count < 2 or len(items) <= _FEW or "fork" not in multiprocessing.get_all_start_methods():
        for i, item in enumerate(items):
            if progress is not None:
                progress(str(item), i, len(items))
            yield work(item, shared)
        return
    yield from _forked(work, items, count, progress)


def _forked(
    work: Callable[[Item, SharedSeconds], Result], items: Sequence[Item], count: int, progress: Progress | None
) -> Iterator[Result]:
    context = multiprocessing.get_context("fork")
    shared, following = SharedSeconds(context), context.Value("i", 0)

    def serve(out: Connection) -> None:
        while True:
            with following.get_lock():
                at = following.value
                following.value += 1
            if at >= len(items):
                return
            try:
                out.send((work(items[at], shared), None))
            except Exception as error:
                out.send((None, error))
                raise

    pipes: dict[Connection, ForkProcess] = {}
    for _ in range(count):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        pipes[ours] = process
    try:
        yield from _received(pipes, items, progress)
    finally:
        for process in pipes.values():
            process.kill()
            process.join()


def _received(pipes: dict[Connection, ForkProcess], items: Sequence[Item], progress: Progress | None) -> Iterator[Any]:
    num_done, waiting = 0, dict(pipes)
    while waiting:
        ready = wait(list(waiting), timeout=_PATIENCE_SECONDS)
        if not ready:
            raise PlanError("a process of the search hangs", given=f"nothing for {_PATIENCE_SECONDS:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                result, error = pipe.recv()
            except EOFError:
                process = waiting.pop(pipe)
                process.join(_PATIENCE_SECONDS)
                continue
            if error is not None:
                raise error
            num_done += 1
            if progress is not None:
                progress(str(items[min(num_done, len(items) - 1)]), num_done, len(items))
            yield result
    if num_done < len(items):
        raise PlanError(
            "a process of the search was killed",
            given=f"{num_done} of {len(items)} shapes were searched",
            required="all of them",
            todo="give it more memory, or pin some degrees (--pp, --tp)",
        )

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


_SAME = 1e-9
"""Of two numbers of seconds that differ by less than this share, one is kept: the same plan under another name."""


class BestSeconds:
    """The least numbers of seconds that any process has found, so many of them as are wanted."""

    def __init__(self, num_wanted: int, context: ForkContext | None = None) -> None:
        self.num_wanted = num_wanted
        self._cells: Any = context.Array("d", [float("inf")] * num_wanted) if context is not None else None
        self._own = [float("inf")] * num_wanted

    @property
    def values(self) -> list[float]:
        return list(self._cells) if self._cells is not None else list(self._own)

    @property
    def least(self) -> float:
        return self.values[0]

    @property
    def last(self) -> float:
        """What is not below this is none of the best; infinite until there are as many as wanted."""
        return self.values[-1]

    def add(self, seconds: float) -> None:
        if self._cells is None:
            self._own = _with(self._own, seconds)
            return
        with self._cells.get_lock():
            self._cells[:] = _with(list(self._cells), seconds)

    def shared(self, context: ForkContext) -> "BestSeconds":
        """The same numbers where several processes see and change them."""
        found = BestSeconds(self.num_wanted, context)
        for seconds in self.values:
            found.add(seconds)
        return found


def is_same(one: float, other: float) -> bool:
    """Are two estimates those of one plan under two names?"""
    return abs(one - other) <= _SAME * one


def _with(values: list[float], seconds: float) -> list[float]:
    if any(value < float("inf") and is_same(value, seconds) for value in values):
        return values
    return sorted([*values, seconds])[: len(values)]


def in_processes(
    work: Callable[[Item, BestSeconds], Result],
    items: Sequence[Item],
    best: BestSeconds,
    *,
    progress: Progress | None = None,
    few: int = _FEW,
) -> Iterator[Result]:
    """The results of all items, in any order; `best` is what is known before, and all processes see what is
    added. Up to `few` items are not worth another process."""
    count = min(os.cpu_count() or 1, len(items))
    if count < 2 or len(items) <= few or "fork" not in multiprocessing.get_all_start_methods():
        for i, item in enumerate(items):
            if progress is not None:
                progress(str(item), i, len(items))
            yield work(item, best)
        return
    yield from _forked(work, items, count, best, progress)


def _forked(
    work: Callable[[Item, BestSeconds], Result],
    items: Sequence[Item],
    count: int,
    best: BestSeconds,
    progress: Progress | None,
) -> Iterator[Result]:
    context = multiprocessing.get_context("fork")
    shared, following = best.shared(context), context.Value("i", 0)

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

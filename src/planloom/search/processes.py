"""Search shapes in several processes, which tell each other the best estimate so far.

Processes are forked: they have the model, the tables of kernels and whatever was priced before, and send back only what
they found. Where nothing can be forked, or there is little to do, everything happens here.
"""

import multiprocessing
import os
import time
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


def can_fork() -> bool:
    """May this process have others? One that may be ended at any time has none, for they would outlive it."""
    return "fork" in multiprocessing.get_all_start_methods() and not multiprocessing.current_process().daemon


def fork_context() -> ForkContext | None:
    """What makes numbers that processes share; None where there will be none."""
    return multiprocessing.get_context("fork") if can_fork() else None


def within_seconds(
    work: Callable[[Item, Callable[[Result], None]], None],
    items: Sequence[Item],
    seconds: float,
    *,
    progress: Progress | None = None,
) -> list[Result | None]:
    """For every item the last result that its work told in the seconds that it had; None if it told nothing.

    Every item has a process of its own, as many at a time as there are processors; it is ended when its time is over.
    Where nothing can be forked, nothing can be ended either, and so nothing is begun.
    """
    told: list[Result | None] = [None] * len(items)
    if not can_fork():
        return told
    context, at_once = multiprocessing.get_context("fork"), min(os.cpu_count() or 1, len(items))
    waiting = list(reversed(range(len(items))))
    running: dict[Connection, tuple[int, ForkProcess, float]] = {}

    def serve(number: int, out: Connection) -> None:
        work(items[number], out.send)

    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                number = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=serve, args=(number, theirs), daemon=True)
                process.start()
                theirs.close()
                running[ours] = (number, process, time.monotonic() + seconds)
                if progress is not None:
                    progress(str(items[number]), len(items) - len(waiting) - len(running), len(items))
            soonest = min(deadline for _, _, deadline in running.values())
            ready = wait(list(running), timeout=max(0.0, soonest - time.monotonic()))
            for pipe, (number, process, deadline) in list(running.items()):
                is_over = time.monotonic() > deadline
                if pipe in ready:
                    try:
                        told[number] = pipe.recv()
                    except EOFError:
                        is_over = True
                if is_over:
                    process.kill()
                    process.join()
                    pipe.close()
                    del running[pipe]
    finally:
        for _, process, _ in running.values():
            process.kill()
            process.join()
    return told


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
    if count < 2 or len(items) <= few or not can_fork():
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

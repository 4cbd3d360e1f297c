"""Communication in the background: one thread that carries out what it is given, first in, first out.

gloo's collectives return at once, but a program of several steps, or one made of rings, needs someone to start the next
step when the last has ended. A daemon thread: a process that ends does not wait for communication that will not come.
"""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")
Span = tuple[float, float]


class Task(Generic[Result]):
    """What was given to the thread: `result()` waits for it, and raises what it raised."""

    def __init__(self, function: Callable[[], Result]) -> None:
        self._function: Callable[[], Result] | None = function
        self._done = threading.Event()
        self._results: list[Result] = []
        self._error: BaseException | None = None
        self.span: Span | None = None
        """When it was carried out, by `time.perf_counter`."""

    def carry_out(self) -> None:
        assert self._function is not None
        start = time.perf_counter()
        try:
            self._results.append(self._function())
        except BaseException as error:
            self._error = error  # raised again where the result is asked for
        self._function = None  # and with it the arrays that it holds
        self.span = (start, time.perf_counter())
        self._done.set()

    def result(self) -> Result:
        self._done.wait()  # what it waits for has a time limit of its own
        if self._error is not None:
            raise self._error
        return self._results[0]


class Background:
    """The thread, started at first use."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Task[object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, function: Callable[[], Result]) -> Task[Result]:
        """Carry out a function when all before it are done."""
        if self._thread is None:
            threads = torch.get_num_threads()
            self._thread = threading.Thread(target=self._run, args=(threads,), name="planloom-wire", daemon=True)
            self._thread.start()
        task = Task(function)
        self._queue.put(task)  # type: ignore[arg-type]
        return task

    def close(self) -> None:
        """End the thread when its work is done."""
        self._queue.put(None)

    def _run(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # OpenMP counts them for each thread
        with torch.no_grad():
            while (task := self._queue.get()) is not None:
                task.carry_out()
                del task

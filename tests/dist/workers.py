"""Worker processes that are started once and run many cases: a pool of gloo ranks on this machine."""

import importlib
import multiprocessing as mp
import os
import socket
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def _serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    while (task := pipe.recv()) is not None:
        module, function, args = task
        try:
            pipe.send(("ok", getattr(importlib.import_module(module), function)(rank, *args)))
        except Exception as error:  # sent to the test, which raises it
            pipe.send(("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()


class Pool:
    """`run(function, *args)` calls `function(rank, *args)` on every rank and returns all results."""

    def __init__(self, world: int) -> None:
        context, port = mp.get_context("spawn"), free_port()
        self._pipes, self._processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, port, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Any, *args: Any, timeout_seconds: float = 120) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__name__, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout_seconds):
                raise TimeoutError(f"rank {rank} did not answer within {timeout_seconds} s")
            results.append(pipe.recv())
        failed = [f"rank {rank}: {text}" for rank, (state, text) in enumerate(results) if state == "error"]
        if failed:
            raise AssertionError("\n".join(failed))
        return [value for _, value in results]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()


class Pools(dict[int, Pool]):
    """Pools by number of ranks, each started at first use."""

    def __missing__(self, world: int) -> Pool:
        self[world] = Pool(world)
        return self[world]

    def close(self) -> None:
        for pool in self.values():
            pool.close()

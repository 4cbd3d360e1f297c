"""Watch: no process outlives a dead one.

Every rank's thread writes a heartbeat to a key-value store and reads the others'. A rank whose heartbeat stands still
is dead or stopped: every other rank names it and ends. So no wait lasts longer than `stale_seconds`, whatever it waits
for, and a step that fails because a peer is gone can say which. The first who finds a dead rank writes its name down,
so that those who end because of it are not taken for the cause.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from planloom.errors import TrainingError

EXIT_CODE = 3
_DEAD = "planloom/dead"
_DONE = b"done"


def start_watch(*, stale_seconds: float = 12.0) -> "Watch":
    """A watch over all ranks of the default process group, on a store of its own at rank 0."""
    rank, world = dist.get_rank(), dist.get_world_size()
    host = os.environ.get("MASTER_ADDR", "localhost")
    limit = timedelta(seconds=60)
    address: list[object] = [None]
    store = None
    if rank == 0:
        store = TCPStore(host, 0, is_master=True, timeout=limit, wait_for_workers=False)
        address = [store.port]
    dist.broadcast_object_list(address, src=0)
    if store is None:
        store = TCPStore(host, int(str(address[0])), is_master=False, timeout=limit)
    watch = Watch(store, rank, world, stale_seconds=stale_seconds)
    watch.start()
    atexit.register(_stop_at_exit, watch)
    return watch


def _stop_at_exit(watch: "Watch") -> None:
    """A script that ends well need not close its trainer; one that ends with an exception is missed, and named."""
    if not hasattr(sys, "last_value"):
        watch.stop()


class Watch:
    """A heartbeat of this rank and an eye on all others."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        beat_seconds: float = 0.5,
        stale_seconds: float = 12.0,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self._store, self._rank, self._world = store, rank, world_size
        self._beat_seconds, self._stale_seconds = beat_seconds, stale_seconds
        self._on_death = on_death or _end_process
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._known_dead: tuple[int, ...] = ()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="planloom-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """A rank that ends well says so, and is not missed."""
        self._stop.set()
        self._thread.join(timeout=2 * self._beat_seconds + 1)
        try:
            self._store.set(_key(self._rank), _DONE.decode())
        except RuntimeError:
            return  # the store ended first, with rank 0: then all are done

    def explain(self, error: Exception) -> TrainingError:
        """A failed communication, with the name of the rank that is gone. This rank's heartbeat ends."""
        dead = self._find_dead(within_seconds=6 * self._beat_seconds)
        self.stop()
        if self._rank == 0:
            time.sleep(4 * self._beat_seconds)  # the store lives here: others may still have to read the name
        return TrainingError(
            f"rank {self._rank} lost its peers: {_name(dead)}",
            given=str(error).splitlines()[0] if str(error) else type(error).__name__,
            required="all ranks alive until the step ends",
            todo="look at the log of the rank named here, then start again from the last checkpoint",
        )

    def _find_dead(self, *, within_seconds: float) -> tuple[int, ...]:
        deadline = time.monotonic() + within_seconds
        while time.monotonic() < deadline and not self._known_dead:
            self._look(stale_seconds=3 * self._beat_seconds)
            time.sleep(self._beat_seconds / 2)
        return self._known_dead

    def _run(self) -> None:
        beat = 0
        while not self._stop.wait(self._beat_seconds):
            beat += 1
            self._look(stale_seconds=self._stale_seconds, beat=str(beat))
            if self._known_dead and not self._stop.wait(8 * self._beat_seconds):
                # The step did not fail by itself in the meantime: end it.
                self._on_death(f"rank {self._rank} ends: {_name(self._known_dead)}")
                return

    def _look(self, *, stale_seconds: float, beat: str = "") -> None:
        """Read all heartbeats; write down who is dead unless somebody has."""
        if self._known_dead:
            return
        try:
            if beat:
                self._store.set(_key(self._rank), beat)
            if not self._store.check([_DEAD]):
                stale = self._stale(stale_seconds)
                if not stale:
                    return
                self._store.compare_set(_DEAD, "", ",".join(map(str, stale)))
            self._known_dead = tuple(int(rank) for rank in self._store.get(_DEAD).decode().split(","))
        except RuntimeError:
            self._known_dead = (0,)  # the store is at rank 0

    def _stale(self, after: float) -> tuple[int, ...]:
        now, dead = time.monotonic(), []
        for rank in range(self._world):
            if rank == self._rank:
                continue
            value = self._store.get(_key(rank)) if self._store.check([_key(rank)]) else b""
            if rank not in self._seen or self._seen[rank][0] != value:
                self._seen[rank] = (value, now)
            elif value != _DONE and now - self._seen[rank][1] > after:
                dead.append(rank)
        return tuple(dead)


def _key(rank: int) -> str:
    return f"planloom/heartbeat/{rank}"


def _name(dead: tuple[int, ...]) -> str:
    if not dead:
        return "no rank was seen to die; one of them failed in the step"
    ranks = ", ".join(map(str, dead))
    return f"rank{'s' * (len(dead) > 1)} {ranks} no longer answer{'s' * (len(dead) == 1)}"


def _end_process(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)

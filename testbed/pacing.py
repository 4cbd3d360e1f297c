"""Two kinds of small processes that make quotas exact while ranks run, one of each on every core.

The kernel notices that a group has used up its quota, or may run again, when the core next comes to its scheduler: at a
tick, every 4 ms where HZ is 250. A group that waits for 4 ms, or for several times that beside three others, loses
quota, since what it could not use within a period of 5 ms is not added to the next. So ranks get less the more the
others do: 0.15 of a core instead of 0.20 with eight of them ([Empirical] 2 vCPU AMD EPYC, Linux 6.18, 2026-11-16).

    metronome   sleeps for a millisecond, for ever, with real-time priority: a core comes to its scheduler at each beat
    filler      runs when nothing else wants to, so that the core never sleeps. A virtual core that has slept comes back
                slow: the same loop then takes up to 1.7 times as much CPU time, and only while the others are idle
                ([Empirical] as above)

With both, 4 x 0.4 and 8 x 0.2 of two cores get their shares to within 2 % while the others idle or compute; while they
send, the same work takes 2 to 7 % longer (`README.md` has the table).
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress

BEAT_SECONDS = 0.001


def start(cores: "list[int]") -> None:
    """Start a metronome and a filler on each core. They end with the run: the supervisor kills all that is left."""
    for core in cores:
        _fork(core, _beat)
        _fork(core, _fill)


def _beat() -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:  # a container may have no real-time share: the next best
        with suppress(OSError):
            os.nice(-20)
    sleep = time.sleep
    while True:
        sleep(BEAT_SECONDS)


def _fill() -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


def _fork(core: int, work: Callable[[], None]) -> None:
    if os.fork() == 0:
        try:
            os.sched_setaffinity(0, {core})
            work()
        finally:
            os._exit(1)

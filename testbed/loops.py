"""The rank that measures its own speed: nothing but Python's own library, run as a file.

Some ranks are measured, one on each core; rank 0, one of them, leads. Before each loop it writes what the others shall
do into a file that all see, and a new number. The measured ranks see the number, wait for the others to change over,
time the loop by the clock and in CPU time, and write the number down as done. The others look many times a second:

    idle      nothing
    compute   arithmetic without end
    send      each sends to the next of the others without end, and receives
"""

import json
import mmap
import os
import socket
import threading
import time

IDLE, COMPUTE, SEND, OVER = range(4)
MODES = {"idle": IDLE, "compute": COMPUTE, "send": SEND}
LIMIT_SECONDS = 60.0
_PORT = 7702
_LOOK_SECONDS = 0.01
_SETTLE_SECONDS = 0.1
_NUM_TRIED = 200_000
_BLOCK = bytes(1 << 16)


class _Board:
    """The file that all see: what to do, the number of the loop, and the number that each rank has done."""

    def __init__(self, path: str, num_ranks: int) -> None:
        with open(path, "r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 2 + num_ranks)
        self.num_ranks = num_ranks
        self._deadline = time.monotonic() + float(os.environ["TESTBED_LOOPS_SECONDS"])

    def mode(self) -> int:
        return OVER if time.monotonic() > self._deadline else self._bytes[0]

    def say(self, mode: int, number: int) -> None:
        self._bytes[0] = mode
        self._bytes[1] = number

    def done(self, rank: int, number: int) -> None:
        self._bytes[2 + rank] = number

    def wait_for_number(self, number: int) -> None:
        while self._bytes[1] != number and self.mode() != OVER:
            time.sleep(_LOOK_SECONDS / 4)

    def wait_for_ranks(self, ranks: "list[int]", number: int) -> None:
        while any(self._bytes[2 + rank] != number for rank in ranks) and self.mode() != OVER:
            time.sleep(_LOOK_SECONDS)


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = json.loads(os.environ["TESTBED_LOOPS"])
    board = _Board(plan["file"], world)
    others = [other for other in range(world) if other not in plan["measured"]]
    if rank in others:
        _follow(board, rank, others, plan["addresses"])
    else:
        _measure(board, rank, plan)


def _measure(board: _Board, rank: int, plan: "dict[str, object]") -> None:
    modes = [str(name) for name in plan["modes"]] * int(str(plan["rounds"]))  # type: ignore[attr-defined]
    measured = [int(other) for other in plan["measured"]]  # type: ignore[attr-defined]
    count = _calibrated(float(str(plan["cpu_seconds"])))
    board.done(rank, 1)
    board.wait_for_ranks(list(range(board.num_ranks)), 1)
    for number, name in enumerate(modes, start=2):
        if rank == 0:
            board.say(MODES[name], number)
        board.wait_for_number(number)
        time.sleep(_SETTLE_SECONDS)
        clock, used = time.perf_counter(), time.process_time()
        _loop(count)
        seconds, cpu_seconds = time.perf_counter() - clock, time.process_time() - used
        print(json.dumps({"mode": name, "seconds": seconds, "cpu_seconds": cpu_seconds}), flush=True)
        board.done(rank, number)
        if rank == 0:
            board.wait_for_ranks(measured, number)
    if rank == 0:
        board.say(OVER, 0)


def _calibrated(cpu_seconds: float) -> int:
    """How many turns of the loop take about this much CPU time here."""
    fastest = float("inf")
    for _ in range(5):
        used = time.process_time()
        _loop(_NUM_TRIED)
        fastest = min(fastest, time.process_time() - used)
    return max(1, round(_NUM_TRIED * cpu_seconds / fastest))


def _loop(count: int) -> int:
    total = 0
    for number in range(count):
        total += number * number
    return total


def _follow(board: _Board, rank: int, others: "list[int]", addresses: "list[str]") -> None:
    flow = None
    if len(others) > 1:
        with socket.create_server((os.environ["TESTBED_ADDRESS"], _PORT)) as listener:
            listener.settimeout(LIMIT_SECONDS)
            flow = _connect(addresses[others[(others.index(rank) + 1) % len(others)]])
            source, _ = listener.accept()
        threading.Thread(target=_receive, args=(source,), daemon=True).start()
    board.done(rank, 1)
    while (mode := board.mode()) != OVER:
        if mode == COMPUTE:
            _loop(1000)
        elif mode == SEND and flow is not None:
            try:
                flow.sendall(_BLOCK)
            except ConnectionError:  # the receiver has seen the end before us
                return
        else:
            time.sleep(_LOOK_SECONDS)


def _receive(source: socket.socket) -> None:
    buffer = bytearray(1 << 16)
    try:
        while source.recv_into(buffer):
            pass
    except ConnectionResetError:
        return


def _connect(address: str) -> socket.socket:
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            return socket.create_connection((address, _PORT), timeout=LIMIT_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_LOOK_SECONDS)


if __name__ == "__main__":
    main()

"""The rank that measures: TCP flows between devices, nothing but Python's own library, run as a file.

Rank 0 leads. For each trial it waits until all ranks are ready and names a start; all processes are on one machine and
have one clock. A sender sends from the start for `settle_seconds` and `measure_seconds`; the receiver notes the time of
every arrival, and counts what arrived in the second of these spans.
"""

import bisect
import json
import os
import socket
import struct
import sys
import threading
import time

LEAD_PORT, FLOW_PORT = 7700, 7701
LIMIT_SECONDS = 60.0
_LEAD_SECONDS = 0.15  # for the go to arrive, and senders to connect
_BLOCK = bytes(1 << 17)


def main() -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    plan = json.loads(os.environ["TESTBED_TRIALS"])
    listener = _listen(os.environ["TESTBED_ADDRESS"], FLOW_PORT)
    lead = _Lead(world) if rank == 0 else None
    follow = None if rank == 0 else _connect(os.environ["MASTER_ADDR"], LEAD_PORT)
    for trial in plan["trials"]:
        start = lead.go() if lead else _hear_go(follow)
        spans = (start, plan["settle_seconds"], trial["measure_seconds"])
        tasks = []
        for number, (source, destination) in enumerate(trial["flows"]):
            if rank == source:
                address = plan["addresses"][destination]
                tasks.append(threading.Thread(target=_send, args=(address, number, *spans)))
            if rank == destination:
                tasks.append(threading.Thread(target=_receive, args=(listener, trial["number"], *spans)))
        for task in tasks:
            task.start()
        for task in tasks:
            task.join()


class _Lead:
    def __init__(self, world: int) -> None:
        listener = _listen(os.environ["TESTBED_ADDRESS"], LEAD_PORT)
        self.followers = [listener.accept()[0] for _ in range(world - 1)]

    def go(self) -> float:
        for follower in self.followers:
            follower.settimeout(LIMIT_SECONDS)
            _read(follower, 1)
        start = time.monotonic() + _LEAD_SECONDS
        for follower in self.followers:
            follower.sendall(struct.pack("!d", start))
        return start


def _hear_go(follow: "socket.socket | None") -> float:
    assert follow is not None
    follow.sendall(b"r")
    return float(struct.unpack("!d", _read(follow, 8))[0])


def _send(address: str, number: int, start: float, settle: float, measure: float) -> None:
    with _connect(address, FLOW_PORT) as flow:
        flow.sendall(struct.pack("!i", number))
        time.sleep(max(0.0, start - time.monotonic()))
        while time.monotonic() < start + settle + measure:
            flow.sendall(_BLOCK)


def _receive(listener: socket.socket, trial: int, start: float, settle: float, measure: float) -> None:
    flow, _ = listener.accept()
    flow.settimeout(LIMIT_SECONDS)
    number = struct.unpack("!i", _read(flow, 4))[0]
    times, totals, buffer = [start], [0], bytearray(len(_BLOCK))
    while got := flow.recv_into(buffer):
        times.append(time.monotonic())
        totals.append(totals[-1] + got)
    begin, end = start + settle, start + settle + measure
    rate = (_total_at(end, times, totals) - _total_at(begin, times, totals)) / measure
    line = json.dumps({"trial": trial, "flow": number, "bytes_per_second": rate})
    sys.stdout.write(line + "\n")  # one write: two threads may have a flow each
    sys.stdout.flush()


def _total_at(moment: float, times: "list[float]", totals: "list[int]") -> float:
    """What had arrived by a moment, between two arrivals in proportion."""
    after = bisect.bisect_left(times, moment)
    if after == len(times):
        return totals[-1]
    if after == 0:
        return 0.0
    share = (moment - times[after - 1]) / (times[after] - times[after - 1])
    return totals[after - 1] + share * (totals[after] - totals[after - 1])


def _listen(address: str, port: int) -> socket.socket:
    listener = socket.create_server((address, port), backlog=128)
    listener.settimeout(LIMIT_SECONDS)
    return listener


def _connect(address: str, port: int) -> socket.socket:
    """Connect to a rank that may not have started yet."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            return socket.create_connection((address, port), timeout=LIMIT_SECONDS)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = connection.recv(size - len(data))
        if not chunk:
            raise ConnectionError("the other rank has gone")
        data += chunk
    return data


if __name__ == "__main__":
    main()

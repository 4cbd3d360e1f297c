"""A rank of a testbed: one device sends to another; every rank then tells by which interfaces it has sent."""

import json
import os
import socket
import sys
import time
from pathlib import Path

SCRATCH = Path(os.environ["TESTBED_CLUSTER"]).parent  # the same folder for all ranks, gone with the testbed
LIMIT_SECONDS = 20.0


def sent_bytes() -> dict[str, int]:
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    return {line.split(":")[0].strip(): int(line.split(":")[1].split()[8]) for line in lines}


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit(f"{path} did not appear")
        time.sleep(0.01)


def main() -> None:
    source, destination, size = map(int, sys.argv[1:])
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    ready, done = SCRATCH / f"ready-{port}", SCRATCH / f"done-{port}"
    before = sent_bytes()
    if rank == destination:
        listener = socket.create_server((os.environ["TESTBED_ADDRESS"], port))
        ready.touch()
        connection, _ = listener.accept()
        received = 0
        while chunk := connection.recv(1 << 16):
            received += len(chunk)
        assert received == size
        done.touch()
    elif rank == source:
        wait_for(ready)
        with socket.create_connection((f"device{destination}", port), timeout=LIMIT_SECONDS) as connection:
            connection.sendall(bytes(size))
    wait_for(done)
    after = sent_bytes()
    print(json.dumps([name for name in after if after[name] - before[name] > size / 2]))


if __name__ == "__main__":
    main()

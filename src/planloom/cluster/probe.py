"""What a CPU core and the loopback of this machine do, measured in about two seconds.

Every core gets a process of its own that is pinned to it, since that is how CPU devices are used: one process a core,
one BLAS thread a process, all at work at once. Such a worker is this very file run as a script, with numpy and the
standard library only. It says `ready`, waits for a line, and answers with one JSON document.

Of repeated measurements the best counts: what else runs on the machine can only slow one down.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_SECONDS = 0.25  # of each measurement
_MATRIX = 512  # rows of the matrices of the product: 1 MiB in float32, beyond the reach of call overhead
_COPIED_BYTES = 64 * 2**20  # by one core at a time: several times its share of any last-level cache
_PING = b"\0" * 8
_NUM_PINGS = 300
_CHUNK_BYTES = 2**20
_ROUND_CHUNKS = 32
_TIMEOUT_SECONDS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreRates:
    """What one core does while all others do the same."""

    float32_flops_per_second: float
    float64_flops_per_second: float
    memory_bytes_per_second: float
    call_seconds: float  # of the smallest operation: what launching a kernel costs here


@dataclass(frozen=True, slots=True, kw_only=True)
class Loopback:
    """TCP between two processes of this machine."""

    bytes_per_second: float
    latency_seconds: float


def measure_cores(cpus: Sequence[int]) -> CoreRates:
    """The mean over these CPUs, all measured at once."""
    workers = [_start("rates", str(cpu)) for cpu in cpus]
    try:
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()  # ready: numpy is loaded, the arrays are written
        answers = []
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            text, _ = worker.communicate(timeout=_TIMEOUT_SECONDS)
            answers.append(json.loads(text))
    finally:
        _stop(workers)
    return CoreRates(
        float32_flops_per_second=statistics.fmean(answer["float32"] for answer in answers),
        float64_flops_per_second=statistics.fmean(answer["float64"] for answer in answers),
        memory_bytes_per_second=statistics.fmean(answer["memory"] for answer in answers),
        call_seconds=statistics.fmean(answer["call"] for answer in answers),
    )


def measure_loopback(cpu: int, other_cpu: int) -> Loopback:
    """TCP between a process on one CPU and one on another."""
    allowed = os.sched_getaffinity(0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(_TIMEOUT_SECONDS)
        worker = _start("echo", str(other_cpu), str(server.getsockname()[1]))
        try:
            connection, _ = server.accept()
            os.sched_setaffinity(0, {cpu})
            with connection:
                connection.settimeout(_TIMEOUT_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                latency = _ping_seconds(connection) / 2
                return Loopback(bytes_per_second=_stream_rate(connection), latency_seconds=latency)
        finally:
            os.sched_setaffinity(0, allowed)
            _stop([worker])


def _ping_seconds(connection: socket.socket) -> float:
    seconds = []
    for _ in range(_NUM_PINGS):
        start = time.perf_counter()
        connection.sendall(_PING)
        _receive(connection, len(_PING))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _stream_rate(connection: socket.socket) -> float:
    chunk = memoryview(bytearray(_CHUNK_BYTES))

    def send() -> None:
        for _ in range(_ROUND_CHUNKS):
            connection.sendall(chunk)
        _receive(connection, 1)

    return _ROUND_CHUNKS * _CHUNK_BYTES / _best_seconds(send)


def _receive(connection: socket.socket, num_bytes: int) -> None:
    while num_bytes:
        received = len(connection.recv(num_bytes))
        if not received:
            raise ConnectionError("the other process has gone")
        num_bytes -= received


def _best_seconds(work: Callable[[], object], *, seconds: float = _SECONDS) -> float:
    """Of as many calls as fit into so many seconds, two at least, the shortest."""
    best, spent = float("inf"), 0.0
    work()
    while spent < seconds:
        start = time.perf_counter()
        work()
        took = time.perf_counter() - start
        best, spent = min(best, took), spent + took
    return best


def _start(*arguments: str) -> subprocess.Popen[str]:
    # -P: this folder's modules must not be found by their bare names.
    command = [sys.executable, "-P", __file__, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _stop(workers: Sequence[subprocess.Popen[str]]) -> None:
    for worker in workers:
        worker.kill()
        worker.wait()
        for stream in (worker.stdin, worker.stdout):
            if stream is not None:
                stream.close()


def _answer_rates(cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    import numpy

    singles = numpy.ones((_MATRIX, _MATRIX), dtype=numpy.float32)
    doubles = numpy.ones((_MATRIX, _MATRIX), dtype=numpy.float64)
    source, target = (numpy.ones(_COPIED_BYTES // 2 // 8, dtype=numpy.float64) for _ in range(2))
    zero = numpy.zeros(1, dtype=numpy.float32)
    print("ready", flush=True)
    sys.stdin.readline()
    flops = 2 * _MATRIX**3

    def many_calls() -> None:
        for _ in range(1000):
            numpy.add(zero, zero, out=zero)

    answer = {
        "float32": flops / _best_seconds(lambda: singles @ singles),
        "float64": flops / _best_seconds(lambda: doubles @ doubles),
        "memory": (source.nbytes + target.nbytes) / _best_seconds(lambda: numpy.copyto(target, source)),
        "call": _best_seconds(many_calls, seconds=0.01) / 1000,
    }
    print(json.dumps(answer), flush=True)


def _answer_echo(cpu: int, port: int) -> None:
    os.sched_setaffinity(0, {cpu})
    with socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_SECONDS) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_NUM_PINGS):
            _receive(connection, len(_PING))
            connection.sendall(_PING)
        buffer, received = bytearray(_CHUNK_BYTES), 0
        while num_bytes := connection.recv_into(buffer):
            received += num_bytes
            if received == _ROUND_CHUNKS * _CHUNK_BYTES:
                connection.sendall(b"\0")
                received = 0


if __name__ == "__main__":
    if sys.argv[1] == "rates":
        _answer_rates(int(sys.argv[2]))
    else:
        _answer_echo(int(sys.argv[2]), int(sys.argv[3]))

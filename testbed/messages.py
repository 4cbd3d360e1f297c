"""What the testbed and its supervisor tell each other: JSON values, one a line, over a socket pair."""

import json
import socket
import time
from typing import Any

Message = dict[str, Any]


class Channel:
    """One end of the conversation. `receive` waits with a limit; the other end's going is `EOFError`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        self._connection.settimeout(None)
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, limit_seconds: float | None) -> Message:
        """The next message; `TimeoutError` when none has come in time."""
        deadline = None if limit_seconds is None else time.monotonic() + limit_seconds
        while b"\n" not in self._received:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._connection.settimeout(left)
            chunk = self._connection.recv(1 << 16)
            if not chunk:
                raise EOFError
            self._received += chunk
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received = bytearray(rest)
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        self._connection.close()

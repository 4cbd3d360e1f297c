"""The store of measured prices: SQLite, safe for several processes.

A price is keyed by what was measured, on which device and with which software.
"""

import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from planloom.errors import PriceError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS measured (
  key TEXT NOT NULL, device TEXT NOT NULL, software TEXT NOT NULL, seconds REAL NOT NULL, spread REAL NOT NULL,
  PRIMARY KEY (key, device, software)
)
"""
_BUSY_SECONDS = 30.0


class PriceStore:
    """Measured seconds for one device and one set of software versions."""

    def __init__(self, path: str | Path, *, device: str, software: str) -> None:
        self.path, self.device, self.software = Path(path), device, software
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._connect()) as connection, connection:
                connection.execute(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise PriceError(
                f"the store of measured prices {self.path} cannot be opened",
                given=str(error),
                required="a writable file written by Planloom",
                todo="choose another path with --store, or remove the file: it can be measured again",
            ) from error

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=_BUSY_SECONDS)

    def load(self) -> dict[str, float]:
        """All prices of this device and software."""
        with closing(self._connect()) as connection:
            rows = connection.execute(
                "SELECT key, seconds FROM measured WHERE device = ? AND software = ?", (self.device, self.software)
            )
            return {str(key): float(seconds) for key, seconds in rows}

    def save(self, prices: Mapping[str, tuple[float, float]]) -> None:
        """Add (seconds, spread) by key, in one transaction; what was there is replaced."""
        rows = [(key, self.device, self.software, seconds, spread) for key, (seconds, spread) in prices.items()]
        with closing(self._connect()) as connection, connection:
            connection.executemany("INSERT OR REPLACE INTO measured VALUES (?, ?, ?, ?, ?)", rows)

"""The store of measured figures: SQLite, safe for several processes.

A figure is keyed by what was measured (`keys`), on which device and with which software, and is a value with its
spread, one standard deviation of its samples. Every `save` is one transaction that has ended when it returns: a session
that is killed is resumed where it ended, and a full disk loses the figure at hand and no other. The journal is SQLite's
default, one file beside the store while it is written: unlike a write-ahead log it also works on shared folders. A
writer asks for the lock before it reads, so two writers wait for each other and never find themselves in a deadlock.

What could not be measured (out of memory) is kept with the reason, so that a session that is resumed does not try
again.
"""

import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from planloom.cost.profile_file import Profile, ProfileName, read_profiles, write_profiles
from planloom.errors import PriceError

_VERSION = 2
_SCHEMA = (
    """CREATE TABLE IF NOT EXISTS figures (
  key TEXT NOT NULL, device TEXT NOT NULL, software TEXT NOT NULL, value REAL NOT NULL, spread REAL NOT NULL,
  PRIMARY KEY (key, device, software))""",
    """CREATE TABLE IF NOT EXISTS skipped (
  key TEXT NOT NULL, device TEXT NOT NULL, software TEXT NOT NULL, reason TEXT NOT NULL,
  PRIMARY KEY (key, device, software))""",
    "DROP TABLE IF EXISTS measured",  # of version 1, whose keys meant less: measured again
)
_BUSY_SECONDS = 60.0


class PriceStore:
    """Measured figures of one device with one set of software versions; a file holds those of many."""

    def __init__(self, path: str | Path, *, device: str, software: str) -> None:
        self.path, self.device, self.software = Path(path), device, software
        with self._explaining("opened"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._connection() as connection:
                version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version > _VERSION:
                raise PriceError(
                    f"the store of measured prices {self.path} was written by a newer Planloom",
                    given=f"version {version}",
                    required=f"version {_VERSION}",
                    todo="use the newer Planloom, or choose another path with --store",
                )
            if version < _VERSION:
                with self._transaction() as connection:
                    for statement in (*_SCHEMA, f"PRAGMA user_version = {_VERSION}"):
                        connection.execute(statement)

    # -- this device and software

    def load(self) -> dict[str, float]:
        """All values by key."""
        return {key: value for key, (value, _) in self.load_with_spread().items()}

    def load_with_spread(self) -> dict[str, tuple[float, float]]:
        """All values by key, each with its spread."""
        return {key: (value, spread) for key, value, spread in self._rows("key, value, spread", "figures")}

    def save(self, figures: Mapping[str, tuple[float, float]]) -> None:
        """Add (value, spread) by key, in one transaction; what was there is replaced."""
        self._add([self._profile(figures=dict(figures))])

    def skipped(self) -> dict[str, str]:
        """What could not be measured, with the reason."""
        return dict(self._rows("key, reason", "skipped"))

    def skip(self, reasons: Mapping[str, str]) -> None:
        """Remember what could not be measured, and why."""
        self._add([self._profile(skipped=dict(reasons))])

    def forget_skipped(self) -> None:
        """Let a session try again what could not be measured."""
        with self._explaining("written"), self._transaction() as connection:
            connection.execute("DELETE FROM skipped WHERE device = ? AND software = ?", (self.device, self.software))

    # -- all devices of the file

    def devices(self) -> tuple[ProfileName, ...]:
        """What the file holds: devices and software, with the number of figures of each."""
        query = "SELECT device, software, COUNT(*) FROM figures GROUP BY device, software ORDER BY device, software"
        with self._explaining("read"), self._connection() as connection:
            return tuple(ProfileName(device=d, software=s, num_figures=n) for d, s, n in connection.execute(query))

    @classmethod
    def choose(cls, path: str | Path, wanted: str) -> "PriceStore":
        """The store of the one device in a file whose name and software contain all of these words."""
        if not Path(path).is_file():
            raise PriceError(f"no store of measured prices {str(path)!r}", required="a store, or `planloom profile`")
        names = cls(path, device="", software="").devices()
        words = wanted.casefold().split()
        found = [n for n in names if all(word in f"{n.device} {n.software}".casefold() for word in words)]
        exact = [n for n in names if n.device == wanted]
        if len(exact) == 1:
            found = exact
        if len(found) != 1:
            shown = "; ".join(f"{n.device} ({n.software}, {n.num_figures} figures)" for n in found or names)
            raise PriceError(
                f"{len(found) or 'no'} measured profiles match {wanted!r} in {path}",
                given=shown or "an empty store",
                required="words that are in the name of exactly one device and its software",
                todo="name more of it" if found else "profile there, and import the file that it exports",
            )
        return cls(path, device=found[0].device, software=found[0].software)

    def export(self, path: str | Path) -> int:
        """Write this device's figures as one JSON file; their number."""
        profile = self.profile()
        write_profiles([profile], Path(path))
        return len(profile.figures)

    def profile(self) -> Profile:
        """All that is known of this device and software."""
        return self._profile(figures=dict(sorted(self.load_with_spread().items())), skipped=self.skipped())

    def import_(self, path: str | Path) -> tuple[ProfileName, ...]:
        """Add the figures of an exported file under the devices that it names, in one transaction."""
        profiles = read_profiles(Path(path))
        self._add(profiles)
        return tuple(profile.name for profile in profiles)

    # -- SQLite

    def _profile(
        self, *, figures: dict[str, tuple[float, float]] | None = None, skipped: dict[str, str] | None = None
    ) -> Profile:
        return Profile(device=self.device, software=self.software, figures=figures or {}, skipped=skipped or {})

    def _rows(self, columns: str, table: str) -> list[tuple[Any, ...]]:
        query = f"SELECT {columns} FROM {table} WHERE device = ? AND software = ?"
        with self._explaining("read"), self._connection() as connection:
            return connection.execute(query, (self.device, self.software)).fetchall()

    def _add(self, profiles: list[Profile]) -> None:
        for profile in profiles:
            for key, (value, spread) in profile.figures.items():
                if not (math.isfinite(value) and math.isfinite(spread)):
                    raise PriceError(f"figure {key} is no number", given=f"{value} ± {spread}", required="finite")
        with self._explaining("written"), self._transaction() as connection:
            for profile in profiles:
                of = (profile.device, profile.software)
                connection.executemany(
                    "INSERT OR REPLACE INTO figures VALUES (?, ?, ?, ?, ?)",
                    [(key, *of, value, spread) for key, (value, spread) in profile.figures.items()],
                )
                connection.executemany(
                    "DELETE FROM skipped WHERE key = ? AND device = ? AND software = ?",
                    [(key, *of) for key in profile.figures],
                )
                connection.executemany(
                    "INSERT OR REPLACE INTO skipped VALUES (?, ?, ?, ?)",
                    [(key, *of, reason) for key, reason in profile.skipped.items() if key not in profile.figures],
                )

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)) as connection:
            yield connection

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """All or nothing; what fails is rolled back when the connection closes."""
        with self._connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield connection
            connection.execute("COMMIT")

    @contextmanager
    def _explaining(self, what: str) -> Iterator[None]:
        """What SQLite and the file system raise, in the user's words."""
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            is_damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
            todo = "make room, see to the permissions, or choose another path with --store; what was saved stays"
            if is_damaged:
                todo = "move the file away, or choose another path with --store: what is in it can be measured again"
            raise PriceError(
                f"the store of measured prices {self.path} cannot be {what}",
                given=f"{type(error).__name__}: {error}",
                required="a file written by Planloom, in a folder with space left",
                todo=todo,
            ) from error

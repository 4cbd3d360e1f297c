"""What tests of the testbed share: where they can run, and what a testbed must not leave behind."""

import os
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from testbed import requirements

MARK = "PLANLOOM_TESTBED_TEST"


@pytest.fixture
def built_here() -> None:
    """For tests that build networks: root, ip and tc, or a skip that says what is missing."""
    reason = requirements.missing()
    if reason:
        pytest.skip(f"no testbed here: {reason}")


@dataclass
class Traces:
    """What one test's testbeds put into the world, found by a variable that their processes inherit."""

    mark: str
    links_before: str
    networks: set[str] = field(default_factory=set)

    def processes(self) -> list[int]:
        """Every process with the mark, but this one."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and int(folder.name) != os.getpid():
                try:
                    environment = (folder / "environ").read_bytes()
                except OSError:
                    continue
                if f"{MARK}={self.mark}".encode() in environment.split(b"\0"):
                    found.append(int(folder.name))
        return found

    def note_networks(self) -> None:
        """Remember the network namespaces that these processes are in, or hold by a descriptor."""
        host = os.readlink("/proc/self/ns/net")
        for pid in self.processes():
            self.networks |= {name for name in _networks_of(Path("/proc", str(pid))) if name != host}

    def networks_left(self) -> set[str]:
        """Of the remembered ones, those that any process of this machine is in or holds."""
        seen = set()
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                seen |= _networks_of(folder)
        return self.networks & seen

    def assert_none_left(self, limit_seconds: float = 10.0) -> None:
        deadline = time.monotonic() + limit_seconds
        while (self.processes() or self.networks_left() or links() != self.links_before) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.05)
        assert self.processes() == []
        assert self.networks_left() == set()
        assert links() == self.links_before
        named = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True, env=_with_sbin())
        assert "device" not in named.stdout


def _networks_of(process: Path) -> set[str]:
    names = set()
    for place in ("ns/net", "fd"):
        try:
            entries = [process / place] if place == "ns/net" else list((process / place).iterdir())
            names |= {name for name in map(os.readlink, entries) if name.startswith("net:")}
        except OSError:
            continue
    return names


def links() -> str:
    """The names of the host's network interfaces."""
    shown = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True, env=_with_sbin())
    return "\n".join(line.split(":")[1].strip() for line in shown.stdout.splitlines())


def _with_sbin() -> dict[str, str]:
    return os.environ | {"PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}


@pytest.fixture
def traces(built_here: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traces]:
    """Everything that a test starts bears a mark; at its end nothing that does may be left."""
    found = Traces(mark=uuid.uuid4().hex, links_before=links())
    monkeypatch.setenv(MARK, found.mark)
    yield found
    found.assert_none_left()

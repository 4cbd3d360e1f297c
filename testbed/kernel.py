"""The four calls of the kernel that Python 3.11 does not have: unshare, setns, prctl, mount (Linux, from libc)."""

import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000

_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Leave the namespaces of these kinds for new ones; a new PID namespace begins with the next child."""
    _checked(_libc.unshare(flags), "unshare")


def enter_network(descriptor: int) -> None:
    """Move this thread, and what it starts from now on, into a network namespace."""
    _checked(_libc.setns(descriptor, CLONE_NEWNET), "setns")


def die_with_parent() -> None:
    """Have this process killed as soon as the thread that started it is gone, however it went."""
    _checked(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def make_mounts_private() -> None:
    """Mounts made from now on are seen in this mount namespace only."""
    _checked(_libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None), "mount")


def mount(kind: str, place: str) -> None:
    _checked(_libc.mount(kind.encode(), place.encode(), kind.encode(), 0, None), f"mount {place}")


def bind(file: str, place: str) -> None:
    """Show a file in the place of another, to this mount namespace only."""
    _checked(_libc.mount(file.encode(), place.encode(), None, _MS_BIND, None), f"mount {place}")


def new_network() -> int:
    """A new, empty network namespace that lives as long as the descriptor is open; this thread stays where it is."""
    here = this_network()
    try:
        unshare(CLONE_NEWNET)
        made = this_network()
        enter_network(here)
    finally:
        os.close(here)
    return made


def this_network() -> int:
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


@contextmanager
def inside_network(descriptor: int) -> Iterator[None]:
    """What is done and started here is done in that network namespace."""
    here = this_network()
    try:
        enter_network(descriptor)
        yield
    finally:
        enter_network(here)
        os.close(here)


def _checked(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")

"""The process between the testbed and its supervisor: it makes sure that nothing outlives the testbed.

The launcher makes new PID, network and mount namespaces and forks the supervisor into them, as their process 1. Then it
only waits for the first of two ends:

    the testbed's process is gone   seen through a pidfd, so by any kind of death, SIGKILL included. The launcher kills
                                    the supervisor; if it cannot, being killed itself, PR_SET_PDEATHSIG does.
    the supervisor is gone          the kernel then kills every process of its PID namespace. With the last of them and
                                    the supervisor's descriptors go the network namespaces, which have no names, and
                                    with these all bridges and cables in them.

Control groups do have names, and stay. Where the ranks have limits, the launcher makes the testbed's groups and, after
either end, removes them: the supervisor's PID namespace is empty by the time that its death can be waited for. If the
launcher is killed itself, the testbed removes them; if both are, the next testbed does.

PR_SET_PDEATHSIG alone, between testbed and supervisor, would not do: it means the death of the parent's *thread*, and a
program may well build a testbed in a thread that ends before the program does.
"""

import os
import select
import signal
import socket
import sys

from testbed import kernel
from testbed.cgroups import Groups
from testbed.messages import Channel
from testbed.supervisor import serve


def main(control: int, testbed_pid: int, groups_text: str = "") -> None:
    """Stand between the testbed with this PID and a supervisor that serves the socket with this descriptor."""
    groups = Groups.from_text(groups_text) if groups_text else None
    testbed = os.pidfd_open(testbed_pid)
    if os.getppid() != testbed_pid:
        sys.exit("the testbed was gone before its launcher had started")
    channel = Channel(socket.socket(fileno=control))
    try:
        if groups is not None:
            groups.remove_left_behind()
            groups.make()
        kernel.unshare(kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWNS)
    except OSError as error:
        channel.send({"event": "refused", "what": str(error)})
        if groups is not None:
            groups.remove()
        sys.exit(1)
    alive, alive_other_end = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        os.close(testbed)
        os.close(alive_other_end)
        _supervise(channel, alive, groups)
    os.close(alive)
    channel.close()
    supervisor_gone = os.pidfd_open(supervisor)
    ready, _, _ = select.select([testbed, supervisor_gone], [], [])
    if supervisor_gone not in ready:
        os.kill(supervisor, signal.SIGKILL)
    os.waitpid(supervisor, 0)  # it has ended when all of its PID namespace have
    if groups is not None:
        groups.remove()


def _supervise(channel: Channel, launcher_alive: int, groups: Groups | None) -> None:
    """Process 1 of the new namespaces. It never returns."""
    status = 1
    try:
        kernel.die_with_parent()
        if not select.select([launcher_alive], [], [], 0)[0]:  # readable: closed, the launcher died before that call
            os.close(launcher_alive)
            serve(channel, groups)
            status = 0
    finally:
        os._exit(status)

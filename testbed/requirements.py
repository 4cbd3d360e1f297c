"""What the testbed needs of a machine: Linux, root, and iproute2, which is installed where that is possible."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from testbed.errors import TestbedError

_SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_INSTALL_SECONDS = 300
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21  # linux/capability.h


def missing() -> str:
    """Why no testbed can be built here, in a few words; empty when one can. Installs nothing."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not _may_build():
        return "this root may not build network namespaces (a container without --privileged)"
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool, path=_SEARCH_PATH) is None]
    return f"{' and '.join(lacking)} of iproute2 not found" if lacking else ""


def _may_build() -> bool:
    """Whether this process has CAP_SYS_ADMIN and CAP_NET_ADMIN."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    effective = int(status.partition("CapEff:")[2].split()[0], 16)
    return all(effective >> number & 1 for number in (_CAP_SYS_ADMIN, _CAP_NET_ADMIN))


def can_install(reason: str) -> bool:
    """Whether what is missing is a package, and there is something to install it with."""
    return "iproute2" in reason and shutil.which("apt-get") is not None


def provided() -> str:
    """What is still missing after an attempt to install it, in a few words; empty when a testbed can be built."""
    reason = missing()
    if can_install(reason):
        _install()
        reason = missing()
    return reason


def require() -> None:
    """See to it that a testbed can be built here, or say what it takes."""
    reason = provided()
    if reason:
        raise TestbedError(
            f"the testbed cannot be built on this machine: {reason}",
            given=f"user {os.geteuid()} on {sys.platform}",
            required="Linux, root, and the commands ip and tc of iproute2",
            todo="run as root (in a container: with --privileged), and install the package iproute2",
        )


def _install() -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["install", "-y", "iproute2"], ["update"], ["install", "-y", "iproute2"]):
        try:
            subprocess.run(
                ["apt-get", *command], env=environment, capture_output=True, timeout=_INSTALL_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return
        if not missing():
            return

"""Ranks as devices: which share of a core each may use, on which core, and whether this machine can hold them to it.

Shares are of one core. In all they may come to `USABLE_SHARE` of the machine's cores: the rest carries packets, the
testbed itself and whatever else runs. Where ranks have the same number of neighbours on every core they stay on it,

    rank r on core r mod cores,      ceil(ranks / cores) x share <= USABLE_SHARE

so that no two ranks meet on a core while another is free; else (few ranks with large shares) the kernel moves them.
"""

import math
import os
from dataclasses import asdict, dataclass

from planloom.cluster import Cluster
from testbed import requirements
from testbed.cgroups import Groups, NoGroupsError, RankLimits, find_places
from testbed.errors import TestbedError
from testbed.messages import Message

USABLE_SHARE = 0.8
PERIOD_US = 5000
_MIN_QUOTA_US = 1000  # kernel/sched/core.c, min_cfs_quota_period
_ROUNDING = 1e-9

ALLOCATOR_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc's mallopt(3): what is freed goes back to the kernel, as on a device, and does not stay with a rank."""

THREADS_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLimits:
    """What each rank may use.

    `cpu_share` is of one core (None: as much as all ranks can have at once). `memory_bytes` is of the whole process
    with all that it starts, Python and torch included (None: no limit). A limit above the size that a process has when
    it is about to build its model is the rank's own call, `testbed.limits.limit_memory`.
    """

    cpu_share: float | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """The limits of a testbed's ranks on this machine's cores."""

    share: float
    limits: RankLimits
    cores: tuple[int, ...]  # of this machine, used by ranks
    core_of_rank: tuple[int | None, ...]  # None: whichever is free

    def to_message(self) -> Message:
        return asdict(self)


def plan_devices(num_ranks: int, wanted: DeviceLimits, cores: tuple[int, ...], core_limit: float) -> DevicePlan:
    """Shares and cores for the ranks; `core_limit` is what the groups around this process leave it."""
    num_cores = min(float(len(cores)), core_limit)
    usable = USABLE_SHARE * num_cores
    together = math.ceil(num_ranks / len(cores))
    share = wanted.cpu_share
    if share is None:
        share = min(1.0, usable / (together * len(cores)) if together > 1 else usable / num_ranks)
    if not 0 < share <= 1 or num_ranks * share > usable + _ROUNDING:
        raise TestbedError(
            f"{num_ranks} ranks cannot have {share:g} of a core each on this machine",
            given=f"{num_ranks * share:g} cores in all",
            required=f"at most 1 each and {usable:g} in all: {USABLE_SHARE:g} of {num_cores:g} cores",
            todo=f"ask for a cpu_share of at most {math.floor(min(1.0, usable / num_ranks) * 1000) / 1000:g}",
        )
    if wanted.memory_bytes is not None and wanted.memory_bytes <= 0:
        raise TestbedError("a device has memory", given=f"{wanted.memory_bytes} bytes", required="more than 0")
    period_us = max(PERIOD_US, math.ceil(_MIN_QUOTA_US / share - _ROUNDING))
    stays = together * share <= USABLE_SHARE + _ROUNDING or num_ranks <= len(cores)
    used = cores[: min(num_ranks, len(cores))] if stays else cores
    return DevicePlan(
        share=share,
        limits=RankLimits(quota_us=round(share * period_us), period_us=period_us, memory_bytes=wanted.memory_bytes),
        cores=used,
        core_of_rank=tuple(used[rank % len(used)] if stays else None for rank in range(num_ranks)),
    )


def plan_here(cluster: Cluster, wanted: DeviceLimits) -> tuple[DevicePlan, Groups]:
    """The plan for this machine, and the groups that will hold the ranks to it (not made yet)."""
    reason = missing_devices()
    if reason:
        raise TestbedError(
            f"ranks cannot be held to limits on this machine: {reason}",
            given=f"user {os.geteuid()}",
            required="root, and control groups of cpu and memory that can be written to",
            todo="leave out `devices`, or let `open_devices` take what is possible",
        )
    groups = Groups.of_owner(find_places(), os.getpid())
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return plan_devices(cluster.num_devices, wanted, cores, groups.own_core_limit()), groups


def missing_devices() -> str:
    """Why ranks cannot be held to limits here, in a few words; empty when they can. It tries, and leaves nothing."""
    reason = requirements.missing()
    if reason and not requirements.can_install(reason):
        return reason
    try:
        groups = Groups.of_owner(find_places(), os.getpid())
        groups.name += "-trial"
        try:
            groups.make()
            groups.make_rank(0, RankLimits(quota_us=_MIN_QUOTA_US, period_us=PERIOD_US, memory_bytes=None))
        finally:
            groups.remove()
    except NoGroupsError as error:
        return str(error)
    except OSError as error:
        return f"control groups cannot be made: {error}"
    return ""

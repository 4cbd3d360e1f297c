"""Whose measured figures serve which cluster.

| figures                         | belong to            | serve                                                       |
|---------------------------------|----------------------|-------------------------------------------------------------|
| runs, updates, sums             | a device             | clusters of this device                                     |
| collectives, exchanges, overlap | and a network        | clusters of this device with this network: what processes   |
|                                 |                      | of one machine measured, a cluster of one node              |

Collectives go by gloo between CPUs, by NCCL between GPUs: a CPU's figures serve clusters whose library is gloo. Which
CPU, cluster files need not say; GPUs are told apart by the word that names their model, letters and digits (H100,
A6000, L40S), or by all words where there is none (RTX 6000 Ada).
"""

import re
from pathlib import Path

from planloom.cluster import Cluster
from planloom.cost.profile_file import Profile, read_profiles
from planloom.cost.store import PriceStore
from planloom.errors import PriceError

CPU_PREFIX = "cpu "
"""What the names of measured CPUs begin with."""


def find_profile(wanted: str, store: str | Path) -> Profile:
    """The measured figures of one device: of a file that was exported, or those in a store with these words."""
    if not Path(wanted).is_file():
        return PriceStore.choose(store, wanted).profile()
    profiles = read_profiles(Path(wanted))
    if len(profiles) != 1:
        raise PriceError(
            f"{wanted!r} holds {len(profiles)} profiles",
            given="; ".join(f"{profile.device} ({profile.software})" for profile in profiles) or "none",
            required="one",
            todo=f"planloom profile --import {wanted}, then --profile with words of the one that is meant",
        )
    return profiles[0]


def require_serves(measured_device: str, cluster: Cluster) -> None:
    """Refuse figures of another kind of device than a cluster's."""
    if not serves(measured_device, cluster):
        raise PriceError(
            "the profile is of another device than the cluster's",
            given=f"figures of {measured_device}",
            required=f"figures of {cluster.device.name}, whose collectives go by {cluster.library}",
            todo="choose another profile or cluster; where they are the same, name the device in the cluster file so",
        )


def serves(measured_device: str, cluster: Cluster) -> bool:
    """Is this the device of a cluster?"""
    if measured_device.startswith(CPU_PREFIX):
        return cluster.library == "gloo"
    if cluster.library != "nccl":
        return False
    found, wanted = (re.findall(r"[A-Z0-9]+", name.upper()) for name in (measured_device, cluster.device.name))
    models = [word for word in wanted if re.fullmatch(r"[A-Z]+[0-9]+[A-Z]?", word)]
    return set(models[:1] or wanted) <= set(found)


def is_one_machine(cluster: Cluster) -> bool:
    """Is there one member of the outermost level, so that processes of one machine have the cluster's own links?"""
    return cluster.level_counts[0] == 1

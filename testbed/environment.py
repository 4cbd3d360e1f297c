"""What a rank is told about itself: torchrun's variables, and the address that libraries have to bind to."""

from planloom.cluster import Cluster
from testbed.cgroups import Groups
from testbed.devices import ALLOCATOR_ENVIRONMENT, THREADS_ENVIRONMENT, DevicePlan
from testbed.limits import GROUP_VARIABLE
from testbed.network import ADDRESS_INTERFACE
from testbed.wiring import device_address

_FIRST_PORT = 29500
_NUM_PORTS = 1000


def rank_environment(cluster: Cluster, rank: int, cluster_path: str, number_of_run: int) -> dict[str, str]:
    """The variables of a rank. "Local" are the devices of one member of the last level but one: what shares a host.

    Every run on a testbed has another port, so that none meets what the one before has left in TIME_WAIT.
    """
    local = cluster.level_counts[-1]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(cluster.num_devices),
        "LOCAL_RANK": str(rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": device_address(0),
        "MASTER_PORT": str(_FIRST_PORT + number_of_run % _NUM_PORTS),
        "GLOO_SOCKET_IFNAME": ADDRESS_INTERFACE,
        "NCCL_SOCKET_IFNAME": ADDRESS_INTERFACE,
        "TP_SOCKET_IFNAME": ADDRESS_INTERFACE,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "TESTBED_CLUSTER": cluster_path,
        "TESTBED_ADDRESS": device_address(rank),
    }


def device_environment(plan: DevicePlan, groups: Groups, rank: int) -> dict[str, str]:
    """The variables of a rank with limits, in addition."""
    return {
        **THREADS_ENVIRONMENT,
        **ALLOCATOR_ENVIRONMENT,
        "TESTBED_CPU_SHARE": f"{plan.share:g}",
        GROUP_VARIABLE: str(groups.folder("memory", f"rank{rank}")),
    }

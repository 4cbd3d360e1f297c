"""What a cluster is: levels, links and one kind of device.

A cluster is a tree whose levels are listed outermost first; level i splits every member of level i - 1 into `count`
members of its own, and the members of the last level are the devices. Device d has one coordinate a level, the mixed
radix digits of d with the outermost level as the major one:

    d = (((c_0) * count_1 + c_1) * count_2 + c_2) ...

Devices whose outermost differing coordinate is at level i communicate over the link of level i: that link connects the
`count` members of level i with each other. How it does so is its shape:

    crossbar  every member has an uplink to a switch that is never the bottleneck
    ring      every member has a link to the next and one to the previous; messages take the shorter way
    pairs     every pair of members has a link of its own
    torus     every device has a link to the next and one to the previous member, to the device there whose other
              coordinates are equal; a message that differs at inner levels too travels those first, one after another

Everything here is a value that was checked when it was made: what can be constructed can be written to a file and read
back (`planloom.cluster.files`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from planloom.errors import ClusterError

DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
"""The dtypes, by torch's names, for which a device may give a peak rate."""


Shape = Literal["crossbar", "ring", "pairs", "torus"]
SHAPES: tuple[Shape, ...] = get_args(Shape)

COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "reduce",
    "broadcast",
    "scatter",
    "gather",
    "rotate",
    "exchange",
)
"""The collectives, and the exchange of single messages, for which a link may give an efficiency."""

MAX_EFFICIENCY = 4.0
"""A switch that reduces on the way passes one: NVLS all-reduce reaches 1.29 of all-gather's bus bandwidth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How the members of one level reach each other.

    `bandwidth_bytes_per_second` is what one uplink (or one link of a ring, pair or torus) carries in each direction.
    With `shared`, a member of the level has one uplink for all the devices in it (a node with one NIC); otherwise every
    device in it has an uplink of its own. `latency_seconds` is that of one hop.

    What is known of single collectives, by their names (`COLLECTIVES`), from data sheets or from `planloom calibrate`:
    `hop_seconds`, the latency of a hop where it differs; `start_seconds`, what one costs before its first hop; `flow`,
    by what share each flow on an uplink beside the first prolongs it; `efficiency`, the share of the bandwidth that it
    reaches, by (collective, members of the level in a group); members 0 stands for any number.
    """

    bandwidth_bytes_per_second: float
    latency_seconds: float
    shared: bool = False
    shape: Shape = "crossbar"
    hop_seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    start_seconds: Mapping[str, float] = field(default_factory=dict, hash=False)
    flow: Mapping[str, float] = field(default_factory=dict, hash=False)
    efficiency: Mapping[tuple[str, int], float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _require_positive("bandwidth_bytes_per_second", self.bandwidth_bytes_per_second)
        _require_positive("latency_seconds", self.latency_seconds)
        if self.shape not in SHAPES:
            raise ClusterError("a link has an unknown shape", given=repr(self.shape), required=", ".join(SHAPES))
        for key in ("hop_seconds", "start_seconds", "flow"):
            figures = dict(getattr(self, key))
            object.__setattr__(self, key, figures)  # ours: no one else can change it
            for collective, figure in figures.items():
                _require_positive(f"{key}[{collective!r}]", figure)
                if collective not in COLLECTIVES:
                    raise ClusterError(
                        f"{key} is given for an unknown collective",
                        given=repr(collective),
                        required=", ".join(COLLECTIVES),
                    )
        object.__setattr__(self, "efficiency", dict(self.efficiency))
        for (collective, members), share in self.efficiency.items():
            if collective not in COLLECTIVES or members < 0 or not 0 < share <= MAX_EFFICIENCY:
                raise ClusterError(
                    "a link has an efficiency that cannot be",
                    given=f"{collective} among {members}: {share}",
                    required=f"a share above 0, at most {MAX_EFFICIENCY:g}, of one of {', '.join(COLLECTIVES)}",
                )

    def hop_of(self, collective: str) -> float:
        """The latency of one hop in a collective."""
        return self.hop_seconds.get(collective, self.latency_seconds)

    def efficiency_of(self, collective: str, members: int) -> float:
        """The share of the bandwidth that a collective reaches among so many members of the level."""
        for key in ((collective, members), (collective, 0)):
            if key in self.efficiency:
                return self.efficiency[key]
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the tree: into how many members it splits what is around it, and the link between them."""

    name: str
    count: int
    link: Link

    def __post_init__(self) -> None:
        _require_name("level", self.name)
        if self.count < 1:
            raise ClusterError(
                f"count of level {self.name!r} is too small", given=str(self.count), required="a whole number from 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU process: peak rates by dtype, memory, and what launching one kernel costs."""

    name: str
    flops_per_second: Mapping[str, float] = field(hash=False)  # a dict has no hash; the other fields suffice
    memory_bytes: int
    memory_bytes_per_second: float
    launch_seconds: float

    def __post_init__(self) -> None:
        _require_name("device", self.name)
        object.__setattr__(self, "flops_per_second", dict(self.flops_per_second))  # ours: no one else can change it
        if not self.flops_per_second or not set(self.flops_per_second) <= set(DTYPES):
            raise ClusterError(
                f"flops_per_second of device {self.name!r} has no or unknown dtypes",
                given=", ".join(map(repr, self.flops_per_second)) or "none",
                required=f"one rate or more, by dtype: {', '.join(DTYPES)}",
            )
        for dtype, rate in self.flops_per_second.items():
            _require_positive(f"flops_per_second[{dtype!r}]", rate)
        _require_positive("memory_bytes", self.memory_bytes)
        _require_positive("memory_bytes_per_second", self.memory_bytes_per_second)
        _require_positive("launch_seconds", self.launch_seconds)


Library = Literal["nccl", "gloo"]
LIBRARIES: tuple[Library, ...] = get_args(Library)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Levels, outermost first, the device that all leaves are, and the library whose collectives run on them."""

    name: str
    levels: tuple[Level, ...]
    device: Device
    library: Library = "nccl"

    def __post_init__(self) -> None:
        _require_name("cluster", self.name)
        names = [level.name for level in self.levels]
        if not names or len(set(names)) < len(names):
            raise ClusterError(
                f"levels of cluster {self.name!r} are empty or have equal names",
                given=", ".join(map(repr, names)) or "none",
                required="one level or more, each with a name of its own",
            )
        if self.library not in LIBRARIES:
            raise ClusterError(
                f"library of cluster {self.name!r} is unknown", given=repr(self.library), required=", ".join(LIBRARIES)
            )
        for index, level in enumerate(self.levels):
            _require_shape(level, num_inner=math.prod(inner.count for inner in self.levels[index + 1 :]))

    @property
    def level_counts(self) -> tuple[int, ...]:
        return tuple(level.count for level in self.levels)

    @property
    def num_devices(self) -> int:
        return math.prod(self.level_counts)

    def coordinates(self, device: int) -> tuple[int, ...]:
        """The coordinate of a device at every level, outermost first."""
        if not 0 <= device < self.num_devices:
            raise ClusterError(
                f"device {device} is not in cluster {self.name!r}",
                given=str(device),
                required=f"a device from 0 to {self.num_devices - 1}",
                todo="use fewer devices, or more nodes",
            )
        digits = []
        for count in reversed(self.level_counts):
            device, digit = divmod(device, count)
            digits.append(digit)
        return tuple(reversed(digits))

    def crossed_level(self, devices: tuple[int, ...]) -> int:
        """The outermost level at which these devices differ: they communicate over its link.

        One device alone crosses nothing; for it this is the innermost level.
        """
        if not devices:
            raise ClusterError(
                f"no devices of cluster {self.name!r} were named", given="()", required="one device or more"
            )
        for level, digits in enumerate(zip(*map(self.coordinates, devices), strict=True)):
            if len(set(digits)) > 1:
                return level
        return len(self.levels) - 1


def _require_shape(level: Level, *, num_inner: int) -> None:
    """A shape that contradicts what is in a member: a ring or pairs of members are wired to each member once."""
    link = level.link
    if link.shape == "torus" and link.shared:
        raise ClusterError(
            f"the link of level {level.name!r} is a torus and shared",
            given="shape torus, shared",
            required="a torus has links of its own for every device",
            todo="leave out shared, or choose the shape ring",
        )
    if link.shape in ("ring", "pairs") and not link.shared and num_inner > 1:
        raise ClusterError(
            f"the link of level {level.name!r} is wired to members, but is not shared by their {num_inner} devices",
            given=f"shape {link.shape}, not shared",
            required=f"shared, for the shape {link.shape} of members with several devices",
            todo="say shared: true, or choose the shape torus or crossbar",
        )


def _require_name(noun: str, name: str) -> None:
    if not name.strip() or not name.isprintable():
        raise ClusterError(f"a {noun} has no proper name", given=repr(name), required="printable text, not empty")


def _require_positive(key: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ClusterError(f"{key} is not a positive number", given=str(value), required="a finite number above zero")

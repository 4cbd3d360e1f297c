"""The `Timeline`: what happened when. The simulator and the runtime both return one."""

from dataclasses import dataclass, field
from typing import Literal

Stream = Literal["compute", "communication", "waiting"]
"""What a device computes, what it communicates, and when its program waits for communication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One instruction on one device; `axis`: over which axis it communicates or waits."""

    device: int
    stream: Stream
    name: str
    micro: int
    start_seconds: float
    stop_seconds: float
    axis: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMemory:
    """The peak of one role's memory: bytes of each part at that moment, and when it is."""

    devices: tuple[int, ...]
    peak_bytes: int
    parts: dict[str, int]
    when: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a simulated step comes to.

    mfu: the model's floating-point operations over what all devices could do in the step; bubble: the share of all
    devices' time in which they wait for other stages; exposed_communication: seconds in which a device waits for
    communication, by axis, the mean of all devices; uncertainty: one standard deviation of the step over its seconds,
    were all its prices wrong alike: the mean of theirs, by seconds.
    """

    step_seconds: float
    mfu: float
    bubble: float
    exposed_communication: dict[str, float]
    memory: tuple[RoleMemory, ...]
    uncertainty: float
    simulate_seconds: float

    @property
    def peak_memory_bytes(self) -> int:
        return max(role.peak_bytes for role in self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The events of one step, from second zero on; `sources`: where the prices of a simulated one come from."""

    events: tuple[Event, ...]
    sources: tuple[str, ...] = ("measured",)
    summary: Summary | None = field(default=None)

    @property
    def step_seconds(self) -> float:
        if self.summary is not None:
            return self.summary.step_seconds
        return max((event.stop_seconds for event in self.events), default=0.0)

    def busy_seconds(self, device: int, stream: Stream) -> float:
        return sum(e.stop_seconds - e.start_seconds for e in self.events if e.device == device and e.stream == stream)

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({event.device for event in self.events}))

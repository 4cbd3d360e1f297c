"""The `Timeline`: what happened when. The simulator and the runtime both return one."""

from dataclasses import dataclass
from typing import Literal

Stream = Literal["compute", "communication"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One instruction on one device."""

    device: int
    stream: Stream
    name: str
    micro: int
    start_seconds: float
    stop_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The events of one step, from second zero on; `sources`: where the prices of a simulated one come from."""

    events: tuple[Event, ...]
    sources: tuple[str, ...] = ("measured",)

    @property
    def step_seconds(self) -> float:
        return max((event.stop_seconds for event in self.events), default=0.0)

    def busy_seconds(self, device: int, stream: Stream) -> float:
        return sum(e.stop_seconds - e.start_seconds for e in self.events if e.device == device and e.stream == stream)

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({event.device for event in self.events}))

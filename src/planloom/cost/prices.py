"""`Prices`: seconds and bytes of every instruction of a program, measured where known.

Every price says where it comes from: measured, interpolated between measured sizes, or modelled from the cluster's
figures; with its uncertainty, one standard deviation over the value: that of the samples of a measurement, of the fit
of a model (`efficiency.yaml`), else assumed. Nothing unknown is priced at zero: what has neither a measurement nor a
model is an error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Literal, TypeVar, cast

from planloom.blocks import BlockGraph, find_segments
from planloom.cluster import Cluster, Message, exchange_seconds
from planloom.collective import Step, step_cost
from planloom.cost.fusion import RunPhase
from planloom.cost.keys import (
    ACCUMULATE_PREFIX,
    MEMORY_PREFIX,
    OVERLAP_COMMUNICATION_KEY,
    OVERLAP_COMPUTE_KEY,
    OVERLAP_EXCHANGE_KEY,
    REST_SECONDS_KEY,
    REST_SHARE_KEY,
    SEGMENT_PREFIX,
    Figure,
    Phase,
    SplitPhase,
    collective_prefix,
    exchange_prefix,
    flags_of,
    run_fingerprint,
    run_key,
    shard_sizes,
    split_key,
    update_key,
    update_peak_key,
)
from planloom.cost.memory import RunMemory, run_memory
from planloom.cost.roofline import estimate_run, memory_seconds, update_seconds
from planloom.program import Program, Run, StageProgram, Transfer

Found = TypeVar("Found", "Price", RunMemory)
Source = Literal["measured", "interpolated", "modelled"]

# How much longer a run takes while its device communicates. [Assumed]: a collective's kernels occupy 16 to 24 of 132
# multiprocessors of an H100 and share its memory; with one GPU it cannot be measured.
_MODELLED_SLOWDOWN = 1.1
# [Assumed]: where the spread of a measurement is not known; between measured sizes; from the links of a cluster file.
_MEASURED_UNCERTAINTY, _INTERPOLATED_UNCERTAINTY, _LINK_UNCERTAINTY = 0.03, 0.08, 0.15
_FARTHEST = 8  # [Assumed]: times the largest measured size, beyond which the cluster's figures are taken
_UPDATE_TEMPORARIES = 2  # copies of the largest shard that AdamW makes at one time (torch's loop over parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Seconds, where they come from, and how long each level's most loaded wire is busy meanwhile.

    `host_seconds`: in which the host starts the work. A host that is ahead of its device costs nothing.
    """

    seconds: float
    source: Source
    uncertainty: float = 0.0
    host_seconds: float = 0.0
    busy: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What a device that has waited makes good: at most `seconds`, while it computes 1 / `share` times as fast.

    That is a device under a quota, with this share of a core (`profile.rest`); others make nothing good.
    """

    seconds: float = 0.0
    share: float = 1.0

    def saved(self, rested_seconds: float, seconds: float) -> float:
        """How much earlier work of so many seconds is over."""
        return min(self.seconds, rested_seconds, (1 - self.share) * seconds)


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of one model on one cluster.

    `measured_links`: the network was measured, too: use measured collectives and overlap, not the cluster's links;
    `fused`: runs are compiled.
    """

    blocks: BlockGraph
    cluster: Cluster
    measured: Mapping[str, float] = field(default_factory=dict)
    spreads: Mapping[str, float] = field(default_factory=dict)
    measured_links: bool = False
    fused: bool = False
    _of_runs: dict[object, object] = field(default_factory=dict, init=False, repr=False, compare=False)

    # -- runs

    def run(self, program: Program, run: Run, phase: Phase) -> Price:
        """One phase of a run on one device."""
        return self._once((phase, self._class(program, run)), lambda: self._run(program, run, phase))

    def _run(self, program: Program, run: Run, phase: Phase) -> Price:
        fingerprint = run_fingerprint(self.blocks, program, run)
        key = run_key(fingerprint, phase)
        if key in self.measured:
            host: Figure = "forward_host" if phase == "forward" else "backward_host"
            return Price(
                seconds=self.measured[key],
                source="measured",
                uncertainty=self._spread(key),
                host_seconds=self.measured.get(run_key(fingerprint, host), 0.0),
            )
        estimate = estimate_run(self.blocks, program, run, phase, self.cluster.device, fused=self.fused)
        return Price(seconds=estimate.seconds, source="modelled", uncertainty=estimate.uncertainty)

    def split_run(self, program: Program, run: Run, phase: SplitPhase) -> Price:
        """One phase of a run whose backward comes in two halves; such a run is not compiled."""
        return self._once(("split", phase, self._class(program, run)), lambda: self._split_run(program, run, phase))

    def _split_run(self, program: Program, run: Run, phase: SplitPhase) -> Price:
        fingerprint = run_fingerprint(self.blocks, program, run)
        key = split_key(fingerprint, phase)
        if key in self.measured:
            return Price(seconds=self.measured[key], source="measured", uncertainty=self._spread(key))

        def of_whole(part: RunPhase) -> Price:
            """Of the run as it is where its backward is whole."""
            known = run_key(fingerprint, part)
            if known in self.measured and not self.fused:
                return Price(seconds=self.measured[known], source="interpolated", uncertainty=self._spread(known))
            estimate = estimate_run(self.blocks, program, run, part, self.cluster.device, fused=False)
            return Price(seconds=estimate.seconds, source="modelled", uncertainty=estimate.uncertainty)

        if phase != "weight_gradient":
            return of_whole(phase)
        whole, first = of_whole("backward"), of_whole("input_gradient")
        return replace(whole, seconds=max(0.0, whole.seconds - first.seconds))

    def run_memory(self, program: Program, run: Run) -> RunMemory:
        """What a run keeps and needs on one device, for one micro-batch."""
        return self._once(("memory", self._class(program, run)), lambda: self._run_memory(program, run))

    def _run_memory(self, program: Program, run: Run) -> RunMemory:
        fingerprint = run_fingerprint(self.blocks, program, run)

        def value(figure: Figure) -> int:
            return int(self.measured[run_key(fingerprint, figure)])

        if run_key(fingerprint, "backward_peak_bytes") not in self.measured:
            return run_memory(self.blocks, program, run, fused=self.fused)

        def flags(figure: Figure, count: int) -> tuple[bool, ...]:
            return tuple(flags_of(run_key(fingerprint, figure), self.measured, count))

        return RunMemory(
            saved_bytes=value("saved_bytes"),
            saved_inputs=flags("saved_inputs", len(run.inputs)),
            saved_outputs=flags("saved_outputs", len(run.outputs)),
            forward_peak_bytes=value("forward_peak_bytes"),
            backward_peak_bytes=value("backward_peak_bytes"),
        )

    def _once(self, key: tuple[object, ...], find: Callable[[], Found]) -> Found:
        """What is found for a key: its first element says of which type."""
        if key not in self._of_runs:
            self._of_runs[key] = find()
        return cast(Found, self._of_runs[key])

    def is_measured(self, program: Program, run: Run) -> bool:
        return self.run(program, run, "forward").source == "measured"

    @cached_property
    def _places(self) -> list[tuple[str, int]]:
        """For every block its segment and its place in it: equal for blocks that are equal and stand alike."""
        places: list[tuple[str, int]] = []
        for segment in find_segments(self.blocks):
            places += [(segment.fingerprint, i) for i in range(segment.stop - segment.start)]
        return places

    def _class(self, program: Program, run: Run) -> object:
        """Equal for runs with equal work: those of the same place in equal segments, split alike."""
        parts = tuple(
            (
                self._places[part.block],
                tuple((dim, tuple(d.size for d in ds)) for dim, ds in part.splits),
                None if part.turn is None else (min(part.turn.number, 1), part.turn.is_last),
            )
            for part in run.blocks
        )
        return program.num_micro_batches, parts, tuple(slot.cotangent is None for slot in run.inputs)

    # -- communication

    def step(self, step: Step, num_bytes: int) -> Price:
        """One step of a collective program; `num_bytes` in each device's array before it."""
        if step.is_local:
            return self.memory(2 * num_bytes)
        line = step_cost(self.cluster, step).line(num_bytes)
        modelled = line.seconds(num_bytes)
        busy = tuple((level, seconds * num_bytes) for level, seconds in line.busy_seconds_per_byte)
        if self.measured_links:
            cost = step_cost(self.cluster, step)
            found = self._on_curve(collective_prefix(step.kind, step.groups), num_bytes, cost.seconds)
            if found is not None:
                return Price(seconds=found.seconds, source=found.source, uncertainty=found.uncertainty, busy=busy)
        return Price(seconds=modelled, source="modelled", uncertainty=_LINK_UNCERTAINTY, busy=busy)

    def exchange(self, transfers: tuple[Transfer, ...], item_bytes: int) -> Price:
        """The messages of one exchange between stages, all at once."""
        messages: list[Message] = []
        box, num_bytes = None, 0
        for t in transfers:  # of thousands of devices, most with the very same box
            if t.source_box is not box:
                box, num_bytes = t.source_box, item_bytes * prod(stop - start for start, stop in t.source_box)
            messages.append((t.source, t.target, num_bytes))
        modelled = exchange_seconds(self.cluster, messages)
        busy = ((self.cluster.crossed_level((messages[0][0], messages[0][1])), modelled),)
        if self.measured_links:
            largest = max(int(num_bytes) for *_, num_bytes in messages)

            def model(size: float) -> float:
                return exchange_seconds(self.cluster, [(s, t, of * size / largest) for s, t, of in messages])

            found = self._on_curve(exchange_prefix((s, t) for s, t, _ in messages), largest, model)
            if found is not None:
                return Price(seconds=found.seconds, source=found.source, uncertainty=found.uncertainty, busy=busy)
        return Price(seconds=modelled, source="modelled", uncertainty=_LINK_UNCERTAINTY, busy=busy)

    @property
    def compute_slowdown(self) -> float:
        """How many times longer a run takes while its device communicates."""
        return self._slowdown(OVERLAP_COMPUTE_KEY, _MODELLED_SLOWDOWN)

    @property
    def communication_slowdown(self) -> float:
        """How many times longer communication takes while its devices compute."""
        return self._slowdown(OVERLAP_COMMUNICATION_KEY, 1.0)

    @property
    def credit(self) -> Credit:
        """What a device makes good that has waited for others; unknown, it is none."""
        if not self.measured_links or REST_SECONDS_KEY not in self.measured:
            return Credit()
        return Credit(seconds=self.measured[REST_SECONDS_KEY], share=self.measured[REST_SHARE_KEY])

    @property
    def exchange_delay(self) -> float:
        """How much later a message between stages arrives while one of them computes; unknown, it is not late."""
        return max(0.0, self.measured.get(OVERLAP_EXCHANGE_KEY, 0.0)) if self.measured_links else 0.0

    def _slowdown(self, key: str, modelled: float) -> float:
        return max(1.0, self.measured.get(key, modelled)) if self.measured_links else modelled

    @cached_property
    def has_segments(self) -> bool:
        """Were segments measured as a whole, on the links that are used?"""
        return self.measured_links and any(key.startswith(SEGMENT_PREFIX) for key in self.measured)

    def segment(self, key: str) -> Price | None:
        """A segment of a body with its collectives, if it was measured as a whole; see `segments`."""
        if key not in self.measured:
            return None
        return Price(seconds=self.measured[key], source="measured", uncertainty=self._spread(key))

    # -- local work

    def memory(self, num_bytes: int) -> Price:
        """Local work that reads and writes this many bytes: sums, copies."""
        found = self._on_curve(MEMORY_PREFIX, num_bytes, self._memory_seconds)
        if found is not None:
            return found
        estimate = memory_seconds(num_bytes, self.cluster.device)
        return Price(seconds=estimate.seconds, source="modelled", uncertainty=estimate.uncertainty)

    def accumulate(self, num_bytes: int) -> Price:
        """An addition in place that reads and writes this many bytes: it needs no fresh memory."""
        return self._on_curve(ACCUMULATE_PREFIX, num_bytes, self._memory_seconds) or self.memory(num_bytes)

    def _memory_seconds(self, num_bytes: float) -> float:
        return memory_seconds(round(num_bytes), self.cluster.device).seconds

    def update(self, program: Program, stage: int) -> Price:
        """One optimizer step on the shards of one device."""
        key = self._update_key(program.stages[stage])
        if key in self.measured:
            return Price(seconds=self.measured[key], source="measured", uncertainty=self._spread(key))
        tensors, parameters = self.blocks.graph.tensors, program.stages[stage].parameters
        sizes = shard_sizes(program.stages[stage])
        shards = [(size, tensors[p.name].item_bytes) for size, p in zip(sizes, parameters, strict=True)]
        estimate = update_seconds(shards, self.cluster.device)
        return Price(seconds=estimate.seconds, source="modelled", uncertainty=estimate.uncertainty)

    def update_bytes(self, stage: StageProgram) -> int:
        """The temporaries of one optimizer step."""
        peak = self.measured.get(update_peak_key(self._update_key(stage)))
        if peak is not None:
            return int(peak)
        tensors = self.blocks.graph.tensors
        sizes = zip(shard_sizes(stage), stage.parameters, strict=True)
        return _UPDATE_TEMPORARIES * max((size * tensors[p.name].item_bytes for size, p in sizes), default=0)

    def _update_key(self, stage: StageProgram) -> str:
        return update_key(shard_sizes(stage), [self.blocks.graph.tensors[p.name].dtype for p in stage.parameters])

    # -- measured sizes

    @cached_property
    def _curves(self) -> dict[str, list[tuple[int, float]]]:
        """Measured (bytes, seconds) by what the keys begin with, ascending."""
        curves: dict[str, list[tuple[int, float]]] = {}
        for key, seconds in self.measured.items():
            prefix, slash, size = key.rpartition("/")
            if size.isdecimal() and key.startswith((MEMORY_PREFIX, ACCUMULATE_PREFIX, "collective/")):
                curves.setdefault(prefix + slash, []).append((int(size), seconds))
        return {prefix: sorted(points) for prefix, points in curves.items()}

    def _on_curve(self, prefix: str, num_bytes: int, model: Callable[[float], float]) -> Price | None:
        """Between measured sizes, or above the largest at the rate of the last two; else by the model's shape.

        None if nothing was measured, or only what is so much smaller that it says nothing but a latency.
        """
        points = self._curves.get(prefix, [])
        exact = dict(points).get(num_bytes)
        if exact is not None:
            return Price(seconds=exact, source="measured", uncertainty=self._spread(f"{prefix}{num_bytes}"))
        if not points or num_bytes > _FARTHEST * points[-1][0]:
            return None
        if num_bytes < points[0][0] or len(points) == 1:
            seconds = _anchored(points[0], num_bytes, model)
            return Price(seconds=seconds, source="modelled", uncertainty=_LINK_UNCERTAINTY)
        seconds = _interpolated(points, num_bytes)
        return Price(seconds=seconds, source="interpolated", uncertainty=_INTERPOLATED_UNCERTAINTY)

    def _spread(self, key: str) -> float:
        """One standard deviation of a measurement over its value."""
        if key not in self.spreads or not self.measured[key]:
            return _MEASURED_UNCERTAINTY
        return self.spreads[key] / self.measured[key]


def _anchored(point: tuple[int, float], num_bytes: int, model: Callable[[float], float]) -> float:
    """A model's seconds, in the ratio that makes them right at the one measured size, s bytes in t seconds.

    Latency and bytes both count, neither is negative: so fewer bytes take at most t and at least their share of it,
    t · n / s, and more bytes at least t and at most their share. Whatever the model says, the price stays between.
    """
    size, seconds = point
    share = seconds * num_bytes / size
    modelled = model(size)
    guess = seconds * model(num_bytes) / modelled if modelled > 0 else share
    return min(max(guess, min(share, seconds)), max(share, seconds))


def _interpolated(points: Sequence[tuple[int, float]], num_bytes: int) -> float:
    for (low, before), (high, after) in pairwise(points):
        if num_bytes <= high or high == points[-1][0]:
            return max(before, before + (after - before) * (num_bytes - low) / (high - low))
    raise AssertionError("one of the pairs is the last")

"""What to say if nothing fits: what binds, in which stage, by how many bytes, and the least memory that would do.

There are three ways to end without a plan:

    nothing divides      no shape that the wishes leave divides the batch and the model's dims
    memory               the smallest plan by the estimate, or every finalist when simulated, holds more than a device
    something else       finalists fit by the estimate, but no program can be made of them

Which of what was pinned would have to give way, `relaxations` finds out.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planloom.cluster import format_bytes
from planloom.errors import PlanError
from planloom.search.figures import block_figures
from planloom.search.planner import Planner, promising_first
from planloom.search.solutions import Solver
from planloom.search.space import Candidate, Shape, Wishes
from planloom.search.stages import Packing, pack_stages

Progress = Callable[[str, int, int], None]
_DEAR = 1e6
"""A price of memory at which nothing but memory counts."""
_BISECTIONS, _ROUNDING = 24, 1e-9
_LEAST_SECONDS = 120.0
"""For the smallest plan of an error message: then the smallest so far is named."""


class NothingFitsError(PlanError):
    """No plan under these wishes: what binds is in `facts`, for machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastMemory:
    """The plan that needs the least memory: its shape, and the bytes of its fullest stage by part."""

    shape: Shape
    num_micro: int
    num_bytes: float
    stage: int
    stored_bytes: float
    saved_bytes: float
    peak_bytes: float
    given_bytes: float

    @property
    def parts(self) -> dict[str, float]:
        """Bytes of the fullest stage, by what they are for."""
        return {
            "parameters, gradients and optimizer": self.stored_bytes,
            "saved activations": self.saved_bytes,
            "temporaries": self.peak_bytes,
            "the batch": self.given_bytes,
        }

    @property
    def facts(self) -> dict[str, Any]:
        """For machines."""
        shown = {"shape": str(self.shape), "num_micro_batches": self.num_micro, "num_bytes": self.num_bytes}
        return shown | {"stage": self.stage, "parts": self.parts}

    @property
    def words(self) -> str:
        listed = ", ".join(f"{name} {format_bytes(size)}" for name, size in self.parts.items())
        return f"{self.shape}, {self.num_micro} micro-batches: stage {self.stage} holds {listed}"


def nothing_fits(
    planner: Planner,
    wishes: Wishes,
    refused: Sequence[tuple[str, str]] = (),
    *,
    too_large: int = 0,
    progress: Progress | None = None,
) -> NothingFitsError:
    """What binds, and the least memory that would do. Of the finalists that were refused, with the reasons, the first
    `too_large` were refused for want of memory, and the others for what else they say."""
    least = least_memory(planner, wishes, seconds=_LEAST_SECONDS, progress=progress)
    limit, count = planner.device_bytes(wishes), planner.cluster.num_devices
    reasons = [f"{shape} {why}" for shape, why in dict.fromkeys(refused)]
    facts: dict[str, Any] = {
        "binds": "memory" if least is not None else "division",
        "usable_bytes": limit,
        "devices": count,
        "smallest": least.facts if least is not None else None,
        "refused": [{"shape": shape, "why": why} for shape, why in dict.fromkeys(refused)],
    }
    if least is None:
        return NothingFitsError(
            "no plan divides the model and the batch",
            given="; ".join(reasons) or f"{count} devices, batch {planner.batch}",
            required="degrees that divide the batch, and dims of the model",
            todo="change the global batch, the number of devices or what is pinned",
            facts=facts,
        )
    if refused and not too_large:
        return NothingFitsError(
            "no plan can be built: some fit by the estimate, but no program can be made of them",
            given="; ".join(reasons),
            required="a plan whose layouts and stages can be carried out",
            todo="change what is pinned",
            facts=facts | {"binds": "programs"},
        )
    if refused:
        others = len(refused) - too_large
        also = f"; {others} of {len(refused)} could not be built at all" if others else ""
        return NothingFitsError(
            "no plan fits into memory: some do by the estimate, but none does when simulated",
            given="; ".join(reasons) + also,
            required=f"at most {format_bytes(limit)} on each of {count} devices",
            todo="use more devices, or a smaller global batch",
            facts=facts,
        )
    fewer = "allow recomputation (no --no-recompute), " if not wishes.recompute else ""
    return NothingFitsError(
        "no plan fits into memory",
        given=f"{format_bytes(limit)} usable on each of {count} devices; the smallest plan is {least.words}",
        required=f"{format_bytes(least.num_bytes)} on each",
        todo=f"{fewer}use more devices (planloom fit says how many), or a smaller global batch",
        facts=facts,
    )


def least_memory(
    planner: Planner,
    wishes: Wishes,
    *,
    enough: float = 0.0,
    seconds: float = float("inf"),
    progress: Progress | None = None,
) -> LeastMemory | None:
    """The plan that needs the least memory, by the estimate, or the first that needs no more than `enough` bytes; the
    least so far when the seconds are over.

    Of the space only shapes with one free axis are looked at: a second one splits no tensor further than a larger first
    one could. None if nothing divides.
    """
    space, started = planner.space(wishes), time.perf_counter()
    few = [shape for shape in space.shapes if sum(kind == "free" for kind in shape.kinds) <= 1] or space.shapes
    best: LeastMemory | None = None
    for i, shape in enumerate(promising_first(few, planner.cluster, planner.batch)):
        if progress is not None:
            progress(f"the smallest plan, {shape}", i, len(few))
        for num_micro in reversed(space.micro_batches):
            placement = space.placements(planner.cluster, shape)[0]
            schedule = space.schedules_of(shape.num_stages)[0]
            candidate = Candidate(shape=shape, placement=placement, num_micro=num_micro, schedule=schedule)
            if not schedule.is_possible(shape.num_stages, num_micro):
                continue
            found = _least_of(planner, candidate, wishes)
            if found is not None:
                best = found if best is None or found.num_bytes < best.num_bytes else best
                break
        if best is not None and (best.num_bytes <= enough or time.perf_counter() - started > seconds):
            break
    return best


def _least_of(planner: Planner, candidate: Candidate, wishes: Wishes) -> LeastMemory | None:
    tables = planner.tables([candidate], wishes)
    if not tables.is_possible:
        return None
    limit = planner.limit_bytes(wishes)
    solver = Solver(tables, planner.places, limit_bytes=max(limit, 1.0), recompute=wishes.recompute)
    if not np.isfinite(solver.bounds[0]):
        return None
    choice = solver.smallest(0, _DEAR)
    figures = block_figures(tables, 0, choice)
    num_stages, most = candidate.num_stages, max(candidate.kept)
    everything = figures.stored_bytes.sum() + most * figures.saved_bytes.sum() + figures.peak_bytes.max()

    def packed(num_bytes: float) -> Packing | None:
        limits = [num_bytes] * num_stages
        return pack_stages([figures], planner.places, candidate.num_micro, limits, schedule=candidate.schedule)

    low, high = 0.0, float(everything) * (1 + _ROUNDING)
    packing = packed(high)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = packed(middle)
        low, high = (low, middle) if found is not None else (middle, high)
        packing = found or packing
    if packing is None:
        return None
    estimate = solver.estimate(0, choice, packing.first_blocks)
    fullest = max(range(len(estimate.stages)), key=lambda s: estimate.stages[s].num_bytes)
    stage, given = estimate.stages[fullest], planner.device_bytes(wishes) - limit
    return LeastMemory(
        shape=candidate.shape,
        num_micro=candidate.num_micro,
        num_bytes=stage.num_bytes + given,
        stage=fullest,
        stored_bytes=stage.stored_bytes,
        saved_bytes=stage.kept_micro * stage.saved_bytes,
        peak_bytes=stage.peak_bytes,
        given_bytes=given,
    )

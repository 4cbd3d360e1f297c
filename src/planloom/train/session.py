"""A training run on this machine: local processes under torchrun, and what they measured."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from planloom.execute.processes import Launch, run_workers
from planloom.simulate import Timeline

# The first steps warm up allocators, connections and caches.
_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """Losses and seconds of every step, seconds of the slowest rank."""

    losses: tuple[float, ...]
    seconds: tuple[float, ...]
    timeline: Timeline | None = None

    @property
    def step_seconds(self) -> float:
        """The median step after the warm-up."""
        return median(self.seconds[_WARM_UP_STEPS:] or self.seconds)


def train_locally(
    model: str,
    plan: Path,
    *,
    num_processes: int,
    num_steps: int,
    learning_rate: float = 1e-3,
    with_timeline: bool = False,
    compiled: bool = False,
    launch: Launch = run_workers,
    on_step: Callable[[int, float, float], None],
) -> TrainingRun:
    """Train a model (`file.py:factory`) under a plan file on local CPU processes; `on_step(step, loss, seconds)`.

    With a timeline, one more step is made and what happened when on every rank is kept. `compiled`: runs are compiled
    at their first use. `launch` runs the workers.
    """
    losses: list[float] = []
    seconds: list[float] = []

    def hear(event: dict[str, float]) -> None:
        losses.append(event["loss"])
        seconds.append(event["seconds"])
        on_step(int(event["step"]), event["loss"], event["seconds"])

    arguments = ["--model", model, "--plan", str(plan), "--steps", str(num_steps)]
    arguments += ["--learning-rate", str(learning_rate), *(["--compile"] if compiled else [])]
    with tempfile.TemporaryDirectory(prefix="planloom-train-") as folder:
        path = Path(folder) / "timeline.json"
        arguments += ["--timeline", str(path)] if with_timeline else []
        launch("planloom.train.worker", arguments, num_processes, hear)
        timeline = msgspec.json.decode(path.read_bytes(), type=Timeline) if with_timeline else None
    return TrainingRun(losses=tuple(losses), seconds=tuple(seconds), timeline=timeline)

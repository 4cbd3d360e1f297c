"""Cutting into stages: packing against all cuts and options, the formula of the step, and where a stage may begin."""

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from planloom.search.schedules import Schedule
from planloom.search.stages import (
    BlockFigures,
    cut_places,
    estimate_stages,
    pack_stages,
)

CLOSE = 1.001
"""Packing bisects to 1e-4 of the pace."""


def figures(seed: int, num_blocks: int) -> BlockFigures:
    rng = np.random.default_rng(seed)
    return BlockFigures(
        micro_seconds=rng.random(num_blocks),
        step_seconds=0.1 * rng.random(num_blocks),
        stored_bytes=rng.random(num_blocks),
        saved_bytes=0.3 * rng.random(num_blocks),
        peak_bytes=0.1 * rng.random(num_blocks),
    )


def changed(own: BlockFigures, rng: np.random.Generator) -> BlockFigures:
    """Blocks that are slower and smaller."""
    slower, smaller = 1 + rng.random(len(own.micro_seconds)), 0.3 + 0.6 * rng.random(len(own.micro_seconds))
    return BlockFigures(
        micro_seconds=own.micro_seconds * slower,
        step_seconds=own.step_seconds * slower,
        stored_bytes=own.stored_bytes * smaller,
        saved_bytes=own.saved_bytes * smaller,
        peak_bytes=own.peak_bytes,
    )


def mixed(options: Sequence[BlockFigures], taken: Sequence[int]) -> BlockFigures:
    """Every block with its option."""
    at = np.arange(len(taken))
    names = ("micro_seconds", "step_seconds", "stored_bytes", "saved_bytes", "peak_bytes")
    return BlockFigures(**{name: np.stack([getattr(o, name) for o in options])[list(taken), at] for name in names})


def pace(own: BlockFigures, first_blocks: Sequence[int], num_micro: int) -> float:
    """What packing minimizes: the slowest stage, with its share of what comes once a step."""
    weight = num_micro + len(first_blocks) - 1
    estimate = estimate_stages(own, first_blocks, num_micro, 0.0)
    return max(stage.micro_seconds + stage.step_seconds / weight for stage in estimate.stages)


def fits(own: BlockFigures, first_blocks: Sequence[int], num_micro: int, limits: Sequence[float]) -> bool:
    stages = estimate_stages(own, first_blocks, num_micro, 0.0).stages
    return all(stage.num_bytes <= limit for stage, limit in zip(stages, limits, strict=True))


def cuts(places: Sequence[int], num_stages: int) -> Iterator[tuple[int, ...]]:
    return ((0, *chosen) for chosen in combinations(places, num_stages - 1))


def switched(num_options: int, edges: Sequence[int], stop: int) -> Iterator[list[int]]:
    """In every stage an option, and from some place on a smaller one."""
    stages = list(zip(edges, [*edges[1:], stop], strict=True))
    rows = []
    for low, high in stages:
        own = [[first] * (high - low) for first in range(num_options)]
        own += [
            [first] * (at - low) + [second] * (high - at)
            for first in range(num_options - 1)
            for second in range(first + 1, num_options)
            for at in range(low, high + 1)
        ]
        rows.append(own)
    return ([option for part in parts for option in part] for parts in product(*rows))


@pytest.mark.parametrize("num_micro", [1, 4])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_one_option_without_limits_has_the_least_pace_of_all_cuts(seed: int, num_stages: int, num_micro: int) -> None:
    own, places = figures(seed, 10), (1, 2, 4, 5, 7, 9)
    packing = pack_stages([own], places, num_micro, [np.inf] * num_stages)
    assert packing is not None
    assert set(packing.first_blocks[1:]) <= set(places)
    best = min(pace(own, cut, num_micro) for cut in cuts(places, num_stages))
    assert best <= pace(own, packing.first_blocks, num_micro) <= CLOSE * best


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_under_limits_the_least_pace_of_all_cuts_and_switches(seed: int, num_stages: int) -> None:
    """The peak of a stage is that of the blocks that are in it."""
    num_blocks, num_micro = 5, 3
    options = [figures(seed, num_blocks)]
    for other in (seed + 100, seed + 200):  # from fast and large to slow and small, block by block
        options.append(changed(options[-1], np.random.default_rng(other)))
    places = tuple(range(1, num_blocks))
    num_found = 0
    for limit in (1.5 / num_stages, 2.5 / num_stages, 1.4):
        limits = [limit * (1 + 0.1 * s) for s in range(num_stages)]
        feasible = [
            pace(mixed(options, taken), cut, num_micro)
            for cut in cuts(places, num_stages)
            for taken in switched(len(options), cut, num_blocks)
            if fits(mixed(options, taken), cut, num_micro, limits)
        ]
        packing = pack_stages(options, places, num_micro, limits)
        assert (packing is None) == (not feasible)
        if packing is not None:
            found = mixed(options, packing.options)
            assert fits(found, packing.first_blocks, num_micro, limits)
            assert min(feasible) * (1 - 1e-12) <= pace(found, packing.first_blocks, num_micro) <= CLOSE * min(feasible)
            num_found += 1
    assert num_found


def test_too_few_places_or_too_little_memory() -> None:
    own = figures(0, 6)
    assert pack_stages([own], (2,), 1, [np.inf] * 3) is None, "three stages need two cuts"
    assert pack_stages([own], (2, 4), 1, [1e-3] * 3) is None


@pytest.mark.parametrize(("num_stages", "num_micro", "kept"), [(1, 8, [1]), (4, 2, [2, 2, 2, 1]), (4, 8, [4, 3, 2, 1])])
def test_the_first_stages_keep_most(num_stages: int, num_micro: int, kept: list[int]) -> None:
    assert list(Schedule().kept(num_stages, num_micro)) == kept


def test_the_step_of_a_cut() -> None:
    """Σ μ + (m - 1) max μ + max σ + the exchange, written out."""
    own = BlockFigures(
        micro_seconds=np.array([1.0, 2.0, 4.0]),
        step_seconds=np.array([0.5, 0.5, 0.25]),
        stored_bytes=np.array([10.0, 20.0, 40.0]),
        saved_bytes=np.array([1.0, 2.0, 3.0]),
        peak_bytes=np.array([5.0, 7.0, 6.0]),
    )
    estimate = estimate_stages(own, (0, 2), 8, 0.125)
    assert estimate.step_seconds == (3 + 4) + 7 * 4 + 1.0 + 0.125
    assert [stage.num_bytes for stage in estimate.stages] == [30 + 2 * 3 + 7, 40 + 3 + 6]
    assert estimate.num_bytes == 49
    assert estimate_stages(own, (0,), 1, 0.0).step_seconds == 7 + 1.25


@pytest.mark.parametrize("seed", range(10))
def test_the_bound_of_the_docstring_is_one(seed: int) -> None:
    own, num_micro, places = figures(seed, 8), 5, range(1, 8)
    for num_stages in (1, 2, 3, 4):
        total = (num_micro + num_stages - 1) * own.micro_seconds.sum() + own.step_seconds.sum()
        for cut in cuts(places, num_stages):
            step = estimate_stages(own, cut, num_micro, 0.0).step_seconds
            assert step >= total / num_stages * (1 - 1e-12)


def chain(num_blocks: int, *, skips: Sequence[tuple[int, int]] = (), rows: Sequence[int] = ()) -> Any:
    """What `cut_places` reads of blocks that each read what the one before made; some are read further on, or are
    rows of experts."""
    users = {f"t{i}": [i + 1] for i in range(num_blocks - 1)}
    for low, high in skips:
        users[f"t{low}"].append(high)
    return SimpleNamespace(
        blocks=range(num_blocks),
        producer={f"t{i}": i for i in range(num_blocks)},
        consumers={**{name: tuple(own) for name, own in users.items()}, "weight": (0, 3)},
        graph=SimpleNamespace(tensors={f"t{i}": SimpleNamespace(rows="m" * (i in rows)) for i in range(num_blocks)}),
    )


def test_a_stage_begins_where_at_most_two_tensors_cross() -> None:
    assert cut_places(chain(5)) == (1, 2, 3, 4)
    skips = ((0, 4), (1, 5))
    assert cut_places(chain(6, skips=skips)) == (1, 2, 5), "at blocks 3 and 4 three tensors cross"
    assert cut_places(chain(6, skips=skips, rows=(0,))) == (5,), "rows of experts cross no cut"
    crowded = ((0, 6), (1, 6), (2, 6), (3, 6))
    everywhere = chain(6, skips=[(low, 5) for low, _ in crowded])
    assert cut_places(everywhere) == (1, 2)

"""Lazy measuring: plan, measure what the best plans use, plan again, until nothing in them is unmeasured."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from planloom.cluster import load_cluster
from planloom.cost import Prices, run_fingerprint, run_key
from planloom.program import Program
from planloom.report import candidates_table
from planloom.search import Candidate, candidate_plans, plan_lazily, price_plans
from tests.pure.tiny_graph import tiny_batch, tiny_blocks

CLUSTER = load_cluster("two-by-two")


class Device:
    """Measures a run as what a table says, else as one second, and counts."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds, self.known = seconds, {}
        self.rounds: list[list[Program]] = []

    def prices(self) -> Prices:
        return Prices(blocks=tiny_blocks(), cluster=CLUSTER, measured=self.known)

    def measure(self, programs: Sequence[Program]) -> int:
        self.rounds.append(list(programs))
        before = len(self.known)
        for program in programs:
            for run in program.runs:
                fingerprint = run_fingerprint(tiny_blocks(), program, run)
                for phase in ("forward", "backward"):
                    self.known[run_key(fingerprint, phase)] = self.seconds.get(fingerprint, 1.0)
        return (len(self.known) - before) // 2


def candidates() -> tuple[Candidate, ...]:
    return candidate_plans(tiny_blocks(), CLUSTER, tiny_batch())


def unmeasured(device: Device, program: Program) -> list[str]:
    prints = [run_fingerprint(tiny_blocks(), program, run) for run in program.runs]
    return [fingerprint for fingerprint in prints if run_key(fingerprint, "forward") not in device.known]


@pytest.mark.parametrize("num_best", [1, 3])
def test_everything_in_the_best_plans_is_measured_at_the_end(num_best: int) -> None:
    device = Device({})
    found = plan_lazily(candidates(), device.prices, device.measure, num_best=num_best)
    best = [c.program for c in found.ranked if c.program is not None][:num_best]
    assert not [fingerprint for program in best for fingerprint in unmeasured(device, program)]
    assert found.num_rounds == len(device.rounds) <= len(candidates())
    assert found.num_measured == len(device.known) // 2
    assert [c.step_seconds for c in found.ranked] == sorted(c.step_seconds for c in found.ranked)


def test_no_program_is_measured_twice_and_plans_that_are_never_good_are_not_measured() -> None:
    """What is measured is as fast as modelled: then the first ranking holds."""
    device = Device({})
    modelled = Prices(blocks=tiny_blocks(), cluster=CLUSTER)
    for candidate in candidates():
        for run in candidate.program.runs if candidate.program is not None else ():
            fingerprint = run_fingerprint(tiny_blocks(), candidate.program, run)
            device.seconds[fingerprint] = modelled.run(candidate.program, run, "forward").seconds
    found = plan_lazily(candidates(), device.prices, device.measure, num_best=2)
    asked = [id(program) for programs in device.rounds for program in programs]
    assert len(asked) == len(set(asked)) < len([c for c in found.ranked if c.program is not None])


def test_a_plan_that_turns_out_slow_gives_way_to_others() -> None:
    device = Device({})
    everything = candidates()
    first = plan_lazily(everything, device.prices, lambda programs: 0, num_best=1).ranked[0]
    found = plan_lazily(everything, device.prices, device.measure, num_best=1)
    assert found.num_rounds > 1
    assert device.rounds[0] == [first.program]


def test_with_nothing_to_plan_nothing_is_measured() -> None:
    refused = [replace(c, plan=None, program=None, refused="no") for c in candidates()]
    device = Device({})
    found = plan_lazily(refused, device.prices, device.measure)
    assert (found.num_rounds, found.num_measured, device.rounds) == (0, 0, [])


def test_plans_that_do_not_fit_rank_behind_all_that_do() -> None:
    """By their step times among themselves, and before those that are refused."""
    prices = Device({}).prices()
    everything = (*price_plans(candidates(), prices), Candidate(name="none", placement="", refused="no"))
    by_memory = sorted({c.memory_bytes for c in everything if c.timeline is not None})
    limit = by_memory[len(by_memory) // 2]
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=limit))
    ranked = price_plans(everything, replace(prices, cluster=cluster))
    fitting = [c for c in ranked if c.timeline is not None and c.memory_bytes <= limit]
    assert list(ranked[: len(fitting)]) == fitting
    assert [c.fits for c in ranked[:-1]] == [c.memory_bytes <= limit for c in ranked[:-1]]
    assert 0 < len(fitting) < len(ranked) - 1
    assert ranked[-1].refused == "no"
    for some in (fitting, ranked[len(fitting) : -1]):
        assert [c.step_seconds for c in some] == sorted(c.step_seconds for c in some)
    rows = Console(width=200).render_lines(candidates_table(ranked, cluster="small"))
    text = "\n".join("".join(part.text for part in row) for row in rows)
    assert text.count("too much") == len(ranked) - 1 - len(fitting)

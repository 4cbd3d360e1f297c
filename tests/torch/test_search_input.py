"""What a search refuses, and in which words; and that its first bound is one."""

import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from planloom.cli import main
from planloom.cost import Prices
from planloom.errors import PlanError
from planloom.search import (
    BlockPin,
    NothingFitsError,
    Wishes,
    find_best,
    least_memory,
    try_relaxations,
    with_relaxations,
)
from planloom.search import finalists as finalists_module
from planloom.search.processes import within_seconds
from tests.torch.searches import planner, spec


def refused(wishes: Wishes, *words: str) -> None:
    own = planner("gpt", "two-by-two")
    with pytest.raises(PlanError, match="(?s)" + ".*".join(map(re.escape, words))):
        find_best(own, Prices(blocks=own.blocks, cluster=own.cluster), spec("gpt"), wishes)


@pytest.mark.parametrize("wishes", [Wishes(tp=3), Wishes(dp=2, tp=4), Wishes(pp=8), Wishes(dp=2, tp=1, pp=1)], ids=str)
def test_degrees_that_do_not_fill_the_devices(wishes: Wishes) -> None:
    given = {name: value for name in ("dp", "tp", "pp") if (value := getattr(wishes, name)) is not None}
    listed = ", ".join(f"{name}={value}" for name, value in given.items())
    refused(wishes, "the pinned degrees do not fill the devices", listed, "product divides 4")


def test_micro_batches_that_do_not_divide_the_batch() -> None:
    refused(Wishes(micro=3), "3 micro-batches of a batch of 8", "one of 1, 2, 4, 8")


def test_a_batch_that_the_degrees_do_not_divide() -> None:
    refused(Wishes(dp=4, micro=4), "no plan divides the model and the batch")


@pytest.mark.parametrize(
    "pin",
    [
        BlockPin(pattern="decoder.*", dim="batch", axis="tp"),
        BlockPin(pattern="layers.0.up", dim="heads", axis="tp"),
        BlockPin(pattern="layers.0.up", dim="out", axis="ep"),
    ],
    ids=str,
)
def test_a_pin_that_matches_nothing(pin: BlockPin) -> None:
    refused(Wishes(pins=(pin,)), "a pin concerns nothing", f"{pin.pattern}={pin.dim}:{pin.axis}", "an axis of dp, tp")


def test_too_little_memory_is_refused_with_what_binds_and_what_would_do() -> None:
    own = planner("gpt", "two-by-two")
    least = least_memory(own, Wishes(memory_bytes=200_000))
    assert least is not None
    refused(
        Wishes(memory_bytes=200_000),
        "no plan fits into memory",
        "195 KiB usable on each of 4 devices",
        f"the smallest plan is {least.shape}, {least.num_micro} micro-batches: stage {least.stage} holds parameters",
        "saved activations",
        "required:",
        "iB on each",
    )


def test_what_is_said_to_be_the_least_memory_is_enough_for_the_estimate_and_less_is_not() -> None:
    own = planner("gpt", "two-by-two")
    for wishes in (Wishes(pp=1), Wishes(pp=2), Wishes(pp=1, recompute=False)):
        least = least_memory(own, wishes)
        assert least is not None
        found = own.search(wishes, limit_bytes=(least.num_bytes - least.given_bytes) * 1.001)
        assert found.ranked, "what is said to be enough is enough"
        assert min(r.solution.estimate.num_bytes for r in found.ranked) <= least.num_bytes


@pytest.mark.parametrize(
    ("model", "cluster_name"), [("gpt", "two-by-two"), ("llama", "flat"), ("zoo/gshard_moe", "two-by-two")]
)
def test_the_bound_before_all_tables_is_below_every_estimate(model: str, cluster_name: str) -> None:
    own = planner(model, cluster_name)
    found = own.search(Wishes(), num_wanted=64)
    for ranked in found.ranked:
        candidate = ranked.solution.candidate
        assert own.least_seconds(candidate.schedule, candidate.shape.num_stages, candidate.num_micro) <= ranked.seconds
    assert found.certificate.bound_seconds <= found.certificate.best_seconds == found.ranked[0].seconds
    assert 0 <= found.certificate.gap < 1


# -- which relaxation of what is pinned is the cheapest


def relaxed(wishes: Wishes, seconds: float = 120.0) -> NothingFitsError:
    """Of the proven space alone: a variant may fit where none of its plans does."""
    own, wishes = planner("gpt", "two-by-two"), replace(wishes, variants=())
    prices = Prices(blocks=own.blocks, cluster=own.cluster)
    with pytest.raises(NothingFitsError) as caught:
        find_best(own, prices, spec("gpt"), wishes)
    found = try_relaxations(own, prices, spec("gpt"), wishes, seconds=seconds)
    return with_relaxations(caught.value, found)


def test_the_cheapest_relaxation_is_named_first_and_its_step_is_that_of_the_search_without_the_pin() -> None:
    own = planner("gpt", "two-by-two")
    wishes = Wishes(dp=1, pp=1, micro=1, memory_bytes=1_300_000)
    error = relaxed(wishes)
    found = error.facts["relaxations"]
    by_words = {each["relaxation"]: each for each in found}
    fitting = [each for each in found if each["fits"]]
    singles = [each for each in fitting if each["kind"] == "one"]
    assert fitting[: len(singles)] == singles, "what costs nothing comes before other hardware"
    steps = [each["step_seconds"] for each in singles]
    assert steps == sorted(steps)
    assert singles, "some single relaxation fits"
    assert f"the cheapest that fits: {singles[0]['relaxation']}" in str(error)
    micro = by_words["leave --micro open (it is 1)"]
    best = find_best(
        own, Prices(blocks=own.blocks, cluster=own.cluster), spec("gpt"),
        Wishes(dp=1, pp=1, memory_bytes=1_300_000, variants=()), num_finalists=2,
    )  # fmt: skip
    assert micro["fits"]
    assert micro["step_seconds"] == best.winner.step_seconds
    assert micro["memory_bytes"] == best.winner.memory_bytes <= 1_300_000
    assert any(each["kind"] == "memory" and each["fits"] for each in found)
    assert all(each["outcome"] in ("fits", "smallest", "no", "undecided") for each in found)


def test_a_relaxation_that_does_not_help_says_what_still_binds() -> None:
    error = relaxed(Wishes(pp=1, recompute=False, memory_bytes=900_000))
    assert "not allow recomputation (no --no-recompute): the smallest plan still holds" in str(error)
    assert error.facts["binds"] == "memory"
    assert error.facts["smallest"]["stage"] == 0
    assert sum(error.facts["smallest"]["parts"].values()) == pytest.approx(error.facts["smallest"]["num_bytes"])


def test_where_nothing_divides_it_is_said_which_degree_has_to_give_way() -> None:
    error = relaxed(Wishes(dp=4, micro=4))
    assert error.facts["binds"] == "division"
    assert "the cheapest that fits: leave --micro open (it is 4)" in str(error)
    assert "or leave --dp open (it is 4)" in str(error)
    assert "not more memory a device: still no plan divides" in str(error)


def test_finalists_that_cannot_be_built_are_not_said_to_want_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PlanError("has a block that cannot be carried out")

    monkeypatch.setattr(finalists_module, "build_program", refuse)
    own = planner("gpt", "two-by-two")
    with pytest.raises(NothingFitsError, match="no plan can be built") as caught:
        find_best(own, Prices(blocks=own.blocks, cluster=own.cluster), spec("gpt"), Wishes(pp=1, micro=1, variants=()))
    assert "has a block that cannot be carried out" in caught.value.given
    assert "memory" not in str(caught.value)
    assert caught.value.facts["binds"] == "programs"


def test_work_is_ended_when_its_time_is_over_and_what_it_told_stands() -> None:
    def work(item: int, tell: Callable[[int], None]) -> None:
        tell(item)
        time.sleep(0 if item % 2 else 60)
        tell(10 * item)

    started = time.monotonic()
    assert within_seconds(work, [1, 2, 3, 4], 1.5) == [10, 2, 30, 4]
    assert time.monotonic() - started < 20


def test_undecided_relaxations_are_said_to_be() -> None:
    error = relaxed(Wishes(pp=1, memory_bytes=200_000), seconds=0.0)
    assert "no single change was found to do" in str(error)
    assert "perhaps more devices: not known after 0 s" in str(error)


def test_the_command_tells_machines_and_people_and_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "plan gpt2?batch=8&seq=64&n_layer=2 --cluster dgx-a100 --nodes 1 --pp 1 --dp 8 --zero 0 --memory 600MiB "
        "--variants none --json"
    )
    monkeypatch.setattr(sys, "argv", ["planloom", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    shown = capsys.readouterr()
    error: dict[str, Any] = json.loads(shown.out)["error"]
    assert ended.value.code == 2
    assert error["what"] == "no plan fits into memory"
    assert error["relaxations"][0]["fits"]
    assert error["relaxations"][0]["relaxation"] in error["todo"]
    assert "the cheapest that fits" in " ".join(shown.err.split())


def test_a_model_that_needs_the_whole_batch_at_once_has_no_micro_batches() -> None:
    own = planner("zoo/gshard_moe", "flat")
    assert own.space(Wishes()).micro_batches == (1,)
    with pytest.raises(PlanError, match="sums over the whole batch and cannot run on micro-batches"):
        own.space(Wishes(micro=2))

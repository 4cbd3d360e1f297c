"""What a search refuses, and in which words; and that its first bound is one."""

import re

import pytest

from planloom.cost import Prices
from planloom.errors import PlanError
from planloom.search import BlockPin, Wishes, find_best, least_memory
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
        assert own.least_seconds(candidate.shape.num_stages, candidate.num_micro) <= ranked.seconds
    assert found.certificate.bound_seconds <= found.certificate.best_seconds == found.ranked[0].seconds
    assert 0 <= found.certificate.gap < 1

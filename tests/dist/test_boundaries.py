"""Pipeline boundaries on real processes: 2 to 4 devices, 4 to 4 in permuted orders; tests/torch emulates them all."""

import pytest
import torch

from planloom.capture import batch_spec
from tests.boundaries import Side, boundary_plan
from tests.dist.cases import captured, reference, require_equal, train
from tests.dist.workers import Pool
from tests.models import build

CASES = [
    ("sequence", (0, 1), "batch", (2, 3, 4, 5), False),
    ("features", (2, 0, 3, 1), "batch and sequence", (7, 4, 6, 5), True),
    ("replicated", (0, 1), "replicated", (2, 3, 4, 5), True),
    ("replicated", (4, 1), "features", (2, 5, 0, 3), True),
    ("batch", (5, 2), "sequence", (3, 0, 4, 1), True),
    ("features", (0, 1), "replicated", (2, 3, 4, 5), True),
    ("replicated", (2, 0, 3, 1), "replicated", (7, 4, 6, 5), True),
    ("batch", (2, 0, 3, 1), "batch", (7, 4, 6, 5), True),
    ("sequence", (2, 0, 3, 1), "replicated", (7, 4, 6, 5), True),
    ("batch and sequence", (6, 1, 4, 3), "features", (5, 0, 7, 2), True),
]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(
            Side(split=first, devices=left),
            Side(split=second, devices=right),
            marks=[pytest.mark.slow] if is_slow else [],
        )
        for first, left, second, right, is_slow in CASES
    ],
    ids=str,
)
def test_gradients_and_sgd_in_float64(pools: dict[int, Pool], first: Side, second: Side) -> None:
    _, batch = build("gpt", torch.float64)
    plan = boundary_plan(captured("gpt", torch.float64), batch_spec(batch), first, second)
    expected = reference("gpt", torch.float64, "sgd", 4)
    results = pools[len(plan.devices)].run(train, "gpt", plan, torch.float64, "sgd", 4)
    require_equal(results, expected)

"""Plans with time axes on real processes: pieces and chunks have the gradients of one device."""

from collections.abc import Callable

import pytest
import torch

from planloom.plan import Plan
from tests.dist.cases import reference, require_equal, train
from tests.dist.workers import Pool
from tests.torch.time_plans import ATTENTION, LAYERS, MLP, empty, heads_of_swin, sharded, tensor_parallel


def co_shard(model: str) -> Plan:
    """Tensor parallel, and what a device has of heads and features in two pieces, recomputed."""
    written = tensor_parallel(empty(model, tp=2), model, "tp")
    written = written.time("co", size=2, over=[ATTENTION[model], MLP[model]], recompute=True)
    return tensor_parallel(written, model, "co").order("1f1b", micro_batches=2).plan("co-shard")


def co_shard_of_shards(model: str) -> Plan:
    """ZeRO-3 over two and tensor parallel over two; pieces that are kept."""
    written = tensor_parallel(sharded(empty(model, dp=2, tp=2), "zero3"), model, "tp")
    written = written.time("co", size=2, over=[ATTENTION[model], MLP[model]])
    return tensor_parallel(written, model, "co").plan("co-shard of shards")


def chunks(model: str) -> Plan:
    """Layers in four chunks of the batch: the reductions of one go on while the next is computed."""
    written = tensor_parallel(empty(model, tp=2), model, "tp")
    written = written.time("chunk", size=4, over=LAYERS[model], order="runs")
    return written.split(LAYERS[model], batch="chunk").plan("chunks")


def swin_in_pieces(model: str) -> Plan:
    """Windows' attention by heads: over two devices, and on each one head after the other."""
    written = heads_of_swin(empty(model, tp=2), "tp").time("co", size=2, over="*.attention*", recompute=True)
    return heads_of_swin(written, "co").plan("swin in pieces")


CASES = [
    (2, "gpt", co_shard),
    pytest.param(2, "llama", co_shard, marks=pytest.mark.slow),
    pytest.param(4, "gpt", co_shard_of_shards, marks=pytest.mark.slow),
    pytest.param(2, "gpt", chunks, marks=pytest.mark.slow),
    (2, "llama", chunks),
    pytest.param(2, "zoo/swin", swin_in_pieces, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world", "model", "make"), CASES)
def test_gradients_and_sgd_in_float64(
    pools: dict[int, Pool], world: int, model: str, make: Callable[[str], Plan]
) -> None:
    results = pools[world].run(train, model, make(model), torch.float64, "sgd", 3)
    require_equal(results, reference(model, torch.float64, "sgd", 3))

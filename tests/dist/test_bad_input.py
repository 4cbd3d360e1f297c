"""Bad input: a clear error that says what was given, what was required and what to do; no process hangs."""

import os
import re
import subprocess
import sys
import time

import pytest
import torch

from planloom.errors import PlanError, TrainingError
from planloom.execute.processes import run_workers
from planloom.program import build_program
from tests.dist.cases import captured, resolve, train
from tests.dist.workers import Pool, free_port

LIMIT_SECONDS = 30


def test_a_plan_for_another_model_is_refused_with_what_differs() -> None:
    plan = resolve("gpt", torch.float32, "dp=2")
    with pytest.raises(PlanError) as caught:
        build_program(captured("llama", torch.float32), plan)
    assert "another model" in str(caught.value)
    assert "in the plan" in str(caught.value)
    assert "in the model" in str(caught.value)


def test_a_plan_for_another_dtype_is_refused_with_what_differs() -> None:
    plan = resolve("gpt", torch.float32, "dp=2")
    with pytest.raises(PlanError, match=r"float32\[.*\] in the plan, float64\[.*\] in the model"):
        build_program(captured("gpt", torch.float64), plan)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(PlanError, match=r"the batch does not divide[\s\S]*batch 8 over 3 micro-batches") as caught:
        resolve("gpt", torch.float32, "dp=2,micro=3")
    assert "a multiple of 6" in str(caught.value)


def test_more_ranks_than_devices_are_refused_on_every_rank(pools: dict[int, Pool]) -> None:
    with pytest.raises(AssertionError) as caught:
        pools[4].run(train, "gpt", "dp=2", torch.float32, "sgd", 1)
    text = str(caught.value)
    assert text.count("TrainingError: more ranks than devices in the plan") >= 4
    assert "4 ranks for plan 'dp=2'" in text
    assert "--nproc-per-node 2" in text


def wrong_batch(rank: int) -> str:
    from planloom.train import parallelize
    from tests.dist.cases import _watch, make_optimizer
    from tests.models import build

    model, batch = build("gpt", torch.float32)
    plan = resolve("gpt", torch.float32, "dp=2")
    blocks = captured("gpt", torch.float32)
    trainer = parallelize(model, plan, optimizer=make_optimizer("sgd"), blocks=blocks, watch=_watch())
    try:
        trainer.step({name: tensor[:4] for name, tensor in batch.items()})
    except TrainingError as error:
        return str(error)
    finally:
        trainer.close()
    return "no error"


def test_a_batch_of_another_shape_is_refused(pools: dict[int, Pool]) -> None:
    for text in pools[2].run(wrong_batch):
        assert "another shape" in text
        assert "(4, 16)" in text
        assert "(8, 16)" in text


def test_torchrun_names_the_rank_that_dies() -> None:
    start = time.monotonic()
    with pytest.raises(TrainingError, match="rank 2") as caught:
        run_workers("tests.dist.dying", ["2", "SIGKILL"], 4, lambda event: None)
    assert "signal 9" in str(caught.value) or "no longer answers" in str(caught.value)
    assert time.monotonic() - start < LIMIT_SECONDS + 20  # the start of the processes included


@pytest.mark.parametrize(
    ("victim", "how"), [(2, "SIGKILL"), pytest.param(0, "SIGKILL", marks=pytest.mark.slow), (1, "SIGSTOP")]
)
def test_without_torchrun_all_others_end_and_name_the_rank(victim: int, how: str) -> None:
    port = str(free_port())
    processes = []
    for rank in range(4):
        environment = {**os.environ, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "4"}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.dist.dying", str(victim), how],
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for rank, process in enumerate(processes):
            if rank == victim:
                continue
            output, errors = process.communicate(timeout=90)
            assert process.returncode != 0
            assert f"rank {victim} no longer answers" in output + errors, output + errors[-3000:]
        ended = time.time()
    finally:
        for process in processes:
            process.kill()
    _, errors = processes[victim].communicate()
    died = re.search(r"died at ([\d.]+)", errors)
    assert died is not None
    assert ended - float(died.group(1)) < LIMIT_SECONDS

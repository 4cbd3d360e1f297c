"""What a rank does in a case: train a model under a plan and return what it computed."""

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from planloom.blocks import BlockGraph, find_blocks
from planloom.capture import batch_spec, cached_capture
from planloom.errors import TrainingError
from planloom.plan import Plan, find_named, named_plan
from planloom.train import parallelize
from planloom.train.watch import Watch, start_watch
from tests.models import build, lifted, loss_of

LEARNING_RATE = 0.05


def _graph_folder() -> Path:
    """One folder for the test session: worker processes inherit the variable, and read what the first has captured."""
    if _FOLDER_VARIABLE not in os.environ:
        os.environ[_FOLDER_VARIABLE] = tempfile.mkdtemp(prefix="planloom-graphs-")
        atexit.register(shutil.rmtree, os.environ[_FOLDER_VARIABLE], ignore_errors=True)
    return Path(os.environ[_FOLDER_VARIABLE])


_FOLDER_VARIABLE = "PLANLOOM_TEST_GRAPHS"
_GRAPHS = _graph_folder()


@cache
def captured(model_name: str, dtype: torch.dtype) -> BlockGraph:
    model, batch = build(model_name, dtype)
    with lifted(dtype):
        return find_blocks(cached_capture(model, batch, folder=_GRAPHS))


@cache
def _watch() -> Watch:
    return start_watch()


def make_optimizer(kind: str) -> Any:
    if kind == "sgd":
        return lambda tensors: torch.optim.SGD(tensors, lr=LEARNING_RATE)
    return lambda tensors: torch.optim.AdamW(tensors, lr=LEARNING_RATE, weight_decay=0.1)


def resolve(model_name: str, dtype: torch.dtype, plan: Plan | str) -> Plan:
    if isinstance(plan, Plan):
        return plan
    _, batch = build(model_name, dtype)
    return named_plan(captured(model_name, dtype), find_named(plan), batch=batch_spec(batch))


def train(
    rank: int, model_name: str, plan: Plan | str, dtype: torch.dtype, optimizer: str, num_steps: int
) -> dict[str, Any]:
    """Losses of all steps, the first step's gradients, the last parameters."""
    model, batch = build(model_name, dtype)
    trainer = parallelize(
        model,
        resolve(model_name, dtype, plan),
        optimizer=make_optimizer(optimizer),
        blocks=captured(model_name, dtype),
        timeout_seconds=60,
        watch=_watch(),
    )
    trainer.keep_gradients()
    losses = [trainer.step(batch)]
    gradients = trainer.gradients()
    losses += [trainer.step(batch) for _ in range(num_steps - 1)]
    result = {"losses": losses, "gradients": gradients, "parameters": trainer.parameters()}
    trainer.close()
    return result


def infer(rank: int, model_name: str, plan: str, num_steps: int) -> dict[str, Any]:
    """Losses of steps that train nothing, the parameters after them, and what is said of gradients."""
    model, batch = build(model_name, torch.float64)
    trainer = parallelize(
        model,
        resolve(model_name, torch.float64, plan),
        optimizer=make_optimizer("sgd"),
        blocks=captured(model_name, torch.float64),
        timeout_seconds=60,
        watch=_watch(),
    )
    losses = [trainer.step(batch) for _ in range(num_steps)]
    refusal = ""
    try:
        trainer.gradients()
    except TrainingError as error:
        refusal = str(error)
    result = {"losses": losses, "parameters": trainer.parameters(), "refusal": refusal}
    trainer.close()
    return result


@cache
def reference(model_name: str, dtype: torch.dtype, optimizer: str, num_steps: int) -> dict[str, Any]:
    """The same on one device, by eager PyTorch."""
    model, batch = build(model_name, dtype)
    optim = make_optimizer(optimizer)(list(model.parameters()))
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    with lifted(dtype):
        for step in range(num_steps):
            optim.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            if step == 0:
                gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optim.step()
            losses.append(float(loss.detach()))
    return {
        "losses": losses,
        "gradients": gradients,
        "parameters": {n: p.detach() for n, p in model.named_parameters()},
    }


def require_equal(results: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """In float64: every rank's losses, gradients and parameters are those of one device, and none is missing."""
    largest = max(float(gradient.abs().max()) for gradient in expected["gradients"].values())
    seen = set()
    for result in results:
        assert all(abs(a - b) <= 1e-12 * abs(b) for a, b in zip(result["losses"], expected["losses"], strict=True))
        for name, gradient in result["gradients"].items():
            whole = expected["gradients"][name]
            bound = 1e-10 * max(float(whole.abs().max()), 1e-6 * largest)
            assert float((gradient - whole).abs().max()) <= bound, name
            assert float((result["parameters"][name] - expected["parameters"][name]).abs().max()) <= 1e-10, name
            seen.add(name)
    assert seen == set(expected["gradients"])

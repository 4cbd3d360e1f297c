"""The graph interpreter beside eager PyTorch, in a process of its own with one thread: time, loss and gradients.

    python -m benchmarks.interpreter_case llama 15

Both take the same step, forward and backward, in turns and in alternating order; ratios are medians over rounds, of
elapsed time and of the processor's, which other processes disturb less.
Gradients are compared one by one: the largest difference, relative to the largest element of that gradient.
"""

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, dict[str, Tensor]]

NUM_WARM_UP = 2
SMALLEST_SCALE = 1e-4
"""Gradients whose largest element is below this share of the largest of all are noise; they are compared at it."""


def llama() -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return LlamaForCausalLM(config), _tokens(config.vocab_size, 4, 128)


def gpt2() -> Built:
    """The sizes of GPT-2 small, without dropout, whose masks eager draws in its own way."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    return GPT2LMHeadModel(config), _tokens(config.vocab_size, 1, 128)


MODELS: dict[str, Callable[[], Built]] = {"llama": llama, "gpt2": gpt2}


def _tokens(vocab_size: int, *shape: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, vocab_size, shape)
    return {"input_ids": tokens, "labels": tokens}


def compare(name: str, num_rounds: int) -> dict[str, Any]:
    from planloom.capture import capture
    from planloom.execute import Interpreter

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    model.train()
    graph = capture(model, batch)
    held = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    interpreter = Interpreter(graph, {n: held[n].detach() for n in graph.buffers}, torch.device("cpu"))
    parameters = {n: held[n] for n in graph.parameters}

    def eager() -> Tensor:
        return model(**batch).loss  # type: ignore[no-any-return]

    def interpreted() -> Tensor:
        return interpreter(parameters, batch)

    expected, found = (_step(model, function)[1:] for function in (eager, interpreted))
    for _ in range(NUM_WARM_UP):
        _step(model, eager)
        _step(model, interpreted)
    rounds = []
    for number in range(num_rounds):
        seconds = {}
        for function in (eager, interpreted) if number % 2 else (interpreted, eager):
            seconds[function] = _step(model, function)[0]
        rounds.append((seconds[eager], seconds[interpreted]))
    return {
        "model": name,
        "batch": list(batch["input_ids"].shape),
        "rounds": num_rounds,
        "eager_seconds": median(eager[0] for eager, _ in rounds),
        "ratio": median(ours[0] / eager[0] for eager, ours in rounds),
        "processor_ratio": median(ours[1] / eager[1] for eager, ours in rounds),
        "ratios": sorted(ours[0] / eager[0] for eager, ours in rounds),
        "loss_difference": abs(float(found[0] - expected[0])) / abs(float(expected[0])),
        **_difference(found[1], expected[1]),
    }


def _step(model: nn.Module, function: Callable[[], Tensor]) -> tuple[tuple[float, float], Tensor, dict[str, Tensor]]:
    """((elapsed seconds, processor seconds), loss, gradients) of one step."""
    model.zero_grad(set_to_none=True)
    start, processor_start = time.perf_counter(), time.process_time()
    loss = function()
    loss.backward()  # type: ignore[no-untyped-call]
    seconds = (time.perf_counter() - start, time.process_time() - processor_start)
    return seconds, loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Any]:
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    differences = [
        float((found[name] - gradient).abs().max()) / max(float(gradient.abs().max()), SMALLEST_SCALE * largest)
        for name, gradient in expected.items()
    ]
    return {
        "gradient_difference": max(differences),
        "gradients": len(differences),
        "bitwise_equal_gradients": sum(torch.equal(found[name], gradient) for name, gradient in expected.items()),
    }


if __name__ == "__main__":
    json.dump(compare(sys.argv[1], int(sys.argv[2])), sys.stdout)

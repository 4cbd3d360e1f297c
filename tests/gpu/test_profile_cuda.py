"""Profiles on a GPU: the sum over runs is the whole forward and backward, memory does not run out into a crash."""

from pathlib import Path

import pytest
import torch

from planloom.blocks import find_blocks
from planloom.capture import batch_spec, capture, load_model
from planloom.cost.keys import run_fingerprint, run_key
from planloom.plan import named_plan, parse_named
from planloom.profile import local_store, profile_here
from planloom.program import build_program

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LLAMA = "llama3-8b?num_hidden_layers=4&hidden_size=2048&intermediate_size=5632&vocab_size=32000&seq=2048&batch=2"


def profiled(source: str, tmp_path: Path) -> tuple[float, dict[str, str], dict[str, float]]:
    """Seconds of forwards and backwards in all runs of one device, what was left out, and the figures."""
    model, batch = load_model(source)
    blocks = find_blocks(capture(model, batch))
    program = build_program(blocks, named_plan(blocks, parse_named("single"), batch=batch_spec(batch)))
    store = local_store(tmp_path / "prices.sqlite", device="cuda")
    profile_here(blocks, model, batch, [program], store, device="cuda", progress=lambda done, total: None)
    figures = store.load()
    total = 0.0
    for run in program.runs:
        fingerprint = run_fingerprint(blocks, program, run)
        total += figures.get(run_key(fingerprint, "forward"), 0.0) + figures.get(run_key(fingerprint, "backward"), 0.0)
    return total, store.skipped(), figures


def test_the_sum_over_runs_is_the_whole(tmp_path: Path) -> None:
    composed, skipped, figures = profiled(LLAMA, tmp_path)
    assert skipped == {}
    assert all(figures[key] > 0 for key in figures if key.endswith(("/forward", "/backward", "/forward_host")))
    model, batch = load_model(LLAMA, device="cuda")
    starts, stops = ([torch.cuda.Event(enable_timing=True) for _ in range(8)] for _ in range(2))
    for start, stop in zip(starts, stops, strict=True):
        start.record()
        model(**batch).loss.backward()
        stop.record()
    torch.cuda.synchronize()
    measured = sorted(start.elapsed_time(stop) for start, stop in zip(starts, stops, strict=True))[4] / 1e3
    assert composed == pytest.approx(measured, rel=0.15)


def test_what_does_not_fit_is_left_out(tmp_path: Path) -> None:
    torch.cuda.set_per_process_memory_fraction(0.02)
    try:
        _, skipped, figures = profiled(LLAMA.replace("batch=2", "batch=16"), tmp_path)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert skipped
    assert all("out of memory" in reason for reason in skipped.values())
    assert any(key.startswith("memory/") for key in figures)

"""What our runtime costs over PyTorch's: a training step of the same model, optimizer, batch and split.

    eager      one process, no split, on a CPU: over the model as it is
    compile    one process, no split, on a GPU: over `torch.compile`, ours with its runs compiled
    ddp        four ranks on a CPU: `dp=4` over DistributedDataParallel
    fsdp2      four ranks on a CPU: `dp=4,zero3` over `fully_shard`

Ours and the other take turns in the same processes; a ratio is the median over rounds. Both compute the same losses.
`--parts` names what is measured; without it, all that this machine can.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.bars import Bar, Outcome, run_benchmark
from planloom.errors import TrainingError
from planloom.execute.processes import run_workers

ROOT = Path(__file__).parents[1]
TIMEOUT_SECONDS = 580
PARTS = ("eager", "compile", "ddp", "fsdp2")
NUM_RANKS = 4
LARGEST_RATIO = 1.05
MODELS = {
    "eager": ("gpt-small", "gpt-medium", "llama-small", "llama-medium"),
    "compile": ("llama-1b",),
    "ddp": ("llama-small", "gpt-small"),
    "fsdp2": ("llama-small", "gpt-small"),
}
QUICK_MODELS = {"eager": ("gpt-small",), "compile": ("llama-1b",), "ddp": ("gpt-small",), "fsdp2": ("gpt-small",)}
ROUNDS, QUICK_ROUNDS = 41, 9
ROUNDS_ON_CUDA = 15
# Of the first loss: bfloat16 rounds to three digits, and a compiler may round elsewhere.
LARGEST_LOSS_DIFFERENCE = {"eager": 1e-5, "compile": 1e-2, "ddp": 1e-5, "fsdp2": 1e-5}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default="", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--models", default="", help="other models for all parts, as llama-1b,llama-3b")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--device", default="cuda", help="where part `compile` runs: cpu to try it")


def measure(arguments: argparse.Namespace) -> Outcome:
    parts = [part for part in PARTS if part in arguments.parts.split(",")] if arguments.parts else list(_possible())
    models = QUICK_MODELS if arguments.quick else MODELS
    rows = []
    for part in parts:
        for model in arguments.models.split(",") if arguments.models else models[part]:
            rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
            if part == "compile":
                rounds = min(rounds, ROUNDS_ON_CUDA)
            found = _ranks(model, part, rounds) if part in ("ddp", "fsdp2") else _alone(model, part, rounds, arguments)
            rows.append({"part": part, **found})
            print(_line(rows[-1]), file=sys.stderr, flush=True)
    return Outcome(tables=[_table(rows)], document={"parts": parts, "rows": rows}, bars=_bars(rows))


def _possible() -> tuple[str, ...]:
    import torch

    return PARTS if torch.cuda.is_available() else tuple(part for part in PARTS if part != "compile")


def _alone(model: str, part: str, rounds: int, arguments: argparse.Namespace) -> dict[str, Any]:
    device = arguments.device if part == "compile" else "cpu"
    command = [sys.executable, "-m", "benchmarks.overhead_case", model, str(rounds), device]
    command += ["--compile"] if part == "compile" else []
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"model": model, "error": f"not done after {TIMEOUT_SECONDS} seconds"}
    if done.returncode:
        complaint = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"model": model, "error": complaint[-1], "where": complaint[-15:]}
    return json.loads(done.stdout.strip().splitlines()[-1])  # type: ignore[no-any-return]


def _ranks(model: str, rival: str, rounds: int) -> dict[str, Any]:
    heard: list[dict[str, Any]] = []
    arguments = ["--model", model, "--rival", rival, "--rounds", str(rounds)]
    try:
        run_workers("benchmarks.overhead_rank", arguments, NUM_RANKS, heard.append)
    except TrainingError as error:
        return {"model": model, "error": str(error).splitlines()[0], "where": str(error).splitlines()[-15:]}
    return heard[-1]


def _bars(rows: list[dict[str, Any]]) -> list[Bar]:
    bars = [Bar(name="comparisons that failed", figure=sum("error" in row for row in rows), ceiling=0)]
    for row in rows:
        if "error" not in row:
            name, limit = f"{row['part']}, {row['model']}", LARGEST_LOSS_DIFFERENCE[row["part"]]
            bars.append(Bar(name=f"{name}: step time over PyTorch's", figure=row["ratio"], ceiling=LARGEST_RATIO))
            bars.append(Bar(name=f"{name}: first loss differs by", figure=row["loss_difference"], ceiling=limit))
    return bars


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("over", "model", title="a training step: ours over PyTorch's, medians of rounds in turns")
    for column in ("PyTorch ms", "ours ms", "ratio", "quartiles", "processor", "rounds"):
        table.add_column(column, justify="right")
    for row in rows:
        if "error" in row:
            table.add_row(row["part"], row["model"], f"[red]{escape(row['error'][:200])}[/red]")
            continue
        quarter = len(row["ratios"]) // 4
        processor = f"{row['processor_ratio']:.3f}" if "processor_ratio" in row else ""
        table.add_row(
            row["part"],
            row["model"],
            f"{row['theirs_seconds'] * 1e3:.1f}",
            f"{row['ours_seconds'] * 1e3:.1f}",
            f"{row['ratio']:.3f}",
            f"{row['ratios'][quarter]:.3f}–{row['ratios'][-1 - quarter]:.3f}",
            processor,
            str(row["rounds"]),
        )
    return table


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['part']} {row['model']}: {row['error'][:300]}"
    return f"{row['part']} {row['model']}: {row['ratio']:.3f}"


if __name__ == "__main__":
    run_benchmark("runtime_overhead", measure, description=str(__doc__).splitlines()[0], options=options)

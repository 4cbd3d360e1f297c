"""Whole forward and backward on one GPU against their composition from profiles of runs, and against no profile at all.

For every setting (`gpu_settings`: Llama, GPT and MoE layers, batch, sequence, tensor-parallel shard; bfloat16,
compiled) the distinct runs of its program are profiled, the seconds and the peak of memory of the whole are predicted
by the simulator and written down, and then the whole is measured. The same settings are priced once more without any
profile. Errors are relative to what was measured; bars are on their means over all settings.

Finished settings are written to `--results` after each, and are not repeated by another call: a run that must be cut
into several continues where it ended. Settings that did not fit into `--seconds` are named as not run.

    python -m benchmarks.prediction_gpu --seconds 540 --results .planloom/gpu.json
    python -m benchmarks.prediction_gpu --device cpu --quick --compiler none       # to try it
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from benchmarks.bars import Bar, Outcome, run_benchmark
from benchmarks.gpu_case import mark_of, measure_case
from benchmarks.gpu_settings import QUICK_SETTINGS, SETTINGS, TINY_SETTINGS, Setting
from planloom.cost import PriceStore
from planloom.execute.compiled import CompiledRuns
from planloom.profile import local_store

ROOT = Path(__file__).parents[1]
MIN_SETTINGS = 20
COMPILE_THREADS_OF_A_WORKER = 3


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=660.0, help="no setting is started that may not end in time")
    parser.add_argument("--results", type=Path, default=ROOT / ".planloom" / "prediction_gpu.json")
    parser.add_argument("--profile", type=Path, default=ROOT / "benchmarks" / "profiles" / "h200.json")
    parser.add_argument("--compiler", default="inductor", choices=("inductor", "none"))
    parser.add_argument("--only", default="", help="only settings with this text in their name")
    parser.add_argument("--workers", type=int, default=4, help="processes that compile ahead")


def measure(arguments: argparse.Namespace) -> Outcome:
    deadline = time.monotonic() + arguments.seconds
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device here; to try the benchmark: --device cpu --quick --compiler none")
    settings: tuple[Setting, ...] = SETTINGS
    if arguments.quick:
        settings = QUICK_SETTINGS if device.type == "cuda" else TINY_SETTINGS
    settings = tuple(setting for setting in settings if arguments.only in setting.name)
    done: dict[str, dict[str, Any]] = {}
    if arguments.results.is_file():
        done = {row["setting"]: row for row in json.loads(arguments.results.read_text()) if "error" not in row}
    path, is_compiled = arguments.results.with_suffix(".sqlite"), arguments.compiler == "inductor"
    store = local_store(path, device=device.type, compiled=is_compiled)
    left = [setting for setting in settings if setting.name not in done]
    workers = arguments.workers if arguments.compiler == "inductor" else 0
    with _compiled_ahead(left, device, workers) as wait_for:
        for setting in left:
            if not _fits(deadline, done.values()):
                break
            wait_for(setting, deadline)
            row = _row(setting, device, arguments.compiler, store)
            done[setting.name] = row
            _write(arguments.results, done.values())
            store.export(arguments.profile)
            if not arguments.json:
                print(_line(row), file=sys.stderr, flush=True)
    rows = [done.get(s.name, {"setting": s.name, "error": "not run: no time left"}) for s in settings]
    return Outcome(
        tables=[_table(rows)],
        document={"device": _name(device), "compiler": arguments.compiler, "settings": rows},
        bars=_bars(rows, is_short=arguments.quick or bool(arguments.only), has_limits=device.type == "cuda"),
    )


def _row(setting: Setting, device: torch.device, compiler: str, store: PriceStore) -> dict[str, Any]:
    """One setting; an error of it becomes its row, with the last lines of where it happened."""
    runs = CompiledRuns() if compiler == "inductor" else None
    try:
        row, measured = measure_case(setting, device, store.load(), runs)
    except Exception as error:  # whatever one setting raises, the others are measured
        where = traceback.format_exc().strip().splitlines()
        return {"setting": setting.name, "error": f"{type(error).__name__}: {error}", "where": where[-12:]}
    store.save(measured)
    if runs is not None:
        row["num_compilations"], row["num_structures"] = runs.num_compilations, runs.num_structures
        row["eager"] = sorted({name for run in runs.eager_runs() for name in run.operators})
    return row


def _fits(deadline: float, rows: Any) -> bool:
    """Is there time for one more like the longest so far?"""
    longest = max((row.get("whole_seconds", 0.0) for row in rows), default=60.0)
    return time.monotonic() + longest < deadline


@contextmanager
def _compiled_ahead(settings: Sequence[Setting], device: torch.device, num_workers: int) -> Iterator[Any]:
    """Processes that compile settings ahead; yields a function that waits until a setting is compiled."""
    with tempfile.TemporaryDirectory(prefix="planloom-marks-") as folder:
        marks, processes = Path(folder), []
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(COMPILE_THREADS_OF_A_WORKER)}
        for i in range(num_workers):
            if names := [setting.name for setting in settings[i::num_workers]]:
                command = [sys.executable, "-m", "benchmarks.gpu_case", str(device), folder, *names]
                with (marks / f"log{i}").open("w") as log:
                    processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))

        def wait_for(setting: Setting, deadline: float) -> None:
            """A worker that has failed is not waited for: what it did not compile is compiled when it is needed."""
            if not processes:
                return
            index = list(settings).index(setting) % num_workers
            while not mark_of(marks, setting).exists() and time.monotonic() < deadline:
                if processes[index].poll() is not None:
                    tail = (marks / f"log{index}").read_text().strip().splitlines()[-1:]
                    print(f"a compiling process ended before {setting.name}: {tail}", file=sys.stderr)
                    return
                time.sleep(0.2)

        try:
            yield wait_for
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait()


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _write(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(list(rows), indent=1) + "\n")


# -- what is shown

_ERRORS = (
    ("seconds from profiles", "predicted_seconds", "measured_seconds"),
    ("memory from profiles", "predicted_bytes", "measured_bytes"),
    ("seconds without profiles", "modelled_seconds", "measured_seconds"),
    ("memory without profiles", "modelled_bytes", "measured_bytes"),
)


def _error(row: dict[str, Any], predicted: str, measured: str) -> float | None:
    """Predicted over measured, less one; None where there is no such figure."""
    if "error" in row or not row.get(predicted) or not row.get(measured):
        return None
    return float(row[predicted] / row[measured] - 1)


def _bars(rows: Sequence[dict[str, Any]], *, is_short: bool, has_limits: bool) -> list[Bar]:
    """The limits are those of a GPU: tiny models on a CPU only try the benchmark."""
    finished = [row for row in rows if "error" not in row]
    bars = [Bar(name="settings measured", figure=len(finished), floor=1 if is_short else MIN_SETTINGS)]
    bars.append(Bar(name="settings that failed", figure=sum("where" in row for row in rows), ceiling=0))
    limits = {"seconds from profiles": 0.05, "memory from profiles": 0.05, "seconds without profiles": 0.15}
    if not has_limits:
        limits = {}
    for name, predicted, measured in _ERRORS:
        errors = {row["setting"]: _error(row, predicted, measured) for row in finished}
        known = {setting: error for setting, error in errors.items() if error is not None}
        if known:
            worst = max(known, key=lambda setting: abs(known[setting]))
            mean = fmean(abs(error) for error in known.values())
            bars.append(Bar(name=f"{name}: mean error", figure=mean, ceiling=limits.get(name)))
            bars.append(Bar(name=f"{name}: worst, {worst}", figure=known[worst]))
    return bars


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table("setting", title="forward and backward: measured, composed from profiles, priced without")
    for column in ("ms", "composed", "modelled", "GiB", "composed", "modelled", "runs", "distinct", "seconds here"):
        table.add_column(column, justify="right")
    for row in rows:
        if "error" in row:
            table.add_row(row["setting"], f"[red]{escape(row['error'][:200])}[/red]")
            continue
        shown = [_percent(_error(row, predicted, measured)) for _, predicted, measured in _ERRORS]
        peak = "" if row["measured_bytes"] is None else f"{row['measured_bytes'] / 2**30:.2f}"
        table.add_row(
            row["setting"],
            f"{row['measured_seconds'] * 1e3:.2f}",
            shown[0],
            shown[2],
            peak,
            shown[1],
            shown[3],
            str(row["num_runs"]),
            str(row["num_distinct_runs"]),
            f"{row['whole_seconds']:.0f}",
        )
    return table


def _percent(error: float | None) -> str:
    return "" if error is None else f"{100 * error:+.1f} %"


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['setting']}: {row['error'][:300]}"
    shown = ", ".join(f"{name} {_percent(_error(row, a, b))}" for name, a, b in _ERRORS)
    return f"{row['setting']}: {row['measured_seconds'] * 1e3:.2f} ms; {shown}; {row['whole_seconds']:.0f} s"


if __name__ == "__main__":
    run_benchmark("prediction_gpu", measure, description=str(__doc__).splitlines()[0], options=options)

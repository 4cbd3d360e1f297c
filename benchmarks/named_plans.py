"""Every plan that has a name, on four and eight ranks: step, peak memory and idle time, predicted beside measured.

The plans of a model are proven, profiled on the ranks under their quota, simulated, and only then trained in turns, as
in `space_time`, which has the same figures for the plans that compete there. Peaks are those of the fullest rank above
what it held before the model was built; idle is the share of a step in which a rank's processor has nothing to do.
There is no bar: how near predictions must be is the business of `prediction_testbed`.
"""

import argparse
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median

from rich.table import Table

from benchmarks.bars import Outcome, run_benchmark
from benchmarks.plan_quality_ranks import Ranks
from benchmarks.space_time import Contestant, OnTestbed, scale_table
from benchmarks.space_time_cases import Small
from planloom.plan import FAMILIES
from testbed import DeviceLimits, open_devices

_ROUNDS = 3
_LLAMA = (
    "llama3-8b?num_hidden_layers=8&hidden_size=128&intermediate_size=384&num_attention_heads=4&num_key_value_heads=4"
    "&head_dim=32&vocab_size=512&seq=32&batch=16&dtype=float32"
)
_MIXTRAL = (
    "mixtral-8x7b?num_hidden_layers=2&hidden_size=128&intermediate_size=256&num_attention_heads=4&num_key_value_heads=4"
    "&head_dim=32&num_local_experts=4&vocab_size=512&seq=32&batch=16&dtype=float32"
)
_MBART = (
    "mbart-large?vocab_size=4096&d_model=128&encoder_layers=2&decoder_layers=2&encoder_ffn_dim=512&decoder_ffn_dim=512"
    "&encoder_attention_heads=4&decoder_attention_heads=4&max_position_embeddings=64&seq=32&batch=16&dropout=0"
    "&dtype=float32"
)
_EVOFORMER = (
    "evoformer?num_blocks=4&num_recycles=2&num_sequences=8&seq=8&msa_channels=64&pair_channels=32&msa_heads=4"
    "&pair_heads=4&head_size=16&outer_channels=8&batch=8&msa_dropout=0&pair_dropout=0&dtype=float32"
)
CASES = (
    Small(
        source=_LLAMA,
        topology="flat-of-4",
        plans=(
            "megatron:tp=2,pp=2,micro=4",
            "megatron:pp=4,micro=4,chunks=2",
            "fsdp:dp=4",
            "hsdp:replicas=2,shards=2",
            "atp:d1=2,d2=2",
            "atp:d1=2,d2=2,chunks=4",
            "looped:pp=2,dp=2,micro=4",
            "zb:pp=4,micro=8",
            "coshard:tp=2,dp=2,pieces=2",
            "context:cp=2,dp=2",
        ),
        others=(),
    ),
    Small(source=_MIXTRAL, topology="flat-of-4", plans=("experts:ep=4", "experts:ep=2,tp=2"), others=()),
    Small(source=_MBART, topology="flat-of-4", plans=("interlaced:pp=4,micro=4",), others=()),
    Small(source=_EVOFORMER, topology="flat-of-4", plans=("3f1b:pp=4,micro=8", "dap:dap=4"), others=()),
    Small(
        source=_LLAMA,
        topology="flat-of-8",
        plans=(
            "megatron:tp=2,pp=2,dp=2,micro=2",
            "megatron:pp=4,tp=2,micro=8,recompute",
            "hsdp:replicas=2,shards=4",
            "atp:dp=2,d1=2,d2=2",
            "looped:pp=4,dp=2,micro=4",
            "zb:pp=4,tp=2,micro=4,v",
            "coshard:pp=4,tp=2,micro=2,pieces=2",
            "context:cp=2,dp=4",
        ),
        others=(),
    ),
)
DEFAULT_WORK = Path(".planloom/named_plans")


def measure(arguments: argparse.Namespace) -> Outcome:
    tables: list[Table] = []
    found: list[tuple[Small, Contestant]] = []
    started = time.monotonic()
    for number, case in enumerate(CASES[:1] if arguments.quick else CASES):
        name = f"{case.source.partition('?')[0]} on {case.topology}"

        def say(text: str, name: str = name) -> None:
            print(f"{(time.monotonic() - started) / 60:4.1f} min, {name}: {text}", file=sys.stderr, flush=True)

        work = Path(arguments.work) / str(number)
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        with (
            open_devices(case.path, DeviceLimits()) as devices,
            Ranks(devices, work / "requests", "benchmarks.space_time_rank") as ranks,
        ):
            scale = OnTestbed(case, devices, ranks, work, say).run(2 if arguments.quick else _ROUNDS, far=float("inf"))
        found += [(case, contestant) for contestant in scale.contestants]
        tables.append(scale_table("", scale, f"{name} ({devices.kind})"))
    steps = [abs(c.predicted_seconds / c.step_seconds - 1) for _, c in found]
    peaks = [abs(c.predicted_bytes / c.peak_bytes - 1) for _, c in found]
    summary = Table("", "median error", "worst", title=f"{len(found)} plans of {len(FAMILIES)} families")
    summary.add_row("step", f"{median(steps):.1%}", f"{max(steps):.1%}")
    summary.add_row("peak memory", f"{median(peaks):.1%}", f"{max(peaks):.1%}")
    document = {"plans": [{"model": case.source, "topology": case.topology} | asdict(c) for case, c in found]}
    return Outcome(tables=[*tables, summary], document=document)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--work", default=str(DEFAULT_WORK), help="where files are kept")


if __name__ == "__main__":
    run_benchmark("named_plans", measure, description=__doc__ or "", options=_options)

"""3F1B and dynamic axial parallel on Evoformers with recycling against the best plans without them.

3F1B, small: wide channels and few residues on a slow network, so that parameters are large beside activations, and a
pipeline sends less than data parallel reduces. Its rivals: data and tensor parallel, dynamic axial parallel, and 1F1B
over the unrolled passes, which is what a pipeline does that does not know recycling: every parameter is read on as many
groups as there are passes, and sent there every step.

Axial, small: few samples, so that data parallel cannot use all ranks; sequences and residues, which it can split, are
what there is most of.

Large: the sizes of AlphaFold 2's initial training and fine-tuning (`where`) on 32 V100. A pass is detached as a whole.
At these 88 M parameters data parallel is simulated to win (2026-11-19: 14.9 s, 3F1B 16.5); SuperScaler scaled the model
to 3.2 G on 32 devices (recalled), which takes minutes a plan to build here.
`python -m benchmarks.space_time_recycling` simulates the large pairs alone; `--blocks N` with fewer blocks.
"""

import argparse
import time
from dataclasses import asdict, replace

from rich.table import Table

from benchmarks.bars import Outcome, run_benchmark
from benchmarks.space_time_cases import Case, Large, Small

_NO_DROPOUT = "msa_dropout=0&pair_dropout=0"
_SMALL = (
    f"evoformer?num_blocks=4&num_recycles=2&num_sequences=8&seq=8&msa_channels=128&pair_channels=64&msa_heads=4"
    f"&pair_heads=4&head_size=32&outer_channels=16&batch=8&{_NO_DROPOUT}&dtype=float32"
)
_SMALL_AXIAL = (
    f"evoformer?num_blocks=2&num_recycles=2&num_sequences=32&seq=32&msa_channels=32&pair_channels=16&msa_heads=4"
    f"&pair_heads=4&head_size=8&outer_channels=8&batch=1&{_NO_DROPOUT}&dtype=float32"
)
_INITIAL = f"evoformer?num_recycles=2&num_sequences=128&seq=256&batch=128&{_NO_DROPOUT}&dtype=float16"
_FINE_TUNING = f"evoformer?num_recycles=2&num_sequences=512&seq=384&batch=128&{_NO_DROPOUT}&dtype=float16"
_SIZES = (
    "48 blocks, c_m 256, c_z 128, batch 128; initial training 128 sequences and 256 residues, fine-tuning 512 and 384 "
    "(Jumper et al. 2021, supplement, tables 4 and 5, recalled; the same pairs of sizes, in float16, in "
    "msrasys/nnscaler@249794a28d1f, examples/alphafold2/README.md); 4 × 8 V100-32GB"
)

RECYCLED = Case(
    feature="3f1b",
    needs_ratio=True,
    small=Small(
        source=_SMALL,
        topology="flat-of-4",
        plans=("3f1b:pp=4,micro=8", "3f1b:pp=4,micro=4"),
        others=("pp=4,micro=4,1f1b", "pp=4,micro=8,1f1b", "dp=4", "dp=4,zero1", "dp=2,tp=2", "dap:dap=2,dp=2"),
    ),
    large=Large(
        source=_INITIAL,
        cluster="dgx-v100",
        nodes=4,
        plans=("3f1b:pp=4,dp=8,micro=16,recompute", "3f1b:pp=8,dp=4,micro=32,recompute"),
        others=(
            "dp=32,micro=4,recompute",
            "dp=32,micro=4,zero1,recompute",
            "dap:dap=2,dp=16,micro=8,recompute",
            "dap:dap=8,dp=4,micro=32,recompute",
            "dp=8,pp=4,micro=16,1f1b,recompute",
        ),
        where=_SIZES,
    ),
)
AXIAL = Case(
    feature="axial",
    small=Small(
        source=_SMALL_AXIAL,
        topology="flat-of-4",
        plans=("dap:dap=4",),
        others=("tp=4", "tp=2,tp2=2", "3f1b:pp=4,micro=1"),
    ),
    large=Large(
        source=_FINE_TUNING.replace("batch=128", "batch=16"),
        cluster="dgx-v100",
        nodes=4,
        plans=("dap:dap=2,dp=16,recompute", "dap:dap=8,dp=4,micro=4,recompute"),
        others=("dp=16,tp=2,recompute", "dp=4,tp=8,micro=4,recompute", "3f1b:pp=2,dp=16,micro=1,recompute"),
        where=f"{_SIZES}; 16 samples, so that samples alone do not fill 32 devices (FastFold's case)",
    ),
)
CASES = (RECYCLED, AXIAL)


def measure(arguments: argparse.Namespace) -> Outcome:
    """The large pairs, simulated."""
    from benchmarks.space_time import simulated

    table = Table("feature", "plan", "step", "bubble", "memory", "fits", title=f"{arguments.blocks} blocks")
    document = []
    for case in CASES:
        assert case.large is not None
        started = time.monotonic()
        source = f"{case.large.source}&num_blocks={arguments.blocks}"
        scale = simulated(replace(case.large, source=source))
        for c in sorted(scale.contestants, key=lambda c: c.predicted_seconds):
            table.add_row(
                case.feature if c.has_feature else "",
                c.plan,
                f"{c.predicted_seconds:.3f} s",
                f"{c.bubble:.0%}",
                f"{c.predicted_bytes / 2**30:.1f} GiB",
                "yes" if c.fits else "no",
            )
        document.append(
            {
                "feature": case.feature,
                "blocks": arguments.blocks,
                "ratio": scale.predicted_ratio,
                "took_seconds": time.monotonic() - started,
                "plans": [asdict(contestant) for contestant in scale.contestants],
            }
        )
    return Outcome(tables=[table], document={"cases": document}, bars=[])


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--blocks", type=int, default=48, help="blocks of the Evoformer; AlphaFold has 48")


if __name__ == "__main__":
    run_benchmark("space_time_recycling", measure, description=__doc__ or "", options=_options)

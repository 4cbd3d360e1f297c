"""The cases of `space_time`: for every feature a plan that has it and the plans without it that it must beat.

*Small* cases are measured on the testbed; *large* ones are simulated at the scale of the paper. Plans are names
(`planloom plans`). A memory limit of a small case is what makes its model large there.
"""

from dataclasses import dataclass
from pathlib import Path

_FOLDERS = (Path("testbed/clusters"), Path("benchmarks/clusters"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A model on a topology of the testbed; `limit`: memory of a rank, as 64MiB, or none. `plans`: with the feature."""

    source: str
    topology: str
    plans: tuple[str, ...]
    others: tuple[str, ...]
    limit: str = ""

    @property
    def path(self) -> Path:
        return next(path for folder in _FOLDERS if (path := folder / f"{self.topology}.yaml").is_file())


@dataclass(frozen=True, slots=True, kw_only=True)
class Large:
    """A model on a cluster of the paper's class; `where`: where its sizes were published."""

    source: str
    cluster: str
    nodes: int
    plans: tuple[str, ...]
    others: tuple[str, ...]
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`wins`: whether the feature is meant to win: overlap in chunks must not where the network is fast."""

    feature: str
    small: Small
    large: Large | None = None
    wins: bool = True
    needs_ratio: bool = False
    """Whether it counts for the bar of features that win by half."""


_SWIN = (
    "swin-large?image_size=160&embed_dim=64&depths=2,1&num_heads=4,4&window_size=20&batch=4&num_labels=16"
    "&drop_path_rate=0&dtype=float32"
)
_LARGE_SWIN = (
    "swin-large?image_size=1536&window_size=48&embed_dim=1536&depths=2,2,58,2&num_heads=32,64,128,256&batch=256"
    "&drop_path_rate=0&dtype=float16"
)
CO_SHARD = Case(
    feature="co-shard",
    needs_ratio=True,
    small=Small(
        source=_SWIN,
        topology="flat-of-4",
        plans=("coshard:dp=4,pieces=2", "coshard:dp=4,pieces=4"),
        others=(
            "dp=4",
            "coshard:dp=4,pieces=1",
            "coshard:dp=2,pp=2,micro=2,pieces=1",
            "coshard:pp=4,micro=4,pieces=1",
            "coshard:dp=2,tp=2,micro=2,pieces=1",
            "coshard:pp=2,tp=2,micro=4,pieces=1",
        ),
        limit="48MiB",
    ),
    large=Large(
        source=_LARGE_SWIN,
        cluster="dgx-v100",
        nodes=4,
        plans=("coshard:pp=4,tp=8,micro=256,pieces=4",),
        others=(
            "coshard:tp=32,micro=256,pieces=1",
            "coshard:pp=2,tp=16,micro=256,pieces=1",
            "coshard:pp=4,tp=8,micro=256,pieces=1",
        ),
        where="msrasys/nnscaler@253b41908f40, handcraft/swin/test-4node.sh: 2 + 2 + 58 + 2 layers, width 1536, 32 "
        "heads, images of 1536, windows of 48, 256 micro-batches of one, float16, 4 × 8 V100-32GB: co-shard with tp 8 "
        "and pp 4 against tp 32; tp 16 and pp 2 ran out of memory there",
    ),
)
"""Batches of one a device and large windows, so that the scores of attention are most of the memory and micro-batches
cannot divide them. Published rivals recompute each attention and each MLP; that is `pieces=1`."""

_LLAMA = (
    "llama3-8b?num_hidden_layers=2&hidden_size=1536&intermediate_size=4096&num_attention_heads=16"
    "&num_key_value_heads=16&head_dim=96&vocab_size=4096&seq=256&batch=2&dtype=float32"
)
_CHUNKED = ("atp:d1=4,d2=1,chunks=2",)
_NOT_CHUNKED = ("atp:d1=4,d2=1", "megatron:tp=4", "megatron:pp=2,tp=2,micro=2", "zb:pp=2,tp=2,micro=2")
"""Few samples and wide layers, so that a pipeline has a large bubble. An uplink that is much slower favours pipelines,
which send less: there, nobody would use tensor parallel over it. [Empirical] The third case that was tried: with half
the width, a zero-bubble pipeline won (0.90 measured, 2026-11-19)."""
CHUNKS = (
    Case(
        feature="chunks",
        small=Small(source=_LLAMA, topology="slow-uplinks-of-2x2", plans=_CHUNKED, others=_NOT_CHUNKED),
    ),
    Case(
        feature="chunks, fast network",
        wins=False,
        small=Small(source=_LLAMA, topology="fast-of-4", plans=_CHUNKED, others=_NOT_CHUNKED[:2]),
    ),
)

_GPT = (
    "gpt2?n_layer=8&n_embd=256&n_head=4&vocab_size=512&seq=32&batch=32&dtype=float32"
    "&attn_pdrop=0&embd_pdrop=0&resid_pdrop=0"
)
ZERO_BUBBLE = Case(
    feature="zero-bubble",
    small=Small(
        source=_GPT,
        topology="flat-of-4",
        plans=("zb:pp=4,micro=4", "zb:pp=4,micro=8"),
        others=("pp=4,micro=4,1f1b", "pp=4,micro=8,1f1b", "pp=4,micro=4,gpipe", "pp=4,micro=8,interleaved"),
    ),
)

CASES: tuple[Case, ...] = (CO_SHARD, *CHUNKS, ZERO_BUBBLE)

"""The cases of `space_time`: for every feature a plan that has it and the plans without it that it must beat.

*Small* cases are measured on the testbed; *large* ones are simulated at the scale of the paper. Plans are names
(`planloom plans`). A memory limit of a small case is what makes its model large there.
"""

from dataclasses import dataclass
from pathlib import Path

_FOLDERS = (Path("testbed/clusters"), Path("benchmarks/clusters"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A model on a topology of the testbed; `limit`: memory of a rank, as 64MiB, or none."""

    source: str
    topology: str
    plan: str
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


_GPT = (
    "gpt2?n_layer=8&n_embd=384&n_head=6&vocab_size=512&seq=32&batch=32&dtype=float32"
    "&attn_pdrop=0&embd_pdrop=0&resid_pdrop=0"
)

_SWIN = (
    "swin-large?image_size=256&embed_dim=32&depths=2,2&num_heads=8,16&window_size=8&batch=4&num_labels=16"
    "&drop_path_rate=0&dtype=float32"
)
_LLAMA = (
    "llama3-8b?num_hidden_layers=2&hidden_size=512&intermediate_size=1408&num_attention_heads=8&num_key_value_heads=4"
    "&vocab_size=512&seq=64&batch=16&dtype=float32"
)

CASES: tuple[Case, ...] = (
    Case(
        feature="co-shard",
        needs_ratio=True,
        small=Small(
            source=_SWIN,
            topology="flat-of-4",
            plan="coshard:dp=4,pieces=2",
            others=("tp=4", "dp=2,tp=2", "dp=4", "dp=4,zero3", "pp=4,micro=4,1f1b", "pp=2,dp=2,micro=2,1f1b"),
            limit="40MiB",
        ),
    ),
    Case(
        feature="chunks",
        small=Small(
            source=_LLAMA,
            topology="uplinks-of-2x2",
            plan="atp:d1=4,d2=1,chunks=4",
            others=("atp:d1=4,d2=1", "atp:d1=2,d2=2"),
        ),
    ),
    Case(
        feature="zero-bubble",
        small=Small(
            source=_GPT,
            topology="flat-of-4",
            plan="zb:pp=4",
            others=("pp=4,micro=4,1f1b", "pp=4,micro=4,gpipe"),
        ),
    ),
)

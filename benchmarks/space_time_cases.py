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

CASES: tuple[Case, ...] = (
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

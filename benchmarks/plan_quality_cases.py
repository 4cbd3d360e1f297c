"""The cases of `plan_quality_testbed`: topologies and models, small enough for shares of one machine.

Models on eight ranks have eight key and value heads and eight experts, so that all rivals can split them.
"""

from dataclasses import dataclass
from pathlib import Path

from benchmarks.prediction_cases import MODELS

_FOLDERS = (Path("benchmarks/clusters"), Path("testbed/clusters"))
_FEWER = {"n_layer=4": "n_layer=2", "batch=16": "batch=8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a topology; `exhaustive`: all plans there are get measured."""

    model: str
    source: str
    topology: str
    kind: str
    num_ranks: int
    exhaustive: bool = False

    @property
    def name(self) -> str:
        return f"{self.topology}/{self.model}"

    @property
    def cluster(self) -> Path:
        return next(path for folder in _FOLDERS if (path := folder / f"{self.topology}.yaml").is_file())


def _source(model: str, num_ranks: int) -> str:
    if num_ranks < 8:
        return MODELS[model]
    wider = MODELS[model].replace("num_key_value_heads=4", "num_key_value_heads=8")
    return wider.replace("num_local_experts=4", "num_local_experts=8")


def _fewer(source: str) -> str:
    for words, fewer in _FEWER.items():
        source = source.replace(words, fewer)
    return source


_TOPOLOGIES = {
    "flat-of-4": ("flat", 4),
    "uplinks-of-2x2": ("slow uplinks", 4),
    "two-by-two-slow": ("one shared NIC", 4),
    "pairs-of-2x2": ("pairs", 4),
    "torus-of-2x2": ("torus", 4),
    "flat-of-8": ("flat", 8),
    "uplinks-of-2x4": ("slow uplinks", 8),
    "shared-nic-of-2x4": ("one shared NIC", 8),
    "pairs-of-2x4": ("pairs", 8),
    "torus-of-2x4": ("torus", 8),
    "three-levels-of-8": ("three levels", 8),
}
_EXHAUSTIVE = {("flat-of-4", "GPT"), ("two-by-two-slow", "Llama"), ("pairs-of-2x2", "MoE")}

CASES = tuple(
    Case(
        model=model,
        source=_source(model, count),
        topology=name,
        kind=kind,
        num_ranks=count,
        exhaustive=(name, model) in _EXHAUSTIVE,
    )
    for name, (kind, count) in _TOPOLOGIES.items()
    for model in MODELS
)
QUICK = (Case(model="GPT", source=_fewer(MODELS["GPT"]), topology="flat-of-4", kind="flat", num_ranks=4),)

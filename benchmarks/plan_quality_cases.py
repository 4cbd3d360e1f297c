"""The cases of `plan_quality_testbed`, fixed before anything is measured, and the plans of the exhaustive ones.

Topologies and models are small enough for shares of one machine, and for minutes.

Models on eight ranks have eight key and value heads and eight experts, so that all rivals can split them, and half the
layers and samples: their ranks have half the share of a core, and of the links.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from planloom.plan import NamedPlan, library

_FOLDERS = (Path("benchmarks/clusters"), Path("testbed/clusters"))
_SIZES = "vocab_size=1024&seq=64&batch={batch}&dtype=float32"
_HEADS = "num_attention_heads=8&num_key_value_heads={heads}"
_SOURCES = {
    "GPT": f"gpt2?n_layer={{layers}}&n_embd=192&n_head=8&{_SIZES}&attn_pdrop=0&embd_pdrop=0&resid_pdrop=0",
    "Llama": f"llama3-8b?num_hidden_layers={{layers}}&hidden_size=192&intermediate_size=512&{_HEADS}&{_SIZES}",
    "MoE": "mixtral-8x7b?num_hidden_layers={layers}&hidden_size=192&intermediate_size=384"
    f"&num_local_experts={{heads}}&{_HEADS}&{_SIZES}",
}
_LAYERS = {"GPT": 4, "Llama": 4, "MoE": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """A cluster file, the kind that it is listed under, and its models; of `exhaustive` ones all plans are measured."""

    name: str
    kind: str
    num_ranks: int
    models: tuple[str, ...]
    exhaustive: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return next(path for folder in _FOLDERS if (path := folder / f"{self.name}.yaml").is_file())

    @property
    def cases(self) -> "tuple[Case, ...]":
        return tuple(
            Case(
                model=model,
                source=source_of(model, self.num_ranks),
                topology=self.name,
                kind=self.kind,
                num_ranks=self.num_ranks,
                exhaustive=model in self.exhaustive,
            )
            for model in self.models
        )


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


def source_of(model: str, num_ranks: int) -> str:
    layers = _LAYERS[model] if num_ranks < 8 else max(2, _LAYERS[model] // 2)
    heads, batch = (4, 16) if num_ranks < 8 else (8, 8)
    return _SOURCES[model].format(layers=layers, heads=heads, batch=batch)


TOPOLOGIES = (
    Topology(name="flat-of-4", kind="flat", num_ranks=4, models=("GPT", "Llama", "MoE"), exhaustive=("GPT",)),
    Topology(name="uplinks-of-2x2", kind="slow uplinks", num_ranks=4, models=("GPT", "MoE")),
    Topology(
        name="two-by-two-slow", kind="one shared NIC", num_ranks=4, models=("Llama", "MoE"), exhaustive=("Llama",)
    ),
    Topology(name="pairs-of-2x2", kind="pairs", num_ranks=4, models=("GPT", "MoE"), exhaustive=("MoE",)),
    Topology(name="torus-of-2x2", kind="torus", num_ranks=4, models=("GPT", "Llama")),
    Topology(name="three-levels-of-8", kind="three levels", num_ranks=8, models=("GPT", "Llama", "MoE")),
    Topology(name="torus-of-2x4", kind="torus", num_ranks=8, models=("Llama",)),
)
QUICK = (Topology(name="flat-of-4", kind="flat", num_ranks=4, models=("GPT",)),)

_MICRO_BATCHES = (2, 4, 8)


def all_plans(num_ranks: int, *, experts: bool) -> tuple[NamedPlan, ...]:
    """The declared space of the exhaustive cases: the library, and its pipelines with every number of micro-batches."""
    named = list(library(num_ranks, experts=experts))
    pipelines = [plan for plan in named if plan.pp > 1] + [NamedPlan(pp=num_ranks)]
    found = [plan for plan in named if plan.pp == 1]
    found += [replace(plan, micro=micro) for plan in pipelines for micro in _MICRO_BATCHES]
    return tuple(dict.fromkeys(found))

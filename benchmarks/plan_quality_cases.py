"""The cases of `plan_quality_testbed`: topologies and models, small enough for shares of one machine.

Models on eight ranks have eight key and value heads and eight experts, so that all rivals can split them.
"""

from dataclasses import dataclass

from benchmarks.prediction_cases import GPT, LLAMA, MOE


def _for_eight(source: str) -> str:
    wider = source.replace("num_key_value_heads=4", "num_key_value_heads=8")
    return wider.replace("num_local_experts=4", "num_local_experts=8")


MODELS = {"GPT": GPT, "Llama": LLAMA, "MoE": MOE}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a topology; `exhaustive`: all plans there are get measured."""

    model: str
    topology: str
    kind: str
    num_ranks: int
    exhaustive: bool = False

    @property
    def name(self) -> str:
        return f"{self.topology}/{self.model}"

    @property
    def cluster(self) -> str:
        return f"testbed/clusters/{self.topology}.yaml"

    @property
    def source(self) -> str:
        return _for_eight(MODELS[self.model]) if self.num_ranks == 8 else MODELS[self.model]


_TOPOLOGIES = {
    "flat-of-4": ("flat", 4),
    "two-by-two-slow": ("slow uplink", 4),
    "pairs-of-2x2": ("pairs", 4),
    "torus-of-2x2": ("torus", 4),
    "shared-nic-of-4": ("one shared NIC", 4),
    "flat-of-8": ("flat", 8),
    "slow-uplink-of-2x4": ("slow uplink", 8),
    "three-levels-of-8": ("three levels", 8),
    "pairs-of-2x4": ("pairs", 8),
    "torus-of-2x4": ("torus", 8),
    "shared-nic-of-2x4": ("one shared NIC", 8),
}
_EXHAUSTIVE = {("flat-of-4", "GPT"), ("two-by-two-slow", "Llama"), ("pairs-of-2x2", "MoE")}

CASES = tuple(
    Case(model=model, topology=name, kind=kind, num_ranks=count, exhaustive=(name, model) in _EXHAUSTIVE)
    for name, (kind, count) in _TOPOLOGIES.items()
    for model in MODELS
)
QUICK = tuple(case for case in CASES if case.name == "flat-of-4/GPT")

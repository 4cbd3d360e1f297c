"""The models that are known by name, as data: configuration, example batch, published figures.

One YAML file each in `presets/`; `planloom.capture` builds them. Nothing here imports torch, so that the command line
can list names and figures at once.

    title: Llama 3 8B
    model: LlamaForCausalLM       # a class of `transformers`, or `Evoformer`, which is ours
    config: {hidden_size: 4096}   # arguments of the class's configuration; what is not named has its default
    batch: 8                      # samples in the example batch
    seq: 8192                     # tokens in a sample (residues of the Evoformer); left out where samples are images
    dtype: bfloat16               # of the parameters: as trained, bfloat16 where that was half precision of either kind
    published:
      parameters: 8_030_261_248   # may be left out where nobody published them
      source: who says so
      active_parameters: 0        # with experts: those that one token meets
      flops:                      # what is published about the work, as it was published
        - {of: training, unit: token, total: 3.8e+25, num_units: 15.6e+12, source: who says so, note: what is left out}

A multiply-accumulate is two floating-point operations everywhere; figures of sources that count it as one are doubled.
"""

import difflib
import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from planloom.errors import CaptureError

_PRESETS = importlib.resources.files("planloom.graph") / "presets"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedFlops:
    """Floating-point operations that a source publishes: `total` for `num_units` tokens, images or pairs of both."""

    of: Literal["forward", "training"]
    unit: Literal["token", "image", "pair"]
    total: float
    num_units: float = 1.0
    seq: int | None = None
    source: str
    note: str = ""

    @property
    def per_unit(self) -> float:
        return self.total / self.num_units


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPreset:
    """A model known by name."""

    name: str
    title: str
    model: str
    config: Mapping[str, Any]
    batch: int
    seq: int | None
    dtype: str
    parameters: int | None
    parameters_source: str
    active_parameters: int | None
    flops: tuple[PublishedFlops, ...]


def preset_names() -> tuple[str, ...]:
    """The names of all models that need no file."""
    return tuple(
        sorted(entry.name.removesuffix(".yaml") for entry in _PRESETS.iterdir() if entry.name.endswith(".yaml"))
    )


def model_preset(name: str) -> ModelPreset:
    """The preset of that name."""
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names)
        raise CaptureError(
            f"no model {name!r}",
            given=name,
            required=f"one of {', '.join(names)}",
            todo=f"did you mean {' or '.join(near)}?" if near else "",
        )
    document = yaml.safe_load((_PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))
    published = document.pop("published", {})
    return ModelPreset(
        **{"seq": None, **document},
        name=name,
        parameters=published.get("parameters"),
        parameters_source=published.get("source", ""),
        active_parameters=published.get("active_parameters"),
        flops=tuple(PublishedFlops(**flops) for flops in published.get("flops", ())),
    )

"""What a mask that depends on no input says, without computing it.

Hugging Face traces attention with a mask built from `arange`, where eager execution says `is_causal=True`. A mask of a
real sequence has billions of elements, but it is made of short vectors: what is short is computed, what is large is
followed as a *band*: element (…, q, k) is true where low ≤ k − q ≤ high. The causal mask is the band up to 0. Of what
is equal for every sample of a batch, one sample is computed: a global batch has millions of tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch

from planloom.graph import FLOAT_MARK, Op, Tensor, is_reference

_LARGEST_COMPUTED = 1 << 20
_PASSED = ("aten.expand.default", "aten.reshape.default", "aten.unsqueeze.default", "aten._to_copy.default")
_FOR_EACH_SAMPLE = ("slice", "sub", "add", "ne", "eq", "diff", "cumsum", "_to_copy")
"""Operators that work on every sample by itself where they do not work along the first dim."""
_AND = ("aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and.default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """True where low ≤ k − q ≤ high, in the last two dims; with infinite bounds, everywhere."""

    low: float = -inf
    high: float = inf

    @property
    def is_everywhere(self) -> bool:
        return self.low == -inf and self.high == inf

    @property
    def is_causal(self) -> bool:
        return self.low == -inf and self.high == 0


def find_bands(ops: Sequence[Op], tensors: Mapping[str, Tensor]) -> dict[str, Band]:
    """The bands among the results of operators that read no input, no buffer and no parameter."""
    known: dict[str, torch.Tensor] = {}
    samples: dict[str, torch.Tensor] = {}
    bands: dict[str, Band] = {}
    for op in ops:
        name = op.outputs[0]
        sample = _sample(op, known, samples, tensors)
        if sample is not None:
            samples[name] = sample
        if any(source not in known and source not in bands for source in op.inputs):
            if op.target == "aten.eq.Tensor" and _are_one_number(op, samples):
                bands[name] = Band()
            continue
        small = tensors[name].shape == () or _numel(tensors[name]) <= _LARGEST_COMPUTED
        if small and all(source in known for source in op.inputs) and op.target.startswith("aten."):
            known[name] = _compute(op, known)
            if known[name].dtype == torch.bool and bool(known[name].all()):
                bands[name] = Band()
        band = _band(op, known, bands, tensors) if tensors[name].dtype == "bool" else None
        if band is not None:
            bands[name] = band
    return bands


def _sample(
    op: Op, known: Mapping[str, torch.Tensor], samples: Mapping[str, torch.Tensor], tensors: Mapping[str, Tensor]
) -> torch.Tensor | None:
    """One sample, of size one in the first dim, of a result that is equal for all of them."""
    word, shape = op.target.split(".")[1], tensors[op.outputs[0]].shape
    if word == "expand" and op.inputs[0] in known and len(shape) > 1:
        value = known[op.inputs[0]]
        return value if tuple(value.shape) == (1, *shape[1:]) else None
    if not op.inputs or op.inputs[0] not in samples:
        return None
    if word == "index" and _is_one_number(samples[op.inputs[0]]):
        return samples[op.inputs[0]].flatten()[:1].reshape([1] * len(shape))
    along_first = any(isinstance(arg, int) and arg == 0 for arg in op.args[1:2]) and word in ("slice", "diff", "cumsum")
    if word in _FOR_EACH_SAMPLE and all(source in samples for source in op.inputs) and not along_first:
        found = _compute(op, samples)
        return found if tuple(found.shape) == (1, *shape[1:]) else None
    return None


def _is_one_number(values: torch.Tensor) -> bool:
    return bool((values == values.flatten()[0]).all())


def _are_one_number(op: Op, samples: Mapping[str, torch.Tensor]) -> bool:
    """Are all elements of all these tensors equal?"""
    if len(op.inputs) != 2 or any(source not in samples for source in op.inputs):
        return False
    return _is_one_number(torch.cat([samples[source].flatten() for source in op.inputs]))


def _numel(tensor: Tensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count


def _compute(op: Op, known: Mapping[str, torch.Tensor]) -> torch.Tensor:
    def plain(arg: Any) -> Any:
        if is_reference(arg):
            return known[arg[1:]]
        if isinstance(arg, list | tuple):
            return [plain(item) for item in arg]
        if isinstance(arg, str) and arg.startswith(FLOAT_MARK):
            return float(arg.removeprefix(FLOAT_MARK))
        return getattr(torch, arg.removeprefix("torch.")) if isinstance(arg, str) and arg.startswith("torch.") else arg

    _, name, overload = op.target.split(".", 2)
    function = getattr(getattr(torch.ops.aten, name), overload)
    return function(*map(plain, op.args), **{key: plain(value) for key, value in op.kwargs.items()})


def _band(
    op: Op, known: Mapping[str, torch.Tensor], bands: Mapping[str, Band], tensors: Mapping[str, Tensor]
) -> Band | None:
    if op.target in _PASSED and op.inputs[0] in bands:
        same_end = tensors[op.inputs[0]].shape[-2:] == tensors[op.outputs[0]].shape[-2:]
        return bands[op.inputs[0]] if same_end or bands[op.inputs[0]].is_everywhere else None
    if op.target in _AND and all(source in bands for source in op.inputs):
        first, second = (bands[source] for source in op.inputs)
        return Band(low=max(first.low, second.low), high=min(first.high, second.high))
    if op.target.startswith("aten.eq.") and len(op.inputs) == 2 and all(source in known for source in op.inputs):
        values = torch.cat([known[source].flatten() for source in op.inputs])
        return Band() if bool((values == values[0]).all()) else None
    return _comparison(op, known)


def _comparison(op: Op, known: Mapping[str, torch.Tensor]) -> Band | None:
    """k compared with q, both of them vectors of consecutive numbers along their own dim."""
    word = op.target.split(".")[1]
    if word not in ("le", "lt", "ge", "gt") or len(op.inputs) != 2 or any(s not in known for s in op.inputs):
        return None
    left, right = (known[source] for source in op.inputs)
    if word in ("ge", "gt"):
        left, right, word = right, left, {"ge": "le", "gt": "lt"}[word]
    strict = 1 if word == "lt" else 0
    k_first, q_first = _first_of_iota(left, -1), _first_of_iota(right, -2)
    if k_first is not None and q_first is not None:  # k + a ≤ q + b
        return Band(high=q_first - k_first - strict)
    q_first, k_first = _first_of_iota(left, -2), _first_of_iota(right, -1)
    if q_first is not None and k_first is not None:  # q + b ≤ k + a
        return Band(low=q_first - k_first + strict)
    return None


def _first_of_iota(values: torch.Tensor, dim: int) -> int | None:
    """The first element, if the tensor counts up by one along this dim and is constant along all others."""
    if values.dim() < 2 or values.shape[dim] != values.numel() or values.dtype.is_floating_point:
        return None
    flat = values.flatten().long()
    first = int(flat[0])
    return first if bool((flat == torch.arange(first, first + flat.numel())).all()) else None

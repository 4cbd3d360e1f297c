"""The notation of dimension rules.

A rule says of an operator which factors of its inputs and outputs are the same, which are contracted and leave a
partial result, and which cannot be split:

    ... in, out in -> ... out              a linear map: `in` is contracted, all others are kept
    batch heads query! size!, … -> …       `!`: this factor cannot be split
    vocab hidden, ... -> ... hidden        an embedding: a one-hot contraction over `vocab`
    (heads size) -> heads size             a view: one dim is a product of two factors, whose sizes must be given

`...` stands for the leading dims that the named ones leave over, right-aligned between inputs as in broadcasting. A
dim of size one has no factors. A factor that an output lacks is contracted: split over an axis it leaves a partial
result, to be combined by `combine`.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

from planloom.layout import Combine

Term = tuple[tuple[str, ...], ...]
"""For each dim of a tensor, its factors by name, major to minor."""

Kind = Literal["view", "pointwise", "contraction"]
ONE_HOT_FACTOR = "vocab"
"""The factor of a one-hot contraction over which indices run."""

Rewrite = Literal["none", "shape", "slice", "mean", "one_hot", "random"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The resolved rule of one operator.

    linear: groups of inputs in which the operator is jointly linear: if exactly the inputs of one group are partial
    sums, so is the output. rewrite: how arguments change for a piece: `shape` (an argument is the output's shape),
    `slice` (start and stop scale), `mean` (divides by the whole size), `one_hot` (indices get the piece's offset),
    `random` (elements are numbered as in the whole).
    differentiable: False for maxima that are used as statistics and carry no cotangent.
    """

    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    sizes: dict[str, int]
    fixed: tuple[str, ...] = ()
    linear: tuple[tuple[int, ...], ...] = ()
    combine: Combine = "sum"
    kind: Kind = "pointwise"
    rewrite: Rewrite = "none"
    differentiable: bool = True

    def __str__(self) -> str:
        def dim(names: tuple[str, ...]) -> str:
            marked = [name + "!" * (name in self.fixed) for name in names]
            return marked[0] if len(marked) == 1 else f"({' '.join(marked)})" if marked else "1"

        def side(terms: tuple[Term, ...]) -> str:
            return ", ".join(" ".join(map(dim, term)) for term in terms)

        return f"{side(self.inputs)} -> {side(self.outputs)}"

    @property
    def contracted(self) -> tuple[str, ...]:
        kept = {name for term in self.outputs for names in term for name in names}
        return tuple(name for name in self.sizes if name not in kept)


@lru_cache(maxsize=1 << 14)  # equal layers ask again and again
def flat(term: Term) -> tuple[str, ...]:
    """The factor names of a tensor in order."""
    return tuple(name for names in term for name in names)


def notate(text: str, *shapes: tuple[int, ...], sizes: dict[str, int] | None = None, **fields: Any) -> Rule:
    """A rule from its notation and the shapes of the inputs and outputs, in order.

    `sizes` gives the sizes of factors that shapes alone leave open, as in `(heads size)`.
    """
    left, right = (side.split(",") for side in text.split("->"))
    known, fixed = dict(sizes or {}), {name.rstrip("!") for name in re.findall(r"[\w.]+!", text)}
    terms = [_term(part, shape, known) for part, shape in zip([*left, *right], shapes, strict=True)]
    used = {name for term in terms for name in flat(term)}
    return Rule(
        inputs=tuple(terms[: len(left)]),
        outputs=tuple(terms[len(left) :]),
        sizes={name: size for name, size in known.items() if name in used},
        fixed=tuple(sorted(fixed & used)),
        **fields,
    )


def _term(text: str, shape: tuple[int, ...], known: dict[str, int]) -> Term:
    """The factors of one tensor; sizes learnt on the way are added to `known`."""
    tokens = re.findall(r"\([^)]*\)|\.\.\.|[\w.]+", text.replace("!", ""))
    if "..." in tokens:
        at = tokens.index("...")
        extra = len(shape) - len(tokens) + 1
        tokens[at : at + 1] = [f"lead{extra - 1 - i}" for i in range(extra)]
    if len(tokens) != len(shape):
        raise ValueError(f"rule term {text!r} has {len(tokens)} dims, the tensor has shape {shape}")
    term = []
    for token, size in zip(tokens, shape, strict=True):
        names = tuple(token.strip("()").split()) if token != "1" else ()
        if size == 1:
            term.append(())
            continue
        open_names = [name for name in names if name not in known]
        if len(open_names) == 1:
            known[open_names[0]] = size // prod(known[name] for name in names if name in known)
        if len(open_names) > 1:
            raise ValueError(f"rule term {text!r} leaves the sizes of {open_names} open for shape {shape}")
        if prod(known[name] for name in names) != size:
            raise ValueError(f"rule term {text!r} does not fit shape {shape}: sizes {known}")
        term.append(tuple(name for name in names if known[name] > 1))
    return tuple(term)

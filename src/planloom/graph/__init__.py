"""The forward pass and loss as a value: tensors, operators and their dimension rules."""

from planloom.graph.factors import refine_factors
from planloom.graph.fingerprint import fingerprint, graph_difference
from planloom.graph.repeats import held_elements, repeated_dims, repeated_factors
from planloom.graph.rules import Rule, notate
from planloom.graph.values import (
    FLOAT_MARK,
    RANDOM_STATE,
    Arg,
    Expansion,
    Graph,
    Op,
    Tensor,
    is_reference,
    reference,
    referenced,
)

__all__ = [
    "FLOAT_MARK",
    "RANDOM_STATE",
    "Arg",
    "Expansion",
    "Graph",
    "Op",
    "Rule",
    "Tensor",
    "fingerprint",
    "graph_difference",
    "held_elements",
    "is_reference",
    "notate",
    "reference",
    "referenced",
    "refine_factors",
    "repeated_dims",
    "repeated_factors",
]

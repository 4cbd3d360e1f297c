"""Fingerprints: is this the model that the plan was made for, and if not, what differs?"""

import hashlib
from typing import Any

import msgspec

from planloom.graph.values import Graph


def fingerprint(graph: Graph) -> str:
    """A digest of everything that a plan depends on: operators, shapes, dtypes, parameters, inputs."""
    return hashlib.sha256(msgspec.json.encode(_lines(graph))).hexdigest()[:24]


def _lines(graph: Graph) -> list[Any]:
    tensor = {name: (t.shape, t.dtype) for name, t in graph.tensors.items()}
    lines: list[Any] = [("input", name, *tensor[name]) for name in graph.inputs]
    lines += [("parameter", name, *tensor[name]) for name in graph.parameters]
    lines += [("operator", op.name, op.target, op.args, op.kwargs, op.outputs) for op in (*graph.given, *graph.ops)]
    return lines


def summary(graph: Graph) -> dict[str, str]:
    """Inputs and parameters by name with shape and dtype: enough to say what differs without the other graph."""
    shown = {}
    for kind, names in (("input", graph.inputs), ("parameter", graph.parameters)):
        for name in names:
            tensor = graph.tensors[name]
            shown[f"{kind} {name}"] = f"{tensor.dtype}{list(tensor.shape)}"
    shown["number of operators"] = str(len(graph.ops) + len(graph.given))
    return shown


def graph_difference(recorded: dict[str, str], graph: Graph, *, most: int = 3) -> str:
    """What differs between a recorded summary and a graph, in words."""
    found = summary(graph)
    differences = [
        f"{key}: {recorded.get(key, 'absent')} in the plan, {found.get(key, 'absent')} in the model"
        for key in sorted({*recorded, *found})
        if recorded.get(key) != found.get(key)
    ]
    more = f" (+{len(differences) - most} more)" if len(differences) > most else ""
    return "; ".join(differences[:most]) + more or "the same inputs and parameters, but other operators or arguments"

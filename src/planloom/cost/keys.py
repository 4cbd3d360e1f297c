"""Keys of measured prices: what must be equal for two measurements to be of the same thing.

A run is known by its operators, local shapes and dtypes: the runs of equal layers share one key, whichever plan they
are in.
"""

import hashlib
from collections.abc import Sequence
from math import prod
from typing import Literal

import msgspec

from planloom.blocks import BlockGraph
from planloom.collective import StepKind
from planloom.program import Program, Run, StageProgram, piece_of

Phase = Literal["forward", "backward"]


def run_fingerprint(blocks: BlockGraph, program: Program, run: Run) -> str:
    """A digest of a run's local work."""
    graph = blocks.graph
    mesh = program.stages[run.stage].mesh
    coordinates = dict.fromkeys(mesh.digits, 0)
    numbers: dict[str, int] = {}
    lines = []
    for part in run.blocks:
        block = blocks.blocks[part.block]
        piece = piece_of(block, part, coordinates, program.num_micro_batches)
        for index in block.ops:
            op = graph.ops[index]
            tensors = []
            for name in (*op.inputs, *op.outputs):
                tensor = graph.tensors[name]
                box = piece.box(tensor.sizes, name)
                sizes = [stop - start for start, stop in box]
                tensors.append((numbers.setdefault(name, len(numbers)), tensor.dtype, sizes))
            args = op.work_args  # which of the random operators it is does not matter
            plain = [arg for arg in args if not isinstance(arg, str | list)]
            lines.append((op.target, plain, tensors))
    return hashlib.sha256(msgspec.json.encode(lines)).hexdigest()[:20]


def run_key(fingerprint: str, phase: Phase) -> str:
    return f"run/{fingerprint}/{phase}"


def collective_key(kind: StepKind | Literal["exchange"], group_size: int, num_bytes: int) -> str:
    """A collective on groups of this size, all groups at once; `num_bytes` in each device's array before it."""
    return f"collective/{kind}/{group_size}/{num_bytes}"


def shard_sizes(stage: StageProgram) -> list[int]:
    """Elements of every parameter shard that one device of a stage updates."""
    return [prod(p.optimizer_layout.local_sizes(p.sizes)) for p in stage.parameters]


def update_key(sizes: Sequence[int], dtypes: Sequence[str]) -> str:
    """One optimizer step on shards of these sizes and dtypes."""
    digest = hashlib.sha256(msgspec.json.encode([list(sizes), list(dtypes)])).hexdigest()[:20]
    return f"update/{digest}"

"""Keys of measured figures: what must be equal for two measurements to be of the same thing.

A run is known by its operators, local shapes, dtypes and boundary: the runs of equal layers share one key, whichever
plan they are in. A collective is known by its kind, by the groups of ranks that take part at once, and by its bytes: on
a real network it matters which ranks talk, and sizes of the same groups may be interpolated.

| key                                      | value                                                                  |
|------------------------------------------|------------------------------------------------------------------------|
| run/<fingerprint>/<figure>               | see `Figure`                                                           |
| update/<digest>                          | seconds of one optimizer step on the shards of a device                |
| update/<digest>/peak_bytes               | bytes of its temporaries, at most at one time                          |
| collective/<kind>/<groups>/<bytes>       | seconds; the bytes are those of a device's array before it             |
| collective/exchange/<pairs>/<bytes>      | seconds; the bytes are those of the largest message                    |
| memory/<bytes>                           | seconds of a sum that reads and writes so many bytes                   |
| accumulate/<bytes>                       | seconds of an addition in place that reads and writes so many bytes    |
| segment/<digest>                         | seconds of a segment of a body with its collectives; see `segments`    |
| overlap/compute, overlap/communication   | how many times longer a run, or a collective, takes while both go on   |
| overlap/exchange                         | seconds that a message takes longer while its ends compute             |
| rest/seconds, rest/share                 | what a device that has waited makes good, and its share of a core      |
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Literal

import msgspec

from planloom.blocks import BlockGraph
from planloom.collective import StepKind
from planloom.graph import Arg
from planloom.program import Program, Run, StageProgram, piece_of
from planloom.program.operations import ops_of

Phase = Literal["forward", "backward"]
SplitPhase = Literal["forward", "input_gradient", "weight_gradient"]

Figure = Literal[
    "forward",  # seconds
    "backward",  # seconds, weight gradients included
    "input_gradient",  # seconds of the part of the backward that makes no weight gradients
    "split_forward",  # seconds of the phases of a run whose backward comes in two halves
    "split_input_gradient",
    "split_weight_gradient",
    "forward_host",  # seconds in which the host starts the work; on a GPU they are hidden while it is behind
    "backward_host",
    "saved_bytes",  # kept between forward and backward in storages of neither an input nor an output slot
    "saved_inputs",  # bit i: the storage of input slot i is kept alive by what the forward saved; see `flags_of`
    "saved_outputs",
    "forward_peak_bytes",  # most bytes made during the forward and alive at one time
    "backward_peak_bytes",  # most bytes above those alive when the backward starts
]


def run_fingerprint(blocks: BlockGraph, program: Program, run: Run) -> str:
    """A digest of a run's local work: operators, local shapes, and what crosses its boundary with a cotangent."""
    graph = blocks.graph
    coordinates = {digit: 0 for part in run.blocks for _, digits in part.splits for digit in digits}
    numbers: dict[str, int] = {}
    lines: list[Any] = []
    for part in run.blocks:
        block = blocks.blocks[part.block]
        piece = piece_of(block, part, coordinates, program.num_micro_batches)
        turn = part.turn
        if turn is not None:  # all turns but the first and the last are alike
            lines.append(["turn", min(turn.number, 1), turn.is_last])
        for index in ops_of(blocks, part):
            op = graph.ops[index]
            tensors = []
            for name in (*op.inputs, *op.outputs):
                tensor = graph.tensors[name]
                sizes = [stop - start for start, stop in piece.box(tensor.sizes, name)]
                where = part.reads.get(name, -1)
                tensors.append((numbers.setdefault(name, len(numbers)), where, tensor.dtype, sizes, tensor.density))
            args = op.work_args  # which of the random operators it is does not matter
            has_shape = op.rule is not None and op.rule.rewrite == "shape"
            options = {key: _plain(arg, has_shape) for key, arg in op.kwargs.items()}
            lines.append((op.target, [_plain(arg, has_shape) for arg in args], options, tensors))
    slots = [
        (numbers.get(slot.tensor, -1), slot.layout.local_sizes(slot.sizes), slot.cotangent is not None)
        for slot in (*run.inputs, *run.outputs)
    ]
    return _digest([lines, len(run.inputs), slots])


def _plain(arg: Arg, has_shape: bool) -> Arg:
    """An argument without names, and without shapes: they are the whole tensor's; the local ones are in the tensors."""
    if isinstance(arg, list | tuple):
        return None if has_shape else [_plain(item, has_shape) for item in arg]
    return None if isinstance(arg, str) else arg


def run_key(fingerprint: str, figure: Figure) -> str:
    return f"run/{fingerprint}/{figure}"


def split_key(fingerprint: str, phase: SplitPhase) -> str:
    """Seconds of a phase of a run whose backward comes in two halves."""
    figures: dict[SplitPhase, Figure] = {
        "forward": "split_forward",
        "input_gradient": "split_input_gradient",
        "weight_gradient": "split_weight_gradient",
    }
    return run_key(fingerprint, figures[phase])


def collective_key(kind: StepKind, groups: Iterable[Sequence[int]], num_bytes: int) -> str:
    """A collective of all these groups at once; `num_bytes` in each device's array before it."""
    return f"{collective_prefix(kind, groups)}{num_bytes}"


def collective_prefix(kind: StepKind, groups: Iterable[Sequence[int]]) -> str:
    """What the keys of a collective begin with, whatever its bytes. The order inside a group moves no bytes."""
    return f"collective/{kind}/{_digest(sorted(sorted(group) for group in groups))}/"


def exchange_key(pairs: Iterable[tuple[int, int]], num_bytes: int) -> str:
    """Messages between these (source, target) pairs, all at once; `num_bytes` in the largest."""
    return f"{exchange_prefix(pairs)}{num_bytes}"


def exchange_prefix(pairs: Iterable[tuple[int, int]]) -> str:
    """What the keys of an exchange begin with, whatever its bytes."""
    return f"collective/exchange/{_digest(sorted(set(pairs)))}/"


def memory_key(num_bytes: int) -> str:
    """A sum that reads and writes so many bytes in all."""
    return f"{MEMORY_PREFIX}{num_bytes}"


def accumulate_key(num_bytes: int) -> str:
    """An addition in place that reads and writes so many bytes in all."""
    return f"{ACCUMULATE_PREFIX}{num_bytes}"


def mask_figures(key: str, flags: Sequence[bool]) -> dict[str, float]:
    """Flags as figures under a key: a float holds 53 bits exactly, so every 48 flags are a figure of their own."""
    words = [flags[i : i + _MASK_BITS] for i in range(0, len(flags), _MASK_BITS)] or [()]
    return {
        _word_key(key, n): float(sum(1 << i for i, flag in enumerate(word) if flag)) for n, word in enumerate(words)
    }


def flags_of(key: str, figures: Mapping[str, float], count: int) -> tuple[bool, ...]:
    """The flags that `mask_figures` wrote."""
    words = [int(figures[_word_key(key, n)]) for n in range(-(-count // _MASK_BITS))]
    return tuple(bool(words[i // _MASK_BITS] >> i % _MASK_BITS & 1) for i in range(count))


def _word_key(key: str, number: int) -> str:
    return key if number == 0 else f"{key}/{number}"


_MASK_BITS = 48
MEMORY_PREFIX, ACCUMULATE_PREFIX, SEGMENT_PREFIX = "memory/", "accumulate/", "segment/"
OVERLAP_COMPUTE_KEY, OVERLAP_COMMUNICATION_KEY = "overlap/compute", "overlap/communication"
OVERLAP_EXCHANGE_KEY = "overlap/exchange"
REST_SECONDS_KEY, REST_SHARE_KEY = "rest/seconds", "rest/share"


def sizes_measured(prefix: str, known: Iterable[str]) -> list[int]:
    """The byte counts of all keys with this prefix, ascending."""
    return sorted(int(key.removeprefix(prefix)) for key in known if key.startswith(prefix))


def shard_sizes(stage: StageProgram) -> list[int]:
    """Elements of every parameter shard that one device of a stage updates."""
    return [prod(p.optimizer_layout.local_sizes(p.sizes)) for p in stage.parameters]


def update_key(sizes: Sequence[int], dtypes: Sequence[str]) -> str:
    """One optimizer step on shards of these sizes and dtypes."""
    return f"update/{_digest([list(sizes), list(dtypes)])}"


def update_peak_key(key: str) -> str:
    """The bytes of an update's temporaries."""
    return f"{key}/peak_bytes"


def _digest(value: Any) -> str:
    return hashlib.sha256(msgspec.json.encode(value)).hexdigest()[:20]

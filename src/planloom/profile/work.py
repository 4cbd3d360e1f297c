"""What there is to measure for programs: distinct runs, updates, collectives and exchanges.

Collectives and exchanges are wanted for their real groups and sizes. A size between two measured ones of the same
groups that differ by at most a factor `COVERED_RATIO` is *covered*: its price is interpolated. So a program with many
sizes needs few measurements, chosen as far apart as that allows.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from planloom.blocks import BlockGraph
from planloom.collective import Step, local_sizes_after
from planloom.cost.keys import (
    OVERLAP_EXCHANGE_KEY,
    REST_SECONDS_KEY,
    accumulate_key,
    collective_prefix,
    exchange_prefix,
    run_fingerprint,
    run_key,
    shard_sizes,
    sizes_measured,
    split_key,
    update_key,
)
from planloom.program import Program, Run, Send, Transfer, collectives_in
from planloom.program.shared import between_roles
from planloom.program.sizes import mask_bytes_of_steps

COVERED_RATIO = 2.0
MEMORY_ELEMENTS = (1 << 10, 1 << 14, 1 << 18, 1 << 22)
"""Of float32, in each of the two operands of a sum: it moves three times as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collectives:
    """A kind of collective on the same groups: an example, and the sizes wanted."""

    step: Step
    sizes: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """Messages between the same pairs of ranks, and the sizes of the largest that are wanted."""

    pairs: tuple[tuple[int, int], ...]
    sizes: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is to be measured: by fingerprint, by update key, and links by the prefix of their keys."""

    runs: dict[str, tuple[Program, Run]]
    splits: dict[str, tuple[Program, Run]]
    """Those whose backward comes in two halves: they are carried out otherwise."""
    updates: dict[str, tuple[list[int], list[str]]]
    links: dict[str, Collectives | Exchanges]
    memory: tuple[int, ...]
    overlap: bool
    rest: bool

    @property
    def num_tasks(self) -> int:
        links = sum(len(link.sizes) for link in self.links.values())
        return self.num_computed + links + len(self.memory) + self.overlap + self.rest

    @property
    def num_computed(self) -> int:
        """Tasks that are measured in every round."""
        return len(self.runs) + len(self.splits) + len(self.updates)


def work_of(blocks: BlockGraph, programs: Sequence[Program], *, with_links: bool) -> Work:
    """Everything that these programs use; `with_links`: what is sent, too."""
    runs: dict[str, tuple[Program, Run]] = {}
    splits: dict[str, tuple[Program, Run]] = {}
    updates: dict[str, tuple[list[int], list[str]]] = {}
    links: dict[str, Collectives | Exchanges] = {}
    for program in programs:
        split = frozenset[int]().union(*(stage.split_runs for stage in program.stages))
        for run in program.runs:
            fingerprint = run_fingerprint(blocks, program, run)
            runs.setdefault(fingerprint, (program, run))
            if run.index in split:
                splits.setdefault(fingerprint, (program, run))
        for stage in program.stages:
            sizes, dtypes = shard_sizes(stage), [blocks.graph.tensors[p.name].dtype for p in stage.parameters]
            if sizes:
                updates[update_key(sizes, dtypes)] = (sizes, dtypes)
        if with_links:
            for step, num_bytes in _steps(blocks, program):
                found = links.setdefault(collective_prefix(step.kind, step.groups), Collectives(step=step))
                found.sizes.add(num_bytes)
            for transfers, num_bytes in _exchanges(blocks, program):
                pairs = tuple(sorted({(t.source, t.target) for t in transfers}))
                links.setdefault(exchange_prefix(pairs), Exchanges(pairs=pairs)).sizes.add(num_bytes)
    memory = tuple(3 * 4 * count for count in MEMORY_ELEMENTS)
    return Work(
        runs=runs,
        splits=splits,
        updates=updates,
        links=links,
        memory=memory,
        overlap=bool(links),
        rest=bool(links),
    )


def missing_work(work: Work, known: Collection[str]) -> Work:
    """The part of it that is not known."""
    links: dict[str, Collectives | Exchanges] = {}
    for prefix, link in sorted(work.links.items()):
        sizes = uncovered(link.sizes, sizes_measured(prefix, known))
        if sizes and isinstance(link, Collectives):
            links[prefix] = Collectives(step=link.step, sizes=sizes)
        elif sizes and isinstance(link, Exchanges):
            links[prefix] = Exchanges(pairs=link.pairs, sizes=sizes)
    return Work(
        runs={print_: of for print_, of in work.runs.items() if run_key(print_, "forward") not in known},
        splits={print_: of for print_, of in work.splits.items() if split_key(print_, "forward") not in known},
        updates={key: of for key, of in work.updates.items() if key not in known},
        links=links,
        memory=tuple(size for size in work.memory if accumulate_key(size) not in known),
        overlap=work.overlap and OVERLAP_EXCHANGE_KEY not in known,
        rest=work.rest and REST_SECONDS_KEY not in known,
    )


def uncovered(wanted: Collection[int], measured: Sequence[int]) -> set[int]:
    """The sizes to measure so that all are measured or lie between two measured ones that are near enough."""
    chosen: list[int] = sorted(measured)
    added: set[int] = set()
    left = sorted(size for size in wanted if not _is_covered(size, chosen))
    while left:
        low = left[0]
        within = [size for size in left if size <= COVERED_RATIO * low]
        new = {low, within[-1]}
        added |= new
        chosen = sorted({*chosen, *new})
        left = [size for size in left if not _is_covered(size, chosen)]
    return added


def _is_covered(size: int, measured: Sequence[int]) -> bool:
    place = bisect_left(measured, size)
    if place < len(measured) and measured[place] == size:
        return True
    return 0 < place < len(measured) and measured[place] <= COVERED_RATIO * measured[place - 1]


def _steps(blocks: BlockGraph, program: Program) -> Iterator[tuple[Step, int]]:
    """Every step that sends something, with the bytes in a device's array before it."""
    for stage in program.stages:
        for body in stage.bodies.values():
            for instruction in body:
                parts = collectives_in(instruction)
                dims = [part.sizes for part in parts]
                for part in parts:
                    masks = zip(part.steps, mask_bytes_of_steps(part), strict=True)
                    yield from ((step, num_bytes) for step, num_bytes in masks if num_bytes)
                for steps in zip(*(part.steps for part in parts), strict=True):
                    of = zip((part.tensor for part in parts), dims, strict=True)
                    if not steps[0].is_local:
                        yield steps[0], sum(_stored_bytes(blocks, tensor, sizes) for tensor, sizes in of)
                    dims = [local_sizes_after(step, sizes) for step, sizes in zip(steps, dims, strict=True)]


def _exchanges(blocks: BlockGraph, program: Program) -> Iterator[tuple[tuple[Transfer, ...], int]]:
    """The messages of every exchange between stages, with the bytes of the largest."""
    role_of = {device: s for s, stage in enumerate(program.stages) for device in stage.mesh.devices}
    for stage in program.stages:
        for body in stage.bodies.values():
            for instruction in body:
                if isinstance(instruction, Send):
                    item_bytes = blocks.graph.tensors[instruction.tensor].item_bytes
                    for transfers in between_roles(role_of, instruction.transfers).values():
                        elements = max(prod(b - a for a, b in t.source_box) for t in transfers)
                        yield transfers, item_bytes * elements


def _stored_bytes(blocks: BlockGraph, name: str, sizes: tuple[int, ...]) -> int:
    """Bytes of a local array; of a ragged tensor only the rows that are there."""
    tensor = blocks.graph.tensors[name]
    return round(prod(sizes) * tensor.item_bytes * tensor.density)


def missing_runs(
    blocks: BlockGraph, programs: Sequence[Program], known: Mapping[str, float]
) -> dict[str, tuple[Program, Run]]:
    """Fingerprint → an example, for every run of these programs that is not measured."""
    return missing_work(work_of(blocks, programs, with_links=False), known).runs


def is_measured(
    blocks: BlockGraph, programs: Sequence[Program], known: Mapping[str, float], *, with_links: bool = True
) -> bool:
    """Is there nothing left to measure for these programs?"""
    return missing_work(work_of(blocks, programs, with_links=with_links), known).num_tasks == 0

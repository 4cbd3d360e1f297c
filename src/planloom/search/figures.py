"""Seconds and bytes of choices: what a solution adds up to, block by block."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planloom.search.elimination import Indices
from planloom.search.stages import BlockFigures
from planloom.search.strategies import boundary_states, split_of
from planloom.search.tables import Tables


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Choice:
    """What was chosen, by places in the tables: for every variable its strategy or layout; for every variable how its
    parameters are stored, -1 where there are none; for every segment whether it is recomputed."""

    variables: Indices
    storage: Indices
    recomputed: NDArray[np.bool_]


def with_best_junctions(tables: Tables, g: int, variables: Indices) -> Indices:
    """The same strategies, and every junction in the layout that takes the least seconds with them.

    What the search weighed against memory is forgotten here: so a plan, which names no junctions, has one estimate.
    """
    found = variables.copy()
    for places in tables.network.places_of_junctions:
        total = np.zeros((len(places.numbers), tables.num_choices(places.key)))
        for key, ends_here, others in places.edges:
            pair = tables.pairs[key].forward[g] + tables.pairs[key].backward[g]
            total += pair[variables[others]] if ends_here else pair[:, variables[others]].T
        found[places.numbers] = total.argmin(axis=1)
    return found


def block_figures(tables: Tables, g: int, choice: Choice) -> BlockFigures:
    """Seconds and bytes of what was chosen for problem g; an edge counts with the block that it leads to."""
    network = tables.network
    segments = network.segment_of_block
    again = choice.recomputed[segments].astype(float)
    count = len(network.blocks.blocks)
    micro, step, stored, saved, leaving, peak, working = (np.zeros(count) for _ in range(7))
    for key, numbers, blocks in network.places_of_keys:
        unary, picked = tables.unary[key], choice.variables[numbers]
        forward = unary.forward[g][picked]
        np.add.at(micro, blocks, forward * (1 + again[blocks]) + unary.backward[g][picked])
        np.add.at(saved, blocks, unary.saved_bytes[g][picked])
        np.add.at(leaving, blocks, unary.leaving_bytes[g][picked])
        np.maximum.at(peak, blocks, unary.peak_bytes[g][picked])
        if unary.parameters is not None:
            own, ways = unary.parameters, choice.storage[numbers]
            micro[blocks] += own.micro_seconds[ways, g, picked]
            step[blocks] += own.step_seconds[ways, g, picked]
            stored[blocks] += own.stored_bytes[ways, g, picked]
            working[blocks] += own.working_bytes[ways, g, picked]
    for key, sources, targets, blocks in network.places_of_edges:
        pair, ends = tables.pairs[key], (choice.variables[sources], choice.variables[targets])
        np.add.at(micro, blocks, pair.forward[g][ends] * (1 + again[blocks]) + pair.backward[g][ends])
    peak = peak + working
    if again.any():  # what a segment saves is there while its backward goes on
        of_segment = np.bincount(segments, weights=saved)
        peak = peak + again * of_segment[segments]
        saved = np.where(again > 0, leaving, saved)
    return BlockFigures(micro_seconds=micro, step_seconds=step, stored_bytes=stored, saved_bytes=saved, peak_bytes=peak)


def exchange_seconds(tables: Tables, g: int, choice: Choice, first_blocks: Sequence[int]) -> float:
    """What crosses the cuts, once there and once back."""
    blocks, total = tables.network.blocks, 0.0
    for cut in first_blocks[1:]:
        for tensor in tables.network.crossing(cut):
            producer = blocks.blocks[blocks.producer[tensor]]
            number = tables.network.of_block[producer.index]
            strategies = tables.strategies[tables.network.variables[number].key]
            row = boundary_states(tables.graph, producer, strategies, tensor)[[choice.variables[number]]]
            split = split_of(row, tables.shape.sizes, len(tables.graph.tensors[tensor].sizes))[0]
            ways = 2 if tables.graph.is_differentiable(tensor) else 1
            num_bytes = float(tables.whole_bytes(tensor, producer)[g] / split)
            total += ways * tables.send_seconds(g, num_bytes)
    return total

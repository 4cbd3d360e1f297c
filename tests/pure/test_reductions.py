"""Choices for a change of layout: their order, chunks and seconds; and all programs of small machines, checked."""

from collections import defaultdict
from itertools import pairwise
from math import prod

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planloom.cluster import Cluster, Library
from planloom.collective import (
    LOCAL_KINDS,
    Choice,
    Move,
    Reduction,
    Synthesized,
    digits_cost,
    find_reductions,
    seconds_price,
    synthesize,
)
from planloom.collective.oracle import check_program
from planloom.collective.reductions import CYCLES, MAX_CHUNKS, MIN_CHUNK_BYTES, MIN_CHUNK_GAIN, MIN_GAIN
from planloom.errors import LayoutError
from planloom.layout import Digit, Layout, Mesh, enumerate_placements, mesh_of
from tests.pure.test_bounds import Change, change_of, changes
from tests.pure.test_geometry import placed_meshes
from tests.pure.test_routes import cluster_of, clusters, link


def found_for(cluster: Cluster, change: Change, num_best: int = 8, *, chunked: bool = True) -> Reduction:
    return find_reductions(
        cluster, change.mesh, change.source, change.target, change.sizes, num_best=num_best, chunked=chunked
    )


def digits_of(move: Move) -> tuple[Digit, ...]:
    return tuple(moved.digit for moved in move.digits)


def step_seconds(cluster: Cluster, mesh: Mesh, move: Move, num_chunks: int) -> float:
    return seconds_price(cluster)(mesh, move.kind, digits_of(move), move.masters)(move.num_bytes / num_chunks)


def sum_of_steps(cluster: Cluster, mesh: Mesh, program: Synthesized, num_chunks: int = 1) -> float:
    return sum(step_seconds(cluster, mesh, move, num_chunks) for move in program.moves)


def busiest_level_seconds(cluster: Cluster, mesh: Mesh, choice: Choice) -> float:
    """How long all chunks together keep the most loaded wires of a level busy."""
    busy: dict[int, float] = defaultdict(float)
    for lane in choice.lanes:
        for move in lane.moves:
            if move.kind not in LOCAL_KINDS:
                num_bytes = move.num_bytes / choice.num_chunks
                line = digits_cost(cluster, mesh, move.kind, digits_of(move), move.masters).line(num_bytes)
                for level, per_byte in line.busy_seconds_per_byte:
                    busy[level] += per_byte * num_bytes
    return max(busy.values(), default=0.0)


@settings(max_examples=20)
@given(clusters(max_devices=12, min_count=2, max_levels=2), st.data())
def test_choices(cluster: Cluster, data: st.DataObject) -> None:
    mesh = data.draw(placed_meshes(cluster))
    change = data.draw(changes(mesh, ("PR", "PR", "PB", "AR", "AB", "MR", "BB")))
    assume(change.source != change.target)
    reduction = found_for(cluster, change)
    best, rest = reduction.choices[0], reduction.choices[1:]
    fastest = min(choice.seconds for choice in reduction.choices)
    assert all(a.seconds <= b.seconds for a, b in pairwise(rest)), "in order, but for a simpler one in front"
    assert best.seconds * (1 - MIN_GAIN) <= fastest
    assert best is reduction.best
    assert best.seconds <= reduction.default.seconds * (1 + MIN_GAIN)
    assert reduction.speedup == reduction.default.seconds / best.seconds
    for choice in (reduction.default, *reduction.choices):
        require_reasonable_seconds(cluster, mesh, choice)
        assert len(choice.programs) in (1, *map(sum, CYCLES))
        assert choice.num_chunks <= MAX_CHUNKS
        assert choice.num_chunks % len(choice.programs) == 0
        require_accepted(change, choice)


def require_accepted(change: Change, choice: Choice) -> None:
    for program in choice.programs:
        check_program(program.program(change.mesh), mesh=change.mesh, source=change.source, target=change.target)


def require_reasonable_seconds(cluster: Cluster, mesh: Mesh, choice: Choice) -> None:
    """One chunk takes the sum of its steps; chunks neither outrun a wire nor each other, and promise a gain."""
    if choice.num_chunks == 1:
        assert choice.seconds == pytest.approx(sum_of_steps(cluster, mesh, choice.programs[0]), rel=1e-9)
        return
    longest = max(sum_of_steps(cluster, mesh, program, choice.num_chunks) for program in choice.programs)
    assert choice.seconds >= longest
    assert choice.seconds >= busiest_level_seconds(cluster, mesh, choice) * (1 - 1e-9)
    if len(choice.programs) == 1:
        assert choice.seconds < sum_of_steps(cluster, mesh, choice.programs[0]) * (1 - MIN_CHUNK_GAIN)
    if choice.num_chunks > len(choice.programs):
        assert min(p.moves[0].num_bytes for p in choice.programs) / choice.num_chunks >= MIN_CHUNK_BYTES


def all_reduce(mesh: Mesh, *axes: str, num_bytes: int = 1 << 26) -> Change:
    places = {digit: "PR" for digit in mesh.digits if digit.axis in axes}
    size = prod(digit.size for digit in places)
    return change_of(mesh, places, num_bytes // 4 // size)


NODES = cluster_of((2, link(shared=True)), (4, link(bandwidth=8e9)))
PLACED = mesh_of(enumerate_placements(NODES.level_counts, {"a": 8})[0])


@pytest.mark.parametrize("pair", ["PR", "PB", "AR", "AB", "MR", "MB", "PM", "AM"])
def test_the_default_is_one_collective(pair: str) -> None:
    reduction = found_for(NODES, change_of(PLACED, dict.fromkeys(PLACED.digits, pair), 1 << 20))
    (program,) = reduction.default.programs
    (move,) = program.moves
    assert reduction.default.num_chunks == 1
    assert set(digits_of(move)) == set(PLACED.digits)
    assert reduction.default.seconds == step_seconds(NODES, PLACED, move, 1)


def test_slow_uplinks_are_crossed_with_what_is_reduced_inside() -> None:
    cluster = cluster_of((4, link(shared=True)), (4, link(bandwidth=8e9)))
    mesh = mesh_of(enumerate_placements(cluster.level_counts, {"a": 16})[0])
    reduction = found_for(cluster, all_reduce(mesh, "a"), chunked=False)
    (program,) = reduction.best.programs
    assert [move.kind for move in program.moves] == ["reduce_scatter", "all_reduce", "all_gather"]
    assert reduction.best.num_chunks == 1
    assert reduction.speedup > 1


def test_chunks_overlap_levels_that_are_about_equally_busy() -> None:
    """Between nodes a quarter of the bytes at a quarter of the rate: halves are on their way at both levels at once."""
    cluster = cluster_of((4, link()), (4, link()), library="gloo")
    mesh = mesh_of(enumerate_placements(cluster.level_counts, {"a": 16})[0])
    whole = found_for(cluster, all_reduce(mesh, "a"), chunked=False)
    parts = found_for(cluster, all_reduce(mesh, "a"))
    assert parts.best.num_chunks > 1
    assert parts.best.seconds < whole.best.seconds
    small = found_for(cluster, all_reduce(mesh, "a", num_bytes=MIN_CHUNK_BYTES))
    assert all(choice.num_chunks <= len(choice.programs) for choice in small.choices)


def test_one_level_has_nothing_to_overlap() -> None:
    cluster, mesh = cluster_of((8, link())), Mesh.of(range(8), a=8)
    reduction = found_for(cluster, all_reduce(mesh, "a"))
    assert reduction.best.num_chunks == 1
    assert [program.moves for program in reduction.best.programs] == [reduction.default.programs[0].moves]
    assert reduction.speedup == 1.0


def test_lanes_take_turns() -> None:
    change = all_reduce(PLACED, "a")
    first, second = synthesize(change.source, change.target, PLACED, change.sizes, num_best=2)
    choice = Choice(programs=(first, second), num_chunks=4, seconds=1.0)
    assert choice.lanes == (first, second, first, second)
    assert Choice(programs=(first,), num_chunks=2, seconds=1.0).lanes == (first, first)


def test_without_chunks_there_is_one_program_in_one_piece() -> None:
    for choice in found_for(NODES, all_reduce(PLACED, "a"), chunked=False).choices:
        assert (len(choice.programs), choice.num_chunks) == (1, 1)
        assert choice.seconds == pytest.approx(choice.programs[0].price, rel=1e-12)


@pytest.mark.parametrize(("library", "times_bound"), [("gloo", 1.25), ("nccl", 2.5)])
def test_both_axes_of_a_torus_are_busy(library: Library, times_bound: float) -> None:
    """Gloo's rings go both ways and come close to the bound; one way round, half of the wires are left."""
    cluster = cluster_of((4, link("torus")), (4, link("torus")), library=library)
    mesh = mesh_of(enumerate_placements(cluster.level_counts, {"a": 16})[0])
    reduction = found_for(cluster, all_reduce(mesh, "a"))
    firsts = [program.moves[0] for program in reduction.best.lanes]
    used = {digits_of(move) for program in reduction.best.lanes for move in program.moves}
    assert used == {(digit,) for digit in mesh.digits}, "one axis at a time"
    assert reduction.best.num_chunks > 1, "one chunk on rows while another is on columns"
    assert {move.kind for move in firsts} == {"reduce_scatter"}
    assert reduction.best.seconds <= times_bound * reduction.lower_bound_seconds
    assert reduction.speedup > 1.5


def test_as_many_choices_as_asked_for() -> None:
    assert len(found_for(NODES, all_reduce(PLACED, "a"), num_best=3).choices) == 3


def test_nothing_to_be_done_is_an_error() -> None:
    with pytest.raises(LayoutError, match="nothing is to be done"):
        found_for(NODES, Change(PLACED, Layout.replicated(1), Layout.replicated(1), (8,)))


def test_others_than_masters_stay_out_of_steps_over_other_digits() -> None:
    mesh = Mesh.of(range(4), a=2, b=2)
    change = change_of(mesh, dict(zip(mesh.digits, ("PR", "MM"), strict=True)))
    (found,) = synthesize(change.source, change.target, mesh, change.sizes)
    check_program(found.program(mesh), mesh=mesh, source=change.source, target=change.target)


def test_no_chunk_is_too_small_to_be_priced() -> None:
    """64 KiB in chunks of 16."""
    fast = link("torus", bandwidth=5e9, latency=1e-9)
    cluster = cluster_of((3, fast), (2, fast), (2, fast))
    mesh = mesh_of(enumerate_placements(cluster.level_counts, {"a": 12})[0])
    reduction = found_for(cluster, change_of(mesh, dict(zip(mesh.digits, ("AR", "MR", "AR"), strict=True)), 1 << 14))
    best = reduction.best
    assert min(p.moves[0].num_bytes for p in best.programs) / best.num_chunks >= min(MIN_CHUNK_BYTES, 1 << 16)


# --- all placements of small machines


def axis_sets(num_devices: int) -> list[dict[str, int]]:
    return [
        {"a": num_devices},
        *({"a": n, "b": num_devices // n} for n in range(2, num_devices) if num_devices % n == 0),
    ]


@pytest.mark.parametrize("levels", [(2, 2), (4,), (2, 4), (4, 4), (2, 2, 2), (2, 2, 4)], ids=str)
def test_the_best_programs_of_every_placement_are_right(levels: tuple[int, ...]) -> None:
    cluster = cluster_of(*((count, link(shared=i == 0, bandwidth=1e9 * 4**i)) for i, count in enumerate(levels)))
    num_programs = 0
    for axes in axis_sets(prod(levels)):
        for placement in enumerate_placements(levels, axes):
            mesh = mesh_of(placement)
            for over in axes:
                for pair in ("PR", "PB", "AR"):
                    change = change_of(mesh, dict.fromkeys(mesh.axis(over).digits, pair), 1 << 10)
                    best = synthesize(
                        change.source, change.target, mesh, change.sizes, price=seconds_price(cluster), num_best=10
                    )
                    num_programs += len(best)
                    for found in best:
                        program = found.program(mesh)
                        check_program(program, mesh=mesh, source=change.source, target=change.target)
    assert num_programs > 10

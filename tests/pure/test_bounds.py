"""Lower bounds: no program is priced below its bound, and the bounds of well-known changes."""

from dataclasses import dataclass
from math import prod

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planloom.cluster import COLLECTIVES, Cluster, Library
from planloom.collective import find_reductions, seconds_price, synthesize
from planloom.collective.bounds import lower_bound_seconds
from planloom.collective.geometry import terrain_of
from planloom.layout import Digit, Layout, Mesh
from tests.pure.test_geometry import flat_meshes, placed_meshes, sliced_meshes
from tests.pure.test_routes import cluster_of, clusters, link

PLACES = ("PR", "PB", "PM", "AR", "AB", "AM", "MR", "MB", "RB", "RP", "AP", "MP", "RR", "PP", "BB", "MM")
"""Where a digit is and where it goes: the letters of `refine`; BB stays split, MM stays at its master."""


@dataclass(frozen=True)
class Change:
    mesh: Mesh
    source: Layout
    target: Layout
    sizes: tuple[int, ...]
    places: frozenset[str] = frozenset()


def change_of(mesh: Mesh, places: dict[Digit, str], unit: int = 1) -> Change:
    """A change of a tensor with a factor for the splits before, one for those after, and one for those that stay."""

    def digits(*pairs: str) -> tuple[Digit, ...]:
        return tuple(digit for digit in mesh.digits if places.get(digit, "RR") in pairs)

    def starts(letter: str) -> tuple[Digit, ...]:
        return digits(*(pair for pair in PLACES if pair[0] == letter and pair != "BB"))

    def ends(letter: str) -> tuple[Digit, ...]:
        return digits(*(pair for pair in PLACES if pair[1] == letter and pair != "BB"))

    source = Layout(splits=(starts("A"), (), digits("BB")), partial=starts("P"), master=starts("M"))
    target = Layout(splits=((), ends("B"), digits("BB")), partial=ends("P"), master=ends("M"))
    temporary = prod(d.size for d in digits("PR"))
    sizes = (
        prod(d.size for d in source.splits[0]),
        prod(d.size for d in target.splits[1]),
        prod(d.size for d in digits("BB")) * temporary * unit,
    )
    return Change(mesh, source, target, sizes, frozenset(places.values()))


@st.composite
def changes(draw: st.DrawFn, mesh: Mesh, places: tuple[str, ...] = PLACES) -> Change:
    chosen = {digit: draw(st.sampled_from(places)) for digit in mesh.digits}
    return change_of(mesh, chosen, draw(st.sampled_from((1, 1 << 10, 1 << 18, 1 << 24))))


def bound_of(cluster: Cluster, change: Change) -> float:
    return lower_bound_seconds(cluster, change.mesh, change.source, change.target, change.sizes)


def require_bounded(cluster: Cluster, change: Change) -> None:
    bound = bound_of(cluster, change)
    for found in synthesize(
        change.source, change.target, change.mesh, change.sizes, price=seconds_price(cluster), num_best=8
    ):
        assert bound <= found.price * (1 + 1e-6), [move.kind for move in found.moves]


def is_doubtful(change: Change) -> bool:
    """What bounds get wrong, see the tests below: a master that holds or wants a piece of the array only."""
    to_or_from_master = change.places & {"PM", "AM", "MR", "MB"}
    in_pieces = change.places & {"AB", "RB", "AP"}
    gathered = "AM" in change.places and change.places & {"PB", "MB"}
    scattered = "MB" in change.places and change.places & {"AR", "AM"}
    return bool(gathered or scattered or (to_or_from_master and in_pieces))


@settings(max_examples=150)
@given(clusters(max_devices=16, min_count=2), st.data())
def test_no_program_is_priced_below_its_bound(cluster: Cluster, data: st.DataObject) -> None:
    mesh = data.draw(st.one_of(make(cluster) for make in (placed_meshes, sliced_meshes, flat_meshes)))
    change = data.draw(changes(mesh))
    assume(terrain_of(cluster, mesh) is not None and not is_doubtful(change))
    require_bounded(cluster, change)


@settings(max_examples=150)
@given(clusters(max_devices=16, min_count=2), st.data())
def test_no_reduction_is_priced_below_its_bound(cluster: Cluster, data: st.DataObject) -> None:
    """One goal for all digits, or a mixture of the four that have no masters."""
    mesh = data.draw(placed_meshes(cluster))
    goals = data.draw(st.sampled_from((("PR",), ("PB",), ("AR",), ("AB",), ("PR", "PB", "AR", "AB"))))
    require_bounded(cluster, data.draw(changes(mesh, (*goals, "RR"))))


@settings(max_examples=10)
@given(clusters(max_devices=12, min_count=2, max_levels=2), st.data())
def test_no_choice_is_below_its_bound(cluster: Cluster, data: st.DataObject) -> None:
    mesh = data.draw(placed_meshes(cluster))
    change = data.draw(changes(mesh, ("PR", "PB", "AR", "AB", "BB")))
    assume(change.source != change.target)
    reduction = find_reductions(cluster, mesh, change.source, change.target, change.sizes, num_best=8)
    assert reduction.lower_bound_seconds == bound_of(cluster, change)
    for choice in (reduction.default, *reduction.choices):
        assert reduction.lower_bound_seconds <= choice.seconds * (1 + 1e-9)


MASTER_PLACES = [
    *((master, cut) for master in ("PM", "MR", "AM", "MB") for cut in ("AB", "RB")),
    ("MB", "AR"),
    ("AM", "PB"),
]


@pytest.mark.parametrize("places", MASTER_PLACES, ids="-".join)
def test_a_master_of_a_piece(places: tuple[str, str]) -> None:
    mesh = Mesh.of(range(6), a=3, b=2)
    change = change_of(mesh, dict(zip(mesh.digits, places, strict=True)), 1 << 20)
    assert is_doubtful(change)
    require_bounded(cluster_of((6, link(latency=1e-9))), change)


@pytest.mark.parametrize(
    ("levels", "mesh"),
    [((2, 2), Mesh.of((0, 2, 3, 1), a=2, b=2)), ((3, 4), Mesh.of(range(12), a=2, b=6))],
    ids=["shuffled", "in order"],
)
def test_digits_that_together_reach_no_more_nodes_than_one_of_them(levels: tuple[int, int], mesh: Mesh) -> None:
    cluster = cluster_of((levels[0], link(shared=True)), (levels[1], link(bandwidth=1e11)))
    require_bounded(cluster, change_of(mesh, dict.fromkeys(mesh.digits, "PR"), 1 << 20))


# --- well-known bounds

BYTES = 1 << 24


def bound_over(cluster: Cluster, mesh: Mesh, pair: str, *axes: str) -> float:
    """The bound of one goal over axes, of a tensor of `BYTES` bytes; before an all-gather, a piece is."""
    places = {digit: pair for digit in mesh.digits if digit.axis in axes}
    change = change_of(mesh, places)
    unit = BYTES // 4 // prod(change.target.local_sizes(change.sizes) if pair == "AR" else change.sizes)
    return bound_of(cluster, change_of(mesh, places, unit))


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("library", ["nccl", "gloo"])
def test_one_crossbar(n: int, library: Library) -> None:
    cluster, mesh = cluster_of((n, link()), library=library), Mesh.of(range(n), a=n)
    once = BYTES / 1e9 * (n - 1) / n
    assert bound_over(cluster, mesh, "PR", "a") == pytest.approx(2 * once)
    for pair in ("PB", "AR"):
        assert bound_over(cluster, mesh, pair, "a") == pytest.approx(once)
    assert bound_over(cluster, mesh, "AB", "a") == pytest.approx(once / n)  # of a device's piece, 1/n of the tensor


def test_two_nodes_that_share_uplinks() -> None:
    """Every element crosses once in each direction."""
    cluster = cluster_of((2, link(shared=True)), (4, link(bandwidth=1e12)))
    together = Mesh.of(range(8), a=8)
    assert bound_over(cluster, together, "PR", "a") == pytest.approx(BYTES / 1e9, rel=1e-2)
    strided = Mesh.of(range(8), a=2, b=4)
    assert bound_over(cluster, strided, "PR", "a") == pytest.approx(4 * BYTES / 1e9)
    own = cluster_of((2, link()), (4, link(bandwidth=1e12)))
    assert bound_over(own, strided, "PR", "a") == pytest.approx(BYTES / 1e9)
    assert bound_over(own, together, "PR", "a") == pytest.approx(BYTES / 1e9 / 4, rel=1e-2)


def test_a_torus() -> None:
    """16 devices with four links each: 2 · 15 sends of every element over 64 wires."""
    cluster = cluster_of((4, link("torus")), (4, link("torus")))
    assert bound_over(cluster, Mesh.of(range(16), a=16), "PR", "a") == pytest.approx(30 / 64 * BYTES / 1e9)
    lines = Mesh.of(range(16), a=4, b=4)
    for axis in ("a", "b"):
        assert bound_over(cluster, lines, "PR", axis) == pytest.approx(6 / 8 * BYTES / 1e9)


def test_a_ring_counts_the_hops_of_those_who_are_apart() -> None:
    cluster = cluster_of((4, link("ring")))
    assert bound_over(cluster, Mesh.of(range(4), a=4), "PR", "a") == pytest.approx(6 / 8 * BYTES / 1e9)
    assert bound_over(cluster, Mesh.of(range(4), a=2, b=2), "PR", "a") >= BYTES / 1e9


def test_a_root_sends_and_receives_through_its_own_link() -> None:
    cluster, mesh = cluster_of((4, link())), Mesh.of(range(4), a=4)
    for pair, share in (("PM", 1.0), ("MR", 1.0), ("MB", 3 / 4)):
        assert bound_over(cluster, mesh, pair, "a") == pytest.approx(share * BYTES / 1e9)


def test_the_best_efficiency_counts() -> None:
    mesh = Mesh.of(range(4), a=4)
    plain = bound_over(cluster_of((4, link())), mesh, "PR", "a")
    for efficiency, factor in (
        ({("all_reduce", 0): 1.25}, 1 / 1.25),
        ({("all_reduce", 0): 0.5}, 1.0),
        ({(kind, 0): 0.5 for kind in COLLECTIVES if kind != "exchange"}, 2.0),
    ):
        cluster = cluster_of((4, link(efficiency=efficiency)))
        assert bound_over(cluster, mesh, "PR", "a") == pytest.approx(factor * plain)


@given(clusters(max_devices=16), st.data())
def test_nothing_moves_in_no_time(cluster: Cluster, data: st.DataObject) -> None:
    mesh = data.draw(placed_meshes(cluster))
    assert bound_of(cluster, data.draw(changes(mesh, ("RR", "PP", "BB", "MM")))) == 0.0
    assert bound_of(cluster, data.draw(changes(mesh, ("RB", "RP", "BB")))) == 0.0, "cut and masked in place"

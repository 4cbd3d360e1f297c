"""Lower bounds: no program is priced below its bound, and the bounds of well-known changes."""

from dataclasses import dataclass
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planloom.cluster import Cluster
from planloom.collective import find_reductions, seconds_price, synthesize
from planloom.collective.bounds import lower_bound_seconds
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
    return Change(mesh, source, target, sizes)


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


@settings(max_examples=200)
@given(clusters(max_devices=16), st.data())
def test_no_program_is_priced_below_its_bound(cluster: Cluster, data: st.DataObject) -> None:
    mesh = data.draw(st.one_of(make(cluster) for make in (placed_meshes, sliced_meshes, flat_meshes)))
    require_bounded(cluster, data.draw(changes(mesh)))

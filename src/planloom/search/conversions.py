"""Seconds of changes of layout, for all pairs of layouts at once and a batch of placements.

Over one axis, from the producer's state to the reader's, and the cotangent's way back:

| producer → reader        | forward        | backward                                        |
|--------------------------|----------------|-------------------------------------------------|
| split f → split f        |                |                                                 |
| split f → split g        | all-to-all     | all-to-all                                      |
| split f → whole          | all-gather     | reduce-scatter of a partial cotangent, else a slice |
| partial → split f        | reduce-scatter | all-gather                                      |
| partial → whole          | all-reduce     | all-reduce of a partial cotangent               |
| whole → split f          | slice          | all-gather                                      |
| whole → whole            |                | all-reduce of a partial cotangent               |

Changes over several axes go one after another, so that arrays are small when they travel: slices, reduce-scatters from
the fastest axis to the slowest, all-reduces, all-to-alls, all-gathers from the slowest axis to the fastest. Where an
axis leaves a factor that an axis inside it goes on splitting, the pieces have to be sorted anew: an all-to-all more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planloom.cluster import Device
from planloom.search.curves import AxisCurves
from planloom.search.strategies import Rows

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class AxisBatch:
    """The curves of one axis in every problem of a batch; `members[i]`: the problems that have `curves[i]`."""

    size: int
    curves: tuple[AxisCurves, ...]
    members: tuple[NDArray[np.intp], ...]

    @staticmethod
    def of(curves: Sequence[AxisCurves]) -> "AxisBatch":
        distinct = list({id(c): c for c in curves}.values())
        members = tuple(np.array([i for i, c in enumerate(curves) if c is own]) for own in distinct)
        return AxisBatch(size=curves[0].size, curves=tuple(distinct), members=members)

    def seconds(self, kind: str, num_bytes: Array) -> Array:
        """Seconds of a collective on arrays of these bytes, the first dim being the problem."""
        if len(self.curves) == 1:
            only: Callable[[Array], Array] = getattr(self.curves[0], kind)
            return only(num_bytes)
        found = np.empty_like(num_bytes)
        for curves, members in zip(self.curves, self.members, strict=True):
            found[members] = getattr(curves, kind)(num_bytes[members])
        return found


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class MeshBatch:
    """The axes of a shape on every placement of a batch."""

    axes: tuple[AxisBatch, ...]
    fastest_first: tuple[int, ...]
    device: Device
    by_volume: bool = False
    """What a device does by itself is free."""
    parts: "tuple[tuple[NDArray[np.intp], MeshBatch], ...]" = ()
    """Problems whose axes have the same order of speeds, as batches of their own; none if all have."""

    @staticmethod
    def of(rows: Sequence[Sequence[AxisCurves]], device: Device, *, by_volume: bool) -> "MeshBatch":
        """From the curves of all axes in every problem. What a problem costs does not depend on the others."""
        by_order: dict[tuple[int, ...], list[int]] = {}
        for i, row in enumerate(rows):
            by_order.setdefault(_fastest_first(row), []).append(i)

        def batch(order: tuple[int, ...], own: Sequence[int]) -> MeshBatch:
            columns = zip(*(rows[i] for i in own), strict=True)
            axes = tuple(AxisBatch.of(column) for column in columns)
            return MeshBatch(axes=axes, fastest_first=order, device=device, by_volume=by_volume)

        whole = batch(next(iter(by_order)), range(len(rows)))
        parts = tuple((np.array(own), batch(order, own)) for order, own in by_order.items())
        return replace(whole, parts=parts if len(parts) > 1 else ())

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(axis.size for axis in self.axes)

    def copy_seconds(self, num_bytes: Array) -> Array:
        """A local slice: it reads and writes what is left."""
        if self.by_volume:
            return np.zeros_like(num_bytes)
        return self.device.launch_seconds + 2 * num_bytes / self.device.memory_bytes_per_second


def _fastest_first(curves: Sequence[AxisCurves]) -> tuple[int, ...]:
    speeds = [own.speed if own.size > 1 else np.inf for own in curves]
    return tuple(sorted(range(len(speeds)), key=lambda a: (-speeds[a], -a)))


class _Way:
    """One tensor on its way through the steps, for all pairs of layouts: seconds so far, bytes now."""

    def __init__(self, mesh: MeshBatch, num_bytes: Array) -> None:
        self.mesh, self.bytes = mesh, num_bytes
        self.seconds = np.zeros_like(num_bytes)

    def step(self, kind: str, axis: int, mask: Mask, growth: float = 1.0) -> None:
        """A collective over an axis where `mask` says so; the array is `growth` times as large afterwards."""
        if mask.any():
            at = self._pairs(mask)
            own = self.bytes[:, at]
            self.seconds[:, at] += self.mesh.axes[axis].seconds(kind, own)
            self.bytes[:, at] = own * growth

    def cut(self, axis: int, mask: Mask) -> None:
        if mask.any():
            at = self._pairs(mask)
            own = self.bytes[:, at] / self.mesh.sizes[axis]
            self.seconds[:, at] += self.mesh.copy_seconds(own)
            self.bytes[:, at] = own

    def _pairs(self, mask: Mask) -> Mask:
        """What is true of some pairs of layouts, spread over all of them."""
        return np.broadcast_to(mask, self.bytes.shape[1:])

    def all_reduce(self, masks: Sequence[Mask]) -> None:
        """All-reduces over the axes; over two, scattered over the faster one meanwhile if that is cheaper."""
        order = [axis for axis in self.mesh.fastest_first if masks[axis].any()]
        if not order:
            return
        pairs = {axis: self._pairs(masks[axis]) for axis in order}
        alone = np.zeros_like(self.seconds)
        for axis, at in pairs.items():
            alone[:, at] += self.mesh.axes[axis].seconds("all_reduce", self.bytes[:, at])
        best = alone.copy()
        for fast, slow in [(a, b) for i, a in enumerate(order) for b in order[i + 1 :]]:
            both = pairs[fast] & pairs[slow]
            if both.any():
                own = self.bytes[:, both]
                part = own / self.mesh.sizes[fast]
                pair = (
                    self.mesh.axes[fast].seconds("reduce_scatter", own)
                    + self.mesh.axes[slow].seconds("all_reduce", part)
                    + self.mesh.axes[fast].seconds("all_gather", part)
                )
                flat = self.mesh.axes[fast].seconds("all_reduce", own) + self.mesh.axes[slow].seconds("all_reduce", own)
                best[:, both] = np.minimum(best[:, both], alone[:, both] - flat + pair)
        self.seconds += best


def conversion_seconds(
    mesh: MeshBatch,
    produced: Rows,
    consumed: Rows,
    num_factors: int,
    whole_bytes: Array,
    *,
    is_differentiable: bool,
    takes_partial: bool = False,
    is_junction: bool = False,
) -> tuple[Array, Array]:
    """Forward and backward seconds, of shape (problems, producer's layouts, reader's layouts).

    `whole_bytes`: of the tensor in a micro-batch, one number a problem; `takes_partial`: the producer passes partial
    cotangents on; `is_junction`: what is partial about the producer is the cotangent that it takes, not its value.
    """
    if mesh.parts:
        forward, backward = (np.empty((len(whole_bytes), len(produced), len(consumed))) for _ in range(2))
        for members, part in mesh.parts:
            forward[members], backward[members] = conversion_seconds(
                part,
                produced,
                consumed,
                num_factors,
                whole_bytes[members],
                is_differentiable=is_differentiable,
                takes_partial=takes_partial,
                is_junction=is_junction,
            )
        return forward, backward
    axes = range(len(mesh.axes))
    was = [produced[:, a][:, None] for a in axes]
    will = [consumed[:, a][None, :] for a in axes]
    was_split, will_split = [w < num_factors for w in was], [w < num_factors for w in will]
    differs = [was[a] != will[a] for a in axes]
    moved = [was_split[a] & will_split[a] & differs[a] for a in axes]
    sorted_anew = [_is_sorted_anew(a, was, was_split, differs) for a in axes]
    sizes = np.array(mesh.sizes, dtype=float)
    shape = (len(whole_bytes), len(produced), len(consumed))

    def local(states: Rows) -> Array:
        found: Array = whole_bytes[:, None] / np.where(states < num_factors, sizes, 1.0).prod(axis=1)[None, :]
        return found

    way = _Way(mesh, np.array(np.broadcast_to(local(produced)[:, :, None], shape)))
    partial = [(was[a] == num_factors) & (not is_junction) for a in axes]
    whole = [~was_split[a] & ~partial[a] for a in axes]
    for a in axes:
        way.cut(a, whole[a] & will_split[a])
    for a in mesh.fastest_first:
        way.step("reduce_scatter", a, partial[a] & will_split[a], 1 / sizes[a])
    way.all_reduce([partial[a] & ~will_split[a] for a in axes])
    for a in axes:
        way.step("all_to_all", a, moved[a] | sorted_anew[a])
    for a in reversed(mesh.fastest_first):
        way.step("all_gather", a, was_split[a] & ~will_split[a], sizes[a])
    forward = way.seconds
    if not is_differentiable:
        return forward, np.zeros(shape)

    way = _Way(mesh, np.array(np.broadcast_to(local(consumed)[:, None, :], shape)))
    given_partial = [(will[a] == num_factors) for a in axes]
    given_whole = [(will[a] == num_factors + 1) for a in axes]
    passed_on = [(whole[a] & takes_partial) | (is_junction & (was[a] == num_factors)) for a in axes]
    for a in axes:
        way.cut(a, given_whole[a] & was_split[a])
    for a in mesh.fastest_first:
        way.step("reduce_scatter", a, given_partial[a] & was_split[a], 1 / sizes[a])
    way.all_reduce([given_partial[a] & ~was_split[a] & ~passed_on[a] for a in axes])
    for a in axes:
        way.step("all_to_all", a, moved[a] | sorted_anew[a])
    for a in reversed(mesh.fastest_first):
        way.step("all_gather", a, will_split[a] & ~was_split[a], sizes[a])
    return forward, way.seconds


def _is_sorted_anew(axis: int, was: Sequence[Rows], was_split: Sequence[Mask], differs: Sequence[Mask]) -> Mask:
    """Does an axis outside this one leave the factor that this one goes on splitting?"""
    found = np.zeros_like(differs[axis])
    for outer in range(axis):
        found = found | (
            was_split[outer] & was_split[axis] & (was[outer] == was[axis]) & differs[outer] & ~differs[axis]
        )
    return found


def reduction_seconds(mesh: MeshBatch, over: Mask, num_bytes: Array) -> Array:
    """All-reduces over the axes of `over` (strategies, axes) of arrays of `num_bytes` (problems, strategies)."""
    if mesh.parts:
        found = np.empty_like(num_bytes)
        for members, part in mesh.parts:
            found[members] = reduction_seconds(part, over, num_bytes[members])
        return found
    way = _Way(mesh, num_bytes)
    way.all_reduce([over[:, a] for a in range(len(mesh.axes))])
    return way.seconds

"""Axes and meshes: ordered digits over an ordered tuple of devices.

An *axis* is an ordered product of *digits*, major to minor. A *mesh* lays its axes over devices: `devices` is listed
row-major over all digits of all axes in order. Device order is a tuple from here to the wire, never a set.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from planloom.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Digit:
    """One factor of an axis: what a single level of the machine, or a loop, counts."""

    axis: str
    index: int
    size: int

    def __str__(self) -> str:
        return f"{self.axis}.{self.index}" if self.index else self.axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A named slice of space (devices) or time (steps on the same devices)."""

    name: str
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.sizes)

    @property
    def digits(self) -> tuple[Digit, ...]:
        """The digits that split anything: those of size one are left out."""
        return tuple(Digit(axis=self.name, index=i, size=n) for i, n in enumerate(self.sizes) if n > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Space axes laid over an ordered tuple of devices."""

    axes: tuple[Axis, ...]
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise LayoutError("a mesh names an axis twice", given=str(names), required="distinct names")
        if prod(axis.size for axis in self.axes) != len(self.devices):
            raise LayoutError(
                "the axes of a mesh do not fill its devices",
                given=f"axes { ({a.name: a.size for a in self.axes}) } on {len(self.devices)} devices {self.devices}",
                required="the product of the axis sizes equals the number of devices",
                todo="change an axis size, or give the mesh as many devices as that product",
            )
        if len(set(self.devices)) != len(self.devices):
            raise LayoutError("a mesh names a device twice", given=str(self.devices), required="distinct devices")

    @staticmethod
    def of(devices: Sequence[int], **sizes: int) -> "Mesh":
        """A mesh with one digit an axis: `Mesh.of((0, 1, 2, 3), dp=2, tp=2)`."""
        return Mesh(axes=tuple(Axis(name=n, sizes=(s,)) for n, s in sizes.items()), devices=tuple(devices))

    def axis(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise LayoutError(
            f"no axis {name!r} in this mesh", given=name, required=f"one of {[a.name for a in self.axes]}"
        )

    @property
    def digits(self) -> tuple[Digit, ...]:
        return tuple(digit for axis in self.axes for digit in axis.digits)

    def coordinates(self, device: int) -> dict[Digit, int]:
        """The device's coordinate along every digit."""
        position, coordinates = self.devices.index(device), {}
        for digit in reversed(self.digits):
            position, coordinates[digit] = divmod(position, digit.size)
        return coordinates

    def groups(self, digits: Sequence[Digit]) -> tuple[tuple[int, ...], ...]:
        """All groups of devices that differ in these digits only, each ordered by them, major first."""
        order = self.digits
        strides = {d: prod(e.size for e in order[i + 1 :]) for i, d in enumerate(order)}
        fixed = [d for d in order if d not in digits]

        def positions(over: Sequence[Digit]) -> list[int]:
            return [
                sum(c * strides[d] for d, c in zip(over, point, strict=True))
                for point in product(*(range(d.size) for d in over))
            ]

        return tuple(tuple(self.devices[base + offset] for offset in positions(digits)) for base in positions(fixed))

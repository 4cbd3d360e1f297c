"""A family of plans with a name of its own: the degrees and switches it takes, and the function that writes the draft.

`megatron:tp=2,pp=2,dp=2` is a *recipe*: a family with its options. A family is ten to forty lines of split, assign and
order; what it returns is a draft, so it is a starting point to edit as well as a plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

from planloom.blocks import BlockGraph
from planloom.layout import Mesh
from planloom.plan.draft import Draft

Option = int | bool
Options = Mapping[str, Option]
BatchSpec = dict[str, tuple[tuple[int, ...], str]]


class Writer(Protocol):
    def __call__(self, blocks: BlockGraph, options: Options, *, mesh: Mesh, batch: BatchSpec) -> Draft: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`axes`: the options that are sizes of axes, outermost first; their product is the number of devices.

    `options`: all options with their defaults; a number takes `name=N`, a switch takes `name` or `no-name`.
    """

    name: str
    about: str
    axes: tuple[str, ...]
    options: Options
    write: Writer

    def mesh(self, options: Options) -> Mesh:
        """The mesh of all devices in order, with this family's axes."""
        sizes = {name: int(options[name]) for name in self.axes}
        return Mesh.of(range(prod(sizes.values())), **sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A family with every option given."""

    family: Family
    options: Options

    @property
    def num_devices(self) -> int:
        return prod(int(self.options[name]) for name in self.family.axes)

    def __str__(self) -> str:
        given = {name: value for name, value in self.options.items() if self._is_told(name, value)}
        words = [
            f"{name}={value}" if not isinstance(value, bool) else name if value else f"no-{name}"
            for name, value in given.items()
        ]
        return ":".join([self.family.name, *([",".join(words)] if words else [])])

    def _is_told(self, name: str, value: Option) -> bool:
        return value != self.family.options[name] or (name in self.family.axes and value != 1)

    def draft(self, blocks: BlockGraph, *, batch: BatchSpec, mesh: Mesh | None = None) -> Draft:
        """The draft on a mesh with the family's axes; without one, on devices 0… in order."""
        return self.family.write(blocks, self.options, mesh=mesh or self.family.mesh(self.options), batch=batch)

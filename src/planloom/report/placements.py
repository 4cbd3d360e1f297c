"""Placements for a terminal: the matrix, which device has which coordinates, the groups of an axis."""

from collections.abc import Mapping, Sequence
from math import prod

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planloom.layout import Mesh, Placement, mesh_of

MAX_PICTURED_DEVICES = 64
"""A picture of more devices than these is no longer looked at."""

MAX_LISTED_GROUPS = 16
_LINE_WIDTH = 72
_COLORS = ("cyan", "yellow", "green", "magenta", "blue", "red", "white", "bright_black")


def placement_view(
    placement: Placement, levels: Mapping[str, int], *, number: int, groups_of: str | None = None
) -> RenderableType:
    """One placement: its matrix as a grid, a picture of the devices where there are few, the groups asked for."""
    parts: list[RenderableType] = [_grid(placement, levels, number)]
    pictured = prod(levels.values()) <= MAX_PICTURED_DEVICES
    if pictured or groups_of is not None:
        mesh = mesh_of(placement)
        if pictured:
            parts.append(Padding(_picture(mesh, levels), (0, 0, 1, 2)))
        if groups_of is not None:
            parts.append(Padding(_groups(mesh, groups_of), (0, 0, 1, 2)))
    return Group(*parts)


def axis_coordinates(mesh: Mesh) -> dict[int, tuple[int, ...]]:
    """The coordinate of every device along every axis."""
    found = {}
    for position, device in enumerate(mesh.devices):
        coordinates = []
        for axis in reversed(mesh.axes):
            position, coordinate = divmod(position, axis.size)
            coordinates.append(coordinate)
        found[device] = tuple(reversed(coordinates))
    return found


def _grid(placement: Placement, levels: Mapping[str, int], number: int) -> Table:
    title = f"{number}: {escape(str(placement))}"
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for level in levels:
        table.add_column(escape(level), justify="right")
    table.add_column("axis", justify="right", style="dim")
    for name, row in zip(placement.axes, placement.matrix, strict=True):
        entries = [str(entry) if entry > 1 else "[dim]1[/dim]" for entry in row]
        table.add_row(escape(name), *entries, str(prod(row)))
    return table


def _picture(mesh: Mesh, levels: Mapping[str, int]) -> Text:
    """The devices in order, a line for each member of all levels but the innermost: coordinates, in the axes' order.

    Colours follow the first axis that splits anything, so that what belongs together is seen.
    """
    shown = [place for place, axis in enumerate(mesh.axes) if axis.size > 1] or [0]
    coordinates = axis_coordinates(mesh)
    cells = ["·".join(str(coordinates[d][place]) for place in shown) for d in range(len(mesh.devices))]
    width = max(map(len, cells))
    names = "·".join(mesh.axes[place].name for place in shown)
    counts, inner = list(levels.values()), list(levels)[-1]
    per_line = next(
        n for n in range(counts[-1], 0, -1) if counts[-1] % n == 0 and (n * (width + 1) <= _LINE_WIDTH or n == 1)
    )
    text = Text(f"{names} of each {inner}:\n", style="dim")
    for start in range(0, len(cells), per_line):
        label = _outer_label(start, levels) if start % counts[-1] == 0 else ""
        text.append(label.ljust(_label_width(levels)), style="dim")
        for device in range(start, start + per_line):
            color = _COLORS[coordinates[device][shown[0]] % len(_COLORS)]
            text.append(cells[device].rjust(width) + " ", style=f"not dim {color}")
        text.append("\n" if start + per_line < len(cells) else "")
    return text


def _outer_label(device: int, levels: Mapping[str, int]) -> str:
    device //= list(levels.values())[-1]
    words = []
    for name, count in reversed(list(levels.items())[:-1]):
        device, digit = divmod(device, count)
        words.append(f"{name} {digit}" if count > 1 or len(levels) == 2 else "")
    return " ".join(word for word in reversed(words) if word)


def _label_width(levels: Mapping[str, int]) -> int:
    last = prod(levels.values()) - 1
    return len(_outer_label(last, levels)) + 2


def _groups(mesh: Mesh, axis: str) -> Text:
    groups = axis_groups(mesh, axis)
    text = Text(f"groups of {axis}:\n", style="dim")
    lines = [", ".join(map(str, group)) for group in groups[:MAX_LISTED_GROUPS]]
    left_out = len(groups) - len(lines)
    text.append("\n".join(f"({line})" for line in lines), style="not dim")
    text.append(f"\nand {left_out} more; --json has them all" if left_out else "")
    return text


def axis_groups(mesh: Mesh, axis: str) -> Sequence[tuple[int, ...]]:
    """The groups of one axis as ordered tuples: devices that differ in that axis's digits only."""
    return mesh.groups(mesh.axis(axis).digits)

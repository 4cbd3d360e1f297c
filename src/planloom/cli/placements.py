"""`planloom placements`: every way to lay axes over the levels of a machine."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from planloom.cli.output import JsonOption, screen, show
from planloom.cluster import load_cluster
from planloom.errors import LayoutError
from planloom.layout import Placement, enumerate_placements, mesh_of
from planloom.report.placements import axis_groups, placement_view

_EXAMPLES = {"--levels": "node=4,gpu=16", "--axes": "data=4,model=16"}


def register(app: typer.Typer) -> None:
    example = "Example: planloom placements --levels node=4,gpu=16 --axes data=4,model=16 --groups data"
    app.command(name="placements", epilog=example)(placements_command)


def placements_command(
    axes: Annotated[str, typer.Option("--axes", help="Axes and their sizes, as data=4,model=16.")],
    levels: Annotated[str | None, typer.Option("--levels", help="Levels, outermost first, as node=4,gpu=16.")] = None,
    cluster: Annotated[str | None, typer.Option("--cluster", help="A cluster's levels: a preset or YAML file.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", help="The number of outermost members of --cluster.")] = None,
    groups: Annotated[str | None, typer.Option("--groups", help="An axis whose groups are shown too.")] = None,
    fold: Annotated[list[str] | None, typer.Option("--fold", help="Interchangeable axes, as data,model.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=0, help="Show so many; 0 shows all. --json has all.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Show every placement: the matrices of how much of each axis varies at each level.

    A row is an axis and multiplies to its size, a column is a level and multiplies to its count.
    """
    counts, sizes = find_levels(levels, cluster, nodes), parse_sizes(axes, option="--axes")
    if groups is not None and groups not in sizes:
        raise LayoutError(f"no axis {groups!r} (--groups)", given=groups, required=f"one of {', '.join(sizes)}")
    interchangeable = [_parse_names(names) for names in fold or ()]
    placements = enumerate_placements(tuple(counts.values()), sizes, interchangeable=interchangeable)
    if as_json:
        documents = [placement_document(placement, counts, groups) for placement in placements]
        show({"count": len(placements), "levels": counts, "axes": sizes, "placements": documents}, as_json=True)
        return
    shown = placements[: limit or None]
    for number, placement in enumerate(shown, start=1):
        screen.print(placement_view(placement, counts, number=number, groups_of=groups))
    rest = f"; the first {len(shown)} are shown, --limit 0 shows all" if len(shown) < len(placements) else ""
    noun = "placement" if len(placements) == 1 else "placements"
    screen.print(f"{len(placements):,} {noun} of {_written(sizes)} on {_written(counts)}{rest}", markup=False)


def placement_document(placement: Placement, levels: Mapping[str, int], groups: str | None) -> dict[str, Any]:
    """A placement for machines: the matrix, the digits of every axis, the groups asked for."""
    names = tuple(levels)
    document: dict[str, Any] = {
        "matrix": [list(row) for row in placement.matrix],
        "digits": {
            axis: [{"level": names[place], "size": size} for place, size in enumerate(row) if size > 1]
            for axis, row in zip(placement.axes, placement.matrix, strict=True)
        },
    }
    if groups is not None:
        document["groups"] = {groups: [list(group) for group in axis_groups(mesh_of(placement), groups)]}
    return document


def find_levels(levels: str | None, cluster: str | None, nodes: int | None) -> dict[str, int]:
    """The levels' counts by name, from --levels or from --cluster and --nodes."""
    if (levels is None) == (cluster is None):
        raise LayoutError(
            "the levels of the machine are not given"
            if levels is None
            else "the levels of the machine are given twice",
            given="neither --levels nor --cluster" if levels is None else f"--levels {levels} and --cluster {cluster}",
            required="one of --levels and --cluster",
            todo=f"for example --levels {_EXAMPLES['--levels']}, or --cluster dgx-h100 --nodes 4",
        )
    if cluster is not None:
        return {level.name: level.count for level in load_cluster(cluster, num_outer=nodes).levels}
    if nodes is not None:
        raise LayoutError(
            "--nodes does not go with --levels",
            given=f"--levels {levels} --nodes {nodes}",
            required="--nodes with --cluster only",
            todo="write the number of nodes into --levels",
        )
    assert levels is not None
    return parse_sizes(levels, option="--levels")


def parse_sizes(text: str, *, option: str) -> dict[str, int]:
    """`data=4,model=16` as a mapping in that order."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (word.strip() for word in part.partition("="))
        if not (name and name.isprintable() and equals and size.isascii() and size.isdigit() and int(size) > 0):
            problem = f"{part.strip()!r} is not a name and a size"
        elif name in sizes:
            problem = f"{name!r} is given twice"
        else:
            sizes[name] = int(size)
            continue
        raise LayoutError(
            f"{option}: {problem}",
            given=text,
            required="names, each once, with whole numbers from 1",
            todo=f"for example {option} {_EXAMPLES[option]}",
        )
    return sizes


def _parse_names(text: str) -> Sequence[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise LayoutError(
            "--fold: a name is missing",
            given=text,
            required="names of axes with commas between",
            todo="for example --fold data,model",
        )
    return names


def _written(sizes: Mapping[str, int]) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())

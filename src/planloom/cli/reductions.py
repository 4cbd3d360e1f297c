"""`planloom reduce`: the best program of collectives for a change of layout, on every placement of the axes.

A *goal* says where the array is before and after, for each axis of --over: partial (every device holds a summand),
whole (every device holds all of it), shard:N (split along its dim N), master (the first device alone holds it).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import RenderableType

from planloom.cli.output import JsonOption, messages, progress_bar, screen, show, write_file
from planloom.cli.placements import parse_sizes
from planloom.cli.plans import ClusterOption, NodesOption
from planloom.cluster import DTYPES, Cluster, format_bytes, load_cluster, parse_bytes
from planloom.collective import Choice, Move, find_reductions, seconds_price
from planloom.collective.oracle import check_program
from planloom.collective.refine import is_refinable
from planloom.errors import LayoutError
from planloom.layout import Digit, Layout, Mesh, Placement, enumerate_placements, mesh_of
from planloom.report.reductions import (
    PlacedReduction,
    choice_words,
    choices_table,
    fastest_first,
    reductions_bars,
    reductions_svg,
    reductions_table,
)

MAX_VERIFIED_DEVICES = 256
"""Up to here the oracle takes some hundredths of a second a program."""

MAX_DIMS = 8
_PLACES = "partial, whole, master, or shard:0 to shard:7"
_GOALS = {
    ("partial", "whole"): "all-reduce",
    ("partial", "shard"): "reduce-scatter",
    ("partial", "master"): "reduce",
    ("shard", "whole"): "all-gather",
    ("shard", "shard"): "all-to-all",
    ("shard", "master"): "gather",
    ("master", "whole"): "broadcast",
    ("master", "shard"): "scatter",
}
_UNNAMED = "change of layout"


def register(app: typer.Typer) -> None:
    example = (
        "Example: planloom reduce --cluster gcp-a2-megagpu-16g --nodes 4 --axes data=4,model=16 --over data "
        "--bytes 2GiB, or with --to shard:0 for a reduce-scatter, --from shard:0 for an all-gather, --from shard:0 "
        "--to shard:1 for an all-to-all, --from master for a broadcast"
    )
    app.command(name="reduce", epilog=example)(reduce_command)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """Where the array is before and after, by axis: `partial`, `whole`, `master`, or the number of the split dim."""

    before: Mapping[str, str | int]
    after: Mapping[str, str | int]

    @property
    def name(self) -> str:
        """`all-reduce`, say; or a name for all that no single collective does."""
        moves = {(_kind(self.before[a]), _kind(self.after[a])) for a in self.before if self.before[a] != self.after[a]}
        return _GOALS.get(moves.pop(), _UNNAMED) if len(moves) == 1 else _UNNAMED

    @property
    def num_dims(self) -> int:
        return 1 + max([0, *(p for p in (*self.before.values(), *self.after.values()) if isinstance(p, int))])

    def layouts(self, mesh: Mesh) -> tuple[Layout, Layout]:
        return self._layout(mesh, self.before), self._layout(mesh, self.after)

    def _layout(self, mesh: Mesh, places: Mapping[str, str | int]) -> Layout:
        def digits(place: str | int) -> tuple[Digit, ...]:
            return tuple(d for axis, where in places.items() if where == place for d in mesh.axis(axis).digits)

        splits = tuple(digits(dim) for dim in range(self.num_dims))
        return Layout(splits=splits, partial=digits("partial"), master=digits("master"))

    def shape(self, axes: Mapping[str, int], num_items: int) -> tuple[int, ...]:
        """The smallest array of at least so many items that every split, also a temporary one, cuts evenly.

        Which of the dims is long changes no cost: the last one that is split is, the others are as short as can be.
        """
        shape = [1] * self.num_dims
        for places in (self.before, self.after):
            for dim in range(self.num_dims):
                shape[dim] = lcm(shape[dim], prod(axes[axis] for axis, place in places.items() if place == dim))
        step = prod(axes[axis] for axis in self.before)
        shape[-1] = -(-num_items // (prod(shape[:-1]) * step)) * step
        return tuple(shape)


def reduce_command(
    cluster: ClusterOption,
    axes: Annotated[str, typer.Option("--axes", help="Axes and their sizes, as data=4,model=16.")],
    over: Annotated[str, typer.Option("--over", help="The axes along which the array changes, as data or data,model.")],
    num_bytes: Annotated[
        str,
        typer.Option("--bytes", help="The whole array, as a device holds it where it is not split: 2GiB, '512 MB'."),
    ],
    nodes: NodesOption = None,
    before: Annotated[
        str,
        typer.Option("--from", help="Before: partial, whole, shard:N, master; or by axis, data=partial,model=shard:0."),
    ] = "partial",
    after: Annotated[str, typer.Option("--to", help="After: whole, shard:N, master, partial; or by axis.")] = "whole",
    placement: Annotated[
        str | None,
        typer.Option("--placement", help="Only this one: '[[4,1],[1,16]]', a row an axis, a column a level."),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Show so many choices for each placement.")] = 1,
    chunks: Annotated[
        bool, typer.Option("--chunks/--no-chunks", help="Cut the array into chunks, and pair programs, where it pays.")
    ] = True,
    dtype: Annotated[str, typer.Option("--dtype", help="What the array holds; the bytes count, not the type.")] = (
        "float32"
    ),
    limit: Annotated[int, typer.Option("--limit", min=0, help="Show so many; 0 shows all. --json has all.")] = 50,
    picture: Annotated[Path | None, typer.Option("--picture", help="Write the bars as an SVG picture here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest program of collectives for a reduction, on every placement of the axes over the levels.

    Shown are the default (one collective), the best program, and a time that no program can beat.

    Devices that differ in axes outside --over do the same at the same time, over the same links.
    """
    machine, sizes = load_cluster(cluster, num_outer=nodes), parse_sizes(axes, option="--axes")
    goal = parse_goal(parse_over(over, sizes), before, after)
    given_bytes, item_bytes = parse_bytes(num_bytes, key="--bytes"), dtype_bytes(dtype)
    shape = goal.shape(sizes, -(-given_bytes // item_bytes))
    placements = find_placements(machine, sizes, placement)
    found: list[PlacedReduction] = []
    with progress_bar("searching programs", total=len(placements)) as bar:
        for number, one in placements.items():
            found.append(_place(machine, goal, shape, item_bytes, number, one, num_best=top, chunked=chunks))
            bar.update(len(found), len(placements))
    levels = [level.name for level in machine.levels]
    whole_bytes = prod(shape) * item_bytes
    change = goal.name if goal.name != _UNNAMED else f"change from {before} to {after}"
    title = f"{change} of {format_bytes(whole_bytes)} over {over} on {_told(machine)}"
    ranked = sorted(found, key=lambda placed: placed.reduction.best.seconds)
    shown = ranked[: limit or None]
    if picture is not None:
        write_file(reductions_svg(shown, levels, title=title), picture)
        messages.print(f"bars written to {picture}", markup=False)
    document = {
        "cluster": machine.name,
        "levels": {level.name: level.count for level in machine.levels},
        "axes": sizes,
        "over": list(goal.before),
        "goal": {"name": goal.name.replace("-", "_").replace(" ", "_"), "from": before, "to": after},
        "bytes": whole_bytes,
        "bytes_given": given_bytes,
        "dtype": dtype,
        "shape": list(shape),
        "placements": [placed_document(machine, placed) for placed in found],
    }
    tables: list[RenderableType] = [reductions_table(shown, title=title), reductions_bars(shown, levels)]
    tables += [choices_table(placed, levels) for placed in shown if top > 1]
    show(document, *tables, as_json=as_json)
    if not as_json:
        screen.print(_summary(ranked, len(shown), given_bytes, whole_bytes), markup=False)


# --- what is asked


def parse_over(text: str, axes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of --over, each once."""
    names = tuple(name.strip() for name in text.split(","))
    for i, name in enumerate(names):
        if name not in axes or name in names[:i]:
            raise LayoutError(
                f"--over: axis {name!r} is named twice" if name in names[:i] else f"no axis {name!r} (--over)",
                given=text,
                required=f"some of {', '.join(axes)}, each once",
                todo=f"for example --over {next(iter(axes))}",
            )
    if all(axes[name] == 1 for name in names):
        raise LayoutError(
            "there is nothing to do over axes of size 1",
            given=", ".join(f"{name}={axes[name]}" for name in names),
            required="an axis of size 2 or more",
        )
    return names


def parse_goal(over: Sequence[str], before: str, after: str) -> Goal:
    """The places of --from and --to for every axis of --over."""
    goal = Goal(before=_parse_places(over, before, "--from"), after=_parse_places(over, after, "--to"))
    if goal.before == goal.after:
        raise LayoutError(
            "nothing is to be done",
            given=f"--from {before} --to {after}",
            required="a place after that differs from the place before",
        )
    for axis in over:
        pair = (goal.before[axis], goal.after[axis])
        if pair in (("whole", "master"), ("master", "master")):
            raise LayoutError(
                f"along {axis!r} an array cannot stay on the first device, or be left there alone",
                given=f"--from {pair[0]} --to {pair[1]} for {axis}",
                required="from partial or shard:N to master, or from master to whole or shard:N",
                todo="for reductions among the first devices only, leave the axis out of --over",
            )
    return goal


def _parse_places(over: Sequence[str], text: str, option: str) -> dict[str, str | int]:
    if "=" not in text:
        return dict.fromkeys(over, _parse_place(text.strip(), text, option))
    places: dict[str, str | int] = {}
    for part in text.split(","):
        axis, _, place = (word.strip() for word in part.partition("="))
        if axis not in over or axis in places:
            raise LayoutError(
                f"{option}: {axis!r} is named twice" if axis in places else f"{option}: {axis!r} is not in --over",
                given=text,
                required=f"a place for each of {', '.join(over)}",
            )
        places[axis] = _parse_place(place, text, option)
    if len(places) < len(over):
        missing = ", ".join(axis for axis in over if axis not in places)
        raise LayoutError(
            f"{option}: no place for {missing}",
            given=text,
            required=f"a place for each of {', '.join(over)}",
            todo="name it, or leave the axis out of --over",
        )
    return {axis: places[axis] for axis in over}


def _parse_place(word: str, text: str, option: str) -> str | int:
    kind, colon, number = word.partition(":")
    if kind == "shard" and colon and number.isascii() and number.isdigit() and int(number) < MAX_DIMS:
        return int(number)
    if word in ("partial", "whole", "master"):
        return word
    raise LayoutError(
        f"{option}: {word!r} is no place of an array",
        given=text,
        required=f"{_PLACES}; or one for each axis of --over",
        todo=f"for example {option} shard:0, or {option} data=partial,model=shard:0",
    )


def _kind(place: str | int) -> str:
    return "shard" if isinstance(place, int) else place


def dtype_bytes(dtype: str) -> int:
    """Bytes of one item."""
    known = {name: int("".join(c for c in name.split("_")[0] if c.isdigit())) // 8 for name in DTYPES}
    known |= {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1}
    if dtype not in known:
        raise LayoutError(f"unknown dtype {dtype!r} (--dtype)", given=dtype, required=f"one of {', '.join(known)}")
    return known[dtype]


def find_placements(cluster: Cluster, axes: Mapping[str, int], wanted: str | None) -> dict[int, Placement]:
    """All placements by number, or the one that is wanted."""
    counts = tuple(level.count for level in cluster.levels)
    placements = dict(enumerate(enumerate_placements(counts, axes), start=1))
    if wanted is None:
        return placements
    matrix = _parse_matrix(wanted)
    chosen = {number: placement for number, placement in placements.items() if placement.matrix == matrix}
    if not chosen:
        levels = ", ".join(f"{level.name}={level.count}" for level in cluster.levels)
        raise LayoutError(
            "--placement: no placement of these axes on these levels",
            given=wanted,
            required=f"rows that multiply to {_written(axes)}, columns that multiply to {levels}",
            todo=f"take one of `planloom placements`, for example {json.dumps(placements[1].matrix)}",
        )
    return chosen


def _parse_matrix(text: str) -> tuple[tuple[int, ...], ...]:
    try:
        rows = json.loads(text)
    except ValueError:
        rows = None
    if isinstance(rows, list) and all(isinstance(row, list) for row in rows):
        matrix = tuple(tuple(row) for row in rows)
        if all(type(entry) is int for row in matrix for entry in row):
            return matrix
    raise LayoutError(
        "--placement: not a matrix of whole numbers",
        given=text,
        required="JSON: a list of rows, one an axis, each a list of numbers, one a level",
        todo="for example --placement '[[4,1],[1,16]]'",
    )


# --- what is found


def _place(
    cluster: Cluster,
    goal: Goal,
    shape: tuple[int, ...],
    item_bytes: int,
    number: int,
    placement: Placement,
    *,
    num_best: int,
    chunked: bool,
) -> PlacedReduction:
    mesh = mesh_of(placement)
    source, target = goal.layouts(mesh)
    if not is_refinable(source, target):
        raise LayoutError(
            "no single program connects the two layouts",
            given=f"from {source} to {target}",
            required="splits of a dim that begin alike before and after",
            todo="name the axis that splits this dim before and after first in --over, or ask for two changes in turn",
        )
    reduction = find_reductions(
        cluster, mesh, source, target, shape, item_bytes=item_bytes, num_best=num_best, chunked=chunked
    )
    verified = None
    if cluster.num_devices <= MAX_VERIFIED_DEVICES:
        for program in {id(p): p for choice in reduction.choices for p in choice.programs}.values():
            check_program(program.program(mesh), mesh=mesh, source=source, target=target)
        verified = True
    return PlacedReduction(number=number, placement=placement, mesh=mesh, reduction=reduction, verified=verified)


def placed_document(cluster: Cluster, placed: PlacedReduction) -> dict[str, Any]:
    """One placement for machines."""
    reduction = placed.reduction
    return {
        "matrix": [list(row) for row in placed.placement.matrix],
        "number": placed.number,
        "default_seconds": reduction.default.seconds,
        "default": choice_document(cluster, placed.mesh, reduction.default),
        "best": choice_document(cluster, placed.mesh, reduction.best),
        "speedup": reduction.speedup,
        "lower_bound_seconds": reduction.lower_bound_seconds,
        "best_over_lower_bound": placed.times_bound,
        "verified": placed.verified,
        "top": [choice_document(cluster, placed.mesh, choice) for choice in fastest_first(reduction)],
    }


def choice_document(cluster: Cluster, mesh: Mesh, choice: Choice) -> dict[str, Any]:
    """A choice for machines. Steps of two programs that take turns follow each other; each has its half of the bytes.

    `num_bytes` is what a device holds before the step, `seconds` the step's over all its chunks, one after another:
    with several chunks steps overlap, and the choice takes less than their sum.
    """
    levels = [level.name for level in cluster.levels]
    return {
        "words": choice_words(choice, levels),
        "seconds": choice.seconds,
        "num_chunks": choice.num_chunks,
        "num_programs": len(choice.programs),
        "steps": [
            _step_document(cluster, mesh, choice, move) | {"program": number}
            for number, program in enumerate(choice.programs)
            for move in program.moves
        ],
    }


def _step_document(cluster: Cluster, mesh: Mesh, choice: Choice, move: Move) -> dict[str, Any]:
    digits, num_lanes = tuple(moved.digit for moved in move.digits), choice.num_chunks // len(choice.programs)
    price = seconds_price(cluster)(mesh, move.kind, digits, move.masters)
    return {
        "kind": move.kind,
        "over": [_digit_document(cluster, digit) for digit in digits],
        "masters": [_digit_document(cluster, digit) for digit in move.masters],
        "num_bytes": round(move.num_bytes / len(choice.programs)),
        "seconds": num_lanes * price(move.num_bytes / choice.num_chunks),
    }


def _digit_document(cluster: Cluster, digit: Digit) -> dict[str, Any]:
    return {"axis": digit.axis, "level": cluster.levels[digit.index].name, "size": digit.size}


def _summary(ranked: Sequence[PlacedReduction], num_shown: int, given_bytes: int, whole_bytes: int) -> str:
    """Below the bars: how many, how far apart, whether checked, what was rounded."""
    lines = [f"{len(ranked):,} placement" + ("s, fastest first" if len(ranked) > 1 else "")]
    if num_shown < len(ranked):
        lines[0] += f"; the first {num_shown} are shown, --limit 0 shows all"
    if len(ranked) > 1:
        spread = ranked[-1].reduction.best.seconds / ranked[0].reduction.best.seconds
        if spread > 1.005:
            lines.append(
                f"the slowest placement takes {spread:.3g}× as long as the fastest, each with its best program"
            )
    if ranked[0].verified:
        lines.append("verified: every program shown leaves on every device what it must")
    else:
        lines.append(f"not verified: more than {MAX_VERIFIED_DEVICES} devices")
    if whole_bytes != given_bytes:
        lines.append(f"{given_bytes:,} bytes were rounded up to {whole_bytes:,}, which every split cuts evenly")
    return "\n".join(lines)


def _told(cluster: Cluster) -> str:
    return f"{cluster.name}: " + " × ".join(f"{level.count} {level.name}" for level in cluster.levels)


def _written(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())

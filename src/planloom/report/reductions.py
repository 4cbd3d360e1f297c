"""Reductions on placements: programs in words, tables and bars for a terminal, one SVG file."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape as escape_xml

from rich.bar import Bar
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planloom.cluster import format_seconds
from planloom.collective import Choice, Move, Reduction
from planloom.layout import Digit, Mesh, Placement

_BAR_WIDTH = 56
_DEFAULT_COLOR, _BEST_COLOR, _BOUND_COLOR = "#bab0ac", "#4c78a8", "#e45756"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedReduction:
    """What was found for one placement; `number` is its place among all placements, from 1."""

    number: int
    placement: Placement
    mesh: Mesh
    reduction: Reduction
    verified: bool | None
    """Whether the best program was checked device by device; None: it was not."""

    @property
    def times_bound(self) -> float | None:
        """The best time over the lower bound: how far from optimal it can be; None where nothing needs to be sent."""
        return times_bound(self.reduction.best, self.reduction)


def times_bound(choice: Choice, reduction: Reduction) -> float | None:
    return choice.seconds / reduction.lower_bound_seconds if reduction.lower_bound_seconds > 0 else None


# --- words


def choice_words(choice: Choice, levels: Sequence[str]) -> str:
    """`reduce-scatter gpu×16 → all-reduce node×4 → all-gather gpu×16, 8 chunks`."""
    moves = [move for program in choice.programs for move in program.moves]
    at_level: dict[int, set[Digit]] = {}
    for move in moves:
        for moved in move.digits:
            at_level.setdefault(moved.digit.index, set()).add(moved.digit)

    def words(move: Move) -> str:
        digits = [moved.digit for moved in move.digits]
        # Where only some of a level's digits take part, the axes tell which.
        over = "·".join(
            ("" if at_level[digit.index] <= set(digits) else f"{digit.axis}:") + f"{levels[digit.index]}×{digit.size}"
            for digit in digits
        )
        masters = "·".join(dict.fromkeys(levels[digit.index] for digit in move.masters))
        return f"{move.kind.replace('_', '-')} {over}" + (f" (first {masters})" if masters else "")

    programs = (" → ".join(map(words, program.moves)) for program in choice.programs)
    chunks = f", {choice.num_chunks} chunks" if choice.num_chunks > 1 else ""
    return " | ".join(programs) + chunks


# --- a terminal


def reductions_table(found: Sequence[PlacedReduction], *, title: str) -> Table:
    """One row a placement; the fastest is marked."""
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("#", "placement", "default", "best", "speed-up", "bound", "best/bound"):
        table.add_column(name, justify="left" if name == "placement" else "right", no_wrap=name != "placement")
    fastest = min(placed.reduction.best.seconds for placed in found)
    for placed in found:
        reduction = placed.reduction
        table.add_row(
            str(placed.number),
            escape(str(placed.placement)),
            format_seconds(reduction.default.seconds),
            format_seconds(reduction.best.seconds),
            f"{reduction.speedup:.2f}×",
            format_seconds(reduction.lower_bound_seconds),
            _times(placed.times_bound),
            style="bold green" if reduction.best.seconds == fastest else "",
        )
    return table


def reductions_bars(found: Sequence[PlacedReduction], levels: Sequence[str]) -> RenderableType:
    """For every placement its best program in words, and bars of the default and of the best on one scale."""
    longest = max(placed.reduction.default.seconds for placed in found)
    parts: list[RenderableType] = []
    for placed in found:
        reduction = placed.reduction
        heading = Text(f"{placed.number}: {placed.placement}", style="bold")
        bars = Table.grid(padding=(0, 1))
        for name, choice, color in (("default", reduction.default, "white"), ("best", reduction.best, "cyan")):
            bar = Bar(1.0, 0, round(choice.seconds / longest, 6), width=_BAR_WIDTH, color=color)
            bars.add_row(Text(name, style="dim"), bar, format_seconds(choice.seconds))
        words = Text(choice_words(reduction.best, levels), style="cyan")
        parts += [heading, Padding(Group(words, bars), (0, 0, 1, 2))]
    return Group(*parts)


def choices_table(placed: PlacedReduction, levels: Sequence[str]) -> Table:
    """The best choices for one placement, fastest first; the one that is recommended is marked."""
    title = f"{placed.number}: {escape(str(placed.placement))}, the fastest choices"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "time", "speed-up", "time/bound"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("program", overflow="fold")
    reduction = placed.reduction
    for choice in fastest_first(reduction):
        is_best = choice is reduction.best
        table.add_row(
            "✓" if is_best else "",
            format_seconds(choice.seconds),
            f"{reduction.default.seconds / choice.seconds:.2f}×",
            _times(times_bound(choice, reduction)),
            escape(choice_words(choice, levels)),
            style="bold green" if is_best else "",
        )
    return table


def fastest_first(reduction: Reduction) -> tuple[Choice, ...]:
    """The choices by time. The recommended one can come later: it is simpler than one that is hardly faster."""
    return tuple(sorted(reduction.choices, key=lambda choice: choice.seconds))


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


# --- an SVG file

_WIDTH, _LEFT, _RIGHT, _TOP, _BAR, _BLOCK = 960, 20, 100, 64, 14, 84
_MAX_WORDS = 150  # characters of 11 pixels on one line; the hint of a bar has them all


def reductions_svg(found: Sequence[PlacedReduction], levels: Sequence[str], *, title: str) -> str:
    """A bar chart: default and best of every placement on one scale, a line at the lower bound."""
    longest = max(placed.reduction.default.seconds for placed in found)
    scale = (_WIDTH - _LEFT - _RIGHT) / max(longest, 1e-12)
    height = _TOP + len(found) * _BLOCK + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 24, 15, title),
    ]
    legend = (("default", _DEFAULT_COLOR), ("best", _BEST_COLOR), ("lower bound", _BOUND_COLOR))
    for i, (name, color) in enumerate(legend):
        parts.append(f'<rect x="{_LEFT + i * 100}" y="36" width="12" height="12" fill="{color}"/>')
        parts.append(_text(_LEFT + i * 100 + 18, 46, 12, name))
    for i, placed in enumerate(found):
        parts += _block(placed, levels, _TOP + i * _BLOCK, scale)
    return "\n".join([*parts, "</svg>", ""])


def _block(placed: PlacedReduction, levels: Sequence[str], top: int, scale: float) -> list[str]:
    reduction = placed.reduction
    words = choice_words(reduction.best, levels)
    shown = words if len(words) <= _MAX_WORDS else words[: _MAX_WORDS - 1] + "…"
    parts = [
        _text(_LEFT, top + 16, 13, f"{placed.number}: {placed.placement}", weight="bold"),
        _text(_LEFT, top + 32, 11, shown),
    ]
    y = top + 38
    for name, choice, color in (
        ("default", reduction.default, _DEFAULT_COLOR),
        ("best", reduction.best, _BEST_COLOR),
    ):
        width, seconds = max(0.4, choice.seconds * scale), format_seconds(choice.seconds)
        hint = escape_xml(f"{name}, {seconds}: {choice_words(choice, levels)}")
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{color}"><title>{hint}</title></rect>'
        )
        speedup = f" ({reduction.speedup:.2f}×)" if choice is reduction.best else ""
        parts.append(_text(_LEFT + width + 6, y + 11, 11, seconds + speedup))
        y += _BAR + 2
    if reduction.lower_bound_seconds > 0:
        x = _LEFT + reduction.lower_bound_seconds * scale
        parts.append(
            f'<line x1="{x:.2f}" y1="{top + 36}" x2="{x:.2f}" y2="{y}" stroke="{_BOUND_COLOR}" stroke-width="2">'
            f"<title>lower bound: {format_seconds(reduction.lower_bound_seconds)}</title></line>"
        )
    return parts


def _text(x: float, y: float, size: int, text: str, *, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" font-weight="{weight}">{escape_xml(text)}</text>'

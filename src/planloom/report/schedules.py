"""Schedules as pictures: a row a device group, time from left to right, on a terminal or as SVG."""

from html import escape
from typing import Any

from rich.text import Text

from planloom.plan.orders import Orders
from planloom.plan.timing import TimedCall, TimedOrders

_STYLES = {
    "forward": "white on blue",
    "backward": "black on dark_orange",
    "input-gradient": "black on cyan",
    "weight-gradient": "black on green",
}
_COLORS = {
    "forward": "#4c78a8",
    "backward": "#f58518",
    "input-gradient": "#72b7b2",
    "weight-gradient": "#54a24b",
}
_LETTERS = {"forward": "F", "backward": "B", "input-gradient": "I", "weight-gradient": "W"}
_SECOND = 18
_ROW = 26
_LEFT = 80


def schedule_rows(timed: TimedOrders, *, width: int) -> list[Text]:
    """One line a group: a call is as wide as it takes time, and says its micro-batch where that fits.

    A later stage of the same group is underlined.
    """
    digits = max((len(str(t.call.micro)) for calls in timed.groups for t in calls), default=1)
    seconds = float(timed.seconds) or 1.0
    scale = min(float(digits + 1), max(1.0, (width - 10) / seconds))
    rows = []
    for group, calls in enumerate(timed.groups):
        row, at = Text(f"group {group:<3} "), 0
        first = min((t.call.stage for t in calls), default=0)
        for t in calls:
            start, stop = round(float(t.start) * scale), round(float(t.stop) * scale)
            row.append("·" * (start - at), style="dim")
            name = f"{_LETTERS[t.call.phase]}{t.call.micro}" if scale > digits else str(t.call.micro)
            style = _STYLES[t.call.phase] + (" underline" if t.call.stage != first else "")
            row.append(name[: max(1, stop - start)].ljust(stop - start), style=style)
            at = stop
        row.append("·" * (round(seconds * scale) - at), style="dim")
        rows.append(row)
    return rows


def schedule_document(orders: Orders, timed: TimedOrders) -> dict[str, Any]:
    """A schedule for machines."""
    return {
        "seconds": float(timed.seconds),
        "bubble": float(timed.bubble),
        "held": list(timed.held),
        "groups": [
            [
                {
                    "stage": t.call.stage,
                    "phase": t.call.phase,
                    "micro": t.call.micro,
                    "start": float(t.start),
                    "stop": float(t.stop),
                }
                for t in calls
            ]
            for calls in timed.groups
        ],
        "num_calls": sum(map(len, orders)),
    }


def schedule_svg(title: str, timed: TimedOrders) -> str:
    """The same as one SVG file."""
    width = _LEFT + round(float(timed.seconds) * _SECOND) + 20
    height = 50 + _ROW * len(timed.groups)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="8" y="22" font-size="15">{escape(title)}</text>',
    ]
    for group, calls in enumerate(timed.groups):
        y = 36 + group * _ROW
        parts.append(f'<text x="8" y="{y + 16}" font-size="12">group {group}</text>')
        first = min((t.call.stage for t in calls), default=0)
        parts += [_bar(t, y, is_first=t.call.stage == first) for t in calls]
    return "\n".join([*parts, "</svg>", ""])


def _bar(t: TimedCall, y: int, *, is_first: bool) -> str:
    x, width = _LEFT + float(t.start) * _SECOND, float(t.stop - t.start) * _SECOND
    hint = f"{t.call.phase} of stage {t.call.stage}, micro-batch {t.call.micro}"
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 4}" fill="{_COLORS[t.call.phase]}" '
        f'fill-opacity="{1 if is_first else 0.6}" stroke="white"><title>{hint}</title></rect>'
        f'<text x="{x + width / 2:.1f}" y="{y + 15}" font-size="10" text-anchor="middle">{t.call.micro}</text>'
    )

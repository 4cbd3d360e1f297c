"""Pictures: a timeline as one SVG file that any browser shows."""

from collections.abc import Mapping
from html import escape

from planloom.cluster import format_seconds
from planloom.simulate import Event, Timeline

_WIDTH, _ROW, _LEFT, _TOP = 960, 22, 90, 40
_COLORS = {
    "Forward": "#4c78a8",
    "Recompute": "#9ecae9",
    "Backward": "#f58518",
    "Update": "#54a24b",
    "communication": "#b279a2",
    "waiting": "#e3e3e3",
    "": "#bab0ac",
}


def timeline_svg(timelines: Mapping[str, Timeline]) -> str:
    """One chart a timeline, by title, below each other on one scale: rows of compute and communication a device."""
    longest = max(timeline.step_seconds for timeline in timelines.values())
    charts, top = [], 0
    for title, timeline in timelines.items():
        charts += _chart(timeline, title, longest, top)
        top += _TOP + 2 * len(timeline.devices) * _ROW + 50
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{top}" font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *charts, "</svg>", ""])


def _chart(timeline: Timeline, title: str, longest: float, top: int) -> list[str]:
    rows = [(device, stream) for device in timeline.devices for stream in ("compute", "communication")]
    scale = (_WIDTH - _LEFT - 20) / max(longest, 1e-12)
    parts = [f'<text x="{_LEFT}" y="{top + 24}" font-size="15">{escape(title)}</text>']
    for i, (device, stream) in enumerate(rows):
        y = top + _TOP + i * _ROW
        if stream == "compute":
            parts.append(f'<text x="8" y="{y + 27}" font-size="12">device {device}</text>')
        for event in sorted(timeline.events, key=lambda event: event.stream != "waiting"):
            row = "communication" if event.stream == "waiting" else event.stream
            if (event.device, row) == (device, stream):
                parts.append(_bar(event, y, scale))
    y = top + _TOP + len(rows) * _ROW + 8
    parts.append(f'<line x1="{_LEFT}" y1="{y}" x2="{_WIDTH - 20}" y2="{y}" stroke="#888"/>')
    for i in range(6):
        x, seconds = _LEFT + i * (_WIDTH - _LEFT - 20) / 5, longest * i / 5
        parts.append(
            f'<text x="{x:.0f}" y="{y + 16}" font-size="11" text-anchor="middle">{format_seconds(seconds)}</text>'
        )
    for i, (name, color) in enumerate((n, c) for n, c in _COLORS.items() if n):
        x = _LEFT + i * 140
        parts.append(f'<rect x="{x}" y="{y + 24}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 34}" font-size="12">{name.lower()}</text>')
    return parts


def _bar(event: Event, y: float, scale: float) -> str:
    key = event.name.split()[0] if event.stream == "compute" else event.stream
    color = _COLORS.get(key, _COLORS[""])
    x, width = _LEFT + event.start_seconds * scale, max(0.4, (event.stop_seconds - event.start_seconds) * scale)
    micro = f", micro-batch {event.micro}" if event.micro >= 0 else ""
    hint = escape(f"{event.name}{micro}: {format_seconds(event.stop_seconds - event.start_seconds)}")
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 4}" fill="{color}" stroke="white" '
        f'stroke-width="0.3"><title>{hint}</title></rect>'
    )

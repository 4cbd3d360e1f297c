"""A timeline as a trace that chrome://tracing and ui.perfetto.dev show: a process for each device, a row a stream."""

import json

from planloom.simulate import Stream, Timeline

_ROWS: dict[Stream, int] = {"compute": 0, "communication": 1, "waiting": 2}


def chrome_trace(timeline: Timeline) -> str:
    """JSON in the Trace Event Format; times are in microseconds there."""
    events: list[dict[str, object]] = []
    for device in timeline.devices:
        events.append(_named("process_name", f"device {device}", device))
        events += [_named("thread_name", stream, device, row) for stream, row in _ROWS.items()]
    for event in timeline.events:
        shown: dict[str, object] = {"micro-batch": event.micro} if event.micro >= 0 else {}
        events.append(
            {
                "name": event.name,
                "cat": event.stream,
                "ph": "X",
                "pid": event.device,
                "tid": _ROWS[event.stream],
                "ts": event.start_seconds * 1e6,
                "dur": (event.stop_seconds - event.start_seconds) * 1e6,
                "args": shown | ({"axis": event.axis} if event.axis else {}),
            }
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _named(what: str, name: str, device: int, row: int = 0) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": device, "tid": row, "args": {"name": name}}

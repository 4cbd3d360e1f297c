"""`planloom schedule`: the picture of a schedule, and what it comes to."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import RenderableType

from planloom.cli.output import JsonOption, screen, show, write_file
from planloom.errors import PlanError
from planloom.plan.order_checks import require_orders
from planloom.plan.schedule_search import search_order
from planloom.plan.schedules import (
    ORDERS,
    RECYCLED_ORDERS,
    SHARED_ORDERS,
    num_passes,
    orders_of,
    schedule_name,
    stages_per_group,
)
from planloom.plan.timing import StageTimes, TimedOrders, time_orders
from planloom.report.schedules import schedule_document, schedule_rows, schedule_svg

_SEARCH = "search"


def register(app: typer.Typer) -> None:
    example = "Example: planloom schedule 1f1b --stages 4 --micro 8; planloom schedule search --stages 3 --micro 4"
    app.command(name="schedule", epilog=example)(schedule_command)


def schedule_command(
    name: Annotated[
        str,
        typer.Argument(
            help=f"One of {', '.join((*ORDERS, *SHARED_ORDERS, *RECYCLED_ORDERS))}, "
            "or search: the best order, small cases."
        ),
    ],
    stages: Annotated[
        int, typer.Option("--stages", help="The number of stages; of one pass, where a model goes through several.")
    ] = 4,
    micro: Annotated[int, typer.Option("--micro", help="The number of micro-batches.")] = 8,
    per_group: Annotated[
        int, typer.Option("--per-group", help="Stages a device group; 0: as the schedule has it.")
    ] = 0,
    times: Annotated[str, typer.Option("--times", help="Forward, input- and weight-gradient, in any unit.")] = "1,1,1",
    exchange: Annotated[float, typer.Option("--exchange", min=0, help="The way to another group.")] = 0.0,
    max_held: Annotated[int, typer.Option("--max-held", help="Refuse more activations a group; 0: any number.")] = 0,
    picture: Annotated[Path | None, typer.Option("--picture", help="Write an SVG file, too.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show when every device group calls what, the bubble and the activations that are held.

    F forward, B backward, I input-gradient, W weight-gradient, each with its micro-batch; · is a bubble.
    """
    of_stage = _times(times, exchange)
    all_times, note, passes = [of_stage] * max(1, stages), "", 1
    if name == _SEARCH:
        orders, note = search_order(all_times, micro, max_held=max_held or None)
    else:
        name = schedule_name(name)
        passes = num_passes(name, per_group)
        stages, all_times = stages * passes, all_times * passes
        orders = orders_of(name, stages, micro, per_group=stages_per_group(name, per_group))
    detached = frozenset(range(stages - stages // passes))
    require_orders(orders, stages, micro, max_held=max_held or None, detached=detached)
    timed = time_orders(orders, all_times)
    title = f"{name}: {stages} stages, {micro} micro-batches"
    if picture is not None:
        write_file(schedule_svg(title, timed), picture)
    document = {"schedule": name, "stages": stages, "micro_batches": micro, **schedule_document(orders, timed)}
    lines: list[RenderableType] = [] if as_json else [title, *schedule_rows(timed, width=screen.width), _summary(timed)]
    show({**document, **({"note": note} if note else {})}, *lines, *([note] if note else []), as_json=as_json)


def _summary(timed: TimedOrders) -> str:
    held = ", ".join(map(str, timed.held))
    return f"takes {float(timed.seconds):g}, bubble {float(timed.bubble):.1%}, activations held by group: {held}"


def _times(text: str, exchange: float) -> StageTimes:
    try:
        forward, first, second = (float(word) for word in text.split(","))
    except ValueError:
        forward = -1.0
    if forward < 0 or min(first, second) < 0:
        raise PlanError(
            "--times: three numbers are needed",
            given=text,
            required="seconds of forward, input-gradient and weight-gradient, none negative",
            todo="for example --times 1,1,1",
        )
    values = [int(v) if v.is_integer() else v for v in (forward, first, second, exchange)]
    return StageTimes(forward=values[0], input_gradient=values[1], weight_gradient=values[2], exchange=values[3])

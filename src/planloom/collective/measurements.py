"""Measured collectives, and the tables that they are read from.

    collective,groups,bytes,seconds
    all_reduce,0-1-2-3;4-5-6-7,1048576,0.00021

A row is one collective on all its groups at once: devices joined by `-`, groups by `;`. `bytes` are those in each
device's array before it: of an all-gather the piece, of all others the whole array. Other columns are not read.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from planloom.cluster import Cluster
from planloom.collective.steps import LOCAL_KINDS, StepKind
from planloom.errors import ClusterError

COLUMNS = ("collective", "groups", "bytes", "seconds")
KINDS = tuple(kind for kind in get_args(StepKind) if kind not in LOCAL_KINDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Seconds of one collective on all its groups at once; `num_bytes` in each device's array before it."""

    kind: StepKind
    groups: tuple[tuple[int, ...], ...]
    num_bytes: float
    seconds: float


def read_measurements(path: Path, cluster: Cluster) -> list[Measurement]:
    """The rows of a table, each checked against the cluster."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
            if missing:
                raise ClusterError(
                    f"{path} has no column {', '.join(missing)}",
                    given=", ".join(reader.fieldnames or ()) or "nothing",
                    required=f"a CSV table with the columns {', '.join(COLUMNS)}",
                )
            return [_read_row(row, f"{path}, line {number}", cluster) for number, row in enumerate(reader, start=2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ClusterError(f"{path} cannot be read", given=str(error), required="a CSV table in UTF-8") from None


def _read_row(row: Mapping[str, str | None], where: str, cluster: Cluster) -> Measurement:
    kind = row["collective"]
    if kind not in KINDS:
        raise ClusterError(f"{where}: unknown collective", given=repr(kind), required=f"one of {', '.join(KINDS)}")
    return Measurement(
        kind=cast(StepKind, kind),
        groups=_read_groups(row["groups"] or "", where, cluster),
        num_bytes=_read_number(row["bytes"], f"{where}: bytes"),
        seconds=_read_number(row["seconds"], f"{where}: seconds"),
    )


def _read_groups(text: str, where: str, cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    required = f"groups of equal size, as 0-1;2-3, of different devices from 0 to {cluster.num_devices - 1}"
    try:
        groups = tuple(tuple(int(device) for device in group.split("-")) for group in text.split(";"))
    except ValueError:
        raise ClusterError(f"{where}: these are no groups", given=repr(text), required=required) from None
    devices = [device for group in groups for device in group]
    fits = all(0 <= device < cluster.num_devices for device in devices)
    if not fits or len(set(devices)) < len(devices) or len({len(group) for group in groups}) > 1:
        raise ClusterError(
            f"{where}: groups that {cluster.name} cannot have",
            given=repr(text),
            required=required,
            todo="name the cluster that was measured, with --nodes as many as were used",
        )
    return groups


def _read_number(text: str | None, where: str) -> float:
    try:
        number = float(text or "")
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise ClusterError(f"{where} is not a positive number", given=repr(text), required="a number above zero")
    return number

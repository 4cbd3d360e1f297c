"""Plan files: JSON, written whole or not at all."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from planloom.errors import LayoutError, PlanError
from planloom.plan.values import PLAN_VERSION, Plan


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write beside the target and rename, so that a full disk leaves no half-written plan."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(plan), indent=1))
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise PlanError(
            f"the plan cannot be written to {path}",
            given=str(error),
            required="a writable folder with space left",
            todo="free space or choose another path; nothing was changed",
        ) from error


def load_plan(path: str | Path) -> Plan:
    """Read a plan file; anything that is not one is refused with the place of the fault."""
    try:
        raw = Path(path).read_bytes()
        if (version := msgspec.json.decode(raw, type=_Versioned).version) is not None:
            _require_version(path, version)
        return msgspec.json.decode(raw, type=Plan)
    except OSError as error:
        raise PlanError(f"the plan file {path} cannot be read", given=str(error), required="a readable file") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, LayoutError) as error:
        raise PlanError(
            f"{path} is not a plan file",
            given=str(error),
            required="JSON written by `planloom plan --out`",
            todo="write the plan again",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _Versioned:
    """What plan files of all versions have."""

    version: int | None = None


def _require_version(path: str | Path, version: int) -> None:
    if version != PLAN_VERSION:
        raise PlanError(
            f"{path} was written by another version of Planloom",
            given=f"plan format {version}",
            required=f"plan format {PLAN_VERSION}",
            todo="plan again with this version",
        )

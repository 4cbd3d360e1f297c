"""Profiles as one JSON file: what was measured on a GPU serves planning on a laptop.

    {"format": "planloom-profile", "version": 2, "digest": "…", "profiles": [
       {"device": "…", "software": "…", "figures": {"run/…/forward": [0.0012, 0.00001]}, "skipped": {}}]}

The digest is that of the profiles, so a file that was cut or changed is refused and not half read. A file appears whole
or not at all: it is written beside its place and renamed.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from planloom.errors import PriceError

FORMAT, VERSION = "planloom-profile", 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileName:
    """Whose figures they are."""

    device: str
    software: str
    num_figures: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Everything that was measured on one device with one set of software versions."""

    device: str
    software: str
    figures: dict[str, tuple[float, float]]
    skipped: dict[str, str]

    @property
    def name(self) -> ProfileName:
        return ProfileName(device=self.device, software=self.software, num_figures=len(self.figures))

    @property
    def is_compiled(self) -> bool:
        """Were compiled runs measured?"""
        return self.software.endswith("compiled")


class _Header(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    version: int


class _Document(_Header, frozen=True, kw_only=True):
    digest: str
    profiles: list[Profile]


def write_profiles(profiles: Sequence[Profile], path: Path) -> None:
    """Write all profiles to one file."""
    document = _Document(format=FORMAT, version=VERSION, digest=_digest(profiles), profiles=list(profiles))
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise PriceError(
            f"the profile {str(path)!r} cannot be written",
            given=str(error),
            required="the path of a file in a folder that exists, with space left",
        ) from error


def read_profiles(path: Path) -> list[Profile]:
    """The profiles of a file that `write_profiles` wrote; anything else is refused."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PriceError(f"the profile {str(path)!r} cannot be read", given=str(error), required="a file") from error
    try:
        header = msgspec.json.decode(content, type=_Header)
        if (header.format, header.version) != (FORMAT, VERSION):
            raise PriceError(
                f"the profile {str(path)!r} is of another version",
                given=f"{header.format} {header.version}",
                required=f"{FORMAT} {VERSION}",
                todo="export it again with this Planloom",
            )
        document = msgspec.json.decode(content, type=_Document)
        if document.digest != _digest(document.profiles):
            raise ValueError("its digest is another")
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise PriceError(
            f"the profile {str(path)!r} is damaged",
            given=str(error),
            required="a whole file, as `planloom profile --export` wrote it",
            todo="copy it again, or export it again",
        ) from error
    return document.profiles


def _digest(profiles: Sequence[Profile]) -> str:
    return hashlib.sha256(msgspec.json.encode(list(profiles))).hexdigest()

"""Figures with human units: text to number, number to text.

A quantity is a decimal number and a unit, as `25 GB/s`; the space may be left out. Units are read to the letter,
because the careless reading is the expensive one: GB is 10^9 bytes, GiB is 2^30, Gbit is an eighth of GB, and `gb` or
`Gbps` is an error. The arithmetic is decimal, so that `3.4 us` is the float nearest to 3.4e-6 and not the product of
two rounded ones.

There are two ways back. `write_*` gives the text that reads as exactly the same number, for files. `format_*` gives
three digits, for tables.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Context, Decimal

from planloom.errors import ClusterError

# Wide enough that every product below is exact for a float's 17 digits; no traps: too large is inf, too small is 0.
_EXACT = Context(prec=100, traps=[])
_QUANTITY = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)\s*", re.ASCII)

_DECIMAL_PREFIXES = (("", 0), ("k", 3), ("M", 6), ("G", 9), ("T", 12), ("P", 15))
_BINARY_PREFIXES = (("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40))


def _decimal(unit: str, scale: str = "1") -> dict[str, Decimal]:
    return {prefix + unit: Decimal(scale) * 10**power for prefix, power in _DECIMAL_PREFIXES}


def _binary(unit: str) -> dict[str, Decimal]:
    return {prefix + unit: Decimal(2**power) for prefix, power in _BINARY_PREFIXES}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One kind of quantity: its name in errors, an example, and its units in the order in which they are written."""

    name: str
    example: str
    units: Mapping[str, Decimal]


_BANDWIDTH = _Kind(
    name="a bandwidth",
    example="25 GB/s",
    units=_decimal("B/s") | _binary("B/s") | _decimal("bit/s", "0.125"),
)
_SECONDS = _Kind(
    name="a time",
    example="3.4 us",
    units={"s": Decimal(1), "ms": Decimal("1e-3"), "us": Decimal("1e-6"), "ns": Decimal("1e-9")},
)
_BYTES = _Kind(name="a memory size", example="80 GiB", units=_decimal("B") | _binary("B"))
_RATE = _Kind(name="a rate", example="312 TFLOP/s", units=_decimal("FLOP/s"))


def parse_bandwidth(value: object, *, key: str) -> float:
    """Bytes per second of `25 GB/s`, `200 Gbit/s`, `100 MiB/s`; `key` is what errors call it."""
    return float(_parse(value, key, _BANDWIDTH))


def parse_seconds(value: object, *, key: str) -> float:
    """Seconds of `3.4 us`, `2 ms`."""
    return float(_parse(value, key, _SECONDS))


def parse_bytes(value: object, *, key: str) -> int:
    """Bytes of `80 GiB`, `16 GB`, to the nearest whole one."""
    quantity = _parse(value, key, _BYTES)
    if quantity < 1:
        raise _error("is less than one byte", value, key, _BYTES)
    return int(quantity.to_integral_value())


def parse_rate(value: object, *, key: str) -> float:
    """Operations per second of `312 TFLOP/s`."""
    return float(_parse(value, key, _RATE))


def write_bandwidth(bytes_per_second: float) -> str:
    """The text that `parse_bandwidth` reads as this very number."""
    return _write(Decimal(repr(float(bytes_per_second))), _decimal("B/s"))


def write_seconds(seconds: float) -> str:
    """The text that `parse_seconds` reads as this very number."""
    return _write(Decimal(repr(float(seconds))), _SECONDS.units)


def write_bytes(num_bytes: int) -> str:
    """The text that `parse_bytes` reads as this very number."""
    return _write(Decimal(num_bytes), _BYTES.units)


def write_rate(flops_per_second: float) -> str:
    """The text that `parse_rate` reads as this very number."""
    return _write(Decimal(repr(float(flops_per_second))), _RATE.units)


def format_bytes(num_bytes: float) -> str:
    """`1.50 GiB`: three digits, for tables."""
    if abs(num_bytes) < 1023.5:
        return f"{num_bytes:.0f} B"
    return _format(num_bytes, {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}, step=1024)


def format_seconds(seconds: float) -> str:
    """`3.40 us`: three digits, for tables; what is far below a nanosecond shows as `0.00 ns`."""
    return _format(seconds, {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}, step=1000) if seconds else "0 s"


def _parse(value: object, key: str, kind: _Kind) -> Decimal:
    if not isinstance(value, str):
        problem = "has no unit" if isinstance(value, int | float) and not isinstance(value, bool) else "is not text"
        raise _error(problem, value, key, kind)
    match = _QUANTITY.fullmatch(value)
    if match is None:
        raise _error("is not a number and a unit", value, key, kind)
    number, unit = match.groups()
    if unit not in kind.units:
        raise _error(f"has the unknown unit {unit!r}" if unit else "has no unit", value, key, kind)
    quantity = _EXACT.multiply(_EXACT.create_decimal(number), kind.units[unit])
    if not (math.isfinite(float(quantity)) and float(quantity) > 0):
        raise _error("is not a finite number above zero", value, key, kind)
    return quantity


def _error(problem: str, value: object, key: str, kind: _Kind) -> ClusterError:
    return ClusterError(
        f"{key} {problem}",
        given=repr(value),
        required=f"{kind.name}: a number above zero and one of {', '.join(kind.units)}, as in '{kind.example}'",
    )


def _write(number: Decimal, units: Mapping[str, Decimal]) -> str:
    """The shortest text in any of these units; exact, since all units are products of twos and tens."""
    return min((f"{_plain(_EXACT.divide(number, scale))} {unit}" for unit, scale in units.items()), key=len)


def _plain(number: Decimal) -> str:
    """Without trailing zeros, and without an exponent where that is no longer than with one."""
    stripped = number.normalize(_EXACT)
    return min(f"{stripped:f}", str(stripped), key=len)


def _format(number: float, units: Mapping[str, float], *, step: int) -> str:
    """In the first unit, smallest first, in which the rounded number is below `step`; else in the last."""
    text = ""
    for unit, scale in units.items():
        scaled = number / scale
        num_decimals = 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
        text = f"{scaled:.{num_decimals}f} {unit}"
        if abs(round(scaled, num_decimals)) < step:
            break
    return text

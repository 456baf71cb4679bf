"""Numbers with units, in the form in which people write them: 5us, 25Gbit, 3GB/s, 133M."""

import decimal
import math
import numbers
import re
import reprlib
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"\s*([+-]?[\d_]*\.?\d[\d_]*(?:[eE][+-]?\d+)?|[+-]?inf|nan)\s*(\S*)\s*")
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_RATES = {f"{p}bit{s}": x / 8 for p, x in _PREFIXES.items() for s in ("", "/s")}
_RATES |= {f"{p}bps": x / 8 for p, x in _PREFIXES.items()}
_RATES |= {f"{p}B/s": x for p, x in _PREFIXES.items()}
_RATES |= {f"{p}B": x for p, x in _PREFIXES.items() if p}
_RATES |= {"KiB/s": 2.0**10, "MiB/s": 2.0**20, "GiB/s": 2.0**30}

# Limits far beyond any network. Within them no cost overflows, so all plans are finite.
_LONGEST = 1e9
_SLOWEST, _FASTEST = 1e-3, 1e21
_MOST = 10**15


def seconds(
    name: str, value: float | str, *, form: str = "a time with its unit, such as 5us, 1.5ms or 2s"
) -> float:
    """A time in seconds, from a number of seconds or text such as ``5us``.

    ``name`` is the name of the argument, and ``form`` the expected form, for the error.
    """
    number = _parse(name, value, _TIMES, form)
    if not 0 <= number <= _LONGEST:
        raise ValueError(f"{name} must be a time from 0 to 1e9 s, got {shown(value)}.")
    return number


def bandwidth(name: str, value: float | str) -> float:
    """Bytes per second, above 0, from such a number or text such as ``25Gbit``."""
    form = "a bandwidth with its unit, such as 25Gbit, 100Mbit or 3GB/s"
    number = _parse(name, value, _RATES, form)
    if not _SLOWEST <= number <= _FASTEST:
        raise ValueError(f"{name} must be a bandwidth from 0.001 to 1e21 B/s, got {shown(value)}.")
    return number


def count(
    name: str, value: float | str, *, most: int = _MOST, examples: str = "133M, 133e6 or 1.3B"
) -> int:
    """A whole number from 1 to ``most``, from text such as ``133M`` or ``133e6``."""
    form = f"a whole number from 1 to {most:,}, such as {examples}"
    number = _parse(name, value, _COUNTS, form)
    if not 1 <= number <= most or number % 1:
        raise ValueError(f"{name} must be {form}, got {shown(value)}.")
    return round(number)


def number(name: str, value: float | str, least: float, most: float) -> float:
    """A number without a unit, from ``least`` to ``most``, such as ``1.5``."""
    form = f"a number from {least:g} to {most:,g}"
    found = _parse(name, value, {"": 1.0}, form)
    if not least <= found <= most:
        raise ValueError(f"{name} must be {form}, got {shown(value)}.")
    return found


def shown(value: object) -> str:
    """The value as given, shortened if it is long."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 60
    return short.repr(value)


def _parse(name: str, value: Any, units: Mapping[str, float], form: str) -> float:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    found = _NUMBER.fullmatch(value) if isinstance(value, str) else None
    if found is None or found[2] not in units:
        raise ValueError(f"{name} must be {form}, got {shown(value)}.")
    try:
        # In decimal, because 5 * 1e-6 is not 5e-6 in floating point.
        return float(decimal.Decimal(found[1]) * decimal.Decimal(repr(units[found[2]])))
    except ArithmeticError:
        return math.inf

"""Numbers with units, as people write them: 5us, 25Gbit, 3GB/s, 133M."""

import decimal
import math
import re
from collections.abc import Mapping

_NUMBER = re.compile(r"\s*([+-]?[\d_]*\.?\d[\d_]*(?:[eE][+-]?\d+)?|[+-]?inf|nan)\s*(\S*)\s*")
_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_RATES = {f"{p}bit{s}": x / 8 for p, x in _PREFIXES.items() for s in ("", "/s")}
_RATES |= {f"{p}bps": x / 8 for p, x in _PREFIXES.items()}
_RATES |= {f"{p}B/s": x for p, x in _PREFIXES.items()}
_RATES |= {f"{p}B": x for p, x in _PREFIXES.items() if p}
_RATES |= {"KiB/s": 2.0**10, "MiB/s": 2.0**20, "GiB/s": 2.0**30}


def seconds(name: str, value: float | str) -> float:
    """A time in seconds, at least 0, from a number of seconds or text such as ``5us``."""
    number = _parse(name, value, _TIMES, "5us, 1.5ms or 2s")
    if not 0 <= number < math.inf:
        raise ValueError(f"{name} is {value!r}; pass a time of at least 0, such as 5us.")
    return number


def bandwidth(name: str, value: float | str) -> float:
    """Bytes per second, above 0, from such a number or text such as ``25Gbit``."""
    number = _parse(name, value, _RATES, "25Gbit, 100Mbit or 3GB/s")
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {value!r}; pass a bandwidth above 0, such as 25Gbit.")
    return number


def count(name: str, value: float | str) -> int:
    """A whole number of at least 1, from text such as ``133M`` or ``133e6``."""
    number = _parse(name, value, _COUNTS, "133M, 133e6 or 1.3B")
    if not 1 <= number < math.inf or number % 1:
        raise ValueError(f"{name} is {value!r}; pass a whole number of at least 1, such as 133M.")
    return round(number)


def _parse(name: str, value: float | str, units: Mapping[str, float], examples: str) -> float:
    if isinstance(value, (int, float)):
        return float(value)
    found = _NUMBER.fullmatch(value)
    unit = found[2] if found else ""
    if not found or unit not in units:
        raise ValueError(f"{name} is {value!r}; write it as {examples}.")
    try:
        # In decimal: 5 * 1e-6 is not 5e-6 in floating point.
        return float(decimal.Decimal(found[1]) * decimal.Decimal(repr(units[unit])))
    except ArithmeticError:
        return math.inf

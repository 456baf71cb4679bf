"""The claims, and the verdicts of their rules on measured numbers.

A rule is a list of bounds on named numbers. So one place determines when a claim holds, which words
the page uses, and which of several seeds is the worse one.
"""

import math
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from ._code import DATA, Check

Numbers = Mapping[str, float]
# The tolerance of a quotient that should be 1 up to rounding.
_ROUNDING = 1e-9

HOLDS = "holds"
ELSEWHERE = "holds elsewhere"
FAILS = "does not hold"
UNTOLD = "undecided here"
UNCHECKED = "cannot be checked here"
UNMEASURED = "not measured yet"
# Failures are listed first.
VERDICTS = (FAILS, ELSEWHERE, UNTOLD, HOLDS, UNMEASURED, UNCHECKED)
# The confidence of the interval of a mean.
_CONFIDENCE = 0.95


class Bound(NamedTuple):
    """The bounds of a number, whose name is in the words of the page."""

    name: str
    least: float = -math.inf
    most: float = math.inf

    def slack(self, numbers: Numbers) -> float:
        """How far inside its bounds the number is; negative if it is outside or NaN."""
        value = numbers[self.name]
        if math.isnan(value):
            return -math.inf
        room = _ROUNDING * max(1.0, abs(value))
        return min(value - self.least, self.most - value) + room

    def __str__(self) -> str:
        if self.least == self.most:
            return f"{self.name} = {shown(self.least)}"
        if math.isinf(self.least):
            return f"{self.name} at most {shown(self.most)}"
        if math.isinf(self.most):
            return f"{self.name} at least {shown(self.least)}"
        return f"{self.name} from {shown(self.least)} to {shown(self.most)}"


# The papers by the first part of the names of their claims.
_PAPERS = {
    "ok-topk": "Ok-Topk",
    "sparcml": "SparCML",
    "mstopk": "MSTopK",
    "adtopk": "ADTopk",
    "control-flow": "Control-flow graphs",
    "library": "This library",
}


class Claim(NamedTuple):
    """One claim and how it is checked; claims.toml describes the fields.

    ``check(seed, quick) -> numbers`` returns every name of ``rule`` and of ``elsewhere``, the rule
    for other conditions than the claim's own. It is None if the claim cannot be checked.
    """

    name: str
    text: str
    source: str
    paper: str
    setting: str = ""
    rule: tuple[Bound, ...] = ()
    check: Callable[[int, bool], Any] | None = None
    where: str = ""
    elsewhere: tuple[Bound, ...] = ()
    reason: str = ""
    unlike: str = ""
    chance: bool = False
    seeds: int = 3

    @property
    def file(self) -> str:
        """The file of the results, one for each paper."""
        return f"{self.name.partition('/')[0]}.json"

    @property
    def paper_name(self) -> str:
        """The paper, as the page has it."""
        first = self.name.partition("/")[0]
        return _PAPERS.get(first, first)

    @property
    def key(self) -> dict[str, str]:
        """Identifies a result; it changes with the setting and with the names of the numbers."""
        names = [bound.name for bound in (*self.rule, *self.elsewhere)]
        return {
            "claim": self.name,
            "mark": f"{zlib.crc32(repr((self.setting, names)).encode()):08x}",
        }


def read(text: str) -> Iterator[Claim]:
    """The claims of a TOML document.

    Raises:
      ValueError: a claim has an unknown field or measurement, lacks data, or has a rule that any
        number meets; the message names the claim and the fix.
    """
    for name, table in tomllib.loads(text).items():
        try:
            yield _claim(name, table)
        except (ValueError, TypeError, KeyError, ImportError, AttributeError) as error:
            raise ValueError(f"the claim {name} in claims.toml: {error}") from error


def _claim(name: str, table: dict[str, Any]) -> Claim:
    fields = {*Claim._fields[1:], "data"}
    if unknown := sorted(set(table) - fields - {"where"}):
        raise ValueError(
            f"{', '.join(unknown)} is no field. The fields are {', '.join(sorted(fields))}."
        )
    if ("check" in table) == ("reason" in table):
        raise ValueError("it needs either a check with a rule, or the reason why there is none.")
    data = tuple(table.pop("data", ()))
    if missing := [file for file in data if not (DATA / file).is_file()]:
        raise ValueError(f"docs/data has no {', '.join(missing)}. Measure it, or correct the name.")
    if "check" in table:
        table |= {"check": Check(*table["check"], data=data), "rule": _rule(table.get("rule"))}
    if other := table.get("elsewhere"):
        table |= {"where": other["where"], "elsewhere": _rule(other.get("rule"))}
    return Claim(name, **table)


def _rule(table: Any) -> tuple[Bound, ...]:
    if not table:
        raise ValueError("it has no rule: write the bounds of a number, as rule.loss = [-inf, 2].")
    for number, limits in table.items():
        if not isinstance(limits, list) or len(limits) != 2 or not limits[0] <= limits[1]:
            raise ValueError(f"the rule of {number!r} must be [least, most], got {limits!r}.")
        if all(map(math.isinf, limits)):
            raise ValueError(f"no number fails the rule of {number!r}, {limits!r}: give a bound.")
    return tuple(Bound(name, *limits) for name, limits in table.items())


def verdict(claim: Claim, measured: Sequence[Numbers]) -> tuple[str, str]:
    """The verdict over all seeds, and a note: under which conditions, or why it is not checked."""
    if claim.check is None:
        return UNCHECKED, claim.reason
    if not measured:
        return UNMEASURED, ""
    if claim.unlike:
        return UNTOLD, claim.unlike
    if claim.chance:
        return _by_chance(claim.rule, measured)
    met = sum(_met(claim.rule, numbers) for numbers in measured)
    if met == len(measured):
        return HOLDS, ""
    note = f"{met} of {len(measured)} seeds do" if met else ""
    if claim.elsewhere and all(_met(claim.elsewhere, numbers) for numbers in measured):
        return ELSEWHERE, "; ".join(filter(None, (claim.where, note)))
    return FAILS, note


def interval(name: str, measured: Sequence[Numbers]) -> tuple[float, float]:
    """The mean of a number over seeds, and half the width of its 95 % Student's t interval.

    A seed must determine everything random. The interval of a single seed is infinite.
    """
    values = [numbers[name] for numbers in measured]
    if len(values) < 2:
        return values[0], math.inf
    times = stats.t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1)
    return float(np.mean(values)), float(times * stats.sem(values))


def _by_chance(rule: Sequence[Bound], measured: Sequence[Numbers]) -> tuple[str, str]:
    """Holds or fails only if the whole interval does, and is undecided otherwise."""
    verdicts, notes = [], []
    for bound in rule:
        mean, room = interval(bound.name, measured)
        inside = [bound.slack({bound.name: mean + sign * room}) >= 0 for sign in (-1, 1)]
        outside = mean + room < bound.least or mean - room > bound.most
        verdicts.append(HOLDS if all(inside) else FAILS if outside else UNTOLD)
        notes.append(f"{bound.name} {shown(mean)} ± {shown(room)}")
    worst = min(verdicts, key=VERDICTS.index)
    return worst, f"{'; '.join(notes)} ({len(measured)} seeds)"


def spread(claim: Claim, measured: Sequence[Numbers]) -> list[tuple[str, float, float]]:
    """Each number by name: the worse of the seeds, then the better one.

    A number without a bound has no worse one, and its smallest value comes first.
    """
    bounds = {bound.name: bound for bound in (*claim.elsewhere, *claim.rule)}
    rows = []
    for name in measured[0] if measured else ():
        key = bounds[name].slack if name in bounds else (lambda numbers, name=name: numbers[name])
        ordered = sorted(measured, key=key)
        rows.append((name, ordered[0][name], ordered[-1][name]))
    return rows


def shown(value: float) -> str:
    """A number with four digits, or a whole one if it is large."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"


def _met(rule: Sequence[Bound], numbers: Numbers) -> bool:
    return all(bound.slack(numbers) >= 0 for bound in rule)


# All of them, in the order of the page.
CLAIMS = tuple(read(Path(__file__).with_name("claims.toml").read_text(encoding="utf-8")))

"""What a claim is, and what its rule makes of measured numbers.

A rule is a list of bounds on named numbers, so that one place says when a claim holds, in which
words the page says so, and which of several seeds is the worse one.
"""

import math
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from ._code import Check

Numbers = Mapping[str, float]
# Of a quotient that is to be 1 to rounding.
_ROUNDING = 1e-9

HOLDS = "holds"
ELSEWHERE = "holds elsewhere"
FAILS = "does not hold"
UNTOLD = "cannot be told here"
UNCHECKED = "cannot be checked here"
UNMEASURED = "not measured yet"
# Failures are listed first.
VERDICTS = (FAILS, ELSEWHERE, UNTOLD, HOLDS, UNMEASURED, UNCHECKED)
# Of the interval of a mean.
_CONFIDENCE = 0.95


class Bound(NamedTuple):
    """What a number, named in the words of the page, has to be."""

    name: str
    least: float = -math.inf
    most: float = math.inf

    def slack(self, numbers: Numbers) -> float:
        """How far inside the number is; negative where it is not, or is no number."""
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


class Claim(NamedTuple):
    """One claim and how it is checked; claims.toml says what the fields are.

    ``check(seed, quick) -> numbers`` has every name of the rule, and of that which holds where a
    claim holds if not where it was made; it is None where nothing can be checked.
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
    chance: bool = False
    seeds: int = 3

    @property
    def file(self) -> str:
        """Where results are kept: one for each paper."""
        return f"{self.name.partition('/')[0]}.json"

    @property
    def key(self) -> dict[str, str]:
        """Of a result; of another setting, or of other numbers, it would be stale."""
        names = [bound.name for bound in (*self.rule, *self.elsewhere)]
        return {
            "claim": self.name,
            "mark": f"{zlib.crc32(repr((self.setting, names)).encode()):08x}",
        }


def _read() -> Iterator[Claim]:
    def rule(table: dict[str, list[float]]) -> tuple[Bound, ...]:
        return tuple(Bound(name, *limits) for name, limits in table.items())

    text = Path(__file__).with_name("claims.toml").read_text(encoding="utf-8")
    for name, table in tomllib.loads(text).items():
        data = tuple(table.pop("data", ()))
        if "check" in table:
            table |= {"check": Check(*table["check"], data=data), "rule": rule(table["rule"])}
        if other := table.get("elsewhere"):
            table |= {"where": other["where"], "elsewhere": rule(other["rule"])}
        yield Claim(name, **table)


def verdict(claim: Claim, measured: Sequence[Numbers]) -> tuple[str, str]:
    """The verdict over all seeds, and a note: where it holds, or why it is not checked."""
    if claim.check is None:
        return UNCHECKED, claim.reason
    if not measured:
        return UNMEASURED, ""
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
    """The mean of a number over seeds, and how far it is known: 95 % of Student's t.

    A seed has to draw all that chance has a part in. One seed tells nothing.
    """
    values = [numbers[name] for numbers in measured]
    if len(values) < 2:
        return values[0], math.inf
    times = stats.t.ppf((1 + _CONFIDENCE) / 2, len(values) - 1)
    return float(np.mean(values)), float(times * stats.sem(values))


def _by_chance(rule: Sequence[Bound], measured: Sequence[Numbers]) -> tuple[str, str]:
    """Holds or fails where the whole interval does: it is small beside what is claimed."""
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

    A number without a bound has no worse one: the smallest comes first.
    """
    bounds = {bound.name: bound for bound in (*claim.elsewhere, *claim.rule)}
    rows = []
    for name in measured[0] if measured else ():
        key = bounds[name].slack if name in bounds else (lambda numbers, name=name: numbers[name])
        ordered = sorted(measured, key=key)
        rows.append((name, ordered[0][name], ordered[-1][name]))
    return rows


def shown(value: float) -> str:
    """A number with four digits, or whole where it is large."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def _met(rule: Sequence[Bound], numbers: Numbers) -> bool:
    return all(bound.slack(numbers) >= 0 for bound in rule)


# All of them, in the order of the page.
CLAIMS = tuple(_read())

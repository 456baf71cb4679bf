"""How often each collective of a program runs: branches and loops, weighted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from sparse_collectives.traffic._traffic import CollectiveTraffic, Scope, shown

_PERIODIC = re.compile(r".*\.every([1-9]\d*)")


class Weights:
    """How often the branches of a conditional and the body of a loop run.

    Args:
      weights: the weights of the branches of conditionals, by a name of their scope.
      trips: the iterations of loops, by a name of their scope.
      conditional: which branch of another conditional counts, "worst" or "best".
    """

    def __init__(
        self, weights: Mapping[str, tuple[float, ...]], trips: Mapping[str, float], conditional: str
    ):
        self._given_weights, self._given_trips = weights, trips
        self._choose = max if conditional == "worst" else min
        self._used: set[str] = set()
        self._conditionals: dict[str, None] = {}
        self._loops: dict[str, None] = {}

    def check_all_used(self) -> None:
        given = (*self._given_weights, *self._given_trips)
        unused = [name for name in given if name not in self._used]
        if unused:
            raise ValueError(
                f"`frequencies` names {unused}, which is the innermost name of no"
                f" conditional (for several weights) or loop (for a number)."
                f" Conditionals: {list(self._conditionals) or 'none'}. Loops with"
                f" collectives: {list(self._loops) or 'none'}."
            )

    def of_branches(
        self, scope: Scope, outer: Scope, branches: list[list[CollectiveTraffic]]
    ) -> Sequence[float]:
        """The weights of branches with these rows, if ``outer`` is the conditional around it."""
        totals = [sum(r.words * r.weight for r in branch) for branch in branches]
        count = len(branches)
        self._conditionals[f"{'/'.join(scope)} ({count} branches)"] = None
        for path in _inside_out(scope, outer):
            for name in _ending(path, self._given_weights):
                weights = self._given_weights[name]
                if len(weights) == count:
                    self._used.add(name)
                    return weights
                if any(branches):  # otherwise nothing moves, and weights do not matter
                    raise ValueError(
                        f"`frequencies[{name!r}]` has {len(weights)} weights, but the conditional"
                        f" in scope {shown(scope)} has {count} branches; pass one"
                        " weight per branch."
                    )
            periodic = _PERIODIC.fullmatch(path[-1])
            if periodic and count == 2:
                share = 1 / int(periodic.group(1))
                heavy = int(totals[1] > totals[0])
                return [share if i == heavy else 1 - share for i in range(2)]
        chosen = totals.index(self._choose(totals))
        return [float(i == chosen) for i in range(count)]

    def of_loop(
        self, scope: Scope, outer: Scope, trips: int | None, has_collectives: bool
    ) -> float:
        """The iterations of a loop, if ``outer`` is the loop around it."""
        if has_collectives:
            self._loops["/".join(scope)] = None
        for path in _inside_out(scope, outer):
            for name in _ending(path, self._given_trips):
                self._used.add(name)
                return self._given_trips[name]
        if trips is not None:
            return trips
        if has_collectives:
            name = scope[-1] if scope else "NAME"
            more = "." if scope else ", and put it under jax.named_scope('NAME')."
            raise ValueError(
                f"the loop in scope {shown(scope)} holds collectives, and its trip count is not a"
                f" constant of the program: pass `frequencies={{{name!r}: iterations}}` with the"
                f" mean number of iterations per execution{more}"
            )
        return 1.0


def scaled(rows: list[CollectiveTraffic], weight: float) -> list[CollectiveTraffic]:
    """The rows with another weight; those without one are left out."""
    return [row._replace(weight=row.weight * weight) for row in rows] if weight else []


def _inside_out(scope: Scope, outer: Scope) -> Iterator[Scope]:
    """The paths to each name of `scope` that `outer` doesn't share, innermost first."""
    shared = 0
    while shared < min(len(scope), len(outer)) and scope[shared] == outer[shared]:
        shared += 1
    for end in range(len(scope), shared, -1):
        yield scope[:end]


def _ending(path: Scope, names: Iterable[str]) -> list[str]:
    """The `names`, of one component or several, with which `path` ends; longest first."""
    ending = [name for name in names if f"/{'/'.join(path)}".endswith(f"/{name}")]
    return sorted(ending, key=len, reverse=True)

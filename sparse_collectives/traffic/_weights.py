"""How often each collective of a program runs: branches and loops, weighted."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sparse_collectives.traffic import _tree
from sparse_collectives.traffic._report import CollectiveTraffic
from sparse_collectives.traffic._tree import Scope

_PERIODIC = re.compile(r".*\.every([1-9]\d*)")


class Weigher:
    """Turns the tree into rows with weights."""

    def __init__(self, weights, trips, conditional: str):
        self._given_weights: dict[str, tuple[float, ...]] = weights
        self._given_trips: dict[str, float] = trips
        self._conditional = conditional
        self._used: set[str] = set()
        self._conditionals: dict[str, None] = {}
        self._loops: dict[str, None] = {}

    def weigh(
        self,
        nodes: list[_tree.Node],
        conditional: Scope = (),
        loop: Scope = (),
    ) -> list[CollectiveTraffic]:
        """The rows of `nodes`.

        Args:
          nodes: part of the tree.
          conditional: the scope of the conditional around it.
          loop: the scope of the loop around it.

        Returns:
          Rows, weighted per execution of `nodes`.
        """
        rows: list[CollectiveTraffic] = []
        for node in nodes:
            scope = node.scope
            if isinstance(node, _tree.Collective):
                path = "/".join(scope)
                rows.append(
                    CollectiveTraffic(node.kind, path, node.words, 1.0, node.group_size, node.axes)
                )
            elif isinstance(node, _tree.Branches):
                branches = [self.weigh(branch, scope, loop) for branch in node.branches]
                weights = self._branch_weights(scope, conditional, branches)
                for branch, weight in zip(branches, weights, strict=True):
                    rows += _scaled(branch, weight)
            else:
                condition = self.weigh(node.condition, conditional, scope)
                body = self.weigh(node.body, conditional, scope)
                trips = self._trips(node, scope, loop, bool(condition or body))
                # The condition is evaluated once more, to end the loop.
                rows += _scaled(condition, trips + 1) + _scaled(body, trips)
        return rows

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

    def _branch_weights(self, scope, outer, branches) -> Sequence[float]:
        totals = [sum(r.words * r.weight for r in branch) for branch in branches]
        count = len(branches)
        self._conditionals[f"{'/'.join(scope)} ({count} branches)"] = None
        for names in _tree.inside_out(scope, outer):
            for name in _tree.ending(names, self._given_weights):
                weights = self._given_weights[name]
                if len(weights) == count:
                    self._used.add(name)
                    return weights
                if any(branches):  # otherwise nothing moves, and weights do not matter
                    raise ValueError(
                        f"`frequencies[{name!r}]` has {len(weights)} weights, but the conditional"
                        f" in scope {_tree.shown(scope)} has {count} branches; pass one"
                        " weight per branch."
                    )
            periodic = _PERIODIC.fullmatch(names[-1])
            if periodic and count == 2:
                share = 1 / int(periodic.group(1))
                heavy = int(totals[1] > totals[0])
                return [share if i == heavy else 1 - share for i in range(2)]
        choose = max if self._conditional == "worst" else min
        chosen = totals.index(choose(totals))
        return [float(i == chosen) for i in range(count)]

    def _trips(self, node, scope, outer, has_collectives: bool) -> float:
        if has_collectives:
            self._loops["/".join(scope)] = None
        for names in _tree.inside_out(scope, outer):
            for name in _tree.ending(names, self._given_trips):
                self._used.add(name)
                return self._given_trips[name]
        if node.trips is not None:
            return node.trips
        if has_collectives:
            name = scope[-1] if scope else "NAME"
            raise ValueError(
                f"the loop in scope {_tree.shown(scope)} holds collectives, and its trip"
                " count is not a constant of the program: pass"
                f" `frequencies={{{name!r}: iterations}}` with the mean number of"
                " iterations per execution"
                + ("." if scope else ", and put it under jax.named_scope('NAME').")
            )
        return 1.0


def _scaled(rows, weight: float) -> list[CollectiveTraffic]:
    if weight == 0:
        return []
    return [row._replace(weight=row.weight * weight) for row in rows]

"""Which workers take part from now on, on which devices and from which state.

One process decides it for all.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from optax_ext.elastic._jax_internals import Device


class Report(NamedTuple):
    """The report of a process before it meets the others.

    Attributes:
      model: a description of the model; processes that have another can't take part.
      versions: the states that it can go on from, the newest first; empty for a process that has
        just begun. A version is the number of exchanges before a state.
      steps: the step of each.
      leaves: whether it leaves: with the newest of its versions it has handed its residual over,
        and has to go back with the others if they don't have that. Without versions it is gone.
      saved: the step of the newest whole checkpoint that it sees; -1 if there is none.
      nonce: a word that no other report has.
    """

    model: str
    versions: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    leaves: bool = False
    saved: int = -1
    nonce: str = ""


class Decision(NamedTuple):
    """What all processes that have met do next.

    Attributes:
      members: the processes that take part, in the order of their numbers.
      holders: the members that have the state of ``version``. If there are none, the first of
        the members, whose parameters all others take over.
      version: the state to go on from; 0 if everything begins.
      step: the step of that state.
      saved: the step of the checkpoint to begin from; -1 to begin without one, or to go on.
      lost: the processes that had a state when they met, and can't go on from it.
      refused: why a process can't take part, by its number.
      nonces: the nonces of the reports that the decision rests on, by process.
      number: how many meetings these members have had with each other, with this one.
    """

    members: tuple[int, ...]
    holders: tuple[int, ...]
    version: int
    step: int
    saved: int
    lost: tuple[int, ...]
    refused: dict[int, str]
    nonces: dict[int, str]
    number: int = 0

    @property
    def mark(self) -> str:
        """A word that no other decision has, of any life of the job."""
        return self.nonces[min(self.nonces)]


def decide(reports: Mapping[int, Report]) -> Decision:
    """The decision, still without its number, for processes that have met, from their reports.

    It takes the newest version that all processes with a state can go back to. Workers differ by at
    most one exchange, since none starts the next before all have finished this one, and each keeps
    the state before its last exchange.
    """
    have = {process for process, report in reports.items() if report.versions}
    reference = reports[min(have or reports)]
    refused = {
        process: f"it trains {report.model}, and process {min(have or reports)} {reference.model}"
        for process, report in sorted(reports.items())
        if report.model != reference.model
    }
    have -= refused.keys()
    common = set.intersection(*({*reports[p].versions} for p in have)) if have else set()
    # A process that lags by more than a failed step can explain begins as a new one does.
    version = max(common or {v for p in have for v in reports[p].versions}, default=0)
    holding = {p for p in have if version in reports[p].versions}
    going = {p for p in holding if reports[p].leaves and version == reports[p].versions[0]}
    # If only those that leave are left, they stay, until they can leave again.
    going = going if going < holding else set()
    going |= {p for p, report in reports.items() if report.leaves and not report.versions}
    members = tuple(sorted(reports.keys() - refused.keys() - going))
    have &= {*members}
    holders = tuple(p for p in members if p in holding)
    lost = tuple(sorted(have - {*holders}))
    saved, step = -1, 0
    if holders:
        first = reports[holders[0]]
        step = first.steps[first.versions.index(version)]
    elif members:
        # All have one folder; a process that does not see it yet, or has another one, says so.
        holders, saved = members[:1], max(reports[p].saved for p in members)
        step = max(saved, 0)
    nonces = {process: report.nonce for process, report in reports.items()}
    return Decision(members, holders, version, step, saved, lost, refused, nonces)


def assigned(
    decision: Decision, devices_of: Callable[[int], Sequence[Device]]
) -> dict[int, Device] | None:
    """One device of each member, by its number and in the order of a mesh.

    Each meeting of these members has other ones: XLA keeps a group of CPU devices indefinitely, by
    the devices in their order, and one that broke stays broken. None if all have been used; a
    group of one can't break.
    """
    size, each = len(decision.members), len(devices_of(decision.members[0]))
    if size > 1 and size * each**size < decision.number:
        return None
    shift = decision.number // each**size % size
    order = (*decision.members[shift:], *decision.members[:shift])
    places = enumerate(order)
    return {x: devices_of(x)[decision.number // each**place % each] for place, x in places}


def written(message: Report | Decision) -> str:
    """A message as text for the others to read."""
    return repr(message._asdict())


def report_of(text: str) -> Report:
    """The report that :func:`written` wrote."""
    return Report(**ast.literal_eval(text))


def decision_of(text: str) -> Decision:
    """The decision that :func:`written` wrote."""
    return Decision(**ast.literal_eval(text))

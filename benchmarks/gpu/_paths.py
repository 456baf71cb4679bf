"""What a GPU is made to do on the lightest and on the heaviest path through a program.

The lightest path takes no turn of a loop whose turns only a run tells, and of a conditional the
branch that launches least: in the programs of this library that is the steady step. The heaviest
takes one turn, and of each conditional the most.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from ._hlo import Instruction, Program, longest, size_of
from ._moved import moved_by

# What launches nothing, besides whatever ends in -done or -update.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id",
    "after-all", "iota", "opt-barrier", "domain",
}  # fmt: skip
# The most entries that XLA sorts in a single kernel.
_ONE_BLOCK = 2048
_COLLECTIVE = re.compile(
    r"^(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast|"
    r"ragged-all-to-all|send|recv)(-start)?$"
)


@dataclass(frozen=True)
class Cost:
    """What a path does.

    Attributes:
      launches: kernels, copies and library calls.
      touched: bytes of all their operands and results, an upper bound of what moves.
      moved: bytes, of a gather what it takes and of a scatter what it changes.
      waits: conditionals and loops for whose predicate the host may have to wait.
      collectives: that are started.
      sorts: launches that are in truth tens of kernels each.
    """

    launches: int = 0
    touched: int = 0
    moved: int = 0
    waits: int = 0
    collectives: int = 0
    sorts: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(astuple(self), astuple(other))))

    def __mul__(self, times: int) -> "Cost":
        return Cost(*(times * a for a in astuple(self)))

    def most(self, other: "Cost") -> "Cost":
        """The larger one of each number."""
        return Cost(*map(max, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Part:
    """An instruction of a path, what it costs alone, and how often the path comes to it."""

    instruction: Instruction
    cost: Cost
    times: int


WAIT = Cost(waits=1)


class Paths:
    """The paths through one program, or from one of its computations on."""

    def __init__(self, program: Program):
        self._computations, self._entry = program.computations, program.entry
        self._shapes = {
            name: {line.name: line.shape for line in lines}
            for name, lines in program.computations.items()
        }
        self.lightest = functools.cache(self._lightest)
        self.heaviest = functools.cache(self._heaviest)

    def _lightest(self, computation: str | None = None) -> Cost:
        """The cost of the lightest path."""
        return sum((part.cost * part.times for part in self.parts(computation)), Cost())

    def _heaviest(self, computation: str | None = None) -> Cost:
        """The cost of the heaviest path; of a conditional the most of each number."""
        name, total = computation or self._entry, Cost()
        for line in self._computations[name]:
            inner = functools.reduce(Cost.most, map(self.heaviest, _reached(line)), Cost())
            if line.opcode == "while":
                total += inner * line.trip_count if line.trip_count is not None else WAIT + inner
            elif line.opcode == "conditional":
                total += WAIT + inner
            else:
                total += inner if line.opcode == "call" else self._alone(name, line)
        return total

    def parts(self, computation: str | None = None, times: int = 1) -> Iterator[Part]:
        """All that the lightest path comes to, in the order of the text."""
        name = computation or self._entry
        for line in self._computations[name]:
            if line.opcode == "while" and line.trip_count is not None:
                yield from self.parts(line.called("body"), times * line.trip_count)
            elif line.opcode == "call":
                yield from self.parts(line.called("to_apply"), times)
            elif line.opcode in ("while", "conditional"):
                yield Part(line, WAIT, times)
                if line.opcode == "conditional":
                    lightest = min(line.branches, key=lambda x: astuple(self.lightest(x))[:2])
                    yield from self.parts(lightest, times)
            elif not _free(line):
                yield Part(line, self._alone(name, line), times)

    def collectives(self) -> int:
        """How many the program has on all its paths, each counted once."""
        waiting, seen, count = [self._entry], set(), 0
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                for line in self._computations[name]:
                    count += self._collective(line)
                    waiting += _reached(line)
        return count

    def _alone(self, computation: str, line: Instruction) -> Cost:
        if _free(line):
            return Cost()
        shapes = self._shapes[computation]
        touched = size_of(line.shape) + sum(size_of(shapes.get(x, "")) for x in line.operands)
        moved = round(moved_by(line, shapes, self._computations.__getitem__))
        inside = self._inside(line)
        long = any(x.opcode == "sort" and longest(x.shape) > _ONE_BLOCK for x in inside)
        sorts = int(long or "RadixSort" in line.target)
        return Cost(1, touched, moved, 0, self._collective(line), sorts)

    def _inside(self, line: Instruction) -> tuple[Instruction, ...]:
        """The instruction, and those of which it is made."""
        made = line.opcode in ("fusion", "async-start")
        return (line, *(self._computations[line.called("calls")] if made else ()))

    def _collective(self, line: Instruction) -> int:
        # XLA wraps some of them in a computation of their own, to start them.
        return int(any(_COLLECTIVE.match(x.opcode) for x in self._inside(line)))


def _reached(line: Instruction) -> tuple[str, ...]:
    """The computations of a loop, a conditional or a call."""
    if line.opcode == "conditional":
        return line.branches
    attribute = {"while": "body", "call": "to_apply"}.get(line.opcode)
    return (line.called(attribute),) if attribute else ()


def _free(line: Instruction) -> bool:
    return line.opcode in _FREE or line.opcode.endswith(("-done", "-update"))

"""What a GPU is made to do on the lightest and on the heaviest path through a program.

The lightest path takes no turn of a loop whose turns only a run tells, and of a conditional the
branch that launches least: in the programs of this library that is the steady step. The heaviest
takes one turn, and of each conditional the most.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

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
        return Cost(*(a + b for a, b in zip(self._values(), other._values())))

    def __mul__(self, times: int) -> "Cost":
        return Cost(*(times * a for a in self._values()))

    def most(self, other: "Cost") -> "Cost":
        """The larger one of each number."""
        return Cost(*map(max, self._values(), other._values()))

    def _values(self) -> tuple[int, ...]:
        return self.launches, self.touched, self.moved, self.waits, self.collectives, self.sorts


@dataclass(frozen=True)
class Part:
    """An instruction of a path, what it costs alone, and how often the path comes to it."""

    instruction: Instruction
    cost: Cost
    times: int


WAIT = Cost(waits=1)


class Paths:
    """The paths through one program."""

    def __init__(self, program: Program):
        self._program = program
        self._shapes = {
            computation: {line.name: line.shape for line in lines}
            for computation, lines in program.computations.items()
        }
        self._lightest: dict[str, Cost] = {}
        self._heaviest: dict[str, Cost] = {}

    def lightest(self, computation: str | None = None) -> Cost:
        """The cost of the lightest path, of the whole program or from a computation on."""
        name = computation or self._program.entry
        if name not in self._lightest:
            costs = (part.cost * part.times for part in self.parts(name))
            self._lightest[name] = sum(costs, Cost())
        return self._lightest[name]

    def heaviest(self, computation: str | None = None) -> Cost:
        """The cost of the heaviest path; of a conditional the most of each number."""
        name = computation or self._program.entry
        if name not in self._heaviest:
            lines = self._program.computations[name]
            self._heaviest[name] = sum((self._most(name, line) for line in lines), Cost())
        return self._heaviest[name]

    def parts(self, computation: str | None = None, times: int = 1) -> Iterator[Part]:
        """All that the lightest path comes to, in the order of the text."""
        name = computation or self._program.entry
        for line in self._program.computations[name]:
            if line.opcode == "while":
                if line.trip_count is None:
                    yield Part(line, WAIT, times)
                else:
                    yield from self.parts(line.called("body"), times * line.trip_count)
            elif line.opcode == "conditional":
                yield Part(line, WAIT, times)
                yield from self.parts(self._branch(line), times)
            elif line.opcode == "call":
                yield from self.parts(line.called("to_apply"), times)
            elif not _free(line):
                yield Part(line, self._alone(name, line), times)

    def collectives(self) -> int:
        """How many the program has on all its paths, each counted once."""
        waiting, seen, count = [self._program.entry], set(), 0
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            for line in self._program.computations[name]:
                count += self._collective(line)
                waiting += _reached(line)
        return count

    def _branch(self, conditional: Instruction) -> str:
        def weight(name: str) -> tuple[int, int]:
            cost = self.lightest(name)
            return cost.launches, cost.touched

        return min(conditional.branches, key=weight)

    def _most(self, computation: str, line: Instruction) -> Cost:
        if line.opcode == "while":
            turn = self.heaviest(line.called("body"))
            return WAIT + turn if line.trip_count is None else turn * line.trip_count
        if line.opcode == "conditional":
            most = Cost()
            for branch in line.branches:
                most = most.most(self.heaviest(branch))
            return WAIT + most
        if line.opcode == "call":
            return self.heaviest(line.called("to_apply"))
        return Cost() if _free(line) else self._alone(computation, line)

    def _alone(self, computation: str, line: Instruction) -> Cost:
        shapes = self._shapes[computation]
        touched = size_of(line.shape) + sum(size_of(shapes.get(x, "")) for x in line.operands)
        moved = moved_by(line, shapes, self._program.computations.__getitem__)
        return Cost(1, touched, round(moved), 0, self._collective(line), self._sorts(line))

    def _inside(self, line: Instruction) -> tuple[Instruction, ...]:
        """The instruction, and those of which it is made."""
        if line.opcode in ("fusion", "async-start"):
            return (line, *self._program.computations[line.called("calls")])
        return (line,)

    def _collective(self, line: Instruction) -> int:
        # XLA wraps some of them in a computation of their own, to start them.
        return int(any(_COLLECTIVE.match(x.opcode) for x in self._inside(line)))

    def _sorts(self, line: Instruction) -> int:
        inside = self._inside(line)
        long = any(x.opcode == "sort" and longest(x.shape) > _ONE_BLOCK for x in inside)
        return int(long or "RadixSort" in line.target)


def _reached(line: Instruction) -> tuple[str, ...]:
    if line.opcode == "while":
        return (line.called("body"),)
    if line.opcode == "conditional":
        return line.branches
    return (line.called("to_apply"),) if line.opcode == "call" else ()


def _free(line: Instruction) -> bool:
    return line.opcode in _FREE or line.opcode.endswith(("-done", "-update"))

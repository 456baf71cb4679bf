"""The work of a GPU on the lightest and on the heaviest path through a program.

The lightest path takes no turn of a loop whose turns are known only at run time, and the branch of
a conditional that launches least: in the programs of this library that is the steady step. The
heaviest takes one turn, and for each conditional the largest numbers.

A cost counts launches (kernels, copies and library calls), the bytes touched (of all their operands
and results, an upper bound) and moved (for a gather what it takes, for a scatter what it changes),
waits (conditionals and loops for whose predicate the host may have to wait), collectives that are
started, and sorts (launches that are in truth tens of kernels each).
"""

import collections
import functools
import math
import operator
import re
from collections.abc import Iterator, Mapping

from ._hlo import Instruction, Program, count_of, longest, size_of

# A missing key counts as 0, and `|` takes the larger one of each.
Cost = collections.Counter[str]
Lines = Mapping[str, Instruction]
_WAIT = Cost(waits=1)
# Opcodes that launch nothing, besides all that end in -done or -update.
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
# The smallest number of bytes that memory delivers.
_SECTOR = 32
# Which operand has the entries that change in the first one.
_UPDATES = {"scatter": 2, "dynamic-update-slice": 1}
# These need only as many entries of their first operand as the result has.
_TAKES = {"gather", "dynamic-slice", "slice"}
# All of their operands are read in full.
_READS_ALL = {
    "reduce", "reduce-window", "sort", "scatter", "dynamic-update-slice", "custom-call", "dot",
    "convolution",
}  # fmt: skip


def _times(cost: Cost, number: int) -> Cost:
    """The cost of that many turns."""
    return Cost({key: number * value for key, value in cost.items()})


@functools.cache
def lightest(program: Program, computation: str | None = None) -> Cost:
    """The cost of the lightest path through a computation, by default through the program."""
    return sum((cost for _, cost in parts(program, computation)), Cost())


@functools.cache
def heaviest(program: Program, computation: str | None = None) -> Cost:
    """The cost of the heaviest path; a conditional counts with the most of each number."""
    total, lines = Cost(), program.computations[computation or program.entry]
    for line in lines.values():
        inner = [heaviest(program, name) for name in line.reached] or [alone(program, lines, line)]
        most, turns = functools.reduce(operator.or_, inner), _turns(line)
        total += most + _WAIT if turns is None else _times(most, turns)
    return total


def parts(
    program: Program, computation: str | None = None, turns: int = 1
) -> Iterator[tuple[Instruction, Cost]]:
    """The instructions on the lightest path, in the order of the text, each with its total cost."""
    lines = program.computations[computation or program.entry]
    for line in lines.values():
        known = _turns(line)
        if line.reached and known is not None:
            yield from parts(program, line.reached[0], turns * known)
        elif line.reached:
            yield line, _times(_WAIT, turns)
            if line.opcode == "conditional":
                costs = {name: lightest(program, name) for name in line.reached}
                ranks = {name: (x["launches"], x["touched"]) for name, x in costs.items()}
                yield from parts(program, min(ranks, key=ranks.__getitem__), turns)
        elif not _free(line):
            yield line, _times(alone(program, lines, line), turns)


def _turns(line: Instruction) -> int | None:
    """How often its computation runs; None if that, or which of several, is not known here."""
    return line.trip_count if line.opcode in ("while", "conditional") else 1


def collectives(program: Program) -> int:
    """The number of collectives on all paths of the program, each counted once."""
    seen, found = [program.entry], 0
    # The list grows while it is read.
    for name in seen:
        lines = program.computations[name].values()
        found += sum(_is_collective(program, line) for line in lines)
        seen += {other for line in lines for other in line.reached}.difference(seen)
    return found


def _free(line: Instruction) -> bool:
    return line.opcode in _FREE or line.opcode.endswith(("-done", "-update"))


def alone(program: Program, lines: Lines, line: Instruction) -> Cost:
    """The cost of one instruction that reaches no computation."""
    if _free(line):
        return Cost()
    touched = size_of(line.shape) + sum(size_of(_shape(lines, name)) for name in line.operands)
    moved = round(_moved(program, lines, line))
    inside = _inside(program, line)
    long = any(x.opcode == "sort" and longest(x.shape) > _ONE_BLOCK for x in inside)
    sorts = int(long or "RadixSort" in line.text("custom_call_target"))
    started = _is_collective(program, line)
    return Cost(launches=1, touched=touched, moved=moved, collectives=started, sorts=sorts)


def _inside(program: Program, line: Instruction) -> list[Instruction]:
    """The instruction, and the instructions it consists of."""
    if line.opcode not in ("fusion", "async-start"):
        return [line]
    return [line, *program.computations[line.called("calls")].values()]


def _is_collective(program: Program, line: Instruction) -> bool:
    # XLA wraps some of them in a computation of their own, to start them.
    return any(_COLLECTIVE.match(x.opcode) for x in _inside(program, line))


# The bytes that one launch moves. A fusion is read backwards: the entries needed of a result are
# needed of its operands, up to all of them; a gather or a slice needs as many entries as it has
# itself. A scatter, or the update of a slice, is in place if it changes an argument of the
# launch.


def _moved(program: Program, around: Lines, line: Instruction) -> float:
    lines, parameters = {line.name: line}, {x: _shape(around, x) for x in line.operands}
    if line.opcode == "fusion":
        inside = program.computations[line.called("calls")]
        lines = {name: x for name, x in inside.items() if x.opcode != "parameter"}
        parameters = {name: x.shape for name, x in inside.items() if x.opcode == "parameter"}
    if not lines:
        return 0.0
    asked: dict[str, float] = collections.defaultdict(float)
    *others, last = lines.values()
    several = last.opcode == "tuple"
    total, in_place = 0.0, set()
    for name in last.operands if several else (last.name,):
        change = lines.get(_origin(name, lines))
        if change is not None and _is_in_place(change, lines, parameters):
            # Read and written; the updates themselves are counted as read.
            updates = change.operands[_UPDATES[change.opcode]]
            updated = parameters.get(updates, _shape(lines, updates))
            few = 2.0 * min(_SECTOR * count_of(updated), size_of(change.shape))
            total += few if change.opcode == "scatter" else size_of(updated)
            in_place.add(change.name)
        else:
            total += size_of(parameters.get(name, _shape(lines, name)))
        asked[name] = math.inf
    for one in reversed(others if several else [*others, last]):
        wanted = min(asked[one.name], count_of(one.shape))
        for place, name in enumerate(one.operands):
            if place or one.name not in in_place:
                asked[name] += _wanted_of(one, place, wanted)
    for name, shape in parameters.items():
        count = count_of(shape)
        total += size_of(shape) * min(asked[name], count) / max(count, 1)
    return total


def _wanted_of(line: Instruction, place: int, wanted: float) -> float:
    """Entries of an operand that ``wanted`` entries of the result need."""
    if not wanted:
        return 0.0
    if line.opcode in _READS_ALL or (line.opcode in _TAKES and place):
        return math.inf
    if line.opcode == "gather":
        # The entries may be anywhere, and each comes with its whole sector.
        return wanted * _SECTOR * count_of(line.shape) / size_of(line.shape)
    return wanted


def _is_in_place(change: Instruction, lines: Lines, parameters: Mapping[str, str]) -> bool:
    """Whether it changes a part of an argument of the launch."""
    # A scatter into several arrays has more operands.
    few = change.opcode != "scatter" or len(change.operands) == 3
    return change.opcode in _UPDATES and few and _origin(change.operands[0], lines) in parameters


def _origin(name: str, lines: Lines) -> str:
    """The array that ``name`` reshapes."""
    while name in lines and lines[name].opcode in ("bitcast", "reshape"):
        name = lines[name].operands[0]
    return name


def _shape(lines: Lines, name: str) -> str:
    return lines[name].shape if name in lines else ""

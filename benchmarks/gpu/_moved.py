"""The bytes that one launch moves: of a gather what it takes, of a scatter what it changes.

A fusion is read backwards. What is asked of its results is asked of their operands, entry by
entry, up to all of them; a gather or a slice asks for as many entries as it has itself. A
scatter, or the update of a slice, is in place where it changes what the launch was given.
"""

import collections
import math
from collections.abc import Callable, Mapping, Sequence

from ._hlo import Instruction, count_of, size_of

# What memory gives at once, however little is wanted of it.
_SECTOR = 32
# Their first operand is asked for no more than they give.
_SLICES = {"dynamic-slice", "slice"}
_RESHAPES = {"bitcast", "reshape"}
# Which operand has the entries that change in the first one.
_UPDATES = {"scatter": 2, "dynamic-update-slice": 1}
# All of their operands are read, whatever is asked of them.
_READS_ALL = {
    "reduce", "reduce-window", "sort", "scatter", "dynamic-update-slice", "custom-call", "dot",
    "convolution",
}  # fmt: skip


def moved_by(
    line: Instruction,
    shapes: Mapping[str, str],
    inside: Callable[[str], Sequence[Instruction]],
) -> float:
    """Bytes that an instruction reads and writes.

    ``shapes`` are by name those of its operands, ``inside`` gives those of a computation.
    """
    if line.opcode != "fusion":
        return _moved((line,), {name: shapes.get(name, "") for name in line.operands})
    lines = inside(line.called("calls"))
    parameters = {x.name: x.shape for x in lines if x.opcode == "parameter"}
    return _moved([x for x in lines if x.opcode != "parameter"], parameters)


def _moved(lines: Sequence[Instruction], parameters: Mapping[str, str]) -> float:
    """Of instructions in their order, the last of which is the result."""
    if not lines:
        return 0.0
    known = {line.name: line for line in lines}
    shapes = {name: line.shape for name, line in known.items()} | dict(parameters)
    asked: dict[str, float] = collections.defaultdict(float)
    *others, last = lines
    several = last.opcode == "tuple"
    total, in_place = 0.0, set()
    for name in last.operands if several else (last.name,):
        change = known.get(_origin(name, known))
        if change is not None and _is_in_place(change, known, parameters):
            total += _changed(change, shapes)
            in_place.add(change.name)
        else:
            total += size_of(shapes.get(name, ""))
        asked[name] = math.inf
    for line in reversed(others if several else lines):
        wanted = min(asked[line.name], count_of(line.shape))
        for place, name in enumerate(line.operands):
            if place or line.name not in in_place:
                asked[name] += _wanted_of(line, place, wanted)
    for name, shape in parameters.items():
        count = count_of(shape)
        total += size_of(shape) * min(asked[name], count) / max(count, 1)
    return total


def _wanted_of(line: Instruction, place: int, wanted: float) -> float:
    """Entries of an operand that ``wanted`` entries of the result need."""
    if not wanted:
        return 0.0
    takes = line.opcode == "gather" or line.opcode in _SLICES
    if line.opcode in _READS_ALL or (takes and place):
        return math.inf
    if line.opcode == "gather":
        # Of any place; the entries that are next to it come along.
        return wanted * _SECTOR * count_of(line.shape) / size_of(line.shape)
    return wanted


def _is_in_place(
    change: Instruction, known: Mapping[str, Instruction], parameters: Mapping[str, str]
) -> bool:
    """Whether it changes a part of what the launch was given."""
    # A scatter into several arrays has more operands.
    few = change.opcode != "scatter" or len(change.operands) == 3
    return change.opcode in _UPDATES and few and _origin(change.operands[0], known) in parameters


def _changed(change: Instruction, shapes: Mapping[str, str]) -> float:
    """Bytes read and written of what changes; the updates themselves are counted as read."""
    updates = shapes.get(change.operands[_UPDATES[change.opcode]], "")
    if change.opcode == "scatter":
        return 2.0 * min(_SECTOR * count_of(updates), size_of(change.shape))
    return size_of(updates)


def _origin(name: str, known: Mapping[str, Instruction]) -> str:
    """What ``name`` is another shape of."""
    while name in known and known[name].opcode in _RESHAPES:
        name = known[name].operands[0]
    return name

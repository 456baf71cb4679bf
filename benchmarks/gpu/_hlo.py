"""The text of an optimised XLA program, as computations of instructions.

Only what a count of kernels needs is read: names, shapes, operands, and the computations that an
instruction calls. Nothing here needs jax.
"""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_HEAD = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s+(?:\(.*\)\s*->.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_BITS = re.compile(r"[a-z]+(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_COMMENT = re.compile(r"/\*.*?\*/")
_ROW = re.compile(r"^(\d+) (.*)$")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: without the percent sign.
      shape: as text, a tuple in parentheses.
      opcode: such as ``fusion`` or ``all-reduce-start``.
      operands: the names of the operands.
      attributes: the rest of the line.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    def called(self, attribute: str) -> str:
        """The computation that an attribute such as ``body`` names.

        Raises:
          ValueError: there is no such attribute.
        """
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        if found is None:
            raise ValueError(f"{self.opcode} {self.name} has no {attribute}")
        return found[1]

    @property
    def trip_count(self) -> int | None:
        """The turns of a loop; None where only a run tells."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def branches(self) -> tuple[str, ...]:
        """The computations of a conditional."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if listed:
            return tuple(name.strip().lstrip("%") for name in listed[1].split(","))
        return self.called("true_computation"), self.called("false_computation")

    @property
    def target(self) -> str:
        """The library function of a custom call; empty for everything else."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def scope(self) -> str:
        """The names around the operation in the JAX program, without the operation's own."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1].rpartition("/")[0] if found else ""

    @property
    def frame(self) -> int:
        """The stack frame that made it; 0 where the text says nothing."""
        found = re.search(r"stack_frame_id=(\d+)", self.attributes)
        return int(found[1]) if found else 0


@dataclass(frozen=True)
class Program:
    """A module: its computations by name, the first one to run, and where operations come from.

    Attributes:
      computations: the instructions of each.
      entry: the name of the one that runs.
      sources: ``file.py:function`` by stack frame.
    """

    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    sources: dict[int, str] = field(default_factory=dict)


def parse(text: str) -> Program:
    """Reads ``compiled.as_text()``.

    Raises:
      ValueError: there is no entry computation in it.
    """
    computations: dict[str, list[Instruction]] = {}
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    current, entry, table = None, None, None
    for line in text.splitlines():
        if current is None:
            head = _HEAD.match(line)
            row = _ROW.match(line)
            if head:
                current, table = computations.setdefault(head[2], []), None
                entry = head[2] if head[1] else entry
            elif line.strip() in tables:
                table = tables[line.strip()]
            elif row and table is not None:
                table[int(row[1])] = row[2]
        elif line.startswith("}"):
            current = None
        else:
            made = _instruction(_COMMENT.sub("", line))
            if made:
                current.append(made)
    if entry is None:
        raise ValueError("the text has no ENTRY computation: it is not that of an XLA program")
    whole = {name: tuple(lines) for name, lines in computations.items()}
    return Program(whole, entry, dict(_sources(tables)))


@functools.cache
def size_of(shape: str) -> int:
    """The bytes of an array, or of all arrays of a tuple.

    Tokens and opaque values take none, and arrays of a few bits are packed.
    """
    total = 0
    for kind, dimensions in _ARRAY.findall(shape):
        count = math.prod(int(d) for d in dimensions.split(",") if d)
        bits = _BITS.match(kind)
        # pred[] is a byte; f8e4m3fn has its bits first, c64 all of them.
        total += -(-count * (8 if kind == "pred" else int(bits[1]) if bits else 0) // 8)
    return total


def count_of(shape: str) -> int:
    """The entries of an array, or of all arrays of a tuple."""
    found = (dimensions for _, dimensions in _ARRAY.findall(shape))
    return sum(math.prod(int(d) for d in dimensions.split(",") if d) for dimensions in found)


def longest(shape: str) -> int:
    """The largest dimension of an array, or of all arrays of a tuple; 1 of a scalar."""
    found = (dimensions.split(",") for _, dimensions in _ARRAY.findall(shape))
    return max((int(d) for dimensions in found for d in dimensions if d), default=1)


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if not match:
        return None
    name, rest = match[1], match[2]
    # A tuple has spaces in it, an array has none.
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if not opcode:
        return None
    close = _closing(rest, opcode.end() - 1)
    operands = tuple(_operands(rest[opcode.end() : close]))
    return Instruction(name, rest[:end], opcode[1], operands, rest[close + 1 :])


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at ``start`` is closed."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text)


def _operands(text: str) -> Iterator[str]:
    """The names in a list that may give a shape before each."""
    depth, start = 0, 0
    for position, character in enumerate(text + ","):
        depth += 1 if character in "([{" else -1 if character in ")]}" else 0
        if character == "," and depth == 0:
            words = text[start:position].split()
            start = position + 1
            if words:
                yield words[-1].lstrip("%")


def _sources(tables: dict[str, dict[int, str]]) -> Iterator[tuple[int, str]]:
    """``file.py:function`` of each stack frame."""
    files, functions, locations, frames = (tables[name] for name in _TABLES)

    def number(row: str, key: str) -> int:
        found = re.search(rf"\b{key}=(\d+)", row)
        return int(found[1]) if found else 0

    for frame, row in frames.items():
        location = locations.get(number(row, "file_location_id"), "")
        file = files.get(number(location, "file_name_id"), "").strip('"').rpartition("/")[2]
        function = functions.get(number(location, "function_name_id"), "").strip('"')
        if file:
            yield frame, f"{file}:{function.rpartition('.')[2]}"

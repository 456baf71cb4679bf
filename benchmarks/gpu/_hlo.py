"""The text of an optimised XLA program, as computations of instructions.

Only what a count of kernels needs is read: names, shapes, operands, and the computations that an
instruction calls. Nothing here needs jax.
"""

import functools
import math
import re
from dataclasses import dataclass

_HEAD = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s+(?:\(.*\)\s*->.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
# A shape may be before a name, which is what the next comma follows.
_OPERAND = re.compile(r"(?:^|(?<=[\s%]))([\w.\-]+)(?=\s*(?:,|$))")
_ARRAY = re.compile(r"\b([a-z]+(\d*)\w*)\[([\d,]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_ROW = re.compile(r"^(\d+) (.*)$")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation: names without the percent sign, the shape as text.

    ``attributes`` is the rest of the line.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    def text(self, attribute: str) -> str:
        """What stands in quotes: ``custom_call_target``, ``op_name``; empty where nothing does."""
        return self._find(rf'{attribute}="([^"]*)"')

    def called(self, attribute: str) -> str:
        """The computation that an attribute such as ``body`` names; else a ValueError."""
        found = self._find(rf"\b{attribute}=%?([\w.\-]+)")
        if not found:
            raise ValueError(f"{self.opcode} {self.name} has no {attribute}")
        return found

    @property
    def reached(self) -> list[str]:
        """The computations of a loop, a conditional or a call."""
        if self.opcode == "conditional":
            listed = self._find(r"branch_computations=\{([^}]*)\}")
            if listed:
                return [name.strip().lstrip("%") for name in listed.split(",")]
            return [self.called("true_computation"), self.called("false_computation")]
        attribute = {"while": "body", "call": "to_apply"}.get(self.opcode)
        return [self.called(attribute)] if attribute else []

    @property
    def trip_count(self) -> int | None:
        """The turns of a loop; None where only a run tells."""
        found = self._find(r'"known_trip_count":\{"n":"(\d+)"')
        return int(found) if found else None

    @property
    def frame(self) -> int:
        """The stack frame that made it; 0 where the text says nothing."""
        return _number(self.attributes, "stack_frame_id")

    def _find(self, pattern: str) -> str:
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""


@dataclass(frozen=True, eq=False)
class Program:
    """A module: instructions by computation and name, and ``file.py:function`` by stack frame."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    sources: dict[int, str]


def parse(text: str) -> Program:
    """Reads ``compiled.as_text()``; a ValueError where no computation is the entry."""
    computations: dict[str, dict[str, Instruction]] = {}
    tables: dict[str, dict[int, str]] = {name: {} for name in _TABLES}
    current, entry, table = None, None, None
    for line in text.splitlines():
        if current is not None:
            if made := _instruction(_COMMENT.sub("", line)):
                current[made.name] = made
            elif line.startswith("}"):
                current = None
        elif head := _HEAD.match(line):
            current, table = computations.setdefault(head[2], {}), None
            entry = head[2] if head[1] else entry
        elif line.strip() in tables:
            table = tables[line.strip()]
        elif table is not None and (row := _ROW.match(line)):
            table[int(row[1])] = row[2]
    if entry is None:
        raise ValueError("the text has no ENTRY computation: it is not that of an XLA program")
    return Program(computations, entry, _sources(*tables.values()))


@functools.cache
def _arrays(shape: str) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The bits of an entry, and the dimensions, of an array or of all arrays of a tuple.

    pred[] is a byte; f8e4m3fn has its bits first, c64 all of them. Tokens and opaque values have
    none.
    """
    return tuple(
        (8 if kind == "pred" else int(bits or 0), tuple(int(d) for d in dims.split(",") if d))
        for kind, bits, dims in _ARRAY.findall(shape)
    )


@functools.cache
def size_of(shape: str) -> int:
    """The bytes of all arrays of a shape; those of a few bits are packed."""
    return sum(-(-math.prod(dimensions) * bits // 8) for bits, dimensions in _arrays(shape))


def count_of(shape: str) -> int:
    """The entries of all arrays."""
    return sum(math.prod(dimensions) for _, dimensions in _arrays(shape))


def longest(shape: str) -> int:
    """The largest dimension; 1 of a scalar."""
    return max((d for _, dimensions in _arrays(shape) for d in dimensions), default=1)


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
    operands = tuple(_OPERAND.findall(rest[opcode.end() : close]))
    return Instruction(name, rest[:end], opcode[1], operands, rest[close + 1 :])


def _closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at ``start`` is closed."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text)


def _number(text: str, key: str) -> int:
    found = re.search(rf"\b{key}=(\d+)", text)
    return int(found[1]) if found else 0


def _sources(
    files: dict[int, str], functions: dict[int, str], places: dict[int, str], frames: dict[int, str]
) -> dict[int, str]:
    found = {}
    for frame, row in frames.items():
        place = places.get(_number(row, "file_location_id"), "")
        file = files.get(_number(place, "file_name_id"), "").strip('"')
        function = functions.get(_number(place, "function_name_id"), "").strip('"')
        if file:
            found[frame] = f"{file.rpartition('/')[2]}:{function.rpartition('.')[2]}"
    return found

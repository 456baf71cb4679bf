"""The text of an optimized XLA program, as computations of instructions.

It parses only what a count of kernels needs: names, shapes, operands, and the computations that an
instruction calls. Nothing here needs jax.
"""

import functools
import math
import re
from dataclasses import dataclass

_HEAD = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s+(?:\(.*\)\s*->.*)?\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT\s+)?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
# A shape may precede a name, which is followed by the next comma.
_OPERAND = re.compile(r"(?:^|(?<=[\s%]))([\w.\-]+)(?=\s*(?:,|$))")
_ARRAY = re.compile(r"\b([a-z]+(\d*)\w*)\[([\d,]*)\]")
_COMMENT = re.compile(r"/\*.*?\*/")
_ROW = re.compile(r"^(\d+) (.*)$")


def _find(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


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
        """A quoted attribute such as ``custom_call_target`` or ``op_name``; empty if missing."""
        return _find(rf'{attribute}="([^"]*)"', self.attributes)

    def called(self, attribute: str) -> str:
        """The computation that an attribute such as ``body`` names; otherwise a ValueError."""
        found = _find(rf"\b{attribute}=%?([\w.\-]+)", self.attributes)
        if not found:
            raise ValueError(f"{self.opcode} {self.name} has no {attribute}")
        return found

    @property
    def reached(self) -> list[str]:
        """The computations of a loop, a conditional or a call."""
        if listed := _find(r"branch_computations=\{([^}]*)\}", self.attributes):
            return [name.strip().lstrip("%") for name in listed.split(",")]
        both = ("true_computation", "false_computation")
        names = {"while": ("body",), "call": ("to_apply",), "conditional": both}
        return [self.called(attribute) for attribute in names.get(self.opcode, ())]

    @property
    def trip_count(self) -> int | None:
        """The turns of a loop; None if they are known only at run time."""
        found = _find(r'"known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(found) if found else None

    @property
    def frame(self) -> str:
        """The number of the stack frame that made it; empty if the text has none."""
        return _find(r"\bstack_frame_id=(\d+)", self.attributes)


@dataclass(frozen=True, eq=False)
class Program:
    """A module: instructions by computation and name, and ``file.py:function`` by stack frame."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    sources: dict[str, str]


def parse(text: str) -> Program:
    """Reads ``compiled.as_text()``; a ValueError if no computation is the entry."""
    computations: dict[str, dict[str, Instruction]] = {}
    names = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
    tables: dict[str, dict[str, str]] = {name: {} for name in names}
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
            table[row[1]] = row[2]
    if entry is None:
        raise ValueError("the text has no ENTRY computation: it is not that of an XLA program")
    return Program(computations, entry, _sources(*tables.values()))


@functools.cache
def _arrays(shape: str) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The bits of an entry, and the dimensions, of an array or of all arrays of a tuple.

    pred[] is a byte; f8e4m3fn has its bits first, c64 has all of them. Tokens and opaque values
    have none.
    """
    return tuple(
        (8 if kind == "pred" else int(bits or 0), tuple(int(d) for d in dims.split(",") if d))
        for kind, bits, dims in _ARRAY.findall(shape)
    )


@functools.cache
def size_of(shape: str) -> int:
    """The bytes of all arrays of a shape; arrays with entries of a few bits are packed."""
    return sum(-(-math.prod(dimensions) * bits // 8) for bits, dimensions in _arrays(shape))


def count_of(shape: str) -> int:
    """The entries of all arrays."""
    return sum(math.prod(dimensions) for _, dimensions in _arrays(shape))


def longest(shape: str) -> int:
    """The largest dimension, which is 1 for a scalar."""
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
    """The position of the parenthesis that closes the one at ``start``."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text)


def _sources(*tables: dict[str, str]) -> dict[str, str]:
    files, functions, places, frames = tables
    found = {}
    for frame, row in frames.items():
        place = places.get(_find(r"\bfile_location_id=(\d+)", row), "")
        file = files.get(_find(r"\bfile_name_id=(\d+)", place), "").strip('"')
        function = functions.get(_find(r"\bfunction_name_id=(\d+)", place), "").strip('"')
        if file:
            found[frame] = f"{file.rpartition('/')[2]}:{function.rpartition('.')[2]}"
    return found

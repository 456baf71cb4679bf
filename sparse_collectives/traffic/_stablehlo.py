"""A lowered program (StableHLO) as a tree of its collectives.

Only what decides how often a collective runs is kept: calls, conditionals and
loops, each with the `jax.named_scope` names around it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from sparse_collectives import _volumes

# Scopes. A location's name is a path: the named scopes and the control flow
# around an operation, then its primitive. In a called function the path starts
# at the function.

_STRUCTURE = re.compile(
    r"cond|branch_\d+_fun|while|body|scan|closed_call|core_call|shard_map|pmap"
    r"|xla_pmap|checkpoint|remat2?|rematted_computation|custom_(jvp|vjp)_call"
    r"|(jit|pjit|pmap)\(.*\)|"
)
_TRANSFORM = re.compile(r"(?:jvp|transpose|vmap|checkpoint|remat)\((.*)\)")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"(:\d)?')  # a line number follows a file's name

Scope = tuple[str, ...]


def scope_of(op) -> Scope:
    """The named scopes around `op`, from its function's start."""
    names = [name for name, line in _QUOTED.findall(str(op.location)) if not line]
    if getattr(jax.config, "jax_include_full_tracebacks_in_locations", True):
        names = names[:1]  # the path; the others are functions of the traceback
    # Without tracebacks the path is in parts, the innermost first.
    path = "/".join(reversed(names))
    scope = []
    for name in path.split("/")[:-1]:
        while match := _TRANSFORM.fullmatch(name):
            name = match.group(1)
        if not _STRUCTURE.fullmatch(name):
            scope.append(name)
    return tuple(scope)


def inside_out(scope: Scope, outer: Scope) -> Iterator[Scope]:
    """The paths to each name of `scope` that `outer` doesn't share, innermost first."""
    shared = 0
    while shared < min(len(scope), len(outer)) and scope[shared] == outer[shared]:
        shared += 1
    for end in range(len(scope), shared, -1):
        yield scope[:end]


def ending(path: Scope, names: Iterable[str]) -> list[str]:
    """Those of `names`, of one component or several, with which `path` ends; longest first."""
    ending = [name for name in names if f"/{'/'.join(path)}".endswith(f"/{name}")]
    return sorted(ending, key=len, reverse=True)


# The program as a tree of what matters here. Scopes are relative to the
# function, because a function may be called from several scopes.


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    scope: Scope
    kind: str
    words: float
    group_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    scope: Scope
    nodes: list


@dataclasses.dataclass(frozen=True, slots=True)
class Branches:
    scope: Scope
    branches: list[list]


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    scope: Scope
    trips: int | None
    condition: list
    body: list


_BY_GROUPS = {
    "stablehlo.all_reduce": ("all_reduce", _volumes.all_reduce),
    "stablehlo.all_gather": ("all_gather", _volumes.all_gather),
    "stablehlo.all_to_all": ("all_to_all", _volumes.all_to_all),
    "stablehlo.reduce_scatter": ("reduce_scatter", _volumes.reduce_scatter),
    "stablehlo.collective_broadcast": ("collective_broadcast", _volumes.broadcast),
}
_CALLEE = {
    "func.call": "callee",
    "stablehlo.composite": "decomposition",
}


class Reader:
    """Turns a StableHLO module into the tree."""

    def __init__(self, module):
        self._functions: dict[str, Any] = {}
        self._meshes: dict[str, int] = {}
        self._read_functions: dict[tuple[str, int], list] = {}
        attributes = module.operation.attributes
        self._workers = 1
        for name in ("mhlo.num_partitions", "mhlo.num_replicas"):
            if name in attributes:
                self._workers *= int(attributes[name].value)
        for op in module.body.operations:
            op = op.operation
            if op.name == "func.func":
                self._functions[op.attributes["sym_name"].value] = op
            elif op.name == "sdy.mesh":
                sizes = re.findall(r'"=(\d+)', str(op.attributes["mesh"]))
                name = op.attributes["sym_name"].value
                self._meshes[name] = math.prod(map(int, sizes))

    def read(self) -> list:
        return self._function("main", self._workers)

    def _function(self, name: str, workers: int) -> list:
        key = (name, workers)
        if key not in self._read_functions:
            region = self._functions[name].regions[0]
            self._read_functions[key] = self._region(region, workers)
        return self._read_functions[key]

    def _region(self, region, workers: int) -> list:
        nodes = []
        for block in region.blocks:
            for op in block.operations:
                self._operation(op.operation, workers, nodes)
        return nodes

    def _operation(self, op, workers: int, nodes: list) -> None:
        name = op.name
        if name in _BY_GROUPS:
            nodes.append(_grouped(op, workers))
        elif name == "stablehlo.collective_permute":
            nodes.append(_permuted(op, workers))
        elif name in _CALLEE:
            callee = op.attributes[_CALLEE[name]].value
            nodes.append(Call(scope_of(op), self._function(callee, workers)))
        elif name in ("stablehlo.case", "stablehlo.if"):
            regions = [self._region(region, workers) for region in op.regions]
            if name == "stablehlo.if":
                regions.reverse()  # its true branch comes first
            nodes.append(Branches(scope_of(op), regions))
        elif name == "stablehlo.while":
            condition, body = (self._region(r, workers) for r in op.regions)
            nodes.append(Loop(scope_of(op), _trip_count(op), condition, body))
        elif name == "sdy.manual_computation":
            inner = self._region(op.regions[0], self._mesh_size(op, workers))
            nodes.append(Call(scope_of(op), inner))
        elif name == "stablehlo.custom_call":
            target = op.attributes["call_target_name"].value
            if "ragged_all_to_all" in target:
                raise ValueError(
                    f"the program holds a {target} in scope {shown(scope_of(op))}, whose"
                    " volume depends on data; measure a program with `all_to_all`."
                )
            if target.startswith("mpi_"):
                raise ValueError(
                    f"the program holds a {target} in scope {shown(scope_of(op))}: an exchange over"
                    " MPI, whose size this can't read; measure the same program over the axis of a"
                    " mesh, where as many words are received."
                )
        else:
            for region in op.regions:
                nodes.extend(self._region(region, workers))

    def _mesh_size(self, op, workers: int) -> int:
        shardings = f"{op.attributes['in_shardings']}{op.attributes['out_shardings']}"
        named = [
            self._meshes[name]
            for name in re.findall(r'@"?(\w+)', shardings)
            if name in self._meshes
        ]
        return max(named, default=max(self._meshes.values(), default=workers))


def _words_of(op) -> float:
    """Words of all operands; i1 and narrower integers take a byte each."""
    total = 0
    for operand in op.operands:
        # 'f32', 'ui8', 'bf16', 'f8E4M3FN', 'complex<f32>'
        element = str(operand.type.element_type)
        bits = int(re.findall(r"\d+", element)[0])
        bits *= 2 if element.startswith("complex") else 1
        total += math.prod(operand.type.shape) * max(1, math.ceil(bits / 8))
    return total / 4


def _grouped(op, workers: int) -> Collective:
    kind, volume = _BY_GROUPS[op.name]
    words = _words_of(op)
    try:
        groups = np.asarray(op.attributes["replica_groups"])
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"cannot read the groups of {op.name}: {op.attributes['replica_groups']}"
        ) from error
    if groups.size == 0:
        sizes = np.array([workers])
    else:
        sizes = (groups.reshape(len(groups), -1) >= 0).sum(axis=1)  # -1 pads
    # With groups of several sizes: the mean over workers.
    distinct, counts = np.unique(sizes, return_counts=True)
    received = sum(
        volume(words, int(size)) * int(size * count)
        for size, count in zip(distinct, counts, strict=True)
    )
    received /= int((distinct * counts).sum())
    return Collective(scope_of(op), kind, float(received), int(distinct.max()))


def _permuted(op, workers: int) -> Collective:
    pairs = np.asarray(op.attributes["source_target_pairs"]).reshape(-1, 2)
    workers = max(workers, int(pairs.max(initial=0)) + 1)
    received = _volumes.ppermute(_words_of(op), workers, pairs.tolist())
    return Collective(scope_of(op), "collective_permute", received, workers)


# Trip counts of `fori_loop`, `scan` and counting `while_loop`s.


def _constant(value) -> int | None:
    owner = value.owner
    if getattr(owner, "name", None) != "stablehlo.constant":
        return None
    if not re.fullmatch(r"u?i\d+", str(value.type.element_type)) or value.type.shape:
        return None
    return int(np.asarray(owner.attributes["value"]).reshape(()))


def _defined_by(value, name: str):
    """The operation `name` that computes `value`, else None."""
    owner = value.owner
    return owner if getattr(owner, "name", None) == name else None


def _trip_count(loop) -> int | None:
    """Iterations of a loop from a constant to a constant by a constant step."""
    loop_condition, loop_body = (region.blocks[0] for region in loop.regions)
    returned = list(loop_body.operations)[-1].operation.operands

    def position(value, block) -> int | None:
        for i, argument in enumerate(block.arguments):
            if argument == value:
                return i
        return None

    def carried_constant(value) -> int | None:
        """A constant, or one that the loop carries and does not change."""
        i = position(value, loop_condition)
        if i is None:
            return _constant(value)
        if returned[i] != loop_body.arguments[i]:
            return None
        return _constant(loop.operands[i])

    test = list(loop_condition.operations)[-1].operation.operands[0]
    compare = _defined_by(test, "stablehlo.compare")
    if compare is None:
        return None
    direction = re.search(r"\b(LT|LE)\b", str(compare.attributes["comparison_direction"]))
    counter = position(compare.operands[0], loop_condition)
    if direction is None or counter is None:
        return None
    increment = _defined_by(returned[counter], "stablehlo.add")
    if increment is None or increment.operands[0] != loop_body.arguments[counter]:
        return None
    step = _constant(increment.operands[1])
    start = _constant(loop.operands[counter])
    stop = carried_constant(compare.operands[1])
    if step is None or start is None or stop is None or step < 1:
        return None
    stop += direction.group() == "LE"
    return max(0, -(-(stop - start) // step))


def shown(scope: Scope) -> str:
    return repr("/".join(scope)) if scope else "'' (no jax.named_scope around it)"

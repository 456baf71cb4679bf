"""The collectives of a compiled program, and the axes of the mesh that each of them is over."""

import re
from typing import NamedTuple

import numpy as np

from tests.optax_ext import shards

_KINDS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
_CALL = re.compile(rf"= (.*?) ({_KINDS})(?:-start)?\(.*")
# Numbers of devices: 0,1,2 or [2,4] or [2,4]T(1,0), a range in that shape, transposed.
_RANGE = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? *\{(.*?)\}")


class Collective(NamedTuple):
    """One of a program.

    Attributes:
      kind: as XLA writes it.
      axes: along which the devices that speak with each other differ, in the order of the mesh.
      entries: of the largest of its results.
    """

    kind: str
    axes: tuple[str, ...]
    entries: int


def of_program(text, mesh):
    """All of them, in the order of the text; the devices of ``mesh`` are numbered in its order."""
    assert [d.id for d in mesh.devices.flat] == list(range(mesh.size))
    found = []
    for match in _CALL.finditer(text):
        result, kind = match.groups()
        differ = np.zeros(len(mesh.axis_names), bool)
        for group in _groups(match[0], mesh.size):
            places = np.stack(np.unravel_index(group, mesh.devices.shape))
            differ |= (places != places[:, :1]).any(axis=1)
        axes = tuple(name for name, d in zip(mesh.axis_names, differ, strict=True) if d)
        entries = max(int(np.prod(shape)) for shape in shards.shapes_in(result))
        found.append(Collective(kind, axes, entries))
    return found


def _groups(line, devices):
    """Of each group the numbers of its devices, in the four ways in which XLA writes them."""
    if (pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line)) is not None:
        return _listed(pairs[1])
    if (shaped := re.search(r"replica_groups=\[([\d,]+)\]<=(\S+)", line)) is not None:
        return _numbers(shaped[2], devices).reshape(_integers(shaped[1]))
    if (named := _MESH.search(line)) is not None:
        # A mesh of XLA's own, and those of its axes that a group is over.
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        ids = _numbers(named[2], devices).reshape(list(sizes.values()))
        over = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", named[3])]
        length = np.prod([ids.shape[i] for i in over])
        return np.moveaxis(ids, over, range(len(over))).reshape(length, -1).T
    listed = re.search(r"replica_groups=\{(.*?)\}\}", line)
    assert listed is not None, line
    return _listed(listed[1])


def _numbers(text, devices):
    if text is None:
        return np.arange(devices)
    if (found := _RANGE.match(text)) is None:
        return np.array(_integers(text))
    ids = np.arange(devices).reshape(_integers(found[1]))
    return ids.transpose(_integers(found[2]) if found[2] else None)


def _listed(text):
    return [_integers(group.strip("{} ,")) for group in text.split("},")]


def _integers(text):
    return [int(x) for x in text.split(",")]

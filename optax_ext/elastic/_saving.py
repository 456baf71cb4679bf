"""Checkpoints of workers that come and go: each writes its own part, during the next steps.

This does not use orbax: if several processes each write alone, orbax writes the NumPy arrays of
process 0 only (``NumpyHandler``, orbax-checkpoint 0.12.8), and restores zeros for the others.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_ext._state._placement import is_spec, state_specs


class Saved(NamedTuple):
    """The part of a checkpoint that a worker takes.

    Attributes:
      size: how many workers wrote it.
      params: the parameters.
      opt_state: the state of the old workers whose parts this one takes; None if there are
        fewer old workers than new ones, and this one takes none.
    """

    size: int
    params: Any
    opt_state: Any


class Saves:
    """The checkpoints in a folder, ``700/0-1-3/3`` for the part of process 3 of three at step 700.

    The part of the first member also has the shared values. A checkpoint is whole when the parts of
    all its members are there; steps that are older than the newest whole one are removed.
    """

    def __init__(self, folder: str | Path | None, every: int | None, process_id: int):
        self._every = every
        self._process_id = process_id
        self._folder = None
        if folder is None:
            return
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"save_every must be a whole number of at least 1, got {every!r}.")
        self._folder = Path(folder).absolute()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: concurrent.futures.Future[None] | None = None

    def are_kept(self) -> bool:
        """Whether there is a folder."""
        return self._folder is not None

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this step."""
        return self._folder is not None and step % (self._every or 1) == 0

    def save(self, step: int, members: tuple[int, ...], params: Any, opt_state: Any) -> None:
        """Begins to write the part of this process, which goes on during the next steps.

        The arrays may not change until it is written.
        """
        own, shared = _split(state_specs(opt_state), opt_state)
        tree = {"own": own}
        if members[0] == self._process_id:
            tree |= {"shared": shared, "params": _listed(jax.tree.map(np.asarray, params))}
        self.wait()
        place = self._part(step, members, self._process_id)
        self._writing = self._pool.submit(self._write, step, place, tree)

    def wait(self) -> None:
        """Waits until the part under way is written; raises its error, if it has one."""
        if self._folder is not None and self._writing is not None:
            self._writing.result()
            self._writing = None

    def newest(self) -> int:
        """The step of the newest whole checkpoint; -1 if there is none."""
        if self._folder is None:
            return -1
        steps = sorted(int(x.name) for x in self._folder.iterdir() if x.name.isdigit())
        return next((step for step in reversed(steps) if self._members(step)), -1)

    def load(
        self, step: int, rank: int, size: int, params: Any, state_of: Callable[[int, Any], Any]
    ) -> Saved:
        """The part of a checkpoint that worker ``rank`` of ``size`` takes.

        Args:
          step: the step of the checkpoint, which is whole.
          rank: the number of the new worker.
          size: how many new ones there are: this one takes the parts ``rank``, ``rank + size``, ...
          params: parameters, or their shapes.
          state_of: the shapes of the state of so many workers.
        """
        members = self._members(step)
        shapes = state_of(len(members), params)
        specs = state_specs(shapes)
        own, shared = _split(specs, shapes, rows=len(members))
        first = {"own": own, "shared": shared, "params": _listed(params)}
        found = self._read(step, members, members[0], first)
        parts = [
            found["own"] if x == members[0] else self._read(step, members, x, {"own": own})["own"]
            for x in members[rank::size]
        ]
        restored = jax.tree.unflatten(jax.tree.structure(params), _values(found["params"]))
        if not parts:
            return Saved(len(members), restored, None)
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return Saved(len(members), restored, _merged(specs, shapes, joined, found["shared"]))

    def _write(self, step: int, place: Path, tree: Any) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        new = place.with_name(f"{place.name}.{os.getpid()}")
        with new.open("wb") as file:
            np.savez(file, **_bytes(tree))
            file.flush()
            os.fsync(file.fileno())
        # The whole file is there or nothing is, whenever this process dies.
        new.replace(place)
        newest = self.newest()
        for old in self._folder.iterdir() if self._folder else ():
            if old.name.isdigit() and int(old.name) < min(newest, step):
                shutil.rmtree(old, ignore_errors=True)

    def _read(self, step: int, members: tuple[int, ...], process: int, like: Any) -> Any:
        place = self._part(step, members, process)
        try:
            # The zip file has a checksum for each array.
            with place.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return _arrays(arrays, like)
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(
                f"the checkpoint {place} can't be read ({error}). Remove the folder of its step, "
                "and the one before it is used."
            ) from error

    def _members(self, step: int) -> tuple[int, ...]:
        """The members of a whole checkpoint of this step; none if there is none."""
        assert self._folder is not None
        whole = []
        # Another process may be removing an old step.
        with contextlib.suppress(FileNotFoundError):
            for group in (self._folder / str(step)).iterdir():
                members = tuple(int(x) for x in group.name.split("-") if x.isdigit())
                parts = [group / str(process) for process in members]
                if members and all(part.is_file() for part in parts):
                    whole.append((max(part.stat().st_mtime_ns for part in parts), members))
        # A step that was taken again may be there twice: the newest counts.
        return max(whole, default=(0, ()))[1]

    def _part(self, step: int, members: tuple[int, ...], process: int) -> Path:
        assert self._folder is not None
        return self._folder / str(step) / "-".join(map(str, members)) / str(process)


def _bytes(tree: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
    """Arrays by name as bytes, since NumPy's format does not have all types of jax."""
    return {
        f"{group}/{name}": np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8)
        for group, arrays in tree.items()
        for name, x in arrays.items()
    }


def _arrays(file: Any, like: dict[str, dict[str, Any]]) -> dict[str, dict[str, np.ndarray]]:
    """The inverse of :func:`_bytes`, in the types and shapes of ``like``."""
    return {
        group: {
            name: np.frombuffer(file[f"{group}/{name}"].tobytes(), x.dtype).reshape(x.shape)
            for name, x in arrays.items()
        }
        for group, arrays in like.items()
    }


def _listed(tree: Any) -> dict[str, Any]:
    return {str(i): x for i, x in enumerate(jax.tree.leaves(tree))}


def _values(listed: dict[str, Any]) -> list[Any]:
    return [listed[str(i)] for i in range(len(listed))]


def _split(specs: Any, tree: Any, rows: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays of one worker, by their number, and the arrays that all share.

    For shapes with several ``rows`` it gives the shapes of one row.
    """
    flat = list(zip(jax.tree.leaves(specs, is_leaf=is_spec), jax.tree.leaves(tree), strict=True))

    def one(x: Any) -> Any:
        if rows == 1:
            return np.asarray(x) if isinstance(x, jax.Array) else x
        return jax.ShapeDtypeStruct((x.shape[0] // rows, *x.shape[1:]), x.dtype)

    own = {str(i): one(x) for i, (spec, x) in enumerate(flat) if len(spec)}
    shared = {str(i): x for i, (spec, x) in enumerate(flat) if not len(spec)}
    return own, {
        name: np.asarray(x) if isinstance(x, jax.Array) else x for name, x in shared.items()
    }


def _merged(specs: Any, shapes: Any, own: dict[str, Any], shared: dict[str, Any]) -> Any:
    """The inverse of :func:`_split`."""
    count = len(jax.tree.leaves(specs, is_leaf=is_spec))
    leaves = [own[str(i)] if str(i) in own else shared[str(i)] for i in range(count)]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

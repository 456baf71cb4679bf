"""Checkpoints of workers that come and go: each writes its own part, during the next steps.

This does not use orbax: if several processes each write alone, orbax writes the NumPy arrays of
process 0 only (``NumpyHandler``, orbax-checkpoint 0.12.8), and restores zeros for the others.
"""

import concurrent.futures
import contextlib
import os
import shutil
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from optax_ext._state._specs import is_spec, state_specs
from optax_ext.elastic._job import check_counts


class Checkpoints:
    """The checkpoints in a folder, ``700/0-1-3/3`` for the part of process 3 of three at step 700.

    The part of the first member also has the shared values. A checkpoint is whole when the parts of
    all its members are there; steps that are older than the newest whole one are removed.
    """

    def __init__(self, folder: str | Path | None, every: int | None, process_id: int):
        self._every = every
        self._process_id = process_id
        # None: no checkpoints are kept.
        self.folder = None if folder is None else Path(folder).absolute()
        self._writing: concurrent.futures.Future[None] | None = None
        if self.folder is not None:
            check_counts(save_every=every)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this step."""
        return self.folder is not None and step % (self._every or 1) == 0

    def save(self, step: int, members: tuple[int, ...], params: Any, opt_state: Any) -> None:
        """Begins to write the part of this process, which goes on during the next steps.

        The arrays may not change until it is written.
        """
        whole = _named(opt_state, params)
        if members[0] != self._process_id:
            whole = {name: x for name, x in whole.items() if name.startswith("own/")}
        part = {name: np.asarray(x) for name, x in whole.items()}
        self.wait()
        place = self._part(step, members, self._process_id)
        self._writing = self._pool.submit(self._write, step, place, part)

    def wait(self) -> None:
        """Waits until the part under way is written; raises its error, if it has one."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def newest(self) -> int:
        """The step of the newest whole checkpoint; -1 if there is none."""
        steps = (int(x.name) for x in self._steps())
        return next((step for step in sorted(steps, reverse=True) if self._members(step)), -1)

    def load(
        self, step: int, rank: int, size: int, params: Any, state_of: Callable[[int, Any], Any]
    ) -> tuple[int, Any, Any]:
        """The part of a whole checkpoint that worker ``rank`` of ``size`` takes.

        It takes the parts ``rank``, ``rank + size``, ... of the old workers. Arrays have the shapes
        of ``params``, and of ``state_of(workers, params)`` for so many workers.

        Returns:
          The number of workers that wrote it, the parameters, and the state of the old workers
          whose parts this one takes: None if there are too few for it to take one.
        """
        members = self._members(step)
        shapes = state_of(len(members), params)
        whole = _named(shapes, params, rows=len(members))
        own = {name: x for name, x in whole.items() if name.startswith("own/")}
        first = self._read(step, members, members[0], whole)
        parts = [
            first if process == members[0] else self._read(step, members, process, own)
            for process in members[rank::size]
        ]
        if parts:
            first |= {name: np.concatenate([part[name] for part in parts]) for name in own}
        leaves, count = [*first.values()], len(jax.tree.leaves(shapes))
        state = jax.tree.unflatten(jax.tree.structure(shapes), leaves[:count])
        restored = jax.tree.unflatten(jax.tree.structure(params), leaves[count:])
        return len(members), restored, state if parts else None

    def _steps(self) -> list[Path]:
        found = self.folder.iterdir() if self.folder else ()
        return [x for x in found if x.name.isdigit()]

    def _write(self, step: int, place: Path, part: dict[str, np.ndarray]) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        new = place.with_name(f"{place.name}.{os.getpid()}")
        with new.open("wb") as file:
            # As bytes, since NumPy's format does not have all types of jax.
            np.savez(file, **{x: np.frombuffer(y.tobytes(), np.uint8) for x, y in part.items()})
            file.flush()
            os.fsync(file.fileno())
        # The whole file is there or nothing is, whenever this process dies.
        new.replace(place)
        newest = self.newest()
        for old in self._steps():
            if int(old.name) < min(newest, step):
                shutil.rmtree(old, ignore_errors=True)

    def _read(
        self, step: int, members: tuple[int, ...], process: int, like: dict[str, Any]
    ) -> dict[str, np.ndarray]:
        place = self._part(step, members, process)
        try:
            # The zip file has a checksum for each array.
            with place.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                return {
                    name: np.frombuffer(arrays[name].tobytes(), x.dtype).reshape(x.shape)
                    for name, x in like.items()
                }
        except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(
                f"the checkpoint {place} can't be read ({error}). Remove the folder of its step, "
                "and the one before it is used."
            ) from error

    def _members(self, step: int) -> tuple[int, ...]:
        """The members of a whole checkpoint of this step; none if there is none."""
        assert self.folder is not None
        whole = []
        # Another process may be removing an old step.
        with contextlib.suppress(FileNotFoundError):
            for group in (self.folder / str(step)).iterdir():
                members = tuple(int(x) for x in group.name.split("-") if x.isdigit())
                parts = [group / str(process) for process in members]
                if members and all(part.is_file() for part in parts):
                    whole.append((max(part.stat().st_mtime_ns for part in parts), members))
        # A step that was taken again may be there twice: the newest counts.
        return max(whole, default=(0, ()))[1]

    def _part(self, step: int, members: tuple[int, ...], process: int) -> Path:
        assert self.folder is not None
        return self.folder / str(step) / "-".join(map(str, members)) / str(process)


def _named(opt_state: Any, params: Any, rows: int = 1) -> dict[str, Any]:
    """The arrays of a state, and then of its parameters, by their names in a part.

    Arrays of ``own/`` belong to one worker, and all parts have them; the part of the first member
    also has the others. For shapes with several ``rows`` it gives the shapes of one row.
    """
    specs = jax.tree.leaves(state_specs(opt_state), is_leaf=is_spec)
    named = {}
    for number, (spec, x) in enumerate(zip(specs, jax.tree.leaves(opt_state), strict=True)):
        if len(spec) and rows > 1:
            x = jax.ShapeDtypeStruct((x.shape[0] // rows, *x.shape[1:]), x.dtype)
        named[f"{'own' if len(spec) else 'shared'}/{number}"] = x
    return named | {f"params/{number}": x for number, x in enumerate(jax.tree.leaves(params))}

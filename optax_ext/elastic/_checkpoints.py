"""Checkpoints of workers that come and go: each writes its own part, during the next steps.

This does not use orbax: if several processes each write alone, orbax writes the NumPy arrays of
process 0 only (``NumpyHandler``, orbax-checkpoint 0.12.8), and restores zeros for the others.
"""

import concurrent.futures
import contextlib
import functools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext._state._checkpoint import checkpoint_metadata
from optax_ext._state._specs import state_specs
from optax_ext.elastic import _files
from optax_ext.elastic._arguments import check_counts
from optax_ext.elastic._waiting import log
from sparse_collectives import _validation

# The folder of a step, and in it one for the processes and the mark of a meeting.
_STEP, _GROUP = re.compile("[1-9][0-9]*"), re.compile("([0-9]+(?:-[0-9]+)*)([.].*)?")


class Checkpoints:
    """The checkpoints in a folder, ``700/0-1-3.5ad0/3`` for the part of process 3 at step 700.

    The members 0, 1 and 3 of a meeting write it, and ``5ad0`` is the mark of the meeting: parts of
    two lives of a job never make one checkpoint. The part of the first member also has the shared
    values. A checkpoint is whole when the parts of all its members are there; steps that are older
    than the newest whole one are removed.

    A part is a line of JSON, which says whose part it is and of which model and optimizer, the
    bytes of its arrays, and a checksum of all.
    """

    def __init__(
        self, folder: str | Path | None, every: int | None, process_id: int, params: Any,
        state_of: Callable[[int, Any], Any],
    ):  # fmt: skip
        """Arrays have the shapes of ``params``, and of ``state_of(workers, params)``."""
        self._every = every
        self._process_id = process_id
        self._params = params
        self._shapes = functools.cache(lambda size: state_of(size, params))
        self._description = functools.cache(lambda size: description(params, self._shapes(size)))
        # None: no checkpoints are kept.
        self.folder = None if folder is None else Path(folder).absolute()
        self._writing: concurrent.futures.Future[OSError | None] | None = None
        if self.folder is not None:
            check_counts(save_every=every)
            # Here it is an error if an optimizer can't be described, and not after some steps.
            self._description(1)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is to be written after this step."""
        return self.folder is not None and step % (self._every or 1) == 0

    def save(
        self, step: int, members: tuple[int, ...], mark: str, params: Any, opt_state: Any
    ) -> None:
        """Begins to write the part of this process, which goes on during the next steps.

        The arrays may not change until it is written.
        """
        assert self.folder is not None
        whole = _named(opt_state, params)
        if members[0] != self._process_id:
            whole = {name: x for name, x in whole.items() if name.startswith("own/")}
        part = [np.asarray(x) for x in whole.values()]
        self.wait()
        group = self.folder / str(step) / f"{'-'.join(map(str, members))}.{mark}"
        place = group / str(self._process_id)
        self._writing = self._pool.submit(self._write, step, place, self._header(place), part)

    def wait(self) -> OSError | None:
        """Waits until the part under way is written; the error if it could not be."""
        writing, self._writing = self._writing, None
        return writing.result() if writing is not None else None

    def newest(self) -> int:
        """The step of the newest whole checkpoint; -1 if there is none."""
        steps = sorted((int(x.name) for x in self._steps()), reverse=True)
        return next((step for step in steps if self._whole(step)), -1)

    def load(self, step: int, rank: int, size: int) -> tuple[int, Any, Any]:
        """The part of a whole checkpoint that worker ``rank`` of ``size`` takes.

        It takes the parts ``rank``, ``rank + size``, ... of the old workers.

        Returns:
          The number of workers that wrote it, the parameters, and the state of the old workers
          whose parts this one takes: None if there are too few for it to take one.

        Raises:
          ValueError: a part is damaged, or of another model or optimizer.
          ValueError: this process sees no such checkpoint, as another one does.
        """
        group = self._whole(step) if self.folder is not None else None
        if group is None:
            raise ValueError(
                f"another process begins from the checkpoint of step {step}, and this one finds no "
                f"whole one in folder={str(self.folder) if self.folder else None!r}. Give all "
                "processes one folder that each of them can read and write."
            )
        members = _members(group)
        shapes = self._shapes(len(members))
        whole = _named(shapes, self._params, rows=len(members))
        own = {name: x for name, x in whole.items() if name.startswith("own/")}
        first = self._read(group / str(members[0]), whole)
        parts = [
            first if process == members[0] else self._read(group / str(process), own)
            for process in members[rank::size]
        ]
        if parts:
            first |= {name: np.concatenate([part[name] for part in parts]) for name in own}
        leaves, count = [*first.values()], len(jax.tree.leaves(shapes))
        state = jax.tree.map(_like, shapes, jax.tree.structure(shapes).unflatten(leaves[:count]))
        restored = jax.tree.unflatten(jax.tree.structure(self._params), leaves[count:])
        return len(members), restored, state if parts else None

    def _steps(self) -> list[Path]:
        found = self.folder.iterdir() if self.folder else ()
        return [x for x in found if _STEP.fullmatch(x.name)]

    def _header(self, place: Path) -> dict[str, Any]:
        """What the first line of a part says."""
        size = len(_members(place.parent))
        return {"part": "/".join(place.parts[-3:]), "of": self._description(size)}

    def _write(
        self, step: int, place: Path, header: dict[str, Any], part: list[np.ndarray]
    ) -> OSError | None:
        content = (np.ravel(x).view(np.uint8).data for x in part)
        try:
            _files.write(place, (json.dumps(header).encode() + b"\n", *content))
        except OSError as error:
            log.warning("the checkpoint of step %d is not written: %s", step, error)
            return error
        with contextlib.suppress(OSError):
            newest = self.newest()
            for old in self._steps():
                if int(old.name) < min(newest, step):
                    shutil.rmtree(old, ignore_errors=True)
        return None

    def _read(self, place: Path, like: dict[str, Any]) -> dict[str, np.ndarray]:
        header = self._header(place)
        try:
            line, _, content = bytes(_files.read(place)).partition(b"\n")
            found = json.loads(line)
            if found["part"] != header["part"]:
                raise ValueError(f"it is {found['part']}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"the checkpoint {place} can't be read ({error}). Remove the folder of its step, "
                "and the one before it is used."
            ) from error
        if differ := _differences(found["of"], header["of"]):
            raise ValueError(
                f"the checkpoint {place} is of another model or optimizer: {'; '.join(differ)}. "
                "Give the params and tx that it was written with, or another folder."
            )
        arrays, start = {}, 0
        for name, x in like.items():
            arrays[name] = np.frombuffer(content, x.dtype, x.size, start).reshape(x.shape)
            start += arrays[name].nbytes
        return arrays

    def _whole(self, step: int) -> Path | None:
        """The folder of a whole checkpoint of this step; None if there is none."""
        assert self.folder is not None
        whole = []
        # Another process may be removing an old step, and a file may have the name of one.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for group in (self.folder / str(step)).iterdir():
                parts = [group / str(process) for process in _members(group)]
                if parts and all(part.is_file() for part in parts):
                    whole.append((max(part.stat().st_mtime_ns for part in parts), group))
        # A step that was taken again may be there twice: the newest counts.
        return max(whole, default=(0, None))[1]


def description(params: Any, opt_state: Any) -> dict[str, Any]:
    """What a model and an optimizer are, with the paths, shapes and dtypes of all arrays."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    shapes = {jax.tree_util.keystr(path): f"{x.dtype}{[*x.shape]}" for path, x in leaves}
    found = {**checkpoint_metadata(opt_state), "params": shapes}
    # Another version may read it, as long as the format is the same.
    del found["version"]
    paths = jax.tree_util.tree_leaves_with_path(found)
    return {jax.tree_util.keystr(path, simple=True, separator=": "): x for path, x in paths}


def _differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Up to four differences of two descriptions; other arrays are a consequence of the others."""
    names = [x for x in {**now, **saved} if saved.get(x) != now.get(x)]
    names.sort(key=lambda name: name.startswith("arrays"))
    return [f"{x} is {saved.get(x)} there, and {now.get(x)} here" for x in names[:4]]


def _members(group: Path) -> tuple[int, ...]:
    """The processes that write such a folder; none if it is another one."""
    found = _GROUP.fullmatch(group.name)
    return tuple(map(int, found[1].split("-"))) if found else ()


def _named(opt_state: Any, params: Any, rows: int = 1) -> dict[str, Any]:
    """The arrays of a state, and then of its parameters, by their names in a part.

    Arrays of ``own/`` belong to one worker, and all parts have them; the part of the first member
    also has the others. For shapes with several ``rows`` it gives the shapes of one row.
    """
    specs = jax.tree.leaves(state_specs(opt_state))
    named = {}
    for number, (spec, x) in enumerate(zip(specs, jax.tree.leaves(opt_state), strict=True)):
        if len(spec) and rows > 1:
            x = jax.ShapeDtypeStruct((x.shape[0] // rows, *x.shape[1:]), x.dtype)
        if _validation.is_key(x):
            # A file has the words of a key.
            words_of = jax.random.key_data
            x = words_of(x) if isinstance(x, jax.Array) else jax.eval_shape(words_of, x)
        named[f"{'own' if len(spec) else 'shared'}/{number}"] = x
    return named | {f"params/{number}": x for number, x in enumerate(jax.tree.leaves(params))}


def _like(shape: Any, words: np.ndarray) -> Any:
    if not _validation.is_key(shape):
        return words
    # JAX names the generator of an array, also of a traced one, and of no shape.
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), shape)
    return jax.random.wrap_key_data(jnp.asarray(words), impl=impls[0])

"""The programs of a training: compiled once for a number of workers, loaded for each group."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from optax_ext._state._init import init_state
from optax_ext._state._specs import state_specs
from optax_ext._train import _mapped
from optax_ext._train._train_step import make_train_step
from optax_ext.elastic import _files, _handover, _jax_internals
from optax_ext.elastic._arguments import without_addresses
from optax_ext.elastic._jax_internals import Device

_WHOLE = PartitionSpec()


class Group(NamedTuple):
    """The programs of the workers of a group, on its devices.

    Attributes:
      order: their processes, in the order of the mesh.
      mesh: one device of each.
      specs: the specs of the arrays of the optimizer state.
      step: ``(params, opt_state, batch) -> (params, opt_state, loss)``.
      poll: ``u32[P, k] -> u32[P, k]``, the rows of all workers on every worker.
      admit: :func:`._handover.admit` for global arrays.
      release: :func:`._handover.release` for global arrays.
    """

    order: tuple[int, ...]
    mesh: Mesh
    specs: Any
    step: Callable[..., Any]
    poll: Callable[..., Any]
    admit: Callable[..., Any]
    release: Callable[..., Any]


class Programs:
    """The programs of a loss and an optimizer, for any group."""

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        tx: optax.GradientTransformation,
        axis: str,
        devices: Sequence[Device],
    ):
        """``devices`` has the devices of all processes, with this process's first."""
        self._loss_fn = loss_fn
        self._tx = tx
        self._axis = axis
        self._devices = devices
        self._compiled: dict[Any, dict[str, Any]] = {}
        self._fresh: dict[int, Any] = {}

    def state_of(self, size: int, params: Any) -> Any:
        """The shapes of the state of ``size`` workers."""
        return jax.eval_shape(lambda p: init_state(self._tx, p, {self._axis: size}), params)

    def fresh(self, size: int, rank: int, params: Any) -> Any:
        """The state of one of ``size`` workers before its first step, with a leading axis of 1."""
        if size not in self._fresh:
            specs = state_specs(self.state_of(size, params))

            def of_one(params: Any, rank: jax.Array) -> Any:
                everywhere = init_state(self._tx, params, {self._axis: size})
                return jax.tree.map(
                    lambda spec, x: _row(x, rank, size) if len(spec) else x, specs, everywhere
                )

            self._fresh[size] = jax.jit(of_one)
        return self._fresh[size](params, np.int32(rank))

    def load(self, assigned: Mapping[int, Device], params: Any, batch: Any) -> Group:
        """The programs for the device of each process, and for ``batch``, the batch of one worker.

        Programs that have not been compiled for so many workers, and for batches of such shapes,
        are compiled.
        """
        size, devices = len(assigned), [*assigned.values()]
        key = (
            size,
            jax.tree.structure(batch),
            *((x.shape, x.dtype) for x in jax.tree.leaves(batch)),
        )
        mesh = self._mesh(devices)
        specs = state_specs(self.state_of(size, params))
        if key not in self._compiled:
            self._compiled[key] = self._compile(size, params, batch)
        loaded = {
            name: _jax_internals.load(lowered, program, devices)
            for name, (lowered, program) in self._compiled[key].items()
        }
        return Group(order=(*assigned,), mesh=mesh, specs=specs, **loaded)

    def _mesh(self, devices: Sequence[Device]) -> Mesh:
        return Mesh(np.array(devices), (self._axis,), axis_types=(AxisType.Auto,))

    def _compile(self, size: int, params: Any, batch: Any) -> dict[str, Any]:
        # For any devices: the devices of a group come when it is loaded.
        mesh = self._mesh(self._devices[:size])
        whole, own = NamedSharding(mesh, _WHOLE), NamedSharding(mesh, PartitionSpec(self._axis))
        state = self.state_of(size, params)
        specs = state_specs(state)

        def shape(x: Any, sharding: NamedSharding, rows: int = 1) -> jax.ShapeDtypeStruct:
            lead = (rows * x.shape[0], *x.shape[1:]) if rows > 1 else x.shape
            return jax.ShapeDtypeStruct(lead, x.dtype, sharding=sharding)

        params = jax.tree.map(lambda x: shape(x, whole), params)
        state = jax.tree.map(lambda spec, x: shape(x, NamedSharding(mesh, spec)), specs, state)
        batch = jax.tree.map(lambda x: shape(x, own, size), batch)
        rows = jax.ShapeDtypeStruct((size, POLLED), np.uint32, sharding=own)
        each = jax.ShapeDtypeStruct((size,), np.bool_, sharding=whole)

        # A step that fails leaves its arguments as they are.
        jitted = make_train_step(self._loss_fn, self._tx, mesh, donate=False).jitted
        axis = self._axis
        # Left to itself XLA returns an empty array whole, which the next program does not take.
        placed = jax.tree.map(lambda x: x.sharding, (params, state))
        step = jax.jit(functools.partial(jitted, places=None), out_shardings=(*placed, None))

        def mapped(function: Any, takes: Any, gives: Any) -> Any:
            given = jax.tree.map(lambda x: x.spec, gives)
            function = _mapped.mapped(function, mesh, takes, given, check_vma=False)
            return jax.jit(function, out_shardings=gives)

        lowered = {
            "step": step.lower(params, state, batch),
            "poll": mapped(
                lambda row: lax.all_gather(row[0], axis), PartitionSpec(axis), whole
            ).lower(rows),
            "admit": mapped(
                lambda *args: _handover.admit(axis, *args), (_WHOLE, specs, _WHOLE), placed
            ).lower(params, state, each),
            "release": mapped(
                lambda *args: _handover.release(axis, *args), (specs, _WHOLE), placed[1]
            ).lower(state, each),
        }
        devices = list(mesh.devices.flat)
        return {name: (x, _kept_or_compiled(x, devices)) for name, x in lowered.items()}


# Words of a worker in a poll.
POLLED = 4


def _kept_or_compiled(lowered: jax.stages.Lowered, devices: Sequence[Device]) -> Any:
    """A program from the folder of jax's cache, for a worker that comes back; else compiled."""
    folder = _jax_internals.cache_folder()
    if not folder:
        return _jax_internals.compiled(lowered, devices)
    text = [lowered.as_text(), jax.__version__, os.environ.get("XLA_FLAGS", "")]
    text.append(_jax_internals.machine(devices))
    # The text of a program has neither the names of its arguments nor the types of keys.
    avals = [str(x) for x in jax.tree.leaves(lowered.args_info)]
    trees = (without_addresses(str(x)) for x in (lowered.in_tree, lowered.out_tree))
    text += [*trees, *avals]
    name = hashlib.sha256("\n".join(text).encode()).hexdigest()
    path = Path(folder) / f"optax_ext_elastic_{name}"
    with contextlib.suppress(OSError, ValueError):
        return pickle.loads(_files.read(path))
    program = _jax_internals.compiled(lowered, devices)
    with contextlib.suppress(OSError):
        _files.write(path, (pickle.dumps(program),))
    return program


def _row(x: jax.Array, rank: jax.Array, size: int) -> jax.Array:
    rows = x.shape[0] // size
    return lax.dynamic_slice_in_dim(x, rank * rows, rows)


# A collective raises the first if another worker is gone, and the second if it fails at once.
FAILURES = (jax.errors.JaxRuntimeError, ValueError)
_STATUS = re.compile(
    "(ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION|INTERNAL|UNAVAILABLE|UNKNOWN): "
)


def said_by_others(error: Exception) -> str:
    """The first line of an error that may come from another worker; raises any other error."""
    if not isinstance(error, jax.errors.JaxRuntimeError) and not _STATUS.match(str(error)):
        raise error
    return str(error).splitlines()[0][:200]

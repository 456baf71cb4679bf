"""Helpers of the optimizers' tests: meshes, steps of P workers, and their results."""

import functools
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests import jax_internals

DOCS = Path(__file__).parents[2] / "docs"


def slow(*values, id=None):
    """One slow case of all these values."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def slow_but(quick, values):
    """These values as cases; all are slow except the quick ones."""
    return [value if value in quick else slow(value) for value in values]


def mesh(sizes=4, names="data", kind=AxisType.Auto):
    """A mesh of the first devices; the sizes and names of several axes are tuples."""
    sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    names = (names,) if isinstance(names, str) else tuple(names)
    devices = np.asarray(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, names, axis_types=(kind,) * len(sizes))


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def flat(tree, lead=()):
    """The leaves side by side, ``f64[*lead, n]``."""
    leaves = [np.asarray(leaf, np.float64).reshape(*lead, -1) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves, axis=-1)


def same(tree, expected):
    """All leaves are equal, of the same types and in the same structure."""
    assert jax.tree.structure(tree) == jax.tree.structure(expected)
    for got, wanted in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


NODES = ("node", "device")


def over_nodes(outer, density=0.1, axis=NODES, **options):
    """The largest entries of the shards of nodes, exchanged by ``outer``."""
    exchange = sc.allreduce.hierarchical(inner_axis="device", outer=outer)
    selector = sc.select.topk(density=density)
    return optax_ext.sparse_allreduce(selector, exchange, axis=axis, **options)


def plain_sum():
    """An allreduce as a user may write it: a dense sum, which may overflow."""

    def reduce(coo, state, *, axis):
        total = jax.lax.psum(coo.to_dense(), axis)
        nothing = sc.PaddedCOO(coo.values[:0], coo.indices[:0], coo.size)
        info = sc.ReduceInfo(
            delivered=jnp.sum(total != 0, dtype=jnp.int32),
            overflow=jnp.zeros((), jnp.int32),
            **{name: jnp.zeros(()) for name in ("threshold", "words", "useful")},
        )
        return total, sc.Undelivered(jnp.zeros_like(coo.values), nothing), state, info

    return sc.SparseAllreduce(lambda size, axis_size: (), reduce, may_keep_partial_sums=False)


class Steps(NamedTuple):
    """The updates of several steps and the states after them, ``[steps, *workers, ...]``."""

    updates: Any
    states: Any
    start: Any  # From the same program: another one may round in other places.

    @property
    def state(self):
        return optax_ext.get_state(self.states)

    @property
    def residuals(self):
        return self.state.residual[..., 0, :]

    @property
    def last(self):
        """The state after the last step, ``[*workers, ...]``."""
        return jax.tree.map(lambda x: x[-1], self.state)


@functools.lru_cache(maxsize=64)
def _program(tx, axis, shape):
    """All steps of all workers in one program."""

    def train(gradients):
        def step(state, gradient):
            updates, state = tx.update(gradient, state)
            return state, (updates, state)

        start = tx.init(jax.tree.map(lambda x: x[0], gradients))
        return start, jax.lax.scan(step, start, gradients)[1]

    size = shape if isinstance(axis, tuple) else shape[0]
    return sc.simulate(train, axis=axis, axis_size=size, in_axes=1, out_axes=(0, 1))


def run(tx, given, axis="w") -> Steps:
    """Steps of P simulated workers with the gradients ``[steps, *workers, ...]``."""
    lead = len(axis) if isinstance(axis, tuple) else 1
    shape = jax.tree.leaves(given)[0].shape[1 : 1 + lead]
    start, (updates, states) = jax.tree.map(np.asarray, _program(tx, axis, shape)(given))
    return Steps(updates, states, start)


def mapped(tx, on, state, *, check_vma=True, specs=None, out_specs=None):
    """A jitted ``(gradients[P, ...], state) -> (updates, state)`` on a mesh of workers."""
    specs = optax_ext.state_specs(state) if specs is None else specs
    names = on.axis_names
    rows = P(names if len(names) > 1 else names[0])
    return on_mesh(
        lambda gradients, state: tx.update(jax.tree.map(lambda x: x[0], gradients), state),
        on,
        (rows, specs),
        (P(), specs if out_specs is None else out_specs),
        check_vma,
    )


def train(tx, loss_fn, params, batches, on, *, state=None, **options):
    """``(params, state, loss)`` before the first step, whose loss is None, and after each."""
    state = optax_ext.init_state(tx, params, on) if state is None else state
    step = optax_ext.make_train_step(loss_fn, tx, on, **{"donate": False, **options})
    found = [(params, state, None)]
    for batch in batches:
        found.append(step(*found[-1][:2], batch))
    return found


def local_step(tx, loss_fn, at=optax_ext.ahead):
    """``(params, state, batch) -> (params, state)`` of one worker, for a hand-written loop."""

    def step(params, state, batch):
        gradients = jax.grad(loss_fn)(at(params, state), batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def on_mesh(function, on, in_specs, out_specs, check_vma=True, **options):
    """The function mapped over the devices, jitted."""
    options |= {"in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}
    return jax.jit(jax.shard_map(function, mesh=on, **options))


def traced_without_devices(tx, like, workers=16):
    """A step on this many absent devices, or on axes of them, with gradients of these shapes."""
    axes = workers if isinstance(workers, dict) else {"data": workers}
    sizes, names = tuple(axes.values()), tuple(axes)
    on = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(axes))
    state = jax.eval_shape(lambda g: optax_ext.init_state(tx, g, axes), like)
    specs = P(), optax_ext.state_specs(state)

    def local(gradient, state):
        return tx.update(jax.lax.pcast(gradient, names, to="varying"), state)

    return on_mesh(local, on, specs, specs).trace(like, state)


def refused(message, function, *given, error=ValueError, **options):
    """Checks that the call raises an error that says this; returns its whole text."""
    with pytest.raises(error, match=message) as found:
        function(*given, **options)
    return str(found.value)


def fails_in_the_step(step, match):
    """Calls a step in which a host callback raises an error."""
    try:
        with pytest.raises(Exception, match=match):  # noqa: B017, PT012
            jax.block_until_ready(step())
            jax.effects_barrier()
    finally:
        # JAX would report the failed callback again when the process ends.
        jax_internals.forget_failed_callbacks()


def programs_of(page):
    """The Python programs of a page of the manual."""
    return re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(), re.DOTALL)


# A small problem, for tests that hold for any problem.
PARAMS = {"w": np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4), "b": np.zeros(4, "f4")}


def loss_fn(params, batch):
    x = batch[0] if isinstance(batch, tuple) else batch
    return jnp.mean((x @ params["w"] + params["b"][None] - 1) ** 2)


def batch_of(rows=16, seed=0):
    return normal((rows, 6), seed)


def by_data_parallel(loss_fn, tx):
    """A step that is written for one device."""

    @optax_ext.data_parallel
    def step(params, state, batch):
        loss, gradient = jax.value_and_grad(loss_fn)(optax_ext.ahead(params, state), batch)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


LOOPS = ("pmap", "check_vma=False", "simulate")


def in_loop(loop, step, workers=4, axis="w"):
    """``step(params, batch)`` of all workers in a loop without types for varying values."""
    if loop == "pmap":
        devices = jax.devices()[:workers]
        return jax.pmap(step, axis_name=axis, devices=devices, in_axes=(None, 0))
    if loop == "simulate":
        return sc.simulate(step, axis=axis, axis_size=workers, in_axes=(None, 0))
    each = (P(), P(axis))
    return on_mesh(lambda p, batch: step(p, batch[0]), mesh(workers, axis), each, P(), False)

"""Steps of parameters that other axes of a mesh shard, and the oracle of their parts."""

import functools
import re

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import optax_ext
import sparse_collectives as sc
from optax_ext._error_feedback import _layout
from optax_ext._state import _shards
from tests.optax_ext import helpers

SHAPES = {
    "columns": ((6, 16), PartitionSpec(None, "model")),
    "rows": ((16, 5), PartitionSpec("model")),
    # All devices hold it, so its rows are dealt out.
    "whole": ((8, 7), PartitionSpec()),
    # Neither its rows nor its entries are a multiple of the devices.
    "odd": ((3, 3), PartitionSpec()),
    "vector": ((7,), PartitionSpec()),
    "scalar": ((), PartitionSpec()),
}
SPECS = {name: spec for name, (_, spec) in SHAPES.items()}
mesh_of = functools.partial(helpers.mesh, names=("data", "model"))


def params_of(seed=0, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: np.float32(rng.standard_normal(x)) for name, (x, _) in shapes.items()}


def placed(params, mesh, specs=SPECS):
    return {
        name: jax.device_put(leaf, NamedSharding(mesh, specs[name]))
        for name, leaf in params.items()
    }


def gradients_of(workers, steps, seed=1, shapes=SHAPES):
    """``[steps, P, ...]`` for each leaf."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_t(3, (steps, workers, *shape)).astype(np.float32)
        for name, (shape, _) in shapes.items()
    }


def stepper(tx, mesh, state, *, manual, axis="data", check_vma=True, specs=SPECS):
    """A jitted ``(params, state, gradients[P, ...]) -> (updates, state)``."""
    if manual:
        of_params, of_state, kept = specs, optax_ext.state_specs(state), {}
        of_gradients = {name: PartitionSpec(axis, *spec) for name, spec in specs.items()}
    else:
        of_params, of_gradients = PartitionSpec(), PartitionSpec(axis)
        of_state = optax_ext.state_specs(state, manual=axis)
        kept = {"axis_names": {axis} if isinstance(axis, str) else set(axis)}

    def step(params, state, gradients):
        gradients = jax.tree.map(lambda x: x[0], gradients)
        return tx.update(gradients, state, params)

    given = of_params, of_state, of_gradients
    return helpers.on_mesh(step, mesh, given, (of_params, of_state), check_vma, **kept)


def run(tx, mesh, gradients, *, params=None, specs=SPECS, **options):
    """The updates of all steps, and the last state."""
    params = placed(params_of() if params is None else params, mesh, specs)
    state = optax_ext.init_state(tx, params, mesh)
    step = stepper(tx, mesh, state, specs=specs, **options)
    steps = len(next(iter(gradients.values())))
    made = []
    for i in range(steps):
        updates, state = step(params, state, {name: g[i] for name, g in gradients.items()})
        made.append(jax.tree.map(np.asarray, updates))
        params = optax.apply_updates(params, updates)
    return made, state


def by_parts(tx, gradients, layout, *, axis="data", scanned=True):
    """The same from unsharded runs, one for each device of a worker with its part of the leaves.

    A scan of all steps is one program; ``scanned=False`` compiles one step, as training does.

    Returns:
      The updates of all steps, and the residuals ``[P, m, n]``.
    """
    steps, workers = next(iter(gradients.values())).shape[:2]
    names, devices = sorted(gradients), layout.sharding.devices  # In the order of the leaves.
    part, cut = _layout.device_layout(layout), {}
    for leaf, name in enumerate(names):
        parts = functools.partial(_shards.parts_of_leaf, layout=layout, leaf=leaf, pad=np.pad)
        flat = np.asarray([[parts(g) for g in of_step] for of_step in gradients[name]])
        cut[name] = flat.reshape((steps, workers, devices, *part.shapes[leaf]))
    init, step = (sc.simulate(f, axis=axis, axis_size=workers) for f in (tx.init, tx.update))

    def trained(mine):
        if scanned:
            found = helpers.run(tx, mine, axis)
            return found.updates, found.residuals[-1]
        state, made = init({name: x[0] for name, x in mine.items()}), []
        for i in range(steps):
            updates, state = step({name: x[i] for name, x in mine.items()}, state)
            made.append(updates)
        updates = jax.tree.map(lambda *x: np.stack(x), *made)
        return updates, np.asarray(optax_ext.get_state(state).residual)[:, 0]

    rows, residuals = [], []
    for j in range(devices):
        updates, residual = trained({name: x[:, :, j] for name, x in cut.items()})
        residuals.append(residual)
        rows.append([updates[name][:, 0].reshape(steps, -1) for name in names])
    made = []
    for i in range(steps):
        of_step = {}
        for leaf, name in enumerate(names):
            parts = np.stack([row[leaf][i] for row in rows])
            of_step[name] = _shards.whole_leaves(parts, layout, leaf, 0)
        made.append(of_step)
    return made, np.stack(residuals, axis=1)


def same_on_devices(tree):
    """Devices that hold the same part of an array have the same bits."""
    for leaf in jax.tree.leaves(tree):
        seen = {}
        for shard in leaf.addressable_shards:
            bits = np.asarray(shard.data).tobytes()
            assert seen.setdefault(str(shard.index), bits) == bits


_SHAPE = re.compile(r"\b(?:f|s|u|bf|pred)(?:\d+)?\[([\d,]*)\]")


def shapes_in(program):
    """The shapes of all arrays in a compiled program: those that one device holds."""
    return [tuple(map(int, found.split(","))) if found else () for found in _SHAPE.findall(program)]

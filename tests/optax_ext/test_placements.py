"""Specs that say the same placement in other words, and axes along which nothing is split."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_ext
import sparse_collectives as sc
from tests.optax_ext import shards
from tests.optax_ext.helpers import mesh, normal

P = PartitionSpec
SHAPES = {"up": (6, 8), "down": (8, 4), "bias": (4,)}
# Of "up" and "down"; those of one list place them in the same way wherever "one" has one device.
SAME = {
    "whole": [
        (P(), P()),
        (P("one"), P()),
        (P(None, "one"), P("one")),
        (P(("one",)), P(None, None)),
        (P("one", None), P(None, "one")),
    ],
    "split": [
        (P(None, "two"), P("two")),
        (P(None, ("two",)), P("two", None)),
        (P("one", "two"), P("two", "one")),
        (P(None, ("one", "two")), P(("two", "one"))),
    ],
}
SIZES = {"whole": (2, 1, 1), "split": (2, 1, 4)}


def sparse_sgd(axis):
    """With the exchange that compiles fastest."""
    return optax_ext.sparse_sgd(0.1, axis=axis, density=0.2, allreduce=sc.allreduce.topk_a())


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] + params["bias"][None] - 1) ** 2)


def placed(on, up, down):
    params = {key: normal(shape, len(key)) for key, shape in SHAPES.items()}
    return shards.placed(params, on, {"up": up, "down": down, "bias": P()})


BATCHES = [normal((8, 6), seed) for seed in range(3)]


def trained(on, tx, begin, later=None, **options):
    """Three steps of one program; before the second the parameters are put where ``later`` says."""
    traces = []

    def counted(params, x):
        traces.append(1)
        return loss_fn(params, x)

    params = placed(on, *begin)
    places = {name: params[name].sharding for name in ("up", "down")}
    state = optax_ext.init_state(tx, params, on)
    step = optax_ext.make_train_step(counted, tx, on, **options)
    for i, batch in enumerate(BATCHES):
        if i == 1 and later is not None:
            params = shards.placed(params, on, {"up": later[0], "down": later[1], "bias": P()})
        params, state, loss = step(params, state, batch)
        for name, place in places.items():
            assert params[name].sharding.is_equivalent_to(place, 2)
    assert len(traces) == 1
    assert np.isfinite(loss)
    return jax.device_get(params)


@pytest.mark.parametrize("kind", SAME)
def test_specs_of_the_same_placement_are_the_same(kind):
    on, tx = mesh(SIZES[kind], ("data", "one", "two")), sparse_sgd("data")
    ends = [trained(on, tx, begin, SAME[kind][i - 1]) for i, begin in enumerate(SAME[kind])]
    for end in ends[1:]:
        jax.tree.map(np.testing.assert_allclose, end, ends[0])


AXES, ONES = ("site", "fsdp"), ("site", "one", "two")


@pytest.mark.parametrize(
    ("sizes", "names", "specs", "options"),
    [
        ((1, 8), AXES, (P(None, AXES), P(AXES)), {}),
        ((8, 1), AXES, (P("fsdp"), P()), {}),
        ((1, 1), AXES, (P(AXES), P("site", "fsdp")), {}),
        ((4, 1, 1), ONES, (P(), P()), {"batch_spec": P(("site", "one"))}),
    ],
)
def test_axes_of_one_worker_or_of_one_device(sizes, names, specs, options):
    trained(mesh(sizes, names), sparse_sgd("site"), specs, **options)


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_mapped_function_of_ones_own_over_explicit_axes(check_vma):
    """The state is on the mesh that was given, and trains as on one with automatic axes."""
    ends = []
    for kind in (AxisType.Auto, AxisType.Explicit):
        on = mesh(4, "data", kind)
        tx = sparse_sgd("data")
        params = placed(on, P(), P())
        state = optax_ext.init_state(tx, params, on)
        assert {leaf.sharding.mesh for leaf in jax.tree.leaves(state)} == {on}
        specs = optax_ext.state_specs(state)

        def local(params, state, x, tx=tx):
            gradients = jax.grad(loss_fn)(optax_ext.ahead(params, state), x)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        step = jax.jit(
            jax.shard_map(
                local,
                mesh=on,
                in_specs=(P(), specs, P("data")),
                out_specs=(P(), specs),
                check_vma=check_vma,
            )
        )
        for batch in BATCHES:
            batch = jax.device_put(batch, NamedSharding(on, P("data")))
            params, state = step(params, state, batch)
        flushed, _ = optax_ext.flush(params, state)
        ends.append(jax.device_get((params, flushed, optax_ext.metrics(state))))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), *ends)

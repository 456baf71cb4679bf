"""What states declare of their fields, and the index that is made from it."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
from optax_ext._error_feedback import _roles
from optax_ext._error_feedback._roles import Role, Rows
from optax_ext._state import _index

PARAMS = {"w": jnp.ones((6, 4)), "b": jnp.zeros(4)}


def mesh_of(workers):
    return jax.make_mesh((workers,), ("data",), devices=jax.devices()[:workers])


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] + params["b"][None] - 1.0) ** 2)


class Stranger(NamedTuple):
    """A state with the names of ours, of another library."""

    inner: Any
    outer: Any
    moved: Any
    missed: Any
    inner_opt_state: Any
    acc_grads: Any
    residual: Any


def stranger(tx=None):
    """A transformation after the exchange, or around ``tx``, that keeps things of its own."""
    around = None if tx is None else optax.with_extra_args_support(tx)

    def init(params):
        own = jax.tree.map(jnp.zeros_like, params)
        inside = () if around is None else around.init(params)
        return Stranger(own, own, own, jnp.zeros(3, jnp.int32), inside, own, jnp.zeros((1, 28)))

    def update(updates, state, params=None, **extra):
        if around is not None:
            updates, inside = around.update(updates, state.inner_opt_state, params, **extra)
            state = state._replace(inner_opt_state=inside)
        moved = jax.tree.map(jnp.add, state.moved, updates)
        return updates, state._replace(moved=moved, acc_grads=moved)

    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize("place", ["after", "around"])
@pytest.mark.one_in(2)
def test_a_state_with_the_field_names_of_ours_is_not_mistaken_for_ours(place):
    ours = optax_ext.sparse_adamw(0.1, density=0.3, axis="data")
    tx = optax.chain(ours, stranger()) if place == "after" else stranger(ours)
    alone = {}
    for name, made in (("alone", ours), ("with", tx)):
        params, state = PARAMS, optax_ext.init_state(made, PARAMS, mesh_of(2))
        step = optax_ext.make_train_step(loss_fn, made, mesh_of(2), donate=False)
        for i in range(3):
            batch = np.random.default_rng(i).standard_normal((4, 6)).astype(np.float32)
            params, state, loss = step(params, state, batch)
        assert loss.shape == ()
        alone[name] = params
    jax.tree.map(np.testing.assert_array_equal, alone["alone"], alone["with"])
    other = state[1] if place == "after" else state
    specs = optax_ext.state_specs(state)
    specs = specs[1] if place == "after" else specs
    for name in set(Stranger._fields) - {"inner_opt_state"}:
        assert {*jax.tree.leaves(getattr(specs, name))} == {P()}
    again = optax_ext.reshard(state, optax_ext.init_state(tx, PARAMS, mesh_of(4)))
    kept = again[1] if place == "after" else again
    jax.tree.map(np.testing.assert_array_equal, kept.moved, other.moved)
    if place == "after":
        gradient, _ = optax_ext.consolidate(params, state)
        assert jax.tree.structure(gradient) == jax.tree.structure(PARAMS)


def test_a_declared_state_gives_every_field_a_role():
    with pytest.raises(TypeError, match=r"Forgetful\.residual says not what it is to the workers"):

        @_roles.declared
        class Forgetful(NamedTuple):
            count: Annotated[jax.Array, _roles.SHARED]
            residual: jax.Array


def test_a_new_field_is_one_line():
    @_roles.declared
    class Counting(NamedTuple):
        around: Annotated[Any, _roles.SHARED]
        seen: Annotated[jax.Array, _roles.SUMMED, _roles.OF_WORKER]

    inside = optax_ext.init_state(optax_ext.topk_a(0.5, axis="data"), PARAMS, {"data": 2})
    fresh = optax_ext.init_state(optax_ext.topk_a(0.5, axis="data"), PARAMS, {"data": 3})
    state = Counting(inside, jnp.array([2, 5], jnp.int32))
    assert optax_ext.state_specs(state).seen == P("data")
    moved = optax_ext.reshard(state, Counting(fresh, jnp.zeros(3, jnp.int32)))
    assert moved.seen.tolist() == [7, 0, 0]


def test_the_index_of_wrappers_of_optax():
    sparse = optax_ext.sparse_adamw(0.1, axis="data")
    tx = optax.partition(
        {"x": optax.masked(sparse, {"w": True, "b": False}), "y": optax_ext.dense(axis="data")},
        {"w": "x", "b": "y"},
    )
    state = optax_ext.init_state(tx, PARAMS, {"data": 2})
    index = _index.of(state)
    assert index.axes == ("data",)
    assert not index.only_sparse
    assert not index.accumulates
    known = jax.tree.unflatten(jax.tree.structure(state), index.leaves)
    (found,) = [x for x in jax.tree.leaves(known, is_leaf=_is_ours) if _is_ours(x)]
    assert (found.residual.role, found.residual.rows) == (Role.SUMMED, Rows.DEVICE)
    assert found.count.spec == P()
    assert found.residual.spec == P("data")
    assert {x.role for x in jax.tree.leaves(found.local, is_leaf=_is_leaf)} == {Role.STATISTIC}


def _is_ours(node):
    return isinstance(node, optax_ext.SparseAllreduceState)


def _is_leaf(node):
    return isinstance(node, _index.Leaf)


@pytest.mark.parametrize("kind", ["diloco", "multi_steps", "delayed", "sparse_adamw"])
def test_metadata_has_the_workers_of_any_state_with_rows(kind):
    dense = optax.chain(optax_ext.dense(axis="data"), optax.adam(1e-2))
    tx = {
        "diloco": optax_ext.published.diloco(optax.adam(1e-2), axis="data", every=5),
        "multi_steps": optax_ext.multi_steps(dense, 3),
        "delayed": optax_ext.delayed(dense),
        "sparse_adamw": optax_ext.sparse_adamw(1e-2, axis="data"),
    }[kind]
    saved = optax_ext.checkpoint_metadata(optax_ext.init_state(tx, PARAMS, mesh_of(3)))
    assert saved["workers"] == 3
    old = jax.sharding.AbstractMesh((3,), ("data",))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    optax_ext.check_metadata(saved, optax_ext.abstract_state(tx, PARAMS, old, sharding=here))


def test_gradients_accumulated_before_a_dense_exchange_move_to_other_workers():
    dense = optax.chain(optax_ext.dense(axis="data"), optax.sgd(1e-2))
    tx = optax_ext.multi_steps(dense, 3)
    state = optax_ext.init_state(tx, PARAMS, {"data": 2})
    state = state._replace(acc_grads=jax.tree.map(lambda x: x + 1.0, state.acc_grads))
    fresh = optax_ext.init_state(tx, PARAMS, {"data": 3})
    moved = optax_ext.reshard(state, fresh)
    for leaf, was in zip(*map(jax.tree.leaves, (moved.acc_grads, PARAMS)), strict=True):
        assert leaf.shape == (3, *was.shape)
        np.testing.assert_array_equal(leaf.sum(0), np.full(was.shape, 2.0))

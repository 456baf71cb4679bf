"""Bad input: an error that names the argument, the value and the fix, at trace time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc

PARAMS = {"kernel": jnp.zeros((8, 4)), "bias": jnp.zeros((4,))}


def mesh(workers=4):
    return jax.make_mesh(
        (workers,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:workers]
    )


def ok_topk(**options):
    return optax_ext.ok_topk(**{"density": 0.1, "axis": "data", **options})


def init(tx, params=PARAMS, workers=4):
    """The state of all workers on one device."""
    return optax_ext.init_state(tx, params, {"data": workers})


def trace_update(tx, params, updates, state=None, check_vma=True):
    """Traces one update on a mesh of four; nothing runs."""
    state = optax_ext.init_state(tx, params, mesh()) if state is None else state
    specs = optax_ext.state_specs(state)

    def local(updates, state):
        updates = jax.tree.map(
            lambda u: jax.lax.pcast(u, "data", to="varying") if check_vma else u, updates
        )
        return tx.update(updates, state)

    jax.eval_shape(
        jax.shard_map(
            local, mesh=mesh(), in_specs=(P(), specs), out_specs=(P(), specs), check_vma=check_vma
        ),
        updates,
        state,
    )


@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.0001, float("nan"), True, "0.1", None])
def test_density_outside_its_range(density):
    with pytest.raises((TypeError, ValueError), match=r"density must be .*\(0, 1\], got"):
        ok_topk(density=density)


def test_a_traced_density():
    with pytest.raises(TypeError, match="density must be a Python number.*close over"):
        jax.jit(lambda d: ok_topk(density=d).init(PARAMS))(0.1)


def test_an_axis_that_is_not_bound():
    tx = ok_topk()
    with pytest.raises(ValueError, match=r"axis='data' is not bound.*init_state\(tx, params, mesh"):
        tx.init(PARAMS)
    state = init(tx)
    with pytest.raises(ValueError, match=r"axis='data' is not bound.*shard_map.*pmap.*simulate"):
        tx.update(PARAMS, state)
    with pytest.raises(ValueError, match=r"axis='data' is not bound"):
        optax_ext.dense(axis="data").update(PARAMS, optax_ext.dense(axis="data").init(PARAMS))


@pytest.mark.parametrize(
    "tx",
    [ok_topk(axis="batch"), optax_ext.dense(axis="batch"), ok_topk(axis=("data", "batch"))],
    ids=["ok_topk", "dense", "two axes"],
)
def test_an_axis_that_the_mesh_does_not_have(tx):
    message = r"axis=.*'batch'.* of the transformation is not an axis of the mesh.*\('data',\)"
    for sizes in (mesh(), {"data": 4}):
        with pytest.raises(ValueError, match=message):
            optax_ext.init_state(optax.chain(tx, optax.sgd(0.1)), PARAMS, sizes)
    with pytest.raises(ValueError, match=message):
        optax_ext.abstract_state(tx, PARAMS, mesh())
    state = optax_ext.init_state(tx, PARAMS, {"data": 4, "batch": 1})
    step = optax_ext.make_train_step(lambda p, b: 0.0, tx, mesh())
    for call in (step, step.lower, step.trace):
        with pytest.raises(ValueError, match=message):
            call(PARAMS, state, np.ones((4, 8), np.float32))


@pytest.mark.parametrize("other", [ok_topk(axis="b"), optax_ext.dense(axis="b")])
def test_allreduces_over_different_axes(other):
    labels = {"kernel": "one", "bias": "other"}
    tx = optax.multi_transform({"one": ok_topk(axis="a"), "other": other}, labels)
    message = "tx has allreduces over different axes, 'a' and 'b'.*same axis="
    with pytest.raises(ValueError, match=message):
        optax_ext.init_state(tx, PARAMS, {"a": 2, "b": 2})
    state = sc.simulate(tx.init, axis=("a", "b"), axis_size=(2, 2), in_axes=None)(PARAMS)
    with pytest.raises(ValueError, match=message):
        optax_ext.state_specs(state)


@pytest.mark.parametrize("tx", [ok_topk(), optax_ext.dense(axis="data")], ids=["ok_topk", "dense"])
def test_gradients_already_summed_over_the_axis(tx):
    def loss(params, x):
        return jnp.mean((x @ params["kernel"] + params["bias"][None]) ** 2)

    def local(params, x):
        gradients = jax.grad(loss)(params, x)  # of replicated params: autodiff adds a psum
        return tx.update(gradients, tx.init(params))[0]

    step = jax.shard_map(local, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match=r"(?s)updates\['bias'\].*already summed.*pcast") as error:
        jax.eval_shape(step, PARAMS, jnp.ones((8, 8)))
    assert "jax.lax.pcast(params, 'data', to='varying')" in str(error.value)


def test_an_update_of_another_tree():
    with pytest.raises(ValueError, match="updates have another tree"):
        trace_update(ok_topk(), PARAMS, {"kernel": jnp.zeros((8, 4))})


def test_an_update_of_another_shape():
    other = {**PARAMS, "kernel": jnp.zeros((4, 8))}
    with pytest.raises(ValueError, match=r"updates\['kernel'\] has shape \(4, 8\).*\(8, 4\)"):
        trace_update(ok_topk(), PARAMS, other)


def test_an_update_of_another_dtype():
    other = {**PARAMS, "bias": jnp.zeros((4,), jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"updates\['bias'\].*bfloat16.*float32.*Cast"):
        trace_update(ok_topk(), PARAMS, other)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_])
def test_leaves_that_are_not_real(dtype):
    params = {**PARAMS, "steps": jnp.zeros((3,), dtype)}
    with pytest.raises(TypeError, match=rf"params\['steps'\].*{jnp.dtype(dtype)}.*optax.masked"):
        init(ok_topk(), params)
    with pytest.raises(TypeError, match=r"updates\['steps'\]"):
        trace_update(ok_topk(), PARAMS, params)


def test_a_float64_leaf():
    params = {"w": np.zeros(3, np.float64)}
    with jax.enable_x64(True), pytest.raises(TypeError, match=r"params\['w'\].*float64.*float32"):
        init(ok_topk(), params)


def test_more_entries_than_an_index_reaches():
    huge = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float32)
    with pytest.raises(ValueError, match=r"size must be below 2\*\*31.*2147483648.*Split"):
        jax.eval_shape(lambda params: init(ok_topk(), params), huge)


def test_a_state_made_for_other_workers():
    state = init(ok_topk(), workers=8)
    with pytest.raises(ValueError, match=r"made for 2 workers and passed whole, or for 8"):
        trace_update(ok_topk(), PARAMS, PARAMS, state)


def test_a_state_that_was_passed_whole():
    tx = ok_topk()
    state = init(tx)
    step = jax.shard_map(
        lambda u, s: tx.update(u, s), mesh=mesh(), in_specs=P(), out_specs=P(), check_vma=False
    )
    with pytest.raises(ValueError, match=r"residual has 4 rows.*state_specs"):
        jax.eval_shape(step, PARAMS, state)


def test_a_selector_of_a_larger_density_than_the_allreduce():
    def transformation(selected, delivered=0.1):
        return optax_ext.sparse_allreduce(
            sc.select.topk(density=selected), sc.allreduce.ok_topk(density=delivered), axis="data"
        )

    for density in (0.1, 0.05):
        transformation(density)
    message = r"selector has density=0\.5 and the allreduce density=0\.1.*Give both density=0\.5"
    with pytest.raises(ValueError, match=message):
        transformation(0.5)


def test_parts_of_another_kind():
    topk, dense = sc.select.topk(density=0.1), sc.allreduce.dense()
    with pytest.raises(TypeError, match=r"selector must be a Selector.*select\.topk"):
        optax_ext.sparse_allreduce(dense, dense, axis="data")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"allreduce must be a SparseAllreduce.*topk_a"):
        optax_ext.sparse_allreduce(topk, topk, axis="data")  # pyright: ignore[reportArgumentType]


def test_unknown_choices():
    with pytest.raises(
        ValueError, match="nonfinite must be one of 'skip', 'drop', 'raise'.*got 'x'"
    ):
        ok_topk(nonfinite="x")
    with pytest.raises(ValueError, match="nonfinite must be one of .*'propagate', got 'ignore'"):
        ok_topk(nonfinite="ignore")
    with pytest.raises(ValueError, match="dense_steps must be an integer of at least 0, got -1"):
        ok_topk(dense_steps=-1)
    for wrong, came in ((3, "3"), (jnp.ones(2, bool), r"bool\[2\]"), (jnp.ones(()), "float32")):
        with pytest.raises(ValueError, match=f"dense_steps must return one bool.*{came}"):
            trace_update(ok_topk(dense_steps=lambda step, wrong=wrong: wrong), PARAMS, PARAMS)
    with pytest.raises(TypeError, match="unexpected keyword argument 'axis_size'"):
        ok_topk(axis_size=4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'repartition'"):
        ok_topk(repartition=3)


def test_a_batch_that_the_workers_do_not_divide():
    tx = optax.chain(ok_topk(), optax.sgd(0.1))
    step = optax_ext.make_train_step(lambda p, b: jnp.sum(p["bias"]), tx, mesh())
    state = optax_ext.init_state(tx, PARAMS, mesh())
    batch = {"x": np.zeros((4, 2)), "y": np.zeros((6,))}
    with pytest.raises(ValueError, match=r"batch\['y'\] has shape \(6,\).*multiple of the 4"):
        step.lower(PARAMS, state, batch)


def test_a_chain_that_does_not_reduce_the_gradients():
    tx = optax.adam(1e-3)
    step = optax_ext.make_train_step(lambda p, b: jnp.sum(b @ p["kernel"]), tx, mesh())
    with pytest.raises(ValueError, match=r"opt_state has no sparse allreduce.*first in the chain"):
        step.lower(PARAMS, tx.init(PARAMS), np.ones((4, 8), np.float32))
    # One of the leaves is passed on as it is.
    labels = {"kernel": "sparse", "bias": "none"}
    tx = optax.multi_transform({"sparse": ok_topk(), "none": optax.identity()}, labels)
    loss = lambda p, b: jnp.sum(b @ p["kernel"]) + jnp.sum(p["bias"])  # noqa: E731
    step = optax_ext.make_train_step(loss, tx, mesh())
    state = optax_ext.init_state(tx, PARAMS, mesh())
    with pytest.raises(ValueError, match=r"updates\['bias'\] of tx differ.*first in the chain"):
        step.lower(PARAMS, state, np.ones((4, 8), np.float32))


def test_an_empty_pytree_works_and_does_nothing():
    for tree in ({}, (), {"none": jnp.zeros((0, 3))}):
        tx = optax.chain(ok_topk(), optax.sgd(0.1))

        def step(tree, tx=tx):
            updates, state = tx.update(tree, tx.init(tree))
            return updates, optax_ext.get_state(state).count

        updates, count = sc.simulate(
            lambda _, tree=tree, step=step: step(tree), axis="data", axis_size=2
        )(jnp.zeros(2))
        assert jax.tree.structure(updates) == jax.tree.structure(tree)
        assert count.tolist() == [1, 1]


# Non-finite gradients.


def simulated(nonfinite, gradients, steps_before=3):
    """Some good steps, then one with ``gradients``; the state before and after."""
    workers, size = gradients.shape
    tx = optax_ext.ok_topk(density=0.1, axis="data", nonfinite=nonfinite)
    params = jnp.zeros((workers, size))
    state = sc.simulate(tx.init, axis="data", axis_size=workers)(params)
    step = sc.simulate(tx.update, axis="data", axis_size=workers)
    rng = np.random.default_rng(0)
    for _ in range(steps_before):
        _, state = step(jnp.asarray(rng.standard_normal((workers, size)), jnp.float32), state)
    updates, after = step(gradients, state)
    good = jnp.asarray(rng.standard_normal((workers, size)), jnp.float32)
    return state, updates, after, step(good, after)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_gradient_skips_the_step_on_all_workers(bad):
    gradients = np.ones((3, 200), np.float32)
    gradients[1, 17] = bad
    before, updates, after, (later, _) = simulated("skip", gradients)
    assert (np.asarray(updates) == 0).all()
    np.testing.assert_array_equal(after.residual, before.residual)
    assert after.skipped.tolist() == [1, 1, 1]
    for name in ("count", "selector", "allreduce", "info"):
        for a, b in zip(
            jax.tree.leaves(getattr(before, name)),
            jax.tree.leaves(getattr(after, name)),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)
    assert np.isfinite(later).all()
    assert np.count_nonzero(later[0]) == 20


def test_a_sum_that_overflows_skips_the_step_too():
    gradients = np.zeros((2, 100), np.float32)
    gradients[0, :30] = 3e38
    tx = optax_ext.ok_topk(density=0.1, axis="data")
    state = sc.simulate(tx.init, axis="data", axis_size=2)(jnp.zeros((2, 100)))
    step = sc.simulate(tx.update, axis="data", axis_size=2)
    _, state = step(gradients, state)
    residual = np.asarray(state.residual)
    _, state = step(gradients, state)
    assert state.skipped.tolist() == [1, 1]
    np.testing.assert_array_equal(state.residual, residual)


def test_a_non_finite_gradient_reaches_every_worker_by_option():
    gradients = np.ones((3, 200), np.float32)
    gradients[1, 17] = np.nan
    gradients[2, 150] = np.inf
    _, updates, after, _ = simulated("propagate", gradients)
    assert np.isnan(np.asarray(updates)[:, 17]).all()
    assert np.isinf(np.asarray(updates)[:, 150]).all()
    assert after.skipped.tolist() == [0, 0, 0]
    # It was delivered, so it is in no residual.
    assert np.isfinite(after.residual).all()

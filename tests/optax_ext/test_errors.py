"""Bad input: an error that names the argument, the value and the fix, at trace time."""

import inspect

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
    assert "optax_ext.ahead(params, opt_state)" in str(error.value)
    assert "jax.lax.pmean or psum of the gradients: take it out" in str(error.value)
    assert "another allreduce of optax_ext earlier in the chain" in str(error.value)


@pytest.mark.parametrize(
    "chain",
    [
        (ok_topk(), ok_topk()),
        (ok_topk(), optax.scale(0.5), ok_topk(density=0.2), optax.sgd(0.1)),
        (optax_ext.dense(axis="data"), ok_topk()),
    ],
    ids=["twice", "apart", "dense"],
)
def test_two_allreduces_of_the_same_gradients(chain):
    tx = optax.chain(*chain)
    message = "tx has two allreduces of the same gradients, one after the other.*Keep one"
    with pytest.raises(ValueError, match=message):
        optax_ext.init_state(tx, PARAMS, mesh())
    inside = optax.chain(optax.masked(optax.identity(), True), tx)
    with pytest.raises(ValueError, match=message):
        init(inside)


def test_allreduces_of_other_leaves_are_no_mistake():
    sparse = {"kernel": True, "bias": False}
    dense = {"kernel": False, "bias": True}
    reduce = optax_ext.dense(axis="data")
    for tx in (
        optax.chain(optax.masked(ok_topk(), sparse), optax.masked(reduce, dense)),
        optax_ext.bucketed(ok_topk(), 2),
        optax_ext.bucketed(reduce, 2),
    ):
        init(tx)
    assert optax_ext.get_state(init(optax.chain(ok_topk(), optax.sgd(0.1)), {})) is not None


@pytest.mark.parametrize(
    ("other", "named"),
    [
        pytest.param(
            ok_topk(density=0.2),
            ["topk(density=0.1)", "topk(density=0.2)", "ok_topk(density=0.2)"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ok_topk(codec=sc.wire.narrow8()),
            ["ok_topk(codec=raw())", "ok_topk(codec=narrow8("],
            marks=pytest.mark.slow,
        ),
        (optax_ext.topk_a(0.1, axis="data"), ["allreduce=ok_topk(", "allreduce=topk_a("]),
        (
            ok_topk(residual=optax_ext.residual(decay=0.9)),
            ["residual=", "decay=1.0) in the state", "decay=0.9) in tx"],
        ),
    ],
    ids=["density", "codec", "allreduce", "residual"],
)
def test_a_state_made_with_other_settings(other, named):
    with pytest.raises(ValueError, match="state was made for another transformation") as error:
        trace_update(other, PARAMS, PARAMS, init(ok_topk()))
    text = str(error.value)
    assert all(part in text for part in named), text
    assert "optax_ext.reshard(opt_state, optax_ext.init_state(tx, params, mesh))" in text
    assert "select.scheduled" in text
    # What the message says to do works.
    moved = optax_ext.reshard(init(ok_topk()), init(other))
    trace_update(other, PARAMS, PARAMS, moved)


@pytest.mark.slow
def test_settings_that_say_nothing_are_not_compared():
    def with_spec(spec):
        selector = sc.select.topk(density=0.1)._replace(spec=spec)
        return optax_ext.sparse_allreduce(selector, sc.allreduce.ok_topk(density=0.1), axis="data")

    for spec in (None, sc.Spec.of("own", scale=np.ones(2, np.float32))):
        trace_update(with_spec(spec), PARAMS, PARAMS, init(with_spec(spec)))
    trace_update(with_spec(None), PARAMS, PARAMS, init(ok_topk()))
    # The text of a traced array has no hash.
    own = sc.Spec("own", (("scale", "float32[2]"),))
    trace_update(
        with_spec(own), PARAMS, PARAMS, init(with_spec(sc.Spec.of("own", scale=np.ones(2, "f4"))))
    )


@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_a_state_made_for_another_axis(kind):
    def tx(axis):
        return ok_topk(axis=axis) if kind == "sparse" else optax_ext.dense(axis=axis)

    state = optax_ext.init_state(tx("data"), PARAMS, mesh())
    step = optax_ext.make_train_step(lambda p, b: jnp.sum(b @ p["kernel"]), tx("dta"), mesh())
    message = r"state was made for axis='data', and the transformation has axis='dta'.*same tx"
    with pytest.raises(ValueError, match=message):
        step.lower(PARAMS, state, np.ones((4, 8), np.float32))


def traced_step(loss, **options):
    tx = optax.chain(ok_topk(), optax.sgd(0.1))
    state = optax_ext.init_state(tx, PARAMS, mesh())
    step = optax_ext.make_train_step(loss, tx, mesh(), **options)
    return step.lower(PARAMS, state, np.ones((4, 8), np.float32))


def scalar_loss(params, batch):
    return jnp.mean(batch @ params["kernel"]) + jnp.sum(params["bias"])


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (
            lambda p, b: (scalar_loss(p, b), {"aux": 1.0}),
            {},
            "scalar, got a tuple of 2.*has_aux=True in optax_ext.make_train_step",
        ),
        (scalar_loss, {"has_aux": True}, r"\(loss, aux\), as has_aux=True says, got an array"),
        (lambda p, b: None, {}, "scalar, got a NoneType"),
        (lambda p, b: b @ p["kernel"], {}, r"scalar, got an array of shape \(1, 4\).*loss.mean"),
        (lambda p, b: (b @ p["kernel"], 0), {"has_aux": True}, r"scalar, .*\(1, 4\).*loss.mean"),
    ],
    ids=["has_aux forgotten", "no aux", "nothing", "no mean", "no mean, with aux"],
)
def test_a_loss_of_another_form(loss, options, message):
    with pytest.raises(TypeError, match=f"loss_fn must return .*{message}"):
        traced_step(loss, **options)


@pytest.mark.slow
def test_a_loss_that_is_averaged_over_the_workers_already():
    message = "loss_fn returned the same on every worker of axis 'data'.*pmean or psum.*twice"
    for reduce in (jax.lax.pmean, jax.lax.psum):
        with pytest.raises(ValueError, match=message):
            traced_step(lambda p, b, reduce=reduce: reduce(scalar_loss(p, b), "data"))
    # Statistics inside of a loss may be over all workers, and a constant is of none.
    traced_step(lambda p, b: scalar_loss(p, b - jax.lax.pmean(b.mean(), "data")))
    traced_step(lambda p, b: 0.0)


def test_parameters_that_an_earlier_step_took_over():
    tx = optax.chain(ok_topk(), optax.sgd(0.1))
    step = optax_ext.make_train_step(scalar_loss, tx, mesh())
    everywhere = jax.sharding.NamedSharding(mesh(), P())
    params = jax.device_put(jax.tree.map(np.asarray, PARAMS), everywhere)
    state = optax_ext.init_state(tx, params, mesh())
    batch = np.ones((4, 8), np.float32)
    result = step(params, state, batch)
    message = r"has been deleted: an earlier step took it over.*jax\.numpy\.copy.*donate=False"
    with pytest.raises(ValueError, match=r"params\['bias'\] " + message):
        step(params, result[1], batch)
    with pytest.raises(ValueError, match="opt_state.* " + message):
        step(result[0], state, batch)
    step(*result[:2], batch)


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


# Whole optimizers, called as those of optax.

WHOLE = {
    "sparse_adamw": optax_ext.sparse_adamw,
    "sparse_sgd": optax_ext.sparse_sgd,
    "ok_topk_sgd": optax_ext.ok_topk_sgd,
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_second_argument_without_its_name(name):
    """It is b1 or a momentum in optax, and would be a density here."""
    make = WHOLE[name]
    message = rf"{name} takes the learning rate and keywords, got 0.9 .*density=0\.9.*b1"
    for more in ((0.9,), (0.9, 0.99)):
        with pytest.raises(TypeError, match=message):
            make(0.1, *more, axis="data")
    inspect.signature(make).bind(0.1, density=0.9, axis="data")
    assert [
        p.name for p in inspect.signature(make).parameters.values() if p.kind != p.KEYWORD_ONLY
    ] == ["learning_rate"]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("momentum", ["b1", "momentum"])
def test_a_momentum_that_whole_optimizers_do_not_have(name, momentum):
    with pytest.raises(TypeError, match=f"{name} has no {momentum}=: .*Leave {momentum} out"):
        WHOLE[name](0.1, density=0.1, axis="data", **{momentum: 0.9})

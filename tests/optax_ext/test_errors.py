"""Bad input: an error that names the argument, the value and the fix, at trace time."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import mesh, slow

PARAMS = {"kernel": jnp.zeros((8, 4)), "bias": jnp.zeros((4,))}
BATCH = np.ones((4, 8), np.float32)
KERNEL, BIAS = {"kernel": True, "bias": False}, {"kernel": False, "bias": True}
DENSE = optax_ext.dense(axis="data")
WHOLE = optax_ext.sparse_adamw(0.1, axis="data")


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


def scalar_loss(params, batch):
    return jnp.mean(batch @ params["kernel"]) + jnp.sum(params["bias"])


def selecting(selected, delivered):
    return optax_ext.sparse_allreduce(
        sc.select.topk(density=selected), sc.allreduce.ok_topk(density=delivered), axis="data"
    )


def with_leaf(name, value):
    return {**PARAMS, name: value}


def passed_whole():
    tx = ok_topk()
    step = jax.shard_map(tx.update, mesh=mesh(), in_specs=P(), out_specs=P(), check_vma=False)
    jax.eval_shape(step, PARAMS, init(tx))


def huge():
    leaf = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float32)
    jax.eval_shape(lambda params: init(ok_topk(), params), leaf)


def dense_steps(returned):
    trace_update(ok_topk(dense_steps=lambda step: returned), PARAMS, PARAMS)


def labelled(**more):
    params = {"a": jnp.zeros((12, 10)), "bias": jnp.zeros(10), "b": jnp.zeros((8, 5))}
    init(ok_topk(dense_leaves={"a": "sparse", "b": "dense"} | more), params)


def updated(**leaves):
    trace_update(ok_topk(), PARAMS, {**PARAMS, **leaves})


def nodes(**options):
    exchange = sc.allreduce.hierarchical(inner_axis="device", outer=sc.allreduce.topk_a())
    return optax_ext.sparse_allreduce(TOPK, exchange, **{"axis": ("node", "device"), **options})


TOPK, DENSE_EXCHANGE = sc.select.topk(density=0.1), sc.allreduce.dense()
MULTI, ADAM, LOCAL = optax_ext.multi_steps, optax.adam(0.1), optax_ext.scale_by_local_adam
AHEAD = optax_ext.residual(step_ahead=1.0)
WRONG_VALUES = [
    (lambda: ok_topk().init(PARAMS), r"axis='data' is not bound.*init_state\(tx, params, mesh"),
    # Who else may have called init.
    (
        lambda: ok_topk().init(PARAMS),
        r"init_state.*jax\.set_mesh.*TrainState.*nnx\.Optimizer.*with_mesh",
    ),
    (
        lambda: ok_topk().update(PARAMS, init(ok_topk())),
        r"axis='data' is not bound.*shard_map.*pmap.*simulate",
    ),
    (lambda: DENSE.update(PARAMS, DENSE.init(PARAMS)), "axis='data' is not bound"),
    (lambda: MULTI(ok_topk(), 2).init(PARAMS), "axis='data' is not bound"),
    (lambda: nodes().init(PARAMS), r"axis=\('node', 'device'\) is not bound"),
    (lambda: optax_ext.ahead(PARAMS, init(WHOLE)), "axis='data' is not bound here"),
    (lambda: updated(more=jnp.zeros(3)), "updates have another tree"),
    (
        lambda: updated(kernel=jnp.zeros((4, 8))),
        r"updates\['kernel'\] has shape \(4, 8\).*\(8, 4\)",
    ),
    (
        lambda: updated(bias=jnp.zeros(4, jnp.bfloat16)),
        r"updates\['bias'\].*bfloat16.*float32.*Cast",
    ),
    (lambda: trace_update(WHOLE, PARAMS, PARAMS), r"call tx.update\(gradients, state, params\)"),
    (huge, r"size must be below 2\*\*31.*2147483648.*Split"),
    (
        lambda: trace_update(ok_topk(), PARAMS, PARAMS, init(ok_topk(), workers=8)),
        r"made for 2 workers and passed whole, or for 8",
    ),
    (passed_whole, r"residual has 4 rows.*state_specs"),
    (
        lambda: selecting(0.5, 0.1),
        r"selector has density=0\.5 and the allreduce density=0\.1.*Give both density=0\.5",
    ),
    (lambda: ok_topk(dense_steps=-1), "dense_steps must be an integer of at least 0, got -1"),
    (lambda: dense_steps(3), "dense_steps must return one bool.*3"),
    (lambda: dense_steps(jnp.ones(2, bool)), r"dense_steps must return one bool.*bool\[2\]"),
    (lambda: dense_steps(jnp.ones(())), "dense_steps must return one bool.*float32"),
    (labelled, r"no label for params\['bias'\].*small_leaves"),
    (lambda: labelled(bias=None), r"no label for params\['bias'\]"),
    (lambda: labelled(bias="big"), r"params\['bias'\] 'big'.*one of"),
    (lambda: labelled(bias="dense", c="dense"), r"label for params\['c'\], which is no leaf"),
    (lambda: optax_ext.dense(axis="data", buckets=0), "buckets must be an integer of at least 1"),
    (lambda: optax_ext.dense(axis="data", buckets=2.0), "buckets must be an integer of at least 1"),
    (lambda: nodes(axis="node"), "must name the axis of the nodes and inner_axis='device'"),
    (lambda: nodes(axis="device"), r"jax\.pmap has one axis only"),
    (lambda: MULTI(ok_topk(), 0), "every_k_schedule must be .* 1, got 0"),
    (lambda: MULTI(ADAM, 2).init(PARAMS), "has no sparse allreduce"),
    (lambda: optax_ext.delayed(ADAM).init(PARAMS), r"tx of optax_ext\.delayed has no sparse allr"),
    (lambda: optax_ext.momentum_correction(1.0), "momentum must be less than 1"),
    (lambda: optax_ext.local_clip_by_global_norm(0.0, axis="data"), "max_norm must be positive"),
    (lambda: optax_ext.residual(jnp.float16), "dtype=float16 of the residual is none of"),
    (lambda: optax_ext.residual(decay=1.5), r"decay must be a number in \[0.0, 1.0\]"),
    *(
        (lambda wrong=wrong: optax_ext.residual(step_ahead=wrong), "step_ahead must be a number")
        for wrong in (-0.1, float("nan"), "P")
    ),
    (lambda: ok_topk(residual=AHEAD), "holds gradients.*Put the rate in front"),
    (lambda: LOCAL(b2=1.0), "b2 must be less than 1"),
    (lambda: LOCAL(b2=-0.1), "b2 must be a number"),
    (lambda: LOCAL(average_every=0, axis="w"), "average_every must be an integer of at least 1"),
    (lambda: LOCAL(average_every=5), "Give the mesh axis of the workers as axis="),
    (lambda: ok_topk(limit=1.0), r"limit bounds .* local=optax.scale_by_learning_rate"),
    *(
        (
            lambda wrong=wrong, make=make: make(limit=wrong),
            re.escape(f"limit must be a number greater than 0 or None, got {wrong!r}."),
        )
        for wrong in (0, -1.0, "2", True, float("nan"))
        for make in (
            lambda **o: ok_topk(local=optax.scale(-1.0), **o),
            lambda **o: optax_ext.sparse_adamw(0.1, axis="data", **o),
        )
    ),
]
WRONG_TYPES = [
    (
        lambda: jax.jit(lambda d: ok_topk(density=d).init(PARAMS))(0.1),
        "density must be a Python number.*close over",
    ),
    (
        lambda: optax_ext.sparse_allreduce(DENSE_EXCHANGE, DENSE_EXCHANGE, axis="data"),
        r"selector must be a Selector.*select\.topk",
    ),
    (
        lambda: optax_ext.sparse_allreduce(TOPK, TOPK, axis="data"),
        r"allreduce must be a SparseAllreduce.*topk_a",
    ),
    (
        lambda: ok_topk(residual=jnp.bfloat16),
        r"residual must be made by optax_ext\.residual, got .*bf",
    ),
    (
        lambda: optax_ext.with_mesh(ok_topk(), {"data": 4}),
        r"mesh must be a jax.sharding.Mesh, got a dict",
    ),
]


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [(ValueError, *row) for row in WRONG_VALUES] + [(TypeError, *row) for row in WRONG_TYPES],
)
def test_a_wrong_call_names_the_argument_the_value_and_the_fix(error, call, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("density", [0, 0.0, -0.1, 1.0001, float("nan"), True, "0.1", None])
def test_density_outside_its_range(density):
    with pytest.raises((TypeError, ValueError), match=r"density must be .*\(0, 1\], got"):
        ok_topk(density=density)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_, jnp.float64])
def test_leaves_that_are_not_real_or_too_long(dtype):
    with jax.enable_x64(dtype is jnp.float64):
        params = with_leaf("steps", jnp.zeros((3,), dtype))
        fix = "float32" if dtype is jnp.float64 else "optax.masked"
        message = rf"params\['steps'\].*{jnp.dtype(dtype)}.*{fix}"
        with pytest.raises(TypeError, match=message):
            init(ok_topk(), params)
        with pytest.raises(TypeError, match=r"updates\['steps'\]"):
            trace_update(ok_topk(), PARAMS, params)


@pytest.mark.parametrize(
    "tx", [ok_topk(axis="batch"), optax_ext.dense(axis="batch"), ok_topk(axis=("data", "batch"))]
)
def test_an_axis_that_the_mesh_does_not_have(tx):
    state = optax_ext.init_state(tx, PARAMS, {"data": 4, "batch": 1})
    step = optax_ext.make_train_step(lambda p, b: 0.0, tx, mesh())
    for call in (
        lambda: optax_ext.init_state(optax.chain(tx, optax.sgd(0.1)), PARAMS, mesh()),
        lambda: optax_ext.init_state(tx, PARAMS, {"data": 4}),
        lambda: optax_ext.abstract_state(tx, PARAMS, mesh()),
        *(lambda f=f: f(PARAMS, state, BATCH) for f in (step, step.lower, step.trace)),
    ):
        with pytest.raises(ValueError, match=r"axis=.*'batch'.* is not an axis of the mesh.*data"):
            call()


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


@pytest.mark.parametrize("tx", [ok_topk(), DENSE], ids=["ok_topk", "dense"])
def test_gradients_already_summed_over_the_axis(tx):
    def local(params, x):
        gradients = jax.grad(scalar_loss)(params, x)  # of replicated params: autodiff adds a psum
        return tx.update(gradients, tx.init(params))[0]

    step = jax.shard_map(local, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match=r"(?s)updates\['bias'\].*already summed.*pcast") as error:
        jax.eval_shape(step, PARAMS, BATCH)
    assert "jax.lax.pcast(params, 'data', to='varying')" in str(error.value)
    assert "optax_ext.ahead(params, opt_state)" in str(error.value)


@pytest.mark.parametrize(
    "chain",
    [
        (ok_topk(), ok_topk()),
        (ok_topk(), optax.scale(0.5), ok_topk(density=0.2), optax.sgd(0.1)),
        (DENSE, ok_topk()),
        (optax.masked(optax.identity(), True), optax.chain(ok_topk(), ok_topk())),
    ],
)
def test_two_allreduces_of_the_same_gradients(chain):
    with pytest.raises(ValueError, match="tx has two allreduces of the same gradients.*Keep one"):
        init(optax.chain(*chain))


def test_allreduces_of_other_leaves_are_no_mistake():
    for tx in (
        optax.chain(optax.masked(ok_topk(), KERNEL), optax.masked(DENSE, BIAS)),
        optax_ext.bucketed(ok_topk(), 2),
        optax_ext.bucketed(DENSE, 2),
    ):
        init(tx)
    assert optax_ext.get_state(init(optax.chain(ok_topk(), optax.sgd(0.1)), {})) is not None


@pytest.mark.parametrize(
    ("other", "named"),
    [
        slow(ok_topk(density=0.2), ["topk(density=0.1)", "topk(density=0.2)"], id="density"),
        slow(
            ok_topk(codec=sc.wire.narrow8()),
            ["ok_topk(codec=raw())", "ok_topk(codec=narrow8("],
            id="codec",
        ),
        (optax_ext.topk_a(0.1, axis="data"), ["allreduce=ok_topk(", "allreduce=topk_a("]),
        (
            ok_topk(residual=optax_ext.residual(decay=0.9)),
            ["residual=", "decay=1.0) in the state", "decay=0.9) in tx"],
        ),
    ],
)
def test_a_state_made_with_other_settings(other, named):
    with pytest.raises(ValueError, match="state was made for another transformation") as error:
        trace_update(other, PARAMS, PARAMS, init(ok_topk()))
    text = str(error.value)
    assert all(part in text for part in named), text
    assert "optax_ext.reshard(opt_state, optax_ext.init_state(tx, params, mesh))" in text
    # What the message says to do works.
    moved = optax_ext.reshard(init(ok_topk()), init(other))
    trace_update(other, PARAMS, PARAMS, moved)


@pytest.mark.slow
def test_settings_that_say_nothing_are_not_compared():
    def with_spec(spec):
        selector = TOPK._replace(spec=spec)
        return optax_ext.sparse_allreduce(selector, sc.allreduce.ok_topk(density=0.1), axis="data")

    # The text of a traced array has no hash.
    traced = sc.Spec("own", (("scale", "float32[2]"),))
    given = with_spec(sc.Spec.of("own", scale=np.ones(2, np.float32)))
    for tx, made in ((with_spec(None), ok_topk()), (given, given), (with_spec(traced), given)):
        trace_update(tx, PARAMS, PARAMS, init(made))


@pytest.mark.parametrize("tree", [{}, (), {"none": np.zeros((0, 3))}], ids=str)
def test_an_empty_pytree_works_and_does_nothing(tree):
    tx = optax.chain(ok_topk(), optax.sgd(0.1))

    def step(_):
        updates, state = tx.update(tree, tx.init(tree))
        return updates, optax_ext.get_state(state).count

    updates, count = sc.simulate(step, axis="data", axis_size=2)(jnp.zeros(2))
    assert jax.tree.structure(updates) == jax.tree.structure(tree)
    assert count.tolist() == [1, 1]

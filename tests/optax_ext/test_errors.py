"""Bad input: an error that names the argument, the value and the fix, at trace time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import mesh, on_mesh, refused, slow

PARAMS = {"kernel": jnp.zeros((8, 4)), "bias": jnp.zeros((4,))}
BATCH = np.ones((4, 8), np.float32)
DENSE = optax_ext.dense(axis="data")
WHOLE = optax_ext.sparse_adamw(0.1, axis="data")
ok_topk = functools.partial(optax_ext.ok_topk, density=0.1, axis="data")


def init(tx, params=PARAMS, workers=4):
    """The state of all workers on one device."""
    return optax_ext.init_state(tx, params, {"data": workers})


def trace_update(tx, params, updates, state=None):
    """Traces one update on a mesh of four; nothing runs."""
    state = optax_ext.init_state(tx, params, mesh()) if state is None else state
    specs = P(), optax_ext.state_specs(state)

    def local(updates, state):
        return tx.update(jax.lax.pcast(updates, "data", to="varying"), state)

    jax.eval_shape(on_mesh(local, mesh(), specs, specs), updates, state)


def scalar_loss(params, batch):
    return jnp.mean(batch @ params["kernel"]) + jnp.sum(params["bias"])


def under_another_mesh():
    with jax.set_mesh(mesh(4, "other")):
        WHOLE.init(PARAMS)


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


TOPK, OK_TOPK = sc.select.topk(density=0.1), sc.allreduce.ok_topk(density=0.1)
INJECTED = optax.inject_hyperparams(optax_ext.sparse_adamw)
INJECTED = functools.partial(INJECTED, learning_rate=0.1, axis="data")
SPARSE = functools.partial(optax_ext.sparse_allreduce, axis="data")
HUGE = jax.ShapeDtypeStruct((2**16, 2**15), jnp.float32)
# The whole state on each worker, and the state of one worker.
SIMULATED = sc.simulate(ok_topk().update, axis="data", axis_size=4, in_axes=(0, None))
ON_ALL = on_mesh(ok_topk().update, mesh(), P(), P(), check_vma=False)
STACKED = jax.tree.map(lambda x: jnp.stack([x] * 4), PARAMS)
SGD = functools.partial(optax_ext.ok_topk_sgd, density=0.1)
MULTI, ADAM, LOCAL = optax_ext.multi_steps, optax.adam(0.1), optax_ext.scale_by_local_adam
AHEAD, MONITOR, XI = optax_ext.residual(step_ahead=1.0), optax_ext.Monitor, optax_ext.measure_xi
CHECK = optax_ext.assert_local_gradients(axis="data")
BEHIND = XI(optax.chain(ok_topk(), ADAM), axis="data")
BOOL, BUCKETS = "dense_steps must return one bool", "buckets must be an integer of at least 1, got"
UNBOUND = "axis='data' is not bound"
WRONG_VALUES = [
    (lambda: ok_topk().init(PARAMS), rf"{UNBOUND}.*init_state\(tx, params, mesh"),
    # Others that may have called init.
    (lambda: ok_topk().init(PARAMS), r"jax\.set_mesh.*TrainState.*nnx\.Optimizer.*with_mesh"),
    (
        lambda: ok_topk().update(PARAMS, init(ok_topk())),
        f"{UNBOUND}.*@optax_ext.data_parallel instead of @jax.jit.*shard_map.*pmap.*simulate",
    ),
    (lambda: DENSE.update(PARAMS, DENSE.init(PARAMS)), UNBOUND),
    (lambda: CHECK.update(PARAMS, ()), UNBOUND),
    (lambda: MULTI(ok_topk(), 2).init(PARAMS), UNBOUND),
    (under_another_mesh, UNBOUND),
    (lambda: nodes().init(PARAMS), r"axis=\('node', 'device'\) is not bound"),
    (lambda: optax_ext.ahead(PARAMS, init(WHOLE)), f"ahead was called where {UNBOUND}.*as they"),
    (lambda: updated(more=jnp.zeros(3)), "updates have another tree"),
    (lambda: updated(kernel=jnp.zeros((4, 8))), r"\['kernel'\] has shape \(4, 8\).*\(8, 4\)"),
    (lambda: updated(bias=jnp.zeros(4, jnp.bfloat16)), r"\['bias'\].*bfloat16.*float32.*Cast"),
    (lambda: trace_update(WHOLE, PARAMS, PARAMS), r"tx.update\(gradients, state, params\)"),
    (lambda: jax.eval_shape(lambda p: init(ok_topk(), p), HUGE), "below 2.*2147483648.*Split"),
    (
        lambda: trace_update(ok_topk(), PARAMS, PARAMS, init(ok_topk(), workers=8)),
        r"made for 2 workers and passed whole, or for 8",
    ),
    (lambda: ON_ALL(PARAMS, init(ok_topk())), r"residual has 4 rows.*state_specs"),
    (lambda: SIMULATED(STACKED, init(ok_topk(), workers=1)), "for 1 workers, .* 4.*reshard"),
    (lambda: SPARSE(sc.select.topk(density=0.5), OK_TOPK), r"0\.5 and .*0\.1.*both density=0\.5"),
    *(
        (lambda wrong=wrong: ok_topk(density=wrong), r"density must be .*\(0, 1\], got")
        for wrong in (0, 0.0, -0.1, 1.0001, float("nan"))
    ),
    (lambda: ok_topk(dense_steps=-1), "dense_steps must be an integer of at least 0, got -1"),
    (lambda: dense_steps(3), f"{BOOL}.*3"),
    (lambda: dense_steps(jnp.ones(2, bool)), rf"{BOOL}.*bool\[2\]"),
    (lambda: dense_steps(jnp.ones(())), f"{BOOL}.*float32"),
    (labelled, r"no label for params\['bias'\].*small_leaves"),
    (lambda: labelled(bias=None), r"no label for params\['bias'\]"),
    (lambda: labelled(bias="big"), r"params\['bias'\] 'big'.*one of"),
    (lambda: labelled(bias="dense", c="dense"), r"label for params\['c'\], which is no leaf"),
    (lambda: init(INJECTED(dense_steps=3)), "dense_steps must be .*static_args="),
    (lambda: optax_ext.dense(axis="data", buckets=0), f"{BUCKETS} 0"),
    (lambda: optax_ext.dense(axis="data", buckets=2.0), f"{BUCKETS} 2.0"),
    (lambda: optax_ext.dense(axis="data", dtype="int8"), "dtype must be one of .*, got 'int8'"),
    (lambda: optax_ext.bucketed(DENSE, 0), f"{BUCKETS} 0"),
    (lambda: nodes(axis="node"), "must name the axis of the nodes and inner_axis='device'"),
    (lambda: nodes(axis="device"), r"jax\.pmap has one axis only"),
    (lambda: MULTI(ok_topk(), 0), "every_k_schedule must be .* 1, got 0"),
    (lambda: MULTI(ADAM, 2).init(PARAMS), "has no sparse allreduce"),
    (lambda: optax_ext.delayed(ADAM).init(PARAMS), r"optax_ext\.delayed has no sparse allreduce"),
    (lambda: XI(ok_topk(), axis="data", every=0), "every must be an integer of at least 1, got 0"),
    (lambda: optax_ext.flush(PARAMS, init(ok_topk())), r"ext.consolidate\(params, opt_state\)"),
    (lambda: optax_ext.momentum_correction(1.0), "momentum must be less than 1"),
    (lambda: optax_ext.local_clip_by_global_norm(0.0, axis="data"), "max_norm must be positive"),
    (lambda: optax_ext.residual(jnp.float16), "dtype=float16 of the residual is none of"),
    (lambda: optax_ext.residual(decay=1.5), r"decay must be a number in \[0.0, 1.0\]"),
    *(
        (lambda wrong=wrong: optax_ext.residual(step_ahead=wrong), "step_ahead must be a number")
        for wrong in (-0.1, float("nan"), "P")
    ),
    (lambda: ok_topk(residual=AHEAD), "holds gradients.*learning rate and its sign"),
    (lambda: LOCAL(b2=1.0), "b2 must be less than 1"),
    (lambda: LOCAL(b2=-0.1), "b2 must be a number"),
    (
        lambda: LOCAL(moments="row"),
        "moments must be one of 'entries', 'factors', 'rows', got 'row'",
    ),
    (lambda: optax_ext.sparse_adamw(0.1, axis="data", moments=None), "moments must .* got None"),
    (lambda: LOCAL(average_every=0, axis="w"), "average_every must be an integer of at least 1"),
    (lambda: LOCAL(average_every=5), "Give the mesh axis of the workers as axis="),
    (lambda: ok_topk(limit=1.0), r"limit bounds .* local=optax.scale_by_learning_rate"),
    *(
        (lambda wrong=wrong, make=make: make(limit=wrong), f"limit must .* got {wrong!r}\\.")
        for wrong in (0, -1.0, "2", True, float("nan"))
        for make in (
            lambda **o: ok_topk(local=optax.scale(-1.0), **o),
            lambda **o: optax_ext.sparse_adamw(0.1, axis="data", **o),
        )
    ),
    *(
        (lambda c=c: init(optax.chain(*c)), "two allreduces of the same gradients.*Keep one")
        for c in (
            (ok_topk(), ok_topk()),
            (ok_topk(), optax.scale(0.5), ok_topk(density=0.2), optax.sgd(0.1)),
            (DENSE, ok_topk()),
            (optax.masked(optax.identity(), True), optax.chain(ok_topk(), ok_topk())),
        )
    ),
]
WRONG_TYPES = [
    (
        lambda: jax.jit(lambda d: ok_topk(density=d).init(PARAMS))(0.1),
        "density must be a Python number.*close over",
    ),
    *(
        (lambda wrong=wrong: ok_topk(density=wrong), r"density must be .*\(0, 1\], got")
        for wrong in (True, "0.1", None)
    ),
    (lambda: SPARSE(OK_TOPK, OK_TOPK), r"selector must be a Selector.*select\.topk"),
    (lambda: SPARSE(TOPK, TOPK), "allreduce must be a SparseAllreduce.*topk_a"),
    (lambda: ok_topk(residual=jnp.bfloat16), r"residual .* made by optax_ext\.residual, got .*bf"),
    (lambda: optax_ext.with_mesh(ok_topk(), {"data": 4}), "mesh must be a .*Mesh, got a dict"),
    (lambda: init(INJECTED(density=0.1)), "density must be .*static_args="),
    (lambda: init(BEHIND), "tx must be a sparse allreduce alone"),
    (lambda: MONITOR("logs"), "write must be callable"),
    (lambda: MONITOR(print, prefix=None), "prefix must be a string.* got None"),
    (lambda: init(WHOLE, (x for x in PARAMS.values())), r"params is a generator.*list\(params\)"),
    *(
        (lambda make=make: make("1e-3", axis="data"), "learning_rate must be a number.*got '1e-3'")
        for make in (optax_ext.sparse_adamw, optax_ext.sparse_sgd, SGD)
    ),
]


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [(ValueError, *row) for row in WRONG_VALUES] + [(TypeError, *row) for row in WRONG_TYPES],
)
def test_a_wrong_call_names_the_argument_the_value_and_the_fix(error, call, message):
    refused(message, call, error=error)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.bool_, jnp.float64])
def test_leaves_that_are_not_real_or_too_long(dtype):
    with jax.enable_x64(dtype is jnp.float64):
        params = {**PARAMS, "steps": jnp.zeros((3,), dtype)}
        fix = "float32" if dtype is jnp.float64 else r"nnx\.Param"
        message = rf"params\['steps'\].*{jnp.dtype(dtype)}.*{fix}"
        refused(message, init, ok_topk(), params, error=TypeError)
        refused(r"updates\['steps'\]", trace_update, ok_topk(), PARAMS, params, error=TypeError)


@pytest.mark.parametrize(
    "tx", [ok_topk(axis="batch"), optax_ext.dense(axis="batch"), ok_topk(axis=("data", "batch"))]
)
def test_an_axis_that_the_mesh_does_not_have(tx):
    state = optax_ext.init_state(tx, PARAMS, {"data": 4, "batch": 1})
    step = optax_ext.make_train_step(lambda p, b: 0.0, tx, mesh())
    for call, *given in (
        (optax_ext.init_state, optax.chain(tx, optax.sgd(0.1)), PARAMS, mesh()),
        (optax_ext.init_state, tx, PARAMS, {"data": 4}),
        (optax_ext.abstract_state, tx, PARAMS, mesh()),
        *((call, PARAMS, state, BATCH) for call in (step, step.lower, step.trace)),
    ):
        refused(r"axis=.*'batch'.* is not an axis of the mesh.*data", call, *given)


@pytest.mark.parametrize("mapped", ["pmap", "vmap", "shard_map"])
def test_an_axis_of_another_name(mapped):
    init = WHOLE.init
    if mapped == "shard_map":
        init = on_mesh(init, mesh(8, "batch"), P(), P())
    else:
        init = getattr(jax, mapped)(init, axis_name="batch")
    message = rf"{UNBOUND} here; the bound axes are \('batch',\).*axis_name='data'"
    refused(message, init, jnp.ones((8, 3)))


@pytest.mark.parametrize("other", [ok_topk(axis="b"), optax_ext.dense(axis="b")])
def test_allreduces_over_different_axes(other):
    labels = {"kernel": "one", "bias": "other"}
    tx = optax.multi_transform({"one": ok_topk(axis="a"), "other": other}, labels)
    message = "tx has allreduces over different axes, 'a' and 'b'.*same axis="
    refused(message, optax_ext.init_state, tx, PARAMS, {"a": 2, "b": 2})
    state = sc.simulate(tx.init, axis=("a", "b"), axis_size=(2, 2), in_axes=None)(PARAMS)
    refused(message, optax_ext.state_specs, state)


@pytest.mark.parametrize("tx", [ok_topk(), DENSE, CHECK], ids=["ok_topk", "dense", "assert"])
def test_gradients_already_summed_over_the_axis(tx):
    def local(params, x):
        gradients = jax.grad(scalar_loss)(params, x)  # of replicated params: autodiff adds a psum
        return tx.update(gradients, tx.init(params))[0]

    step = on_mesh(local, mesh(), (P(), P("data")), P())
    message = r"(?s)updates\['bias'\].*already summed.*pcast"
    text = refused(message, jax.eval_shape, step, PARAMS, BATCH)
    assert "jax.lax.pcast(params, 'data', to='varying')" in text
    # The most probable cause comes first.
    assert text.index("optax_ext.ahead(params, opt_state)") < text.index("pmean")


def test_allreduces_of_other_leaves_are_no_mistake():
    for tx in (optax_ext.bucketed(ok_topk(), 2), optax_ext.bucketed(DENSE, 2)):
        assert optax_ext.get_info(init(tx)) is not None
    assert optax_ext.get_state(init(optax.chain(ok_topk(), optax.sgd(0.1)), {})) is not None


@pytest.mark.parametrize(
    ("other", "named"),
    [
        slow(ok_topk(density=0.2), ["topk(density=0.1)", "topk(density=0.2)"], id="density"),
        slow(ok_topk(codec=sc.wire.narrow8()), ["(codec=raw())", "(codec=narrow8("], id="codec"),
        (optax_ext.topk_a(0.1, axis="data"), ["allreduce=ok_topk(", "allreduce=topk_a("]),
        (
            ok_topk(residual=optax_ext.residual(decay=0.9)),
            ["residual=", "decay=1.0) in the state", "decay=0.9) in tx"],
        ),
    ],
)
def test_a_state_made_with_other_settings(other, named):
    message = "state was made for another transformation"
    text = refused(message, trace_update, other, PARAMS, PARAMS, init(ok_topk()))
    assert all(part in text for part in named), text
    assert "optax_ext.reshard(opt_state, optax_ext.init_state(tx, params, mesh))" in text
    # The fix in the message works.
    moved = optax_ext.reshard(init(ok_topk()), init(other))
    trace_update(other, PARAMS, PARAMS, moved)


@pytest.mark.parametrize("make", [ok_topk, optax_ext.dense])
def test_a_state_made_for_another_axis(make):
    state, step = init(make(axis="data")), optax_ext.make_train_step
    lower = step(scalar_loss, make(axis="dta"), mesh()).lower
    message = r"state was made for axis='data', and the transformation has axis='dta'.*same tx"
    refused(message, lower, PARAMS, state, BATCH)


@pytest.mark.slow
def test_settings_that_say_nothing_are_not_compared():
    def with_spec(spec):
        return SPARSE(TOPK._replace(spec=spec), OK_TOPK)

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


@pytest.mark.parametrize("axis", [0, ("data", 1)])
@pytest.mark.parametrize("make", [optax_ext.sparse_adamw, optax_ext.ok_topk, optax_ext.dense])
def test_a_number_is_no_axis(make, axis):
    given = () if make is optax_ext.dense else (0.1,)
    message = r"must be the name of an axis, or a tuple of names.*axis='data'"
    refused(message, lambda: make(*given, axis=axis).init({"w": jnp.ones(4)}))


@pytest.mark.parametrize("rounds", ["every", "local_steps"])
def test_what_reads_the_loss_next_to_rounds_is_named(rounds):
    tx = optax_ext.sparse_sgd(0.1, axis="data", every=2)
    if rounds == "local_steps":
        tx = optax_ext.published.diloco(optax.sgd(0.1), axis="data", every=2)
    tx = optax.chain(tx, optax.contrib.reduce_on_plateau())
    on, params = mesh(2), {"w": jnp.ones((4, 2))}
    state = optax_ext.init_state(tx, params, on)

    def loss_fn(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    for check_vma in (True, False):
        step = optax_ext.make_train_step(loss_fn, tx, on, check_vma=check_vma)
        message = "ReduceLROnPlateau next to an exchange in rounds"
        refused(message, step, params, state, np.ones((4, 4), np.float32))


def test_a_batch_loss_or_auxiliary_value_that_can_not_be():
    tx, on, params = optax_ext.sparse_sgd(0.1, axis="data"), mesh(2), {"w": jnp.ones((4, 2))}
    state, batch = optax_ext.init_state(tx, params, on), np.ones((4, 4), np.float32)

    def result_of(loss_fn, batch=batch, **options):
        step = optax_ext.make_train_step(loss_fn, tx, on, donate=False, **options)
        return step(params, state, batch)

    def mean(params, x):
        return jnp.mean((x @ params["w"]) ** 2)

    refused("no examples in it", result_of, mean, batch[:0])
    # Examples without entries are examples.
    result_of(lambda p, x: mean(p, x[0]) + x[1].sum(), (batch, np.ones((4, 0), np.float32)))
    for loss_fn in (
        lambda p, x: mean(p, x).astype(int),
        lambda p, x: mean(p, x).astype(jnp.complex64),
    ):
        with pytest.raises(TypeError, match="must return a real number, got one of"):
            result_of(loss_fn)
    with pytest.raises(TypeError, match=r"aux\['text'\] is 'hello', a str"):
        result_of(lambda p, x: (mean(p, x), {"text": "hello"}), has_aux=True)
    with pytest.raises(TypeError, match="exchange_mesh must be a jax.sharding.Mesh"):
        optax_ext.make_train_round(mean, tx, on, exchange_mesh="x")
    local = optax_ext.published.diloco(optax.sgd(0.1), axis="data", every=2)
    step = optax_ext.make_train_round(mean, local, on)
    given = optax_ext.init_state(local, params, on)
    refused("counts the steps of its rounds itself", step, params, given, np.ones((2, 4, 4)))

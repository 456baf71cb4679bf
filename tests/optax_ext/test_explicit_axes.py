"""A mesh with explicit axes, also as the mesh of the program, and arrays on other devices."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback as call_with_effects
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
from tests.optax_ext.helpers import PARAMS, batch_of, bits, by_data_parallel, loss_fn, mesh, slow

EXPLICIT = mesh(kind=AxisType.Explicit)
AROUND = {"set": lambda on: jax.set_mesh(on), "given": lambda on: contextlib.nullcontext()}
TX = {
    "sparse_adamw": lambda: optax_ext.sparse_adamw(1e-2, axis="data", density=0.25),
    "every": lambda: optax_ext.sparse_adamw(1e-2, axis="data", density=0.25, every=2),
    "diloco": lambda: optax_ext.published.diloco(optax.adam(1e-2), axis="data", every=2),
    "dense": lambda: optax.chain(optax_ext.dense(axis="data"), optax.adam(1e-2)),
}
STEPS = 3


def trained(tx, on, around, placed=lambda x: x):
    traces, seen = [], []

    def counted(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    with around(on):
        params = jax.tree.map(jnp.array, PARAMS)
        state = optax_ext.init_state(tx, params, on)
        step = optax_ext.make_train_step(counted, tx, on)
        for i in range(STEPS):
            params, state, loss = step(params, state, placed(batch_of(seed=i)))
            # The program goes on with each result.
            seen.append([loss * 2, jnp.mean(loss), jax.tree.map(lambda x: 0.9 * x, params)])
            jax.tree.map(lambda x: x + 1, state)
        assert len(traces) == 1
        return params, state, seen


@functools.cache
def expected(name):
    return trained(TX[name](), mesh(), AROUND["given"])


@pytest.mark.parametrize("name", ["sparse_adamw", "every", *map(slow, ("diloco", "dense"))])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.one_in(2)
def test_steps_have_the_bits_of_auto_axes(name, around):
    found = trained(TX[name](), EXPLICIT, AROUND[around])
    assert bits(found) == bits(expected(name))
    if around == "set":
        leaves = jax.tree.leaves(found[:2])
        assert {leaf.sharding.mesh.axis_types for leaf in leaves} == {(AxisType.Explicit,)}


def check_close(found, expected):
    """Another program: XLA may round a product and a sum once there, and twice here."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("spec", [P(), P("data")])
def test_a_batch_that_is_on_the_explicit_mesh(spec):
    def placed(batch):
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(EXPLICIT, spec)), batch)

    found = trained(TX["sparse_adamw"](), EXPLICIT, jax.set_mesh, placed)
    check_close(found, expected("sparse_adamw"))


@pytest.mark.parametrize("which", ["params", *map(slow, ("batch", "both"))])
@pytest.mark.parametrize("way", ["make_train_step", "data_parallel"])
def test_results_are_on_the_axes_of_the_arrays(which, way):
    """So that the program can compute with results and with arrays that it has placed itself."""

    def placed(tree, *kinds, spec):
        if which not in kinds:
            return tree
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(EXPLICIT, spec)), tree)

    tx, traces = TX["sparse_adamw"](), []
    params = placed(jax.tree.map(jnp.array, PARAMS), "params", "both", spec=P())
    average = jax.tree.map(jnp.copy, params)
    batches = [placed(batch_of(seed=i), "batch", "both", spec=P("data")) for i in range(3)]
    state = optax_ext.init_state(tx, params, EXPLICIT)

    def counted(params, batch):
        traces.append(1)
        return loss_fn(params, batch)

    step = optax_ext.make_train_step(counted, tx, EXPLICIT)
    step = by_data_parallel(counted, tx) if way == "data_parallel" else step
    for batch in batches:
        params, state, loss = step(params, state, batch)
        average = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, average, params)
        assert float(jax.jit(loss_fn)(params, batch)) > 0
        assert float(loss) > 0
    assert len(traces) == 1
    flushed, state = optax_ext.flush(params, state)
    assert float(jax.jit(loss_fn)(flushed, batches[0])) > 0


@pytest.mark.parametrize("use", ["metrics", "get_info", "flush", "consolidate", "Monitor"])
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_functions_of_a_state_take_it(use, kind):
    on = mesh(kind=kind)
    params, state, _ = trained(TX["sparse_adamw"](), on, jax.set_mesh)
    auto = expected("sparse_adamw")
    function = {
        "metrics": lambda p, s: optax_ext.metrics(s),
        "get_info": lambda p, s: optax_ext.get_info(s),
        "flush": lambda p, s: optax_ext.flush(params=p, opt_state=s),
        "consolidate": optax_ext.consolidate,
        "Monitor": lambda p, s: optax_ext.Monitor(lambda *_: None, every=1)(s),
    }[use]
    with jax.set_mesh(EXPLICIT):
        found = function(params, state)
        if kind == AxisType.Explicit:
            jax.tree.map(lambda x: x * 2, found)
    assert bits(found) == bits(function(*auto[:2]))


@pytest.mark.parametrize("on", [mesh(), slow(EXPLICIT)], ids=["auto", "explicit"])
@pytest.mark.parametrize("around", AROUND)
def test_a_scan_around_a_step_trains_as_the_loop(on, around):
    tx = TX["sparse_adamw"]()
    batches = jax.tree.map(lambda *x: np.stack(x), *(batch_of(seed=i) for i in range(STEPS)))
    with AROUND[around](on):
        params = jax.tree.map(jnp.array, PARAMS)
        state = optax_ext.init_state(tx, params, on)
        step = optax_ext.make_train_step(loss_fn, tx, on, donate=False)

        def one(carry, batch):
            *carry, loss = step(*carry, batch)
            return tuple(carry), loss

        found, _ = jax.jit(lambda carry, xs: jax.lax.scan(one, carry, xs))((params, state), batches)
    check_close(found, expected("sparse_adamw")[:2])


def sharded_params(on, bias="model"):
    place = {"w": P(None, "model"), "b": P(bias)}
    return jax.device_put(PARAMS, {name: NamedSharding(on, spec) for name, spec in place.items()})


@pytest.mark.parametrize("kind", [AxisType.Auto, slow(AxisType.Explicit)])
@pytest.mark.parametrize("bias", ["model", None])
def test_a_scan_around_a_step_keeps_parameters_in_their_places(kind, bias):
    """On Auto axes a traced parameter has no placement, and its layout in the state has one."""
    tx = optax.chain(optax_ext.ok_topk(0.25, axis="data"), optax.sgd(1e-2))
    on = mesh((2, 2), ("data", "model"), kind)
    batches = jax.tree.map(lambda *x: np.stack(x), *(batch_of(seed=i) for i in range(STEPS)))
    params = sharded_params(on, bias)
    start = params, state = params, optax_ext.init_state(tx, params, on)
    step = optax_ext.make_train_step(loss_fn, tx, on, donate=False)
    for i in range(STEPS):
        params, state, _ = step(params, state, batch_of(seed=i))

    def one(carry, batch):
        return step(*carry, batch)[:2], None

    found, _ = jax.jit(lambda carry, xs: jax.lax.scan(one, carry, xs))(start, batches)
    check_close(found, (params, state))
    for got, wanted in zip(*map(jax.tree.leaves, (found, (params, state))), strict=True):
        assert got.sharding.is_equivalent_to(wanted.sharding, got.ndim)
    step(*found, batch_of(seed=STEPS))


@pytest.mark.slow
def test_a_round_on_explicit_axes():
    tx, ends = TX["every"](), []
    batches = jax.tree.map(lambda *x: np.stack(x), *(batch_of(seed=i) for i in range(2)))
    for on, around in ((mesh(), AROUND["given"]), (EXPLICIT, jax.set_mesh)):
        with around(on):
            params = jax.tree.map(jnp.array, PARAMS)
            state = optax_ext.init_state(tx, params, on)
            take = optax_ext.make_train_round(loss_fn, tx, on)
            for _ in range(2):
                params, state, losses = take(params, state, batches)
                losses * 2
            ends.append(bits((params, state, losses)))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("sharded", [False, slow(True)])
def test_data_parallel_and_sharded_parameters(sharded):
    tx, ends = TX["sparse_adamw"](), []
    sizes, names = ((2, 2), ("data", "model")) if sharded else (4, "data")
    for kind in (AxisType.Auto, AxisType.Explicit):
        on = mesh(sizes, names, kind)
        with jax.set_mesh(on):
            params = sharded_params(on) if sharded else jax.tree.map(jnp.array, PARAMS)
            state = optax_ext.init_state(tx, params, on)

            step = by_data_parallel(loss_fn, tx)
            if sharded:
                step = optax_ext.make_train_step(loss_fn, tx, on)
            for i in range(STEPS):
                params, state, loss = step(params, state, batch_of(seed=i))
                jax.tree.map(lambda x: x * 2, (params, loss))
        assert {leaf.sharding.mesh for leaf in jax.tree.leaves((params, state, loss))} == {on}
        ends.append(bits((params, state, loss)))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(("kind", "calls"), [(AxisType.Auto, 1), (AxisType.Explicit, 2)])
def test_data_parallel_moves_arrays_together_if_at_all(kind, calls, monkeypatch):
    """The batch; and all arrays to the axes of the program, and back to the axes of the caller."""
    on, tx, moved = mesh(kind=kind), TX["sparse_adamw"](), []
    params, batch = jax.tree.map(jnp.array, PARAMS), batch_of(seed=0)
    state, step = optax_ext.init_state(tx, params, on), by_data_parallel(loss_fn, tx)
    params, state, _ = step(params, state, batch)
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, place: moved.append(x) or put(x, place))
    step(params, state, batch)
    assert len(moved) == calls
    if calls == 1:
        assert len(moved[0]) == len(jax.tree.leaves(batch))


def pure_callback(x):
    return jax.pure_callback(lambda x: np.float32(x), jax.ShapeDtypeStruct((), x.dtype), x)


def io_callback(x):
    shape = jax.ShapeDtypeStruct((), x.dtype)
    return call_with_effects(lambda x: np.float32(x), shape, x)


@custom_partitioning
def partitioned(x):
    return x + 0


partitioned.def_partition(
    partition=lambda mesh, args, result: (mesh, lambda x: x + 0, result.sharding, ()),
    sharding_rule="->",
)
NEEDS_DEVICES = {"pure": pure_callback, "io": io_callback, "partitioned": partitioned}


def ended(way, tx, loss_fn, on, around):
    """Parameters, state and losses after four steps, by one of the ways to train."""
    params, losses = jax.device_put(PARAMS, NamedSharding(on, P())), []
    state = optax_ext.init_state(tx, params, on)
    if way == "data_parallel":
        step = by_data_parallel(loss_fn, tx)
    elif way == "make_train_step":
        step = optax_ext.make_train_step(loss_fn, tx, on)
    else:
        step = optax_ext.make_train_round(loss_fn, tx, on)
    batches = [batch_of(seed=i) for i in range(4)]
    if way == "make_train_round":
        pairs = batches[:2], batches[2:]
        batches = [jax.tree.map(lambda *x: jnp.stack(x), *pair) for pair in pairs]
    with around(on):
        for batch in batches:
            params, state, loss = step(params, state, batch)
            losses.append(loss)
    return params, state, losses


@pytest.mark.parametrize("way", ["make_train_step", "make_train_round", "data_parallel"])
@pytest.mark.parametrize("around", ["set", slow("given")])
@pytest.mark.parametrize("what", ["pure", slow("io"), slow("partitioned")])
def test_a_loss_that_needs_the_devices_when_it_is_lowered(what, around, way):
    """JAX refuses it in a program that has explicit and other axes."""

    traces = []

    def needs(params, batch):
        traces.append(1)
        # By a function that JAX does not have to differentiate.
        scale = NEEDS_DEVICES[what](jax.lax.stop_gradient(jnp.max(batch)))
        return loss_fn(params, batch) * scale

    def plain(params, batch):
        return loss_fn(params, batch) * jax.lax.stop_gradient(jnp.max(batch))

    tx = TX["every" if way == "make_train_round" else "sparse_adamw"]()
    found = ended(way, tx, needs, EXPLICIT, AROUND[around])
    # The program that JAX refuses, and the other one; the loop of a round traces its body twice.
    assert len(traces) <= (4 if way == "make_train_round" else 2)
    check_close(found, ended(way, tx, plain, EXPLICIT, AROUND[around]))
    leaves = jax.tree.leaves(found)
    assert {leaf.sharding.mesh.axis_types for leaf in leaves} == {(AxisType.Explicit,)}


@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize("optimizer", ["schedule_free_sgd", slow("prodigy"), slow("adam")])
@pytest.mark.parametrize("device", [0, 7])
def test_a_state_of_parameters_that_are_committed_to_one_device(optimizer, device):
    after = {"adam": optax.adam(1e-2)}.get(optimizer)
    if after is None:
        after = getattr(optax.contrib, optimizer)(0.1)
    tx, on = optax.chain(optax_ext.topk_a(0.1, axis="data"), after), mesh()
    committed = jax.device_put(PARAMS, jax.devices()[device])
    found = optax_ext.init_state(tx, committed, on)
    assert bits(found) == bits(optax_ext.init_state(tx, PARAMS, on))
    devices = {*on.devices.flat}
    assert all(leaf.sharding.device_set == devices for leaf in jax.tree.leaves(found))
    batch = jax.device_put(batch_of(), jax.devices()[7 - device])
    optax_ext.make_train_step(loss_fn, tx, on)(committed, found, batch)


@pytest.mark.parametrize("on", [mesh(), EXPLICIT], ids=["auto", "explicit"])
def test_a_batch_that_is_committed_to_one_device(on):
    def end(committed):
        tx, batch = TX["every"](), batch_of()
        params = jax.device_put(PARAMS, NamedSharding(on, P()))
        state = optax_ext.init_state(tx, params, on)
        batches = jax.tree.map(lambda x: jnp.stack([x, x]), batch)
        if committed:
            batch, batches = jax.device_put((batch, batches), jax.devices()[3])
        step, round_of = (
            f(loss_fn, tx, on) for f in (optax_ext.make_train_step, optax_ext.make_train_round)
        )
        for _ in range(2):
            params, state, _ = step(params, state, batch)
        return round_of(params, state, batches)

    assert bits(end(True)) == bits(end(False))

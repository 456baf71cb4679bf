"""The options that all ways to map a step have, and losses that types of JAX would refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from optax_ext._error_feedback import _equations

WORKERS, STEPS = 2, 2
MESH = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
PARAMS = {"w": np.full((6, 4), 0.1, np.float32), "u": np.full((4, 4), 0.1, np.float32)}


def batch_of(seed):
    return np.random.default_rng(seed).standard_normal((4, 3, 6)).astype(np.float32)


def recurrent(params, batch):
    """A loss with a scan that starts from zeros, as every recurrent layer has one."""

    def cell(carry, x):
        carry = jnp.tanh(x @ params["w"] + carry @ params["u"])
        return carry, carry

    _, states = jax.lax.scan(cell, jnp.zeros((batch.shape[0], 4)), batch.swapaxes(0, 1))
    return jnp.mean((states - 1.0) ** 2)


def with_aux(params, batch):
    aux = {"mean": batch.mean(), "shape": jnp.zeros(batch.shape[:1]), "number": 2.0}
    return recurrent(params, batch), aux


def optimizer(every=None):
    return optax_ext.sparse_sgd(0.1, density=0.5, axis="data", every=every)


def by_step(loss_fn, **options):
    tx = optimizer()
    state = optax_ext.init_state(tx, PARAMS, MESH)
    return optax_ext.make_train_step(loss_fn, tx, MESH, **options), state, batch_of


def by_round(loss_fn, **options):
    tx = optimizer(every=STEPS)
    state = optax_ext.init_state(tx, PARAMS, MESH)
    made = optax_ext.make_train_round(loss_fn, tx, MESH, **options)
    return made, state, lambda i: np.stack([batch_of(i + j) for j in range(STEPS)])


def by_data_parallel(loss_fn, *, has_aux=False, **options):
    tx = optimizer()

    @optax_ext.data_parallel(**options)
    def step(params, state, batch):
        there = optax_ext.ahead(params, state)
        loss, gradients = jax.value_and_grad(loss_fn, has_aux=has_aux)(there, batch)
        updates, state = tx.update(gradients, state, params)
        made = optax.apply_updates(params, updates), state
        return (*made, *loss) if has_aux else (*made, loss)

    return step, optax_ext.init_state(tx, PARAMS, MESH), batch_of


WAYS = {"step": by_step, "round": by_round, "data_parallel": by_data_parallel}
OPTIONS = [
    {},
    {"has_aux": True},
    {"check_vma": False},
    {"donate": False},
    {"donate": True},
    {"steps_in_flight": 1},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.one_in(2)
def test_each_way_takes_each_option_and_trains_a_scan_from_zeros(way, options):
    loss_fn = with_aux if "has_aux" in options else recurrent
    step, state, batches = WAYS[way](loss_fn, **options)
    params, losses = jax.tree.map(jnp.asarray, PARAMS), []
    for i in range(3):
        given = params
        params, state, loss, *aux = step(params, state, batches(i))
        losses.append(float(jnp.mean(loss)))
        donated = options.get("donate", way != "data_parallel")
        # The first arrays are copied to the mesh.
        assert i == 0 or all(x.is_deleted() == donated for x in jax.tree.leaves(given))
    assert losses[-1] < losses[0]
    lead = (STEPS, WORKERS) if way == "round" else ()
    assert loss.shape == lead
    if "has_aux" in options:
        (aux,) = aux
        assert aux["mean"].shape == lead
        assert aux["shape"].shape == (*lead, 4 // WORKERS)
        assert np.all(np.asarray(aux["number"]) == 2.0)


@pytest.mark.parametrize("way", ["step", "data_parallel"])
def test_without_types_the_same_numbers_come_out(way):
    results = []
    for check_vma in (True, False):
        step, state, batches = WAYS[way](recurrent, check_vma=check_vma, donate=False)
        params, state, _ = step(PARAMS, state, batches(0))
        results.append(jax.tree.leaves((params, state)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def loop(x, y):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + y), (0, x))[1]


PROGRAMS = {
    "an argument": (lambda x, y: (x, y), [True, False]),
    "a constant": (lambda x, y: (jnp.zeros(3), y * 2), [False, False]),
    "a sum": (lambda x, y: (jax.lax.psum(x, "w") + y, x + y), [False, True]),
    "a gather": (lambda x, y: (jax.lax.all_gather(x, "w"), y), [False, False]),
    "a message": (lambda x, y: (jax.lax.ppermute(y, "w", [(0, 1), (1, 0)]), y), [True, False]),
    "the index": (lambda x, y: (jax.lax.axis_index("w"), y), [True, False]),
    "a carry": (lambda x, y: jax.lax.scan(lambda c, _: (c + x, c), y, None, 2), [True, True]),
    "a sum in a loop": (
        lambda x, y: jax.lax.scan(lambda c, _: (c + jax.lax.psum(x, "w"), x), y, None, 2),
        [False, True],
    ),
    "a loop": (lambda x, y: (loop(y, x), loop(y, y)), [True, False]),
    "a number of turns": (
        lambda x, y: (jax.lax.while_loop(lambda c: c < x[0], lambda c: c + 1, y[0]), y),
        [True, False],
    ),
    "a branch": (
        lambda x, y: (
            jax.lax.cond(y[0] > 0, lambda: x, lambda: y),
            jax.lax.cond(x[0] > 0, lambda: y, lambda: y * 2),
        ),
        [True, True],
    ),
    "a call": (lambda x, y: jax.jit(lambda a, b: (b, a))(x, y), [False, True]),
    "a gradient": (lambda x, y: (jax.grad(lambda a: (a * x).sum())(y), y), [True, False]),
    "a group of workers": (
        lambda x, y: (jax.lax.psum(x, "w", axis_index_groups=[[0], [1]]), y),
        [True, False],
    ),
    "a sum inside a call": (
        lambda x, y: (jax.jit(lambda a: jax.lax.pmean(a, "w"))(x), jax.checkpoint(jnp.sin)(x)),
        [False, True],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_which_results_may_differ_between_workers(name):
    program, expected = PROGRAMS[name]
    found = []

    def of_worker(x, y):
        closed = jax.make_jaxpr(program)(x, y)
        found.append(_equations.varying(closed, [True, False], "w"))
        return x

    jax.vmap(of_worker, axis_name="w", in_axes=(0, None))(jnp.ones((2, 3)), jnp.ones(3))
    assert found == [expected]


def mean(x):
    return jax.lax.pmean(x, "w")


REDUCED = {
    "a mean": (mean, True),
    "a mean in a call": (jax.jit(mean), True),
    "a gradient": (jnp.sin, False),
    "a constant in a call": (jax.jit(jnp.zeros_like), False),
    "a mean and a gradient in a call": (jax.jit(lambda x: mean(x) + x), False),
    "the mean of a call that also returns a gradient": (
        lambda x: jax.jit(lambda x: (mean(x), x))(x)[0],
        True,
    ),
    "the gradient of a call that also returns a mean": (
        lambda x: jax.jit(lambda x: (mean(x), x))(x)[1],
        False,
    ),
    "a mean times the number of the worker": (
        jax.jit(lambda x: mean(x) * jax.lax.axis_index("w").astype(x.dtype)),
        False,
    ),
    "a mean carried through a loop": (
        lambda x: jax.lax.fori_loop(0, 3, lambda _, y: 2 * y, mean(x)),
        True,
    ),
    "a loop that adds a gradient": (
        lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y + x, mean(x)),
        False,
    ),
}


@pytest.mark.parametrize("name", REDUCED)
def test_which_values_are_proven_to_be_reduced(name):
    program, expected = REDUCED[name]
    found = []

    def of_worker(x):
        value = program(x)
        found.append(_equations.is_reduced([value], "w"))
        return value

    mesh = jax.make_mesh((2,), ("w",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("w")
    mapped = jax.shard_map(of_worker, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    jax.make_jaxpr(mapped)(jnp.ones((2, 3)))
    assert found == [expected]


def test_what_the_equations_do_not_prove_to_be_the_same_is_an_error():
    _, state, batches = by_data_parallel(recurrent)

    @optax_ext.data_parallel
    def step(params, state, batch):
        state = state._replace(count=state.count + (batch.sum() > 0).astype(jnp.int32))
        return params, state

    with pytest.raises(ValueError, match=r"\.count of the optimizer state differs between"):
        step(PARAMS, state, batches(0))


BY_MESSAGES = {
    "ssar_recursive_double": sc.allreduce.published.ssar_recursive_double(),
    "gtopk": sc.allreduce.published.gtopk(density=0.5),
}


@pytest.mark.parametrize("name", BY_MESSAGES)
@pytest.mark.one_in(2)
def test_equations_prove_totals_that_workers_make_by_messages(name):
    """Nothing is averaged that all have alike: the same bits as from a step with types."""
    selector = sc.select.topk(density=0.5)
    exchange = optax_ext.sparse_allreduce(selector, BY_MESSAGES[name], axis="data")
    tx, mesh = optax.chain(exchange, optax.sgd(0.1)), jax.make_mesh((3,), ("data",))
    batches = [np.concatenate([batch_of(i), batch_of(i + 9)])[:6] for i in range(3)]

    @optax_ext.data_parallel
    def by_hand(params, state, batch):
        loss, gradients = jax.value_and_grad(recurrent)(params, batch)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    results = []
    for step in (by_hand, optax_ext.make_train_step(recurrent, tx, mesh, donate=False)):
        params, state = PARAMS, optax_ext.init_state(tx, PARAMS, mesh)
        for batch in batches:
            params, state, _ = step(params, state, batch)
        results.append(jax.tree.leaves((params, state[0].residual)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)

"""The complete optimizers: against NumPy, step-ahead, weight decay, skipped steps, the end."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from optax_ext._error_feedback import _residual
from optax_ext._state import _find
from tests.optax_ext.helpers import flat, mesh, normal, on_mesh, run, same, slow, train
from tests.reference import partitioned_topk as reference

WORKERS, SIZE, STEPS = 4, 120, 8
EXACT, LOCAL_ADAM = sc.allreduce.partitioned_topk(), optax_ext.scale_by_local_adam


def params_at_start(dtype=jnp.float32):
    values = np.random.default_rng(5).standard_normal(SIZE).astype(np.float32)
    return {"a": jnp.asarray(values[:96].reshape(8, 12), dtype), "b": jnp.asarray(values[96:])}


def targets(seed=0):
    """A target for each worker and step: the loss is half of the squared distance to it."""
    rng = np.random.default_rng(seed)
    common = 2 * rng.standard_normal(SIZE)
    return (common + rng.standard_normal((STEPS, WORKERS, SIZE))).astype(np.float32)


def loss_fn(params, batch):
    where = jnp.concatenate([jnp.ravel(x).astype(jnp.float32) for x in jax.tree.leaves(params)])
    return 0.5 * jnp.sum((where - batch[0]) ** 2)


def trained(tx, steps=STEPS, params=None, on=None, given=None, **options):
    """Parameters, states and losses before the first step and after each."""
    params = params_at_start() if params is None else params
    given = targets() if given is None else given
    return train(tx, loss_fn, params, given[:steps], on or mesh(), **options)


# So large that the entries' first steps differ in length.
EPS = 0.5


def preconditioned(nu, g, t, b2=0.999):
    nu = b2 * nu + (1 - b2) * g**2
    return nu, g / (np.sqrt(nu / (1 - b2**t)) + EPS)


@pytest.mark.parametrize("check_vma", [slow(True), False])
def test_sparse_adamw_is_what_it_says(check_vma):
    """All of it in NumPy: the gradient at the step ahead, the preconditioner, parts, the decay."""
    schedule = optax.linear_schedule(0.05, 0.01, STEPS)
    tx = optax_ext.sparse_adamw(
        schedule, density=0.1, axis="data", eps=EPS, weight_decay=0.1, allreduce=EXACT
    )
    states = trained(tx, check_vma=check_vma)
    w = flat(params_at_start())
    residual, nu, beyond = np.zeros((WORKERS, SIZE)), np.zeros((WORKERS, SIZE)), 0
    owner = reference.part_of_each_index(SIZE, WORKERS, 1, SIZE // WORKERS)
    # The last steps are left out: without optimizations XLA rounds the accumulator in two ways
    # there, and the k-th entry of a worker, below its own threshold by the last bit, waits.
    for t, target in enumerate(targets()[:6]):
        rate = float(schedule(t))
        gradient = w + residual / WORKERS - target
        nu, u = preconditioned(nu, gradient, t + 1)
        # The default gain for four workers is the root of 2, and the limit 2 rates.
        total, residual = reference.step(residual - rate * 2**0.5 * u, t, 3, owner)
        moved = (total / WORKERS + 3 * np.clip(total / WORKERS, -2 * rate, 2 * rate)) / 4
        residual = residual + total / WORKERS - moved
        beyond += (moved != total / WORKERS).sum()
        w = w + moved - rate * 0.1 * w
        np.testing.assert_allclose(flat(states[t + 1][0]), w, rtol=1e-4, atol=1e-5)
        kept = optax_ext.get_state(states[t + 1][1]).residual
        np.testing.assert_allclose(kept, residual, rtol=1e-3, atol=1e-5)
    assert beyond > STEPS


@pytest.mark.parametrize(
    ("labels", "nonfinite"),
    [
        slow(None, "skip"),
        slow({"a": "sparse", "b": "dense"}, "drop"),
        ({"a": "dense", "b": "dense"}, "skip"),
    ],
)
def test_flat_buffers_of_adamw_get_what_the_leaves_would(labels, nonfinite):
    """There is one buffer for each way of exchange, and no transformation of the tree."""
    given = targets()
    given[2, 1, [7, 100]] = np.nan
    options = {"axis": "data", "nonfinite": nonfinite, "dense_leaves": labels}
    whole = optax_ext.sparse_adamw(
        0.05, density=0.2, weight_decay=0.0, gain=1.0, eps=EPS, **options
    )
    tree = optax_ext.sparse_allreduce(
        sc.select.topk(density=0.2),
        sc.allreduce.partitioned_topk(bits=None),
        local=optax.chain(LOCAL_ADAM(eps=EPS), optax.scale_by_learning_rate(0.05)),
        residual=optax_ext.residual(step_ahead=1.0),
        limit=0.1,
        **options,
    )
    start = {"params": params_at_start(jnp.bfloat16), "given": given}
    for (a, one, _), (b, other, _) in zip(trained(whole, **start), trained(tree, **start)):
        np.testing.assert_allclose(flat(a), flat(b), rtol=1e-6)
        one, other = optax_ext.get_state(one), optax_ext.get_state(other)
        np.testing.assert_allclose(one.residual, other.residual, rtol=1e-5, atol=1e-7)
        moments = [sorted(flat(optax.tree.get(state.local, "nu"))) for state in (one, other)]
        np.testing.assert_allclose(*moments, rtol=1e-6)
        assert (one.skipped, one.dropped) == (other.skipped, other.dropped)
    assert one.dropped + one.skipped


@pytest.mark.slow
def test_sparse_sgd_of_all_entries_is_sgd():
    tx = optax_ext.sparse_sgd(0.1, density=1.0, axis="data", allreduce=EXACT)
    w = flat(params_at_start())
    for target, (params, state, _) in zip(targets(), trained(tx)[1:], strict=True):
        w = w - 0.1 * (w - target.mean(axis=0))
        np.testing.assert_allclose(flat(params), w, rtol=1e-4, atol=1e-5)
        assert (np.asarray(optax_ext.get_state(state).residual) == 0).all()


def test_step_ahead_of_many_workers_is_a_tenth_at_least():
    shares = [_residual.share(1.0, workers) for workers in (1, 4, 10, 16, 100)]
    assert shares == [1.0, 0.25, 0.1, 0.1, 0.1]
    assert _residual.share(0.5, 4) == 0.125
    assert _residual.share(20.0, 10) == 1.0


def waiting(state):
    """Each worker's residuals, ``f64[P, n]``; zeros for a dense leaf at the end."""
    buckets = [s.residual.astype(jnp.float32) for s in _find.get_states(state)]
    rows = np.concatenate([np.asarray(x, np.float64) for x in reversed(buckets)], axis=1)
    if rows.shape[1] == SIZE // 2:  # The shards of a node's two workers.
        rows = np.repeat(rows.reshape(2, -1), 2, axis=0)
    return np.pad(rows, ((0, 0), (0, SIZE - rows.shape[1])))


sparse_sgd = functools.partial(optax_ext.sparse_sgd, 0.1, density=0.1, axis="data")
HIERARCHICAL = sc.allreduce.hierarchical(
    inner_axis="device", outer=sc.allreduce.partitioned_topk(bits=16)
)
BF16 = optax_ext.residual(jnp.bfloat16, step_ahead=1.0)
# The transformation, and the share of its residual by which a worker looks ahead.
WAYS = {
    "plain": (sparse_sgd(), 1 / WORKERS),
    "bfloat16 residual": (sparse_sgd(residual=BF16), 1 / WORKERS),
    "a number": (sparse_sgd(residual=optax_ext.residual(step_ahead=2.0)), 2 / WORKERS),
    "with correction": (sparse_sgd(correction=optax_ext.momentum_correction(0.9)), 1 / WORKERS),
    "of gradients": (optax.chain(optax_ext.ok_topk(0.1, axis="data"), optax.sgd(0.1)), 0.0),
    "dense leaves": (sparse_sgd(dense_leaves={"a": "sparse", "b": "dense"}), 1 / WORKERS),
    "bucketed": (optax_ext.bucketed(sparse_sgd(), 2), 1 / WORKERS),
    "nodes": (sparse_sgd(axis=("node", "device"), allreduce=HIERARCHICAL), 1 / WORKERS),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_step_ahead_is_a_share_of_what_waits(way):
    tx, share = WAYS[way]
    on = mesh((2, 2), ("node", "device")) if way == "nodes" else mesh()
    params, state, _ = trained(tx, steps=3, on=on)[-1]
    kept = waiting(state)
    assert np.abs(kept).max() > 0.1

    def local(params, state):
        return jax.tree.map(lambda x: x[None], optax_ext.ahead(params, state))

    specs = P(), optax_ext.state_specs(state)
    ahead = flat(on_mesh(local, on, specs, P(on.axis_names))(params, state), (WORKERS,))
    np.testing.assert_allclose(ahead, flat(params) + share * kept, rtol=1e-5)


@pytest.mark.slow
def test_skipped_step_decays_nothing_and_learns_nothing():
    tx = optax_ext.sparse_adamw(0.1, density=0.1, axis="data", weight_decay=0.5)
    given = targets()
    given[3, 1, 7] = np.nan
    before, after = trained(tx, given=given)[3:5]
    np.testing.assert_array_equal(flat(before[0]), flat(after[0]))
    same(optax_ext.get_state(before[1]).local, optax_ext.get_state(after[1]).local)


@pytest.mark.slow
def test_weight_decay_where_the_mask_says():
    plain, _, _ = trained(sparse_sgd(allreduce=EXACT), steps=1)[-1]
    mask, decayed = {"a": True, "b": False}, 0.1 * 0.3 * params_at_start()["a"]
    for given in (mask, lambda params: mask):
        tx = sparse_sgd(weight_decay=0.3, mask=given, allreduce=EXACT)
        params, _, _ = trained(tx, steps=1)[-1]
        np.testing.assert_allclose(params["a"], plain["a"] - decayed, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(params["b"], plain["b"])


@pytest.mark.slow
def test_learning_rate_of_zero_at_the_start_moves_nothing_and_recovers():
    schedule = optax.linear_schedule(0.0, 0.1, 4)
    for make in (optax_ext.sparse_adamw, optax_ext.sparse_sgd):
        states = trained(make(schedule, density=0.1, axis="data"))
        np.testing.assert_array_equal(flat(states[0][0]), flat(states[1][0]))
        assert np.isfinite(flat(states[-1][0])).all()
        assert (flat(states[-1][0]) != flat(states[0][0])).any()


@pytest.mark.slow
def test_selection_has_one_entry_of_each_worker_at_least():
    _, state, _ = trained(optax_ext.sparse_sgd(0.1, density=0.01, axis="data"))[-1]
    assert int(optax_ext.get_info(state).delivered) >= WORKERS


def test_local_adam_is_adam_without_a_first_moment():
    both = LOCAL_ADAM(0.9, axis="w"), optax.scale_by_adam(b1=0.0, b2=0.9)
    updates = [run(tx, normal((6, 2, 7))).updates for tx in both]
    np.testing.assert_allclose(*updates, rtol=1e-5)


def test_second_moments_are_averaged_every_so_many_steps():
    gradients, expected = normal((6, 3, 7)), np.zeros((3, 7))
    nu = run(LOCAL_ADAM(0.9, axis="w", average_every=3), gradients).states.nu
    for t in range(6):
        expected = 0.9 * expected + 0.1 * gradients[t].astype(np.float64) ** 2
        if t % 3 == 2:
            expected = np.tile(expected.mean(0), (3, 1))
        np.testing.assert_allclose(nu[t], expected, rtol=1e-5)


def test_averaged_moments_under_shard_map_with_types():
    adam = LOCAL_ADAM(axis="data", average_every=2)
    local = optax.chain(adam, optax.scale_by_learning_rate(0.1))
    tx = optax_ext.sparse_allreduce(sc.select.topk(density=0.1), EXACT, axis="data", local=local)
    _, state, _ = trained(tx, steps=4)[-1]
    for x in jax.tree.leaves(optax_ext.get_state(state).local[0].nu):
        np.testing.assert_array_equal(x, np.broadcast_to(x[0], x.shape))

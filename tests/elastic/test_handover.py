"""The handover of state between workers, on the devices of one process."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from optax_ext.elastic import _handover, _programs
from tests.optax_ext.helpers import bits, mesh

WORKERS = 4
PARAMS = {"w": jnp.arange(12.0).reshape(3, 4) / 7.0, "b": jnp.full(5, -0.0, jnp.bfloat16)}
OPTIMIZERS = {
    "sparse_adamw": optax_ext.sparse_adamw(0.1, density=0.3, axis="data"),
    "rounds": optax_ext.sparse_adamw(0.1, density=0.3, axis="data", every=2),
    "corrected": optax.chain(
        optax_ext.topk_a(0.3, axis="data", correction=optax_ext.momentum_correction(0.9)),
        optax.adam(0.1),
    ),
    "accumulated": optax_ext.multi_steps(optax_ext.sparse_sgd(0.1, axis="data"), 2),
    "powersgd": optax.chain(optax_ext.powersgd(1, axis="data"), optax.sgd(0.1)),
    "bfloat16": optax_ext.sparse_sgd(
        0.1, density=0.3, axis="data", residual=optax_ext.residual(jnp.bfloat16)
    ),
}


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"] - params["b"][None, :4].astype(jnp.float32)) ** 2)


def trained(tx, steps=3):
    """Parameters and state after a few steps."""
    state = optax_ext.init_state(tx, PARAMS, mesh(WORKERS))
    step = optax_ext.make_train_step(loss_fn, tx, mesh(WORKERS), donate=False)
    params = PARAMS
    for number in range(steps):
        batch = np.random.default_rng(number).standard_normal((8, 3)).astype(np.float32)
        params, state, _ = step(params, state, batch)
    return params, state


def on_mesh(function, specs_in, specs_out, *args):
    mapped = jax.shard_map(
        function, mesh=mesh(WORKERS), in_specs=specs_in, out_specs=specs_out, check_vma=False
    )
    return jax.jit(mapped)(*args)


def kinds_of(state):
    """What each array is when a worker comes or goes, written down without the index."""
    summed = "residual", "velocity", "dense_velocity", "missed", "acc_grads"
    anew = "owner", "info"

    def kind(path, _):
        names = [key.name for key in path if hasattr(key, "name")]
        if any(name in summed for name in names):
            return "added"
        if "local" in names:
            return "learned"
        if "selector" in names:
            return "of the first"
        return "anew" if any(name in anew for name in names) else "shared"

    return jax.tree_util.tree_map_with_path(kind, state)


def own_sums(state):
    """The sum over the workers of all arrays that add up, in float64."""
    kinds = jax.tree.leaves(kinds_of(state))
    return [
        np.asarray(x, np.float64).reshape(WORKERS, -1).sum(0)
        for kind, x in zip(kinds, jax.tree.leaves(state), strict=True)
        if kind == "added"
    ]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.one_in(2)
def test_those_that_leave_hand_over_all_that_adds_up(name):
    _, state = trained(OPTIMIZERS[name])
    specs = optax_ext.state_specs(state)
    leaves = jnp.array([False, True, False, True])
    after = on_mesh(
        lambda s, x: _handover.release("data", s, x), (specs, P()), specs, state, leaves
    )
    before, found = own_sums(state), own_sums(after)
    assert any(np.abs(x).sum() > 0 for x in before)
    digits = 8 if name == "bfloat16" else 24
    for old, new in zip(before, found, strict=True):
        # Each worker rounds once.
        np.testing.assert_allclose(new, old, atol=2 * np.abs(old).max(initial=0) * 2.0**-digits)
    kinds = jax.tree.leaves(kinds_of(state))
    for kind, old, new in zip(kinds, jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        if kind != "added":
            np.testing.assert_array_equal(old, new)
            continue
        rows = np.asarray(new).reshape(WORKERS, -1)
        assert not rows[np.asarray(leaves)].any()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_newcomer_has_what_all_share_and_the_mean_of_what_others_have_learned(name):
    tx = OPTIMIZERS[name]
    params, state = trained(tx)
    fresh = optax_ext.init_state(tx, PARAMS, mesh(WORKERS))
    holds = np.array([True, False, True, False])
    # New arrays may also be the same on all workers.
    kinds = jax.tree.map(
        lambda spec, kind: kind if len(spec) else "shared" if kind == "shared" else "anew, whole",
        optax_ext.state_specs(state),
        kinds_of(state),
    )
    whole = ("shared", "anew, whole")

    def mixed(kind, old, new):
        """Workers that hold nothing have their first arrays; all have arrays of their own."""
        old, new = np.asarray(old), np.asarray(new)
        if kind in whole:
            return np.stack([old if x else np.full_like(new, 7) for x in holds])
        rows = len(old) // WORKERS
        return np.concatenate(
            [(old if x else new)[i * rows : (i + 1) * rows] for i, x in enumerate(holds)]
        )

    given = jax.tree.map(mixed, kinds, state, fresh)
    given_params = jax.tree.map(
        lambda x: np.stack([np.asarray(x) if y else np.zeros_like(x) for y in holds]), params
    )

    def received(params, state):
        shared = jax.tree.map(lambda kind, x: x[0] if kind in whole else x, kinds, state)
        params, state = _handover.admit(
            "data", jax.tree.map(lambda x: x[0], params), shared, jnp.asarray(holds)
        )
        lead = jax.tree.map(lambda kind, x: x[None] if kind in whole else x, kinds, state)
        return jax.tree.map(lambda x: x[None], params), lead

    got_params, got = on_mesh(received, P("data"), P("data"), given_params, given)
    for old, new in zip(jax.tree.leaves(params), jax.tree.leaves(got_params), strict=True):
        for row in np.asarray(new):
            # Bits, and not numbers: a zero may have a sign.
            assert row.tobytes() == np.asarray(old).tobytes()
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)]
    flat = zip(paths, *map(jax.tree.leaves, (kinds, state, fresh, got)), strict=True)
    for path, kind, old, new, found in flat:
        old, new, found = map(np.asarray, (old, new, found))
        if kind == "shared":
            assert all(row.tobytes() == old.tobytes() for row in found), path
            continue
        if kind in whole:
            continue
        rows = [x.reshape(WORKERS, -1) for x in (old, new, found)]
        np.testing.assert_array_equal(rows[2][holds], rows[0][holds])
        if kind in ("added", "anew"):
            np.testing.assert_array_equal(rows[2][~holds], rows[1][~holds])
        elif kind == "learned" and np.issubdtype(old.dtype, np.floating):
            mean = rows[0][holds].astype(np.float32).mean(0)
            np.testing.assert_allclose(rows[2][~holds], [mean] * 2, rtol=1e-6)
        else:
            np.testing.assert_array_equal(rows[2][~holds], rows[0][[0, 0]])


SELECTORS = [
    sc.select.scheduled(sc.select.topk(density=0.5), sc.select.staged_density(10, (0.5, 0.1))),
    sc.select.random_k(density=0.3),
    sc.select.threshold_reuse(density=0.3),
    sc.select.published.adtopk_threshold(density=0.3, steps=100, warmup=1),
    sc.select.published.sidco(density=0.3),
]


@pytest.mark.parametrize("selector", SELECTORS, ids=lambda x: x.spec.name)
def test_newcomers_select_as_after_a_reshard(selector):
    exchange = optax_ext.sparse_allreduce(selector, sc.allreduce.topk_a(), axis="data")
    tx = optax.chain(exchange, optax.sgd(0.1))
    old, new = optax_ext.init_state(tx, PARAMS, mesh(2)), 4
    # As if it had selected before.
    selected = jax.tree.map(lambda x: jnp.full_like(x, 7), old[0].selector)
    old = (old[0]._replace(selector=selected), *old[1:])
    programs = _programs.Programs(loss_fn, tx, "data", jax.devices())
    specs = optax_ext.state_specs(old)

    def met(worker):
        """The state with which a worker of the old or of the new ones comes."""
        fresh = programs.fresh(new, worker, PARAMS)
        if worker >= 2:
            return fresh
        own = jax.tree.map(lambda spec, x: jnp.split(x, 2)[worker] if len(spec) else x, specs, old)
        return _handover.carried(own, fresh)

    given = jax.tree.map(
        lambda spec, *x: jnp.concatenate(x) if len(spec) else x[0], specs, *map(met, range(new))
    )
    _, got = on_mesh(
        lambda *args: _handover.admit("data", *args),
        (P(), specs, P()),
        (P(), specs),
        *(PARAMS, given, jnp.arange(new) < 2),
    )
    expected = optax_ext.reshard(old, optax_ext.init_state(tx, PARAMS, mesh(new)))
    assert bits(got) == bits(expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.one_in(2)
def test_a_worker_goes_on_in_another_group_with_what_is_its_own(name):
    tx = OPTIMIZERS[name]
    _, state = trained(tx)
    programs = _programs.Programs(loss_fn, tx, "data", jax.devices())
    fresh = programs.fresh(2, 1, PARAMS)
    specs = optax_ext.state_specs(state)

    def row(worker):
        return jax.tree.map(
            lambda spec, x: (
                x[worker * (len(x) // WORKERS) :][: len(x) // WORKERS] if len(spec) else x
            ),
            specs,
            state,
        )

    carried = _handover.carried(row(2), fresh)
    kinds = kinds_of(row(2))
    for kind, old, new in zip(*map(jax.tree.leaves, (kinds, row(2), carried)), strict=True):
        if kind in ("added", "learned", "shared"):
            np.testing.assert_array_equal(np.asarray(old), np.asarray(new), strict=True)
    whole = optax_ext.init_state(tx, PARAMS, {"data": 2})
    assert jax.tree.structure(carried) == jax.tree.structure(whole)
    for node in jax.tree.leaves(carried, is_leaf=lambda x: hasattr(x, "owner")):
        if hasattr(node, "owner"):
            assert node.owner.tolist() == [1]
            assert node.settings.workers == 2
    # One new worker takes the sum of two old ones.
    joined = jax.tree.map(
        lambda spec, a, b: jnp.concatenate([a, b]) if len(spec) else a, specs, row(0), row(3)
    )
    both = _handover.carried(joined, programs.fresh(1, 0, PARAMS))
    for kind, old, new in zip(*map(jax.tree.leaves, (kinds, joined, both)), strict=True):
        if kind == "added":
            total = np.asarray(old, np.float64).reshape(2, -1).sum(0)
            atol = np.abs(total).max(initial=0) * (2.0**-8 if name == "bfloat16" else 2.0**-24)
            np.testing.assert_allclose(np.asarray(new, np.float64).ravel(), total, atol=atol)

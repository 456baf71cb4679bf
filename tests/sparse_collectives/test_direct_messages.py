"""Sums and gathers by direct messages equal XLA's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from sparse_collectives import transport
from sparse_collectives.transport import _direct
from tests.programs import direct_messages

WORKERS = 4
RING = tuple(f"stablehlo.{name}" for name in ("all_reduce", "all_gather", "reduce_scatter"))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Auto,))


@pytest.fixture
def grid():
    return jax.make_mesh((2, 2), ("site", "device"), axis_types=(AxisType.Auto,) * 2)


def of_all(x, axis="data"):
    return {
        "psum": transport.psum(x, axis),
        "all_gather": transport.all_gather(x, axis),
        "pmean": transport.pmean(x.astype(jnp.float32), axis),
    }


def values(shape, dtype, workers=WORKERS):
    given = np.random.default_rng(len(shape)).standard_normal((workers, *shape)) * 9
    return jnp.asarray(given).astype(dtype)


def in_both_ways(function, mesh, x, spec, **options):
    """The function's results for each worker's row, and the text of its direct program."""
    found, text = {}, ""
    for use in (False, True):
        with direct_messages(use):
            mapped = jax.shard_map(
                lambda x: function(x[0]), mesh=mesh, in_specs=spec, out_specs=P(), **options
            )
            lowered = jax.jit(mapped).lower(x)
            found[use], text = lowered.compile()(x), lowered.as_text()
    return found[False], found[True], text


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("shape", [(), (3,), (4,), (5, 7)])
@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16"])
@pytest.mark.one_in(3)
def test_direct_messages_equal_those_of_xla(mesh, shape, dtype, check_vma):
    x = values(shape, dtype)
    ring, direct, text = in_both_ways(of_all, mesh, x, P("data"), check_vma=check_vma)
    assert "stablehlo.all_to_all" in text
    assert not any(name in text for name in RING)
    for name, expected in ring.items():
        assert direct[name].dtype == expected.dtype
        assert direct[name].shape == expected.shape
        if dtype == "int32" or name == "all_gather":
            np.testing.assert_array_equal(direct[name], expected)
        else:
            # Another order of a sum of four, of which bfloat16 keeps 8 bits.
            rounding = 2**-7 if dtype == "bfloat16" else 1e-6
            largest = float(jnp.max(jnp.abs(x)))
            close = {"rtol": rounding, "atol": WORKERS * largest * rounding}
            mine, other = (np.asarray(y, np.float32) for y in (direct[name], expected))
            np.testing.assert_allclose(mine, other, **close)


def test_parts_of_a_sum(mesh):
    x = values((8, 3), "int32")
    ring, direct, text = in_both_ways(
        lambda x: transport.all_gather(transport.psum_scatter(x, "data"), "data"),
        mesh,
        x,
        P("data"),
    )
    assert not any(name in text for name in RING)
    np.testing.assert_array_equal(direct, ring)


@pytest.mark.parametrize("axis", [("site", "device"), "site"])
def test_axes_of_a_grid(grid, axis):
    x = values((6,), "int32")

    def function(x):
        total = transport.psum(x, axis)
        return total if axis != "site" else jax.lax.psum(total, "device")

    ring, direct, _ = in_both_ways(function, grid, x, P(("site", "device")))
    np.testing.assert_array_equal(direct, ring)


def test_large_sums_stay_in_the_ring(mesh):
    small, large = _direct.MOST_BYTES // 4, _direct.MOST_BYTES // 4 + 1
    for size, direct in ((small, True), (large, False)):
        x = jnp.zeros((WORKERS, size))
        *_, text = in_both_ways(lambda x: transport.psum(x, "data"), mesh, x, P("data"))
        assert ("stablehlo.all_to_all" in text) == direct
        assert ("stablehlo.all_reduce" in text) != direct


def test_direct_messages_under_pmap_and_simulated():
    x = values((5,), "int32")
    with direct_messages(True):
        mapped = jax.pmap(lambda x: transport.psum(x, "data"), axis_name="data")(x)
        simulated = jax.vmap(lambda x: transport.psum(x, "data"), axis_name="data")(x)
    for total in (mapped, simulated):
        np.testing.assert_array_equal(total, jnp.broadcast_to(x.sum(0), (WORKERS, 5)))


@pytest.mark.parametrize(("every", "bits"), [(1, None), (3, None), (1, (1, 3)), (3, (1, 3))])
@pytest.mark.one_in(2)
def test_direct_messages_give_a_training_the_same_bits(mesh, every, bits):
    """Sums of integers have no order, and the owner of an index adds codes in its own.

    What codes leave in a residual is rounded, which fused multiply-adds of another program may
    change by a unit in the last place. Integers leave numbers that float32 has.
    """
    params = {"w": jnp.ones((32, 16))}
    x = jax.random.normal(jax.random.key(0), (8, 32))
    ended = {}
    for use in (False, True):
        with direct_messages(use):
            exchange = sc.allreduce.partitioned_topk(bits=bits)
            tx = optax_ext.sparse_adamw(0.01, axis="data", every=every, allreduce=exchange)
            step = optax_ext.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh)
            state = jax.tree.map(jnp.copy, optax_ext.init_state(tx, params, mesh))
            mine = jax.tree.map(jnp.copy, params)
            for _ in range(7):
                mine, state, _ = step(mine, state, x)
            ended[use] = mine, optax.tree_utils.tree_get(state, "residual")
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
    jax.tree.map(close if bits else np.testing.assert_array_equal, *ended.values())


def test_compiled_program_follows_the_setting(mesh):
    total = jax.jit(
        jax.shard_map(
            lambda x: transport.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
    )
    x = jnp.arange(4.0 * WORKERS)
    for use in (False, True, False):
        with direct_messages(use):
            assert ("all_to_all" in total.lower(x).as_text()) == use
            total(x)


def test_use_direct_messages_refuses_another_value():
    with pytest.raises(ValueError, match="use must be True or False, got 1"):
        transport.use_direct_messages(1)

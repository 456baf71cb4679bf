"""Helpers of the allreduces' tests."""

import contextlib
import functools
import math

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import sparse_collectives as sc
from sparse_collectives.transport import _direct

# Codecs by the name of their factory; `without_feedback` is around another one.
CODECS = [name for name in sc.wire.__all__ if name != "without_feedback"]
# A power of two or not, prime or not; seven is a prime and one less than a power of two.
WORKERS = (1, 2, 3, 4, 5, 6, 7, 8)


def slow(*values):
    """These values as slow parameters."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_rows(*rows):
    """These rows as slow parameters."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def slow_but(quick, values):
    """These values as parameters; all are slow except the quick ones."""
    return [value if value in quick else slow(value)[0] for value in values]


@contextlib.contextmanager
def traced_for(form):
    """Traces the form of a computation for "cpu" or "cuda", which a CPU then runs in either case.

    jax chooses when a program is lowered, which for "cuda" would be no program for a CPU.
    """
    jax.clear_caches()  # They have no key for this.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            jax.lax,
            "platform_dependent",
            lambda *args, default, **of: of.get(form, default)(*args),
        )
        yield
    jax.clear_caches()


@functools.cache
def simulated_select(selector: sc.Selector, workers: int):
    """``select(acc[P, n], selector_state) -> (coo, dict)``, jitted: all allreduces share it."""

    def select(acc, selector_state):
        coo, selector_state, selection = selector.select(acc, selector_state)
        return coo, {
            "sent": coo.to_dense(),
            "selector_state": selector_state,
            "selection": selection,
        }

    return sc.simulate(select, axis_size=workers)


@functools.cache
def simulated_reduce(allreduce: sc.SparseAllreduce, workers: int):
    """``reduce(coo, allreduce_state) -> dict`` of P simulated workers, jitted.

    All workers share the allreduce's state; the results have a leading axis. The kept entries are
    a PaddedCOO, in which an index may occur more than once.
    """

    def reduce(coo, allreduce_state):
        total, undelivered, allreduce_state, info = allreduce.reduce(
            coo, allreduce_state, axis="workers"
        )
        sparse = isinstance(total, sc.PaddedCOO)
        return {
            "total": total.to_dense() if sparse else total,
            "indices": total.indices if sparse else jnp.arange(coo.size),
            "kept": as_coo(coo, undelivered),
            "allreduce_state": allreduce_state,
            "info": info,
        }

    return sc.simulate(reduce, axis_size=workers, in_axes=(0, None))


def completed(selector: sc.Selector, allreduce: sc.SparseAllreduce, size: int, workers: int):
    """``step(acc f[P, n], states) -> (dict, states)`` of all workers, and the first states.

    A worker selects from the allreduce's view of the accumulator. The allreduce also receives the
    accumulator, and the result ``kept`` is the rest of the accumulators.
    """

    def init(acc):
        state = allreduce.init(size, workers)
        seen = allreduce.local_view(acc, state, axis="workers")
        return selector.init(seen.shape[0]), state

    def step(acc, states):
        selected, state = states
        seen = allreduce.local_view(acc, state, axis="workers")
        coo, selected, _ = selector.select(seen, selected)
        coo = allreduce.to_global(coo, size, state, axis="workers")
        total, undelivered, state, info = allreduce.reduce(coo, state, axis="workers", acc=acc)
        out = {"total": total.to_dense(), "kept": undelivered.residual(acc, coo), "info": info}
        return out, (selected, state)

    start = sc.simulate(init, axis_size=workers)(jnp.zeros((workers, size)))
    return sc.simulate(step, axis_size=workers), start


def as_coo(coo: sc.PaddedCOO, undelivered: sc.Undelivered) -> sc.PaddedCOO:
    """All kept values of a worker, as entries; an index may occur more than once."""
    slots, parts = undelivered.slots, [undelivered.others]
    instead = undelivered.rest_at_total
    if instead is not None:
        parts.append(instead)
        slots = jnp.where(jnp.isin(coo.indices, instead.indices), 0, slots)
    return sc.PaddedCOO(
        jnp.concatenate([slots, *(part.values for part in parts)]),
        jnp.concatenate([coo.indices, *(part.indices for part in parts)]),
        coo.size,
    )


def sum_of_parts(coo: sc.PaddedCOO) -> jax.Array:
    """The vector whose parts are in ``coo``: an index may occur several times."""
    return jnp.zeros((coo.size,), coo.values.dtype).at[coo.indices].add(coo.values, mode="drop")


@functools.cache
def lossy_codec() -> sc.Codec:
    """Rounds to multiples of 2^-8, leaves out every seventh entry, and pads."""
    exact = sc.wire.raw()

    def encode(coo, seed):
        slot = jax.lax.broadcasted_iota(jnp.uint32, coo.indices.shape, coo.indices.ndim - 1)
        sent = (coo.indices < coo.size) & ((slot + seed) % 7 != 0)
        rounded = (jnp.round(coo.values.astype(jnp.float32) * 256) / 256).astype(coo.values.dtype)
        error = jnp.where(sent, coo.values - rounded, 0)
        rows = (jnp.where(sent, rounded, 0), jnp.where(sent, coo.indices, coo.size))
        # More slots than entries; the padding comes first.
        room = [(0, 0)] * (coo.indices.ndim - 1) + [(3, 0)]
        values, indices = jnp.pad(rows[0], room), jnp.pad(rows[1], room, constant_values=coo.size)
        message = exact.encode(sc.PaddedCOO(values, indices, coo.size), seed).message
        return sc.Encoded(message, sent, error)

    def encode_dense(values, seed):
        rounded = jnp.round(values * 256) / 256
        return exact.encode_dense(rounded, seed)[0], values - rounded

    return exact._replace(encode=encode, encode_dense=encode_dense, exact=False)


def run_once(selector, allreduce, acc, allreduce_state=None):
    """One step from fresh states."""
    workers, size = acc.shape
    state = jax.tree.map(lambda x: np.broadcast_to(x, (workers, *np.shape(x))), selector.init(size))
    if allreduce_state is None:
        allreduce_state = allreduce.init(size, workers)
    coo, selected = simulated_select(selector, workers)(acc, state)
    out = simulated_reduce(allreduce, workers)(coo, allreduce_state)
    return {**selected, **out, "kept": added_up(out["kept"])}


def next_state(out):
    """The state of the allreduce after a step, which all workers share."""
    return jax.tree.map(lambda x: x[0], out["allreduce_state"])


def check_conserved(out, where="", *, tolerance=1e-6, rounds=False):
    """All workers have the same total, and total and kept entries add up to the sent ones.

    With ``rounds`` the kept values may be larger than the sent ones, and are rounded themselves.
    """
    total = np.asarray(out["total"])
    assert all(row.tobytes() == total[0].tobytes() for row in total), where
    total, sent, kept = (np.asarray(out[name], np.float64) for name in ("total", "sent", "kept"))
    # Some platforms flush sums of subnormals to zero.
    scale = np.abs(sent).sum(axis=0) + 1e-30
    if rounds:
        scale += np.abs(kept).sum(axis=0)
    # Sums of up to 8 float32: a few units in the last place of the summands.
    error = np.abs(sent.sum(axis=0) - kept.sum(axis=0) - total[0]) / scale
    assert error.max() < tolerance, where


def as_entries(vectors) -> list[dict[int, float]]:
    """The nonzero entries of each vector, from index to value."""
    return [{int(i): v[i] for i in np.flatnonzero(v)} for v in np.asarray(vectors)]


def mesh(workers: int | tuple[int, ...], axis: str | tuple[str, ...] = "w") -> jax.sharding.Mesh:
    """The first devices along one axis, or several."""
    sizes, names = (tuple(np.atleast_1d(x).tolist()) for x in (workers, axis))
    types, devices = (AxisType.Auto,) * len(sizes), jax.devices()[: math.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=types, devices=devices)


def abstract_mesh(**axes: int) -> jax.sharding.AbstractMesh:
    """A mesh without devices: the sizes of its axes by name."""
    types = (AxisType.Auto,) * len(axes)
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)


def added_up(coo):
    """The vectors ``[P, n]`` of PaddedCOOs; repeated indices add.

    In NumPy: on some platforms XLA flushes subnormals in an addition.
    """
    indices = np.asarray(coo.indices)
    dense = np.zeros((len(indices), coo.size + 1), np.float32)
    values = np.asarray(coo.values).astype(np.float32)
    np.add.at(dense, (np.arange(len(indices))[:, None], indices), values)
    return dense[:, :-1].astype(coo.values.dtype)


def hard_accumulators(workers: int, size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Accumulators on which allreduces go wrong, by name, ``f32[P, n]`` each."""
    rng = np.random.default_rng(seed)
    shape = (workers, size)
    normal = rng.standard_normal(shape).astype(np.float32)
    one_worker = np.zeros(shape, np.float32)
    one_worker[workers // 2] = normal[workers // 2]
    one_region = normal * 1e-3
    one_region[:, : size // 16] *= 1e6
    cancelling = normal.copy()
    if workers > 1:
        cancelling[1] = -cancelling[0]
    sparse = np.where(rng.random(shape) < 0.003, normal, 0).astype(np.float32)
    return {
        "normal": normal,
        "ties": rng.integers(-3, 4, shape).astype(np.float32),
        "all equal": np.ones(shape, np.float32),
        "all zero": np.zeros(shape, np.float32),
        "one worker": one_worker,
        "one region": one_region,
        "last region": one_region[:, ::-1].copy(),
        "disjoint": (normal * (np.arange(size) % workers == np.arange(workers)[:, None])).astype(
            np.float32
        ),
        "same on all": np.broadcast_to(normal[0], shape).copy(),
        "cancelling": cancelling,
        "fewer than k nonzeros": sparse,
        "subnormal": (normal * np.float32(1e-40)).astype(np.float32),
        "heavy tail": rng.standard_cauchy(shape).astype(np.float32),
    }


def independent_psums(jaxpr) -> list:
    """The arrays that a jaxpr sums over the workers, in order; none depends on another."""
    behind, summed = set(), []
    for equation in jaxpr.eqns:
        inputs = [v for v in equation.invars if isinstance(v, jax.extend.core.Var)]
        if equation.primitive.name.startswith("psum"):
            assert not behind & set(inputs), "an allreduce waits for another"
            summed += inputs
        if equation.primitive.name.startswith("psum") or behind & set(inputs):
            behind |= set(equation.outvars)
    return summed


def check_replicated_on_a_mesh(selector, allreduce, size, *, check_vma, workers=3):
    """On a mesh, the total, the kept entries and the state have the bits of one device."""
    acc = hard_accumulators(workers, size)["normal"]

    def step(acc):
        coo, _, _ = selector.select(acc[0], selector.init(size))
        total, undelivered, state, info = allreduce.reduce(
            coo, allreduce.init(size, workers), axis="w"
        )
        total = total.to_dense() if isinstance(total, sc.PaddedCOO) else total
        kept = sum_of_parts(as_coo(coo, undelivered))
        return total, kept[None], state, info.words, info.overflow[None]

    run = jax.shard_map(
        step,
        mesh=mesh(workers),
        in_specs=P("w"),
        out_specs=(P(), P("w"), P(), P(), P("w")),
        check_vma=check_vma,
    )
    traced = jax.jit(run).trace(acc)
    total, kept, state, words, overflow = traced.lower().compile()(acc)
    expected = run_once(selector, allreduce, acc)
    for replica in total.addressable_shards:
        np.testing.assert_array_equal(replica.data, expected["total"][0])
    np.testing.assert_array_equal(kept, expected["kept"])
    jax.tree.map(np.testing.assert_array_equal, state, next_state(expected))
    # It includes the words that recursive doubling adds for the types; only forms chosen by the
    # data vary.
    least, most = (sc.traffic.of_traced(traced, conditional=c).words for c in ("best", "worst"))
    assert least <= words <= most
    assert check_vma or words == expected["info"].words[0]
    np.testing.assert_array_equal(overflow, expected["info"].overflow)


def selector_factory(name):
    """The factory of the selector with that name, also among the published ones."""
    return getattr(sc.select, name, None) or getattr(sc.select.published, name)


@contextlib.contextmanager
def direct_messages(use: bool):
    """Programs that are traced within send small sums directly, or do not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_direct, "_in_use", use)
        yield

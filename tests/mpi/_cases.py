"""Cases that MPI ranks and the devices of a mesh both run, to compare their bits."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import optax_ext
import sparse_collectives as sc
from sparse_collectives import transport
from tests.sparse_collectives.helpers import hard_accumulators

SIZE = 600
DENSITY = 0.05
DTYPES = ("float32", "bfloat16", "float16", "int32")


class Case(NamedTuple):
    """An allreduce, and its axes: ``"flat"``, one axis, or ``"grid"``, two."""

    allreduce: sc.SparseAllreduce
    workers: tuple[int, ...]
    axes: str = "flat"


_a, _w = sc.allreduce, sc.wire
CASES = {
    "ok_topk": Case(_a.ok_topk(density=DENSITY), (2, 3, 4)),
    "ok_topk, balanced regions": Case(_a.ok_topk(density=DENSITY, regions="balanced"), (2, 3, 4)),
    "ok_topk all_to_all": Case(
        _a.ok_topk(density=DENSITY, schedule="all_to_all", global_period=3), (3,)
    ),
    "ok_topk qsgd": Case(_a.ok_topk(density=DENSITY, codec=_w.qsgd(bits=4)), (4,)),
    "partitioned_topk": Case(_a.partitioned_topk(), (3,)),
    "partitioned_topk, 16 bits": Case(_a.partitioned_topk(density=DENSITY, bits=16), (2, 3)),
    "partitioned_topk, 1 and 3": Case(_a.partitioned_topk(density=DENSITY, bits=(1, 3)), (2, 3)),
    "topk_a": Case(_a.topk_a(), (2, 3)),
    "topk_a narrow8": Case(_a.topk_a(codec=_w.narrow8()), (3,)),
    "gtopk": Case(_a.published.gtopk(density=DENSITY), (3, 4)),
    "spardl": Case(_a.spardl(density=DENSITY), (2, 3, 4)),
    "row_topk": Case(_a.row_topk(density=DENSITY), (2, 3, 4)),
    "ring_sparse": Case(_a.published.ring_sparse(), (3,)),
    "sparse_allgather": Case(_a.published.sparse_allgather(), (3,)),
    "ssar_recursive_double": Case(_a.published.ssar_recursive_double(), (3, 4)),
    "ssar_split_allgather": Case(_a.published.ssar_split_allgather(), (3,)),
    "dsar_split_allgather": Case(_a.published.dsar_split_allgather(), (3,)),
    "dense": Case(_a.dense(), (3,)),
    "dense_bucketed": Case(_a.published.dense_bucketed(buckets=3), (3,)),
    "auto": Case(sc.planner.auto(density=DENSITY, latency="5us", bandwidth="1Gbit"), (3,)),
    "torus_2d": Case(_a.published.torus_2d(), (4,), "grid"),
}


def leaves(prefix: str, tree: Any) -> dict[str, np.ndarray]:
    """All arrays by their path; bfloat16, which npz does not support, as float32."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        array = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
        found[f"{prefix}{jax.tree_util.keystr(path)}"] = array
    return found


def gradients(workers: int) -> np.ndarray:
    """A step for each kind of hard accumulator, ``f32[P, steps, n]``."""
    return np.stack(list(hard_accumulators(workers, SIZE).values()), axis=1)


def run(allreduce: sc.SparseAllreduce, axis: Any, workers: int, steps: jax.Array) -> dict[str, Any]:
    """Error feedback over ``steps f32[S, n]`` of this worker, in one scan."""
    selector = sc.select.topk(density=DENSITY)

    def step(carry, gradient):
        residual, selector_state, state = carry
        acc = residual + gradient
        coo, selector_state, _ = selector.select(acc, selector_state)
        total, undelivered, state, info = allreduce.reduce(coo, state, axis=axis)
        kept = undelivered.residual(acc, coo)
        total = total.to_dense() if isinstance(total, sc.PaddedCOO) else total
        return (kept, selector_state, state), (total, info)

    start = jnp.zeros((SIZE,)), selector.init(SIZE), allreduce.init(SIZE, workers)
    (residual, _, state), (totals, info) = lax.scan(step, start, steps)
    return {"residual": residual, "totals": totals, "state": state, "info": info._asdict()}


def operands(dtype: str, workers: int) -> np.ndarray:
    """``[P, P * 50]``, values of many magnitudes, whose sum depends on the order."""
    rng = np.random.default_rng(workers)
    shape = (workers, workers * 50)
    if np.issubdtype(np.dtype(dtype), np.integer):
        return rng.integers(0, 50, shape).astype(dtype)
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-2, 3, shape)).astype(dtype)


def rings(workers: int) -> dict[str, list[tuple[int, int]]]:
    """Pairs of a ppermute: all take part; a chain; one message; a fixed point; none."""
    return {
        "ring": [(i, (i + 1) % workers) for i in range(workers)],
        "chain": [(i, i + 1) for i in range(workers - 1)],
        "one": [(workers - 1, 0)],
        "self": [(0, 0)],
        "none": [],
    }


def transports(axis: Any, workers: int, x: jax.Array) -> dict[str, jax.Array]:
    """Every function of the transport on this worker's ``x[P * m]``."""
    out = {
        "psum": transport.psum(x, axis),
        "psum short": transport.psum(x[:7].reshape(7, 1), axis),
        "psum scalar": transport.psum(x[0], axis),
        "psum empty": transport.psum(x[:0], axis),
        "psum_scatter": transport.psum_scatter(x, axis),
        "all_gather": transport.all_gather(x.reshape(workers, -1), axis),
        "all_to_all": transport.all_to_all(x.reshape(workers, -1), axis),
    }
    if jnp.issubdtype(x.dtype, jnp.floating):
        out["pmean"] = transport.pmean(x, axis)
    for name, pairs in rings(workers).items():
        out[f"ppermute {name}"] = transport.ppermute(x, axis, pairs)
    return out


def in_control_flow(axis: Any, workers: int, x: jax.Array) -> dict[str, jax.Array]:
    """Exchanges in branches and loops, in an order that a rank must not change."""
    ring, chain = rings(workers)["ring"], rings(workers)["chain"]
    total = transport.psum(x, axis)

    def either(value):
        return lax.cond(
            transport.psum(value[0], axis) % 2 == 0,
            lambda: transport.psum(value, axis) - 1,
            lambda: transport.ppermute(value, axis, chain) + 1,
        )

    branches = [
        lambda: x,
        lambda: transport.ppermute(x, axis, ring),
        lambda: transport.all_to_all(x.reshape(workers, -1), axis).reshape(-1),
    ]
    return {
        "switch": jnp.stack([lax.switch((total[0] + i) % 3, branches) for i in range(3)]),
        "scan": lax.scan(lambda value, _: (either(value), value[0]), x, None, length=4)[0],
        "fori": lax.fori_loop(0, 3, lambda _, value: either(value), x),
        "while": lax.while_loop(
            lambda carry: carry[0] < 3,
            lambda carry: (carry[0] + 1, transport.ppermute(either(carry[1]), axis, ring)),
            (0, x),
        )[1],
    }


LAYERS = (20, 30, 5)


def params() -> list[dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    return [
        {"w": jnp.asarray(rng.standard_normal(shape) / 5, jnp.float32), "b": jnp.zeros(shape[1])}
        for shape in zip(LAYERS[:-1], LAYERS[1:])
    ]


def batches(training: str, workers: int) -> np.ndarray:
    """``f32[steps, P, examples, features]``; sparse trainings must skip step 7 of worker 1."""
    steps = TRAININGS[training].steps
    data = np.random.default_rng(1).standard_normal((steps, workers, 8, LAYERS[0]))
    if training != "dense":
        data[7, 1, 0, 0] = np.nan
    return data.astype(np.float32)


def loss(params: Any, batch: jax.Array) -> jax.Array:
    hidden = jnp.tanh(batch @ params[0]["w"] + params[0]["b"])
    return jnp.mean((hidden @ params[1]["w"] + params[1]["b"] - batch[:, : LAYERS[-1]]) ** 2)


def train_step(tx: optax.GradientTransformation, params: Any, state: Any, batch: jax.Array):
    value, grads = jax.value_and_grad(loss)(optax_ext.ahead(params, state), batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


class Training(NamedTuple):
    """An optimizer, made for an axis and an inner axis, and its numbers of steps and workers."""

    make: Callable[[Any, Any], optax.GradientTransformation]
    workers: int
    steps: int
    axes: str = "flat"


TRAININGS = {
    "ok_topk": Training(
        lambda axis, _: optax.chain(optax_ext.ok_topk(0.05, axis=axis), optax.adam(1e-2)), 4, 50
    ),
    "sparse_adamw": Training(lambda axis, _: optax_ext.sparse_adamw(1e-2, axis=axis), 3, 14),
    "quantized": Training(
        lambda axis, _: optax.chain(optax_ext.quantized(axis=axis), optax.lion(1e-2)), 3, 12
    ),
    "dense warm-up, lamb": Training(
        lambda axis, _: optax.chain(
            optax_ext.topk_a(0.05, axis=axis, dense_steps=3),
            optax_ext.contrib.lamb(1e-2, axis=axis),
        ),
        3,
        12,
    ),
    "dense": Training(
        lambda axis, _: optax.chain(optax_ext.dense(axis=axis), optax.sgd(0.1)), 2, 12
    ),
    "hitopk": Training(
        lambda axis, inner: optax_ext.published.hitopk(0.05, axis=axis, inner_axis=inner),
        4,
        12,
        "grid",
    ),
}

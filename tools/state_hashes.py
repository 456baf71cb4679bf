"""Prints a hash of what ten steps of many transformations compute, to compare two versions.

    python tools/state_hashes.py > before.txt   # on one version
    python tools/state_hashes.py > after.txt    # on the other, on the same machine
    diff before.txt after.txt

A line has the name of a configuration and hashes of its updates, of its residuals and of its
counters (with the words that it reports), over all workers and all steps. One of the gradients is
not finite at the fifth step. A change that moves code and computes the same leaves every hash as it
is; another order of a sum changes the first two.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from optax_ext._state import _find

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
# The versions to be compared may be in folders of their own.
sys.path.insert(0, str(Path.cwd()))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import optax_ext  # noqa: E402
import sparse_collectives as sc  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

STEPS, WORKERS, BAD = 10, 4, 5
RATE = optax.scale_by_learning_rate(0.1)
SHAPES = {"w": (32, 48), "b": (48,), "scale": ()}
# Over the axis "model" of two devices, where parameters are sharded.
SPECS = {"w": PartitionSpec(None, "model"), "b": PartitionSpec("model"), "scale": PartitionSpec()}


def _small(params: Any) -> Any:
    return jax.tree.map(lambda x: "dense" if x.size < 100 else "sparse", params)


def _around(allreduce: Callable[[], Any], **options: Any) -> optax.GradientTransformation:
    select = sc.select.topk(density=0.05)
    return optax_ext.sparse_allreduce(select, allreduce(), axis="data", **options)


def _nested() -> optax.GradientTransformation:
    nodes = sc.allreduce.hierarchical(inner_axis="chip", outer=sc.allreduce.topk_a())
    select = sc.select.topk(density=0.1)
    return optax_ext.sparse_allreduce(select, nodes, axis=("data", "chip"))


WHOLE: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sparse_adamw": lambda: optax_ext.sparse_adamw(1e-2, axis="data", weight_decay=0.1),
    "sparse_adamw, 1 %": lambda: optax_ext.sparse_adamw(1e-2, axis="data", density=0.01),
    "sparse_adamw, no limit": lambda: optax_ext.sparse_adamw(1e-2, axis="data", limit=None),
    "sparse_adamw, dense leaves": lambda: optax_ext.sparse_adamw(
        1e-2, axis="data", dense_leaves=_small
    ),
    "sparse_sgd": lambda: optax_ext.sparse_sgd(0.1, axis="data"),
    "sparse_sgd, bfloat16": lambda: optax_ext.sparse_sgd(
        0.1, axis="data", residual=optax_ext.residual(jnp.bfloat16, decay=0.9)
    ),
    "sparse_sgd, momentum": lambda: optax_ext.sparse_sgd(
        0.1, axis="data", correction=optax_ext.momentum_correction(0.9)
    ),
    "ok_topk_sgd": lambda: optax_ext.ok_topk_sgd(0.1, density=0.05, axis="data"),
    "ok_topk, adam": lambda: optax.chain(optax_ext.ok_topk(0.05, axis="data"), optax.adam(1e-2)),
    "ok_topk, drop, clip": lambda: optax_ext.ok_topk(
        0.05,
        axis="data",
        nonfinite="drop",
        local=optax_ext.local_clip_by_global_norm(1.0, axis="data"),
    ),
    "topk_a": lambda: optax_ext.topk_a(0.05, axis="data"),
    "topk_a, dense steps": lambda: optax_ext.topk_a(0.05, axis="data", dense_steps=3),
    "topk_a, rate, dense leaves": lambda: optax_ext.topk_a(
        0.05, axis="data", local=RATE, dense_leaves=_small
    ),
    "dgc": lambda: optax_ext.published.dgc(0.05, axis="data", dense_leaves=_small),
    "agreed": lambda: _around(sc.allreduce.agreed),
    "agreed, 8 bits": lambda: _around(lambda: sc.allreduce.agreed(bits=8)),
    "powersgd": lambda: optax_ext.powersgd(2, axis="data"),
    "acp_sgd": lambda: optax_ext.acp_sgd(2, axis="data"),
    "bucketed": lambda: optax_ext.bucketed(optax_ext.topk_a(0.05, axis="data"), 2),
    "delayed": lambda: optax_ext.delayed(optax_ext.topk_a(0.05, axis="data")),
    "multi_steps": lambda: optax_ext.multi_steps(optax_ext.topk_a(0.05, axis="data"), 2),
    "dense": lambda: optax_ext.dense(axis="data"),
}
SHARDED = {
    name: WHOLE[name]
    for name in ("sparse_adamw", "topk_a", "dgc", "ok_topk, drop, clip", "powersgd", "agreed")
}


def gradients(step: int) -> Any:
    """Of all workers, ``f32[P, ...]``; one entry of the third is not finite at one step."""
    draw = np.random.default_rng(step)
    made = {
        name: draw.standard_t(3, (WORKERS, *shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    if step == BAD:
        made["w"][2, 3, 4] = np.nan
    return made


def params() -> Any:
    """Small, so that weight decay is seen."""
    draw = np.random.default_rng(0)
    return {k: jnp.asarray(draw.normal(size=s).astype(np.float32)) for k, s in SHAPES.items()}


class Hashes:
    """Of updates, residuals and counters."""

    def __init__(self) -> None:
        self._each = [hashlib.sha256() for _ in range(3)]

    def add(self, updates: Any, state: Any) -> None:
        """What one step made."""
        found = _find.get_states(state)
        counters = [(s.count, s.skipped, s.dropped, s.withheld) for s in found]
        info = optax_ext.get_info(state)
        kept = [(s.residual, s.velocity, s.dense_velocity) for s in found]
        counters = (counters, info.words, info.selected, info.delivered)
        for digest, tree in zip(self._each, (updates, kept, counters), strict=True):
            for leaf in jax.tree.leaves(tree):
                digest.update(np.ascontiguousarray(leaf).tobytes())

    def __str__(self) -> str:
        return " ".join(digest.hexdigest()[:12] for digest in self._each)


def whole(tx: optax.GradientTransformation, sizes: dict[str, int]) -> Hashes:
    """Of parameters that every worker has whole, over the axes of a mesh."""
    made, here, names = Hashes(), params(), tuple(sizes)
    state = optax_ext.init_state(tx, here, sizes)
    specs, split = optax_ext.state_specs(state), PartitionSpec(names)
    mesh = jax.make_mesh(tuple(sizes.values()), names, axis_types=(AxisType.Auto,) * len(names))

    def step(given: Any, state: Any) -> Any:
        updates, state = tx.update(jax.tree.map(lambda x: x[0], given), state, here)
        return jax.tree.map(lambda x: x[None], updates), state

    go = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(split, specs), out_specs=(split, specs), check_vma=False
        )
    )
    for t in range(STEPS):
        updates, state = go(gradients(t), state)
        made.add(updates, state)
    return made


def sharded(tx: optax.GradientTransformation) -> Hashes:
    """Of two workers of two devices, through the step that the library makes."""
    made = Hashes()
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    here = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params(), SPECS)
    state = optax_ext.init_state(tx, here, mesh)

    def loss(params: Any, batch: Any) -> jax.Array:
        products = jax.tree.map(lambda x, g: jnp.sum(x * jnp.mean(g, 0)), params, batch)
        return sum(jax.tree.leaves(products), jnp.float32(0))

    step = optax_ext.make_train_step(loss, tx, mesh)
    for t in range(STEPS):
        here, state, _ = step(here, state, gradients(t))
        made.add(here, state)
    return made


def main() -> None:
    """Prints a line for each configuration."""
    for name, tx in WHOLE.items():
        print(f"{name}: {whole(tx(), {'data': WORKERS})}", flush=True)
    print(f"hierarchical: {whole(_nested(), {'data': 2, 'chip': 2})}", flush=True)
    for name, tx in SHARDED.items():
        print(f"{name}, sharded: {sharded(tx())}", flush=True)


if __name__ == "__main__":
    main()

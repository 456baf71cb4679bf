"""Prints hashes of the results of ten steps of many transformations, to compare two versions.

    python tools/state_hashes.py > before.txt   # on one version
    python tools/state_hashes.py > after.txt    # on the other, on the same machine
    diff before.txt after.txt

A line has the name of a configuration and hashes of its updates, of its residuals and of its
counters (with the words that it reports), over all workers and all steps. One of the gradients is
not finite at the fifth step. A change that moves code and computes the same leaves every hash
unchanged; another order of a sum changes the first two.
"""

import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from optax_ext._state import _find

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
# The compared versions may be in folders of their own.
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

Steps = Iterator[tuple[Any, Any]]
STEPS, WORKERS, BAD = 10, 4, 5
SHAPES = {"w": (32, 48), "b": (48,), "scale": ()}
# Over the axis "model" of two devices, for sharded parameters.
SPECS = {"w": PartitionSpec(None, "model"), "b": PartitionSpec("model"), "scale": PartitionSpec()}
MODULES = (sc.allreduce, sc.select, optax_ext)
NAMES = {name: getattr(module, name) for module in MODULES for name in module.__all__} | {
    "jnp": jnp,
    "optax": optax,
    "dgc": optax_ext.published.dgc,
    "nodes": sc.allreduce.hierarchical(inner_axis="chip", outer=sc.allreduce.topk_a()),
    "small": lambda params: jax.tree.map(lambda x: "dense" if x.size < 100 else "sparse", params),
}
# Expressions; those before the empty line are also run with sharded parameters.
CASES = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
NESTED = 'sparse_allreduce(topk(density=0.1), nodes, axis=("data", "chip"))'


def gradients(step: int) -> Any:
    """Gradients of all workers, ``f32[P, ...]``; one entry of the third is once not finite."""
    draw = np.random.default_rng(step)
    made = {k: draw.standard_t(3, (WORKERS, *s)).astype(np.float32) for k, s in SHAPES.items()}
    if step == BAD:
        made["w"][2, 3, 4] = np.nan
    return made


def params() -> Any:
    """Small parameters, so that weight decay has a visible effect."""
    draw = np.random.default_rng(0)
    return {k: jnp.asarray(draw.normal(size=s).astype(np.float32)) for k, s in SHAPES.items()}


def hashes(steps: Iterable[tuple[Any, Any]]) -> str:
    """Hashes of the updates, residuals and counters of the steps."""
    digests = [hashlib.sha256() for _ in range(3)]
    for updates, state in steps:
        found, info = _find.get_states(state), optax_ext.get_info(state)
        kept = [(s.residual, s.velocity, s.dense_velocity) for s in found]
        counters = [(s.count, s.skipped, s.dropped, s.withheld) for s in found]
        counters += [info.words, info.selected, info.delivered]
        for digest, tree in zip(digests, (updates, kept, counters), strict=True):
            for leaf in jax.tree.leaves(tree):
                digest.update(np.ascontiguousarray(leaf).tobytes())
    return " ".join(digest.hexdigest()[:12] for digest in digests)


def whole(tx: optax.GradientTransformation, sizes: dict[str, int]) -> Steps:
    """Runs with parameters that every worker has whole, over the axes of a mesh."""
    here, names = params(), tuple(sizes)
    state = optax_ext.init_state(tx, here, sizes)
    specs, split = optax_ext.state_specs(state), PartitionSpec(names)
    mesh = jax.make_mesh(tuple(sizes.values()), names, axis_types=(AxisType.Auto,) * len(names))

    def step(given: Any, state: Any) -> Any:
        updates, state = tx.update(jax.tree.map(lambda x: x[0], given), state, here)
        return jax.tree.map(lambda x: x[None], updates), state

    both = (split, specs)
    mapped = jax.shard_map(step, mesh=mesh, in_specs=both, out_specs=both, check_vma=False)
    go = jax.jit(mapped)
    for t in range(STEPS):
        updates, state = go(gradients(t), state)
        yield updates, state


def sharded(tx: optax.GradientTransformation, sizes: dict[str, int]) -> Steps:
    """Runs with two workers of two devices, by the library's training step."""
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 2)
    here = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params(), SPECS)
    state = optax_ext.init_state(tx, here, mesh)

    def loss(params: Any, batch: Any) -> jax.Array:
        products = jax.tree.map(lambda x, g: jnp.sum(x * jnp.mean(g, 0)), params, batch)
        return sum(jax.tree.leaves(products), jnp.float32(0))

    step = optax_ext.make_train_step(loss, tx, mesh)
    for t in range(STEPS):
        here, state, _ = step(here, state, gradients(t))
        yield here, state


def main() -> None:
    """Prints a line for each configuration."""
    cases = [(x, whole, {"data": WORKERS}) for x in CASES.splitlines() if x]
    cases += [(NESTED, whole, {"data": 2, "chip": 2})]
    both = CASES.partition("\n\n")[0].splitlines()
    cases += [(x, sharded, {"data": 2, "model": 2}) for x in both]
    for text, run, sizes in cases:
        made = hashes(run(eval(text, dict(NAMES)), sizes))
        print(f"{text}, {run.__name__}: {made}", flush=True)


if __name__ == "__main__":
    main()

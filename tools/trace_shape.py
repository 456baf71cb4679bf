"""Counts the Python that one traced step enters, as a measure of how much there is to read.

    python tools/trace_shape.py

A row has the files of both packages, the distinct functions, their calls, and how often a call goes
from one package into the other.
"""

import collections
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The version to be counted may be in a folder of its own.
sys.path.insert(0, str(Path.cwd()))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax.sharding import AxisType  # noqa: E402

import optax_ext  # noqa: E402
import sparse_collectives as sc  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)

PARAMS = {"w": jnp.zeros((16, 32)), "b": jnp.zeros((32,)), "v": jnp.zeros((32, 4))}
OPTIMIZERS = {
    "sparse_adamw": optax_ext.sparse_adamw(1e-3, axis="data", weight_decay=0.0),
    "chain(ok_topk, adam)": optax.chain(optax_ext.ok_topk(0.05, axis="data"), optax.adam(1e-3)),
    "chain(dense, adam)": optax.chain(optax_ext.dense(axis="data"), optax.adam(1e-3)),
}


def counted(run: Callable[[], Any]) -> tuple[int, int, int, int]:
    """Files, functions, calls and switches while ``run`` is called."""
    folders = [os.path.dirname(module.__file__) for module in (optax_ext, sc)]
    # The functions that were entered, and for each open one its package, or None.
    seen, switches, stack = collections.Counter(), 0, []

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal switches
        if event == "call":
            code = frame.f_code
            here = next((x for x in folders if code.co_filename.startswith(x)), None)
            if here is not None:
                seen[code.co_filename, code.co_qualname] += 1
                last = next((x for x in reversed(stack) if x), here)
                switches += last != here
            stack.append(here)
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len({file for file, _ in seen}), len(seen), seen.total(), switches


def main() -> None:
    """Prints a row for each optimizer, alone and in a training step."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    batch = jnp.ones((8, 16))

    def loss(params: Any, batch: Any) -> jax.Array:
        hidden = batch @ params["w"] + params["b"][None]
        return jnp.mean((hidden @ params["v"]) ** 2)

    print("| | files | functions | calls | switches between the packages |\n|---|---|---|---|---|")
    for name, tx in OPTIMIZERS.items():
        state = optax_ext.init_state(tx, PARAMS, {"data": 4})
        four = jax.tree.map(lambda x: jnp.stack([x] * 4), PARAMS)

        def update(gradients: Any, tx: Any = tx) -> Any:
            return tx.update(gradients, tx.init(gradients))[0]

        alone = sc.simulate(update, axis="data", axis_size=4)
        step = optax_ext.make_train_step(loss, tx, mesh)
        runs = {
            "`init` and `update`": functools.partial(alone.lower, four),
            "`make_train_step`": functools.partial(step.lower, PARAMS, state, batch),
        }
        for what, run in runs.items():
            print(f"| `{name}`, {what} | {' | '.join(map(str, counted(run)))} |")


if __name__ == "__main__":
    main()

"""The cost of `flush` at a constant learning rate: test accuracy before and after it, and of dense.

    python -m benchmarks.training.flush_cost --images fashion-mnist [--steps 1000] [--seeds 3]
    python -m benchmarks.training.flush_cost --images fashion-mnist --raw

A perceptron with two hidden layers of 128 in flax.nnx, over eight devices of this machine, as a
newcomer would write it: a learning rate of 1e-3, batches of 128, nothing tuned. The baseline is
dense AdamW. A seed determines the parameters and the batches.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType

import optax_ext

from .._common import display, options, reports
from ._data import read_images

WORKERS, BATCH, WIDTH, RATE = 8, 128, 128, 1e-3


def perceptron(inputs: int, classes: int, seed: int) -> nnx.Module:
    """A perceptron with two hidden layers."""
    rngs = nnx.Rngs(seed)
    layers = [nnx.Linear(inputs, WIDTH, rngs=rngs), nnx.relu]
    layers += [nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.relu]
    return nnx.Sequential(*layers, nnx.Linear(WIDTH, classes, rngs=rngs))


def train(data: Any, tx: Any, *, flush: bool, steps: int, seed: int) -> list[float]:
    """Test accuracies in percent: after the training, and with ``flush`` also after it."""
    flat = data.train_images.reshape(len(data.train_images), -1)
    graph, params = nnx.split(perceptron(flat.shape[1], data.classes, seed))
    mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(AxisType.Auto,))

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(graph, params)(batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def accuracy(params: Any) -> float:
        logits = nnx.merge(graph, params)(data.test_images.reshape(len(data.test_images), -1))
        return 100 * float(jnp.mean(jnp.argmax(logits, -1) == data.test_labels))

    state = optax_ext.init_state(tx, params, mesh)
    step = optax_ext.make_train_step(loss, tx, mesh)
    random = np.random.default_rng(seed)
    for _ in range(steps):
        chosen = random.integers(0, len(flat), BATCH)
        params, state, _ = step(params, state, (flat[chosen], data.train_labels[chosen]))
    found = [accuracy(params)]
    return [*found, accuracy(optax_ext.flush(params, state)[0])] if flush else found


@options.program
def main(argv: list[str] | None = None) -> None:
    """Trains, and prints the table."""
    raw = (False, "pixels from 0 to 1, in place of a mean of 0 and a deviation of 1")
    usual = {"steps": 1000, "seeds": 3, "raw": raw}
    args = options.parser_of(__doc__, "images", "json", **usual).parse_args(argv)
    jax.config.update("jax_num_cpu_devices", WORKERS)
    data = read_images(args.images)
    if args.raw:
        low, high = data.train_images.min(), data.train_images.max()
        images = [(x - low) / (high - low) for x in (data.train_images, data.test_images)]
        data = data._replace(train_images=images[0], test_images=images[1])
    dense = optax.chain(optax_ext.dense(axis="data"), optax.adamw(RATE))
    ways = {"dense": dense} | {
        f"sparse_adamw, {density:.0%}": optax_ext.sparse_adamw(RATE, density=density, axis="data")
        for density in (0.05, 0.01)
    }
    rows, shown = [], []
    for name, tx in ways.items():
        given = {"flush": tx is not dense, "steps": args.steps}
        runs = [train(data, tx, seed=seed, **given) for seed in range(args.seeds)]
        trained, *flushed = accuracy = np.array(runs).T.tolist()
        rows.append({"method": name, "accuracy": accuracy})
        shown.append({"method": name, "trained": trained, "flushed": sum(flushed, [])})
    title = f"test accuracy, %, of each seed after {args.steps} steps at a rate of {RATE:g}"
    display.show_rows(title, shown)
    content = {"steps": args.steps, "raw": args.raw, "jax": jax.__version__, "rows": rows}
    reports.write(args.json, content)


if __name__ == "__main__":
    raise SystemExit(main())

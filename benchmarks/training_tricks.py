"""What the tricks of DGC do for the accuracy at a low density, one after the other.

A small network on Fashion-MNIST (``--images FOLDER``) or scikit-learn's digits, over simulated
workers; the mean and the spread of the test accuracy over some seeds.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_ext
import sparse_collectives as sc

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))

from _data import batches, digits, idx_folder  # noqa: E402  # pyright: ignore

MOMENTUM = 0.9


def variants(density: float, steps: int, rate: float, max_norm: float):
    """Each trick is added to those before it."""

    def sparse(*, masking=None, clip=False, dense_steps=0):
        plain = masking is None
        correction = None if plain else optax_ext.momentum_correction(MOMENTUM, masking=masking)
        tx = optax_ext.topk_a(density, axis="w", correction=correction, dense_steps=dense_steps)
        before = [optax_ext.local_clip_by_global_norm(max_norm, axis="w")] if clip else []
        return optax.chain(*before, tx, optax.sgd(rate, momentum=MOMENTUM if plain else None))

    return {
        "dense": optax.chain(optax_ext.dense(axis="w"), optax.sgd(rate, momentum=MOMENTUM)),
        "top-k": sparse(),
        "+ momentum correction": sparse(masking=False),
        "+ masking": sparse(masking=True),
        "+ clipping": sparse(masking=True, clip=True),
        "+ warm-up": sparse(masking=True, clip=True, dense_steps=max(1, steps // 10)),
    }


def logits(params, images):
    """A network of one hidden layer."""
    x = images.reshape(images.shape[0], -1)
    x = jax.nn.relu(x @ params["w0"] + params["b0"])
    return x @ params["w1"] + params["b1"]


def accuracy(tx, data, *, workers: int, steps: int, batch: int, hidden: int, seed: int) -> float:
    """Trains, and returns the test accuracy."""
    random = np.random.default_rng(seed)
    inputs = int(np.prod(data.train_images.shape[1:]))

    def layer(rows, columns):
        return jnp.asarray(random.normal(0, (2 / rows) ** 0.5, (rows, columns)), jnp.float32)

    params = {
        "w0": layer(inputs, hidden),
        "b0": jnp.zeros(hidden),
        "w1": layer(hidden, data.classes),
        "b1": jnp.zeros(data.classes),
    }

    def loss(params, images, labels):
        scores = logits(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    def step(params, state, images, labels):
        updates, state = tx.update(jax.grad(loss)(params, images, labels), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(lambda x: jnp.stack([x] * workers), params)
    state = sc.simulate(tx.init, axis="w", axis_size=workers)(params)
    run = sc.simulate(step, axis="w", axis_size=workers)
    stream = batches(data.train_images, data.train_labels, size=workers * batch, seed=seed)
    for _ in range(steps):
        images, labels = next(stream)
        images = images.reshape(workers, batch, *images.shape[1:])
        params, state = run(params, state, images, labels.reshape(workers, batch))
    final = jax.tree.map(lambda x: x[0], params)
    found = jnp.argmax(logits(final, data.test_images), -1)
    return float(jnp.mean(found == data.test_labels))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=Path, help="a folder of IDX files; default: digits")
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="of each worker")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--max-norm", type=float, default=4.0)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    data = idx_folder(options.images) if options.images else digits()
    print(f"test accuracy, {options.workers} workers, density {options.density:g}")
    chosen = variants(options.density, options.steps, options.rate, options.max_norm)
    for name, tx in chosen.items():
        scores = [
            accuracy(
                tx,
                data,
                workers=options.workers,
                steps=options.steps,
                batch=options.batch,
                hidden=options.hidden,
                seed=seed,
            )
            for seed in range(options.seeds)
        ]
        low, high = min(scores), max(scores)
        print(f"{name:24}{np.mean(scores):8.2%}   {low:.2%} to {high:.2%}", flush=True)


if __name__ == "__main__":
    main()

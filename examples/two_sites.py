"""A site of a training to which several sites contribute, each with examples of its own.

    python examples/two_sites.py STORE berlin &
    python examples/two_sites.py STORE paris

STORE is a folder that both reach, or the URL of a bucket. The site `berlin` has the first hundred
of scikit-learn's digits and every other site the second hundred; they exchange the largest tenth
of what their parameters have moved in ten steps. `--alone` trains without the other site.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from _data import InputError, digits
from _options import numbers_of, parser_of
from optax_ext import sites

TX = optax.adamw(3e-3)
STEPS, BATCH = 10, 32  # of a round


def init_params(key: jax.Array) -> dict[str, jax.Array]:
    """Returns a perceptron for images of 64 pixels: 9,610 parameters."""
    keys = jax.random.split(key)
    return {
        "hidden": 0.1 * jax.random.normal(keys[0], (64, 128)),
        "hidden_bias": jnp.zeros(128),
        "out": 0.1 * jax.random.normal(keys[1], (128, 10)),
        "out_bias": jnp.zeros(10),
    }


def logits_of(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    """Maps f32[batch, 64] to f32[batch, 10]."""
    hidden = jax.nn.relu(images @ params["hidden"] + params["hidden_bias"])
    return hidden @ params["out"] + params["out_bias"]


def loss_fn(params: dict[str, jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy."""
    logits = logits_of(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@jax.jit
def step(params, state, images, labels):
    """Takes one step of this site alone, with any optimizer of optax."""
    gradients = jax.grad(loss_fn)(params, images, labels)
    updates, state = TX.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


def train(options: argparse.Namespace) -> None:
    """Trains this site, and prints a line for each round."""
    data = digits()
    images, test = (x.reshape(len(x), -1) for x in (data.train_images, data.test_images))
    mine = range(100) if options.name == "berlin" else range(100, 200)
    quorum = 1 if options.alone else 2  # a round waits for both
    first = init_params(jax.random.key(options.seed))
    site = sites.Site(options.store, options.name, first, density=0.1, quorum=quorum)
    params = jax.tree.map(jnp.asarray, site.params)  # of the run, if it has begun
    state, rng = TX.init(params), np.random.default_rng(options.seed)
    for _ in range(options.rounds):
        for _ in range(STEPS):
            chosen = rng.choice(mine, BATCH)
            params, state = step(params, state, images[chosen], data.train_labels[chosen])
        params = site.exchange(params, tokens=STEPS * BATCH, wait=True)
        correct = logits_of(params, test).argmax(-1) == data.test_labels
        names = ", ".join(site.last.sites)
        print(f"{options.name}, round {site.round} of {names}: accuracy {correct.mean():.3f}")
    site.finish(params)


def main(argv: list[str] | None = None) -> int:
    """Runs a site; returns the exit status."""
    parser = parser_of("Train one of two sites.")
    add = numbers_of(parser)
    parser.add_argument("store", help="a folder, or the URL of a bucket")
    parser.add_argument("name", help="berlin, or another name for the other site")
    add("--rounds", int, 20, 1, 10**6, "rounds of ten steps")
    add("--seed", int, 0, 0, 2**31 - 1, "of the parameters and batches")
    parser.add_argument("--alone", action="store_true", help="without the other site")
    try:
        train(parser.parse_args(argv))
    except (InputError, TimeoutError, ValueError) as error:
        print(f"two_sites.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

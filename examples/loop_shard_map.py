"""Your own training loop over `jax.shard_map`, for a model of plain functions and arrays.

    python examples/loop_shard_map.py

It writes out `optax_ext.make_train_step`: local gradients (`ahead`), a state of which a part
belongs to one worker (`state_specs`), donation, and waiting for the steps.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import optax_ext
from _data import InputError, batches, digits
from _options import check_batch, training_parser
from _workers import start_workers


def init_params(seed: int, sizes: tuple[int, ...]) -> list[dict[str, np.ndarray]]:
    """The weights and biases of a perceptron with these layers."""
    rng = np.random.default_rng(seed)
    return [
        {
            "w": rng.normal(0, np.sqrt(2 / inputs), (inputs, outputs)).astype(np.float32),
            "b": np.zeros(outputs, np.float32),
        }
        for inputs, outputs in zip(sizes, sizes[1:])
    ]


def logits_of(params: list[dict[str, jax.Array]], images: jax.Array) -> jax.Array:
    """Maps f32[batch, height, width] to f32[batch, classes]."""
    x = images.reshape(len(images), -1)
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss_fn(params: list[dict[str, jax.Array]], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The mean over the given images; in the step below these are the images of one worker."""
    images, labels = batch
    losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, images), labels)
    return losses.mean()


def make_step(tx: optax.GradientTransformation, mesh: jax.sharding.Mesh, opt_state: optax.OptState):
    """``step(params, opt_state, batch) -> (params, opt_state, loss)``, jitted."""

    def local_step(params, opt_state, batch):
        # `ahead` makes the parameters this worker's own, and applies its share of the residual. At
        # `params` itself, autodiff would sum the gradients over the workers.
        here = optax_ext.ahead(params, opt_state)
        loss, gradients = jax.value_and_grad(loss_fn)(here, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")

    specs = optax_ext.state_specs(opt_state)  # the residual differs between the workers
    mapped = jax.shard_map(
        local_step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs, P())
    )
    # With donation, the sum of residual and gradient is computed in place.
    return jax.jit(mapped, donate_argnums=(0, 1))


def train(options: argparse.Namespace) -> None:
    """Trains and reports."""
    mesh = start_workers(options.workers)
    data = digits()
    rate = optax.cosine_decay_schedule(options.lr, options.steps)
    tx = optax_ext.sparse_adamw(rate, axis="data")

    params = init_params(options.seed, (data.train_images[0].size, 256, 256, data.classes))
    # On the mesh from the start, since the placement of an array belongs to its type: otherwise
    # the step would be compiled a second time for the arrays that it returns.
    params = jax.device_put(params, jax.sharding.NamedSharding(mesh, P()))
    opt_state = optax_ext.init_state(tx, params, mesh)
    step = make_step(tx, mesh, opt_state)

    stream = batches(data.train_images, data.train_labels, size=options.batch, seed=options.seed)
    for number in range(1, options.steps + 1):
        params, opt_state, loss = step(params, opt_state, next(stream))
        # A call returns before its step is computed. On CPU, steps must not queue without end.
        jax.block_until_ready(loss)
        if number % 50 == 0 or number in (1, options.steps):
            words = float(optax_ext.get_info(opt_state).words)
            print(f"step {number}: loss {loss:.4f}, {words:,.0f} words to each worker", flush=True)

    params, opt_state = optax_ext.flush(params, opt_state)  # applies a share of the residuals
    logits = logits_of(jax.device_get(params), data.test_images)
    accuracy = jnp.mean(jnp.argmax(logits, axis=-1) == data.test_labels)
    print(f"test accuracy {accuracy:.2%}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options; exits with status 2 and one line if one of them is wrong."""
    parser = training_parser(
        "Train in a loop over jax.shard_map.", steps=200, batch=128, rate=0.003
    )
    options = parser.parse_args(argv)
    check_batch(parser, options)
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the training; returns the exit status."""
    try:
        train(parse(argv))
    except InputError as error:
        print(f"loop_shard_map.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

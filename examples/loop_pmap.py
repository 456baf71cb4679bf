"""A training loop over `jax.pmap`, with a sparse allreduce instead of `jax.lax.pmean`.

    python examples/loop_pmap.py

Two things differ from a loop that averages its gradients: the optimizer takes the gradients of one
worker, and its state is created inside the mapped function. As always under `pmap`, every array has
a leading axis of the workers.
"""

import argparse
import sys

import jax
import numpy as np
import optax

import optax_ext
from _data import InputError, batches, digits
from _options import check_batch, training_parser
from _workers import start_workers
from train_digits import Classifier


def train(options: argparse.Namespace) -> None:
    """Trains and reports."""
    devices = list(start_workers(options.workers).devices.flat)
    data = digits()
    model = Classifier(data.classes)
    rate = optax.cosine_decay_schedule(options.lr, options.steps)
    tx = optax_ext.sparse_adamw(rate, axis="data")

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def local_step(params, opt_state, batch):
        # No pmean of the gradients: all workers would then select the same entries.
        here = optax_ext.ahead(params, opt_state)
        loss, gradients = jax.value_and_grad(loss_fn)(here, batch)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")

    over_workers = {"axis_name": "data", "devices": devices}
    init = jax.pmap(tx.init, **over_workers)
    step = jax.pmap(local_step, **over_workers, donate_argnums=(0, 1))

    def split(x):
        return x.reshape(options.workers, -1, *x.shape[1:])

    params = model.init(jax.random.key(options.seed), data.train_images[:1])["params"]
    params = jax.tree.map(lambda x: np.repeat(x[None], options.workers, axis=0), params)
    opt_state = init(params)
    stream = batches(data.train_images, data.train_labels, size=options.batch, seed=options.seed)
    for number in range(1, options.steps + 1):
        params, opt_state, loss = step(params, opt_state, jax.tree.map(split, next(stream)))
        loss = float(loss[0])  # waits for the step: on CPU, steps must not queue without end
        if number % 50 == 0 or number in (1, options.steps):
            words = float(optax_ext.get_info(opt_state).words[0])
            print(f"step {number}: loss {loss:.4f}, {words:,.0f} words to each worker", flush=True)

    params = jax.device_get(params)
    same = all((x == x[0]).all() for x in jax.tree.leaves(params))
    logits = model.apply({"params": jax.tree.map(lambda x: x[0], params)}, data.test_images)
    accuracy = np.mean(np.argmax(logits, axis=-1) == data.test_labels)
    print(f"test accuracy {accuracy:.2%}; parameters {'equal' if same else 'differ'}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options; exits with status 2 and one line if one of them is wrong."""
    parser = training_parser("Train in a loop over jax.pmap.", steps=200, batch=128, rate=0.003)
    options = parser.parse_args(argv)
    check_batch(parser, options)
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the training; returns the exit status."""
    try:
        train(parse(argv))
    except InputError as error:
        print(f"loop_pmap.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

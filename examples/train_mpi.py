"""Trains on scikit-learn's digits over MPI, one worker per process.

    mpirun -n 4 python examples/train_mpi.py

There is no mesh and no mapped function: each process jits the step of one worker, which sees its
own part of the images, and the optimizer exchanges a few entries of the updates. The worker of rank
0 prints.
"""

import argparse

import jax
import numpy as np
import optax
from mpi4py import MPI

import optax_ext
from _data import batches, digits
from train_digits import Classifier


def main() -> None:
    """Trains, and prints accuracy and traffic once."""
    parser = argparse.ArgumentParser(description="Train with sparse_adamw over MPI.")
    parser.add_argument("--steps", type=int, default=300, help="steps (300)")
    parser.add_argument("--density", type=float, default=0.05, help="k/n (0.05)")
    parser.add_argument("--batch", type=int, default=32, help="images of each worker (32)")
    options = parser.parse_args()

    jax.config.update("jax_platforms", "cpu")
    world = MPI.COMM_WORLD
    workers, rank = world.Get_size(), world.Get_rank()
    data = digits()
    model = Classifier(data.classes)

    def loss_fn(params, images, labels):
        logits = model.apply({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    tx = optax_ext.sparse_adamw(0.01, density=options.density, axis=world)
    # All ranks begin with the same parameters, and keep them the same.
    params = model.init(jax.random.key(0), data.train_images[:1])["params"]
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, images, labels):
        # A worker takes its gradient where its own unsent entries would move the parameters.
        ahead = optax_ext.ahead(params, opt_state)
        gradients = jax.grad(loss_fn)(ahead, images, labels)
        updates, opt_state = tx.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    mine = slice(rank, None, workers)
    stream = batches(
        data.train_images[mine], data.train_labels[mine], size=options.batch, seed=rank
    )
    for _ in range(options.steps):
        params, opt_state = step(params, opt_state, *next(stream))

    logits = model.apply({"params": params}, data.test_images)
    accuracy = np.mean(np.argmax(logits, axis=-1) == data.test_labels)
    # The steps are complete here, so that MPI is free for our own calls.
    sums = world.gather(float(optax.tree.sum(jax.tree.map(np.sum, params))))
    if rank == 0:
        info = optax_ext.get_info(opt_state)
        assert info is not None
        assert sums is not None
        print(
            f"{workers} workers, {options.steps} steps: test accuracy {accuracy:.2%}, "
            f"{int(info.delivered)} entries delivered and {float(info.words):.0f} words received "
            f"in the last step, parameters {'equal' if len(set(sums)) == 1 else 'differ'}"
        )


if __name__ == "__main__":
    main()

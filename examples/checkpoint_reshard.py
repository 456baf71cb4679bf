"""Trains on 8 workers, saves with orbax, restores on 4, and continues with all residuals.

    python examples/checkpoint_reshard.py
    python examples/checkpoint_reshard.py --workers 4 --then 8 --folder FOLDER

Each worker has its own residual. `optax_ext.reshard` distributes them to another number of workers
and keeps their sum. docs/checkpoints.md says more.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AbstractMesh, Mesh, SingleDeviceSharding

import optax_ext
from _data import InputError, batches, digits
from _options import check_batch, numbers_of, training_parser
from _workers import start_workers
from train_digits import Classifier


def save(path: Path, params: Any, opt_state: Any) -> None:
    """Writes parameters and state, with the residuals of all workers in it."""
    with ocp.StandardCheckpointer() as checkpointer:
        # The configuration of the state, so that a restore into another one names the difference.
        metadata = optax_ext.checkpoint_metadata(opt_state)
        checkpointer.save(path, (params, opt_state), custom_metadata=metadata)


def restore(path: Path, tx: Any, params: Any, mesh: Mesh) -> tuple[Any, Any]:
    """``(params, opt_state)`` of the workers that saved, not yet of the workers of `mesh`.

    Args:
      path: written by :func:`save`.
      tx: the same transformation as then.
      params: the parameters or their shapes.
      mesh: the new workers; its first device holds the restored arrays.
    """
    here = SingleDeviceSharding(mesh.devices.flat[0])
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(path).custom_metadata
        old_mesh = AbstractMesh((saved["workers"],), ("data",))
        expected = optax_ext.abstract_state(tx, params, old_mesh, sharding=here)
        optax_ext.check_metadata(saved, expected)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), params
        )
        return checkpointer.restore(path, (shapes, expected))


def waiting(opt_state: Any) -> np.ndarray:
    """f64[n], the sum of the residuals over the workers."""
    residual = np.asarray(optax_ext.get_state(opt_state).residual)
    return residual.sum(axis=0, dtype=np.float64)


def train(options: argparse.Namespace, folder: Path) -> None:
    """Trains with the old workers, then with the new ones."""
    # Both groups are devices of one process here; usually the second is another program.
    start_workers(max(options.workers, options.then))
    data = digits()
    model = Classifier(data.classes)
    tx = optax_ext.sparse_adamw(options.lr, axis="data")

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    def steps(params: Any, opt_state: Any, mesh: Mesh, stream: Iterator) -> tuple[Any, Any]:
        step = optax_ext.make_train_step(loss_fn, tx, mesh)
        losses = []
        for _ in range(options.steps):
            params, opt_state, loss = step(params, opt_state, next(stream))
            losses.append(float(loss))
        print(f"{mesh.size} workers: loss from {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
        return params, opt_state

    params = model.init(jax.random.key(options.seed), data.train_images[:1])["params"]
    stream = batches(data.train_images, data.train_labels, size=options.batch, seed=options.seed)
    mesh = start_workers(options.workers)
    params, opt_state = steps(params, optax_ext.init_state(tx, params, mesh), mesh, stream)
    before = waiting(opt_state)
    save(folder / "saved", params, opt_state)

    mesh = start_workers(options.then)
    params, opt_state = restore(folder / "saved", tx, params, mesh)
    opt_state = optax_ext.reshard(opt_state, optax_ext.init_state(tx, params, mesh))
    after = waiting(opt_state)
    print(
        f"restored: the residuals of {options.workers} workers have magnitude "
        f"{np.abs(before).sum():.6f}, those of {options.then} {np.abs(after).sum():.6f}; "
        f"the largest difference at an entry is {np.abs(after - before).max():.1e}"
    )
    # An update is the mean over the workers, so the residual now weighs 8/4 as much. To keep its
    # weight, multiply the residuals by 4/8 before they are resharded.
    params, _ = steps(params, opt_state, mesh, stream)
    logits = model.apply({"params": jax.device_get(params)}, data.test_images)
    print(f"test accuracy {np.mean(np.argmax(logits, axis=-1) == data.test_labels):.2%}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options; exits with status 2 and one line when one of them is wrong."""
    parser = training_parser(
        "Go on with another number of workers.", steps=100, batch=128, rate=0.003
    )
    numbers_of(parser)("--then", int, 4, 1, 64, "workers that go on")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="of the checkpoint; else it is temporary"
    )
    options = parser.parse_args(argv)
    check_batch(parser, options)
    if options.batch % options.then:
        parser.error(f"--batch {options.batch} is not divisible by --then {options.then}")
    if options.folder and (options.folder / "saved").exists():
        parser.error(f"--folder {options.folder} has a checkpoint already")
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the training; returns the exit status."""
    try:
        options = parse(argv)
        with tempfile.TemporaryDirectory() as temporary:
            # Orbax needs an absolute path.
            train(options, (options.folder or Path(temporary)).resolve())
    except InputError as error:
        print(f"checkpoint_reshard.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Trains over several processes, on one host or many, and resumes with another number of them.

    python examples/train_multihost.py --coordinator HOST:PORT --num-processes 2 --process-id 0
    python examples/train_multihost.py --coordinator HOST:PORT --num-processes 2 --process-id 1

Every process runs this program. Under SLURM it needs no options, and alone it trains in one
process. Each worker (a device) has its own part of the images, and a process keeps the parts of
its own workers. docs/multihost.md says more.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_ext
from _data import Dataset, InputError, digits, idx_folder
from _options import parser_of, positive
from _processes import add_processes, start

METHODS = {
    "sparse_adamw": lambda rate, density: optax_ext.sparse_adamw(
        rate, density=density, axis="data"
    ),
    "ok_topk": lambda rate, density: optax.chain(
        optax_ext.ok_topk(density, axis="data"), optax.adamw(rate)
    ),
    "dense": lambda rate, density: optax.chain(optax_ext.dense(axis="data"), optax.adamw(rate)),
}


class Classifier(nn.Module):
    """A perceptron with one hidden layer."""

    classes: int

    @nn.compact
    def __call__(self, images):
        """Maps f32[batch, height, width] to logits, f32[batch, classes]."""
        x = images.reshape(images.shape[0], -1)
        return nn.Dense(self.classes)(nn.relu(nn.Dense(256)(x)))


class Parts:
    """The images of this process's workers, and the batch of each step from them.

    A batch depends only on the seed, the worker and the step: neither on how many workers a process
    has, nor on where a training was interrupted.
    """

    def __init__(self, data: Dataset, mesh: Mesh, options: argparse.Namespace):
        """Keeps every P-th image for each of the P workers.

        Raises:
          InputError: a batch that P does not divide, or of more images than there are.
        """
        if options.batch % mesh.size:
            raise InputError(f"--batch {options.batch} is not divisible by {mesh.size} workers")
        here = jax.process_index()
        workers = [i for i, d in enumerate(mesh.devices.flat) if d.process_index == here]
        self.parts = {
            i: (data.train_images[i :: mesh.size], data.train_labels[i :: mesh.size])
            for i in workers
        }
        self.size, self.seed = options.batch // mesh.size, options.seed
        self.images = len(data.train_images) // mesh.size
        if self.size > self.images:
            raise InputError(f"--batch {options.batch}: a worker has {self.images} images only")
        self.sharding = NamedSharding(mesh, P("data"))

    def batch(self, step: int) -> tuple[jax.Array, jax.Array]:
        """The global batch, of which this process gives the rows of its workers."""
        epoch, at = divmod(step, self.images // self.size)
        rows = []
        for worker, (images, labels) in self.parts.items():
            order = np.random.default_rng((self.seed, worker, epoch)).permutation(self.images)
            chosen = order[at * self.size : (at + 1) * self.size]
            rows.append((images[chosen], labels[chosen]))
        images, labels = (np.concatenate(leaves) for leaves in zip(*rows, strict=True))
        make = jax.make_array_from_process_local_data
        return make(self.sharding, images), make(self.sharding, labels)


def restore(checkpointer: Any, path: Path, tx: Any, params: Any, mesh: Mesh) -> tuple[Any, Any]:
    """``(params, opt_state)`` of a checkpoint, saved by as many or by another number of workers."""
    saved = checkpointer.metadata(path).custom_metadata

    def shapes(where):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), params
        )

    if saved["workers"] == mesh.size:
        expected = optax_ext.abstract_state(tx, params, mesh)
        optax_ext.check_metadata(saved, expected)
        return checkpointer.restore(path, (shapes(NamedSharding(mesh, P())), expected))
    # Each process restores the state of all old workers for itself.
    host = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    workers = AbstractMesh((saved["workers"],), ("data",))
    old = optax_ext.abstract_state(tx, params, workers, sharding=host)
    optax_ext.check_metadata(saved, old)
    restored, state = checkpointer.restore(path, (shapes(host), old))
    return restored, optax_ext.reshard(state, optax_ext.init_state(tx, params, mesh))


def last_step(folder: Path) -> int:
    """The last step that was saved, as process 0 sees it; 0 if none was."""
    names = [path.name for path in folder.glob("step_*")] if folder.is_dir() else []
    steps = [int(name[5:]) for name in names if name[5:].isdecimal()]
    return int(multihost_utils.broadcast_one_to_all(np.int32(max(steps, default=0))))


def train(options: argparse.Namespace) -> None:
    """Trains, saves and reports."""
    start(options)
    data = idx_folder(options.data) if options.data else digits()
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=auto)
    parts = Parts(data, mesh, options)

    def say(text: str) -> None:
        if jax.process_index() == 0:
            print(text, flush=True)

    model = Classifier(data.classes)

    def loss_fn(params, batch):
        logits = model.apply({"params": params}, batch[0])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

    # From the same seed in every process; make_train_step checks that they are the same.
    params = model.init(jax.random.key(options.seed), data.train_images[:1])["params"]
    params = jax.device_get(params)
    tx = METHODS[options.method](options.lr, options.density)
    step = optax_ext.make_train_step(loss_fn, tx, mesh)
    say(f"{jax.process_count()} processes, {mesh.size} workers, {options.method}")

    with ocp.StandardCheckpointer() as checkpointer:
        begin = last_step(options.checkpoints) if options.checkpoints else 0
        if begin and not options.resume:
            raise InputError(f"{options.checkpoints} has a training: --resume, or another folder")
        if begin:
            path = options.checkpoints / f"step_{begin}"
            try:
                params, opt_state = restore(checkpointer, path, tx, params, mesh)
            except ValueError as error:
                raise InputError(f"{path}: {error}") from error
            say(f"resumed after step {begin}")
        else:
            opt_state = optax_ext.init_state(tx, params, mesh)

        for number in range(begin + 1, options.steps + 1):
            params, opt_state, loss = step(params, opt_state, parts.batch(number - 1))
            if number % options.report == 0 or number == options.steps:
                say(f"step {number}: loss {float(loss):.4f}{_counts(opt_state)}")
            if options.checkpoints and number % options.save_every == 0:
                metadata = optax_ext.checkpoint_metadata(opt_state)
                path = options.checkpoints / f"step_{number}"
                checkpointer.save(path, (params, opt_state), custom_metadata=metadata)

    logits = model.apply({"params": jax.device_get(params)}, data.test_images)
    accuracy = np.mean(np.argmax(logits, axis=-1) == data.test_labels)
    say(f"test accuracy {accuracy:.2%}")


def _counts(opt_state: Any) -> str:
    info = optax_ext.get_info(opt_state)
    if info is None:
        return ""
    # A count for each worker is spread over the processes, so all of them have to take part.
    selected = multihost_utils.process_allgather(info.selected, tiled=True)
    return f", selected {np.mean(selected):.0f}, delivered {info.delivered}, words {info.words:.0f}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options; exits with status 2 and one line if one of them is wrong."""
    parser = parser_of("Train over several processes.")
    add = parser.add_argument
    add_processes(parser)
    add("--method", choices=METHODS, default="sparse_adamw", help="(sparse_adamw)")
    add("--density", type=float, default=0.05, help="selected components over all, k/n (0.05)")
    add("--steps", type=positive, default=300, help="the last step (300)")
    add("--batch", type=positive, default=96, help="images of all workers together (96)")
    add("--lr", type=float, default=0.003, help="learning rate (0.003)")
    add("--seed", type=int, default=0, help="of the parameters and of the order of images (0)")
    add("--data", type=Path, metavar="DIR", help="folder of IDX files instead of digits")
    add("--report", type=positive, default=50, help="steps between two lines (50)")
    add("--checkpoints", type=Path, metavar="DIR", help="folder that all processes see")
    add("--save-every", type=positive, default=100, help="steps between checkpoints (100)")
    add("--resume", action="store_true", help="go on after the last checkpoint, if there is one")
    options = parser.parse_args(argv)
    if not 0 < options.density <= 1:
        parser.error(f"--density is {options.density}; it must be above 0 and at most 1")
    if options.seed < 0:
        parser.error(f"--seed is {options.seed}; it must be 0 or more")
    if options.resume and not options.checkpoints:
        parser.error("--resume needs --checkpoints DIR")
    if options.checkpoints:
        options.checkpoints = options.checkpoints.resolve()  # orbax needs an absolute path
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the training; returns the exit status."""
    try:
        train(parse(argv))
    except InputError as error:
        print(f"train_multihost.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

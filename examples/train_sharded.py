"""Trains a transformer whose parameters are sharded inside a site; sites exchange sparsely.

    python examples/train_sharded.py --devices 8 --sites 2 --layout fsdp
    python examples/train_sharded.py --devices 4 --sites 2 --every 10

A site is a worker of several devices: tensor parallelism, FSDP, or both split its parameters over
them. Each device exchanges a part of the gradients with the devices at its place in other sites.
With --every, sites exchange only at every H-th step and train alone in between, for links on which
a message takes longer than a step; --direct is also for such links. It runs over several processes
as train_multihost.py does. docs/sharded.md and docs/between_sites.md say more.
"""

import argparse
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import optax_ext
from _data import InputError, text_of, windows
from _options import parser_of, positive
from _processes import add_processes, start
from _transformer import RULES, sharded_model
from sparse_collectives import transport

CHARACTERS = 128  # ASCII
METHODS = {
    "sparse_adamw": lambda rate, density, every: optax_ext.sparse_adamw(
        rate, density=density, every=every, axis="site"
    ),
    "diloco": lambda rate, density, every: optax_ext.published.diloco(
        optax.adamw(rate), every=every, outer_rate=1.0, momentum=0.0, axis="site"
    ),
    "ok_topk": lambda rate, density, every: optax.chain(
        optax_ext.ok_topk(density, axis="site"), optax.adamw(rate)
    ),
    "dense": lambda rate, density, every: optax.chain(
        optax_ext.dense(axis="site"), optax.adamw(rate)
    ),
}
# Methods that can take some steps without an exchange.
ROUNDS = ("sparse_adamw", "diloco")


def mesh_of(options: argparse.Namespace) -> jax.sharding.Mesh:
    """The sites, and in each the axes of the layout.

    Raises:
      InputError: the devices can't be divided equally among so many sites.
    """
    devices, sites = jax.device_count(), options.sites
    if devices % sites:
        raise InputError(f"--sites {sites} does not divide the {devices} devices")
    inside = {"fsdp": (devices // sites, 1), "tensor": (1, devices // sites)}
    shape = inside.get(options.layout, (devices // sites // 2, 2))
    if shape[0] * shape[1] * sites != devices:
        raise InputError(f"--layout both needs an even number of devices in a site, not {shape}")
    names = ("site", "fsdp", "tensor")
    return jax.make_mesh((sites, *shape), names, axis_types=(AxisType.Auto,) * 3)


def batch_of(text: np.ndarray, step: int, options: argparse.Namespace, where: NamedSharding):
    """The windows of a step, each device's made by its own process."""
    seed = (options.seed, step)
    batch = windows(text, count=options.batch, length=options.length, seed=seed)
    return jax.make_array_from_callback(batch.shape, where, lambda index: batch[index])


def train(options: argparse.Namespace) -> None:
    """Trains and reports."""
    start(options)
    transport.use_direct_messages(options.direct)
    mesh = mesh_of(options)
    # The devices of a site share its windows if FSDP splits the parameters.
    spec = PartitionSpec(("site", "fsdp"))
    if options.batch % (mesh.shape["site"] * mesh.shape["fsdp"]):
        raise InputError(f"--batch {options.batch} is not divisible by the devices of {spec[0]}")
    text = text_of(options.text)
    graph, params = sharded_model(
        mesh,
        options.layout,
        options.seed,
        characters=CHARACTERS,
        width=options.width,
        layers=options.layers,
        length=options.length,
    )

    def loss_fn(params, windows):
        logits = nnx.merge(graph, params)(windows[:, :-1])
        labels = jax.nn.one_hot(windows[:, 1:], CHARACTERS)
        return optax.softmax_cross_entropy(logits, labels).mean()

    def say(line: str) -> None:
        if jax.process_index() == 0:
            print(line, flush=True)

    tx = METHODS[options.method](options.lr, options.density, options.every)
    opt_state = optax_ext.init_state(tx, params, mesh)
    step = optax_ext.make_train_step(loss_fn, tx, mesh, batch_spec=spec)
    # With rounds each site has its own loss, and this mean is the only further exchange.
    mean = jax.jit(jax.numpy.mean, out_shardings=NamedSharding(mesh, PartitionSpec()))
    everything = jax.tree.leaves((params, opt_state))
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in everything)
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    say(
        f"{size:,} parameters, mesh {dict(mesh.shape)}, {options.method}: a device holds "
        f"{held / 2**20:.1f} of {sum(x.nbytes for x in everything) / 2**20:.1f} MiB"
    )
    begun = time.perf_counter()
    for number in range(1, options.steps + 1):
        batch = batch_of(text, number, options, NamedSharding(mesh, spec))
        params, opt_state, loss = step(params, opt_state, batch)
        if number % options.report == 0 or number == options.steps:
            info = optax_ext.get_info(opt_state)
            words = 0 if info is None else float(info.words)
            last, seconds = float(mean(loss)), time.perf_counter() - begun
            say(
                f"step {number}: loss {last:.4f}, {words:,.0f} words to each site "
                f"({words / size:.1%} of the parameters), {seconds:.0f} s"
            )


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Returns the options; exits with status 2 and one line if one of them is wrong."""
    parser = parser_of("Train a transformer whose parameters are sharded.")
    add_processes(parser)
    add = parser.add_argument
    add("--sites", type=positive, default=2, help="workers, each of several devices (2)")
    add("--layout", choices=RULES, default="fsdp", help="how a site shards its parameters (fsdp)")
    add("--method", choices=METHODS, default="sparse_adamw", help="(sparse_adamw)")
    add("--density", type=float, default=0.01, help="exchanged of all parameters, k/n (0.01)")
    add("--every", type=positive, default=1, help="steps from one exchange to the next (1)")
    add("--direct", action="store_true", help="for links on which a message takes long")
    add("--steps", type=positive, default=100, help="(100)")
    add("--batch", type=positive, default=16, help="windows of all sites together (16)")
    add("--length", type=positive, default=64, help="characters of a window (64)")
    add("--width", type=positive, default=64, help="of the model, a multiple of 16 (64)")
    add("--layers", type=positive, default=2, help="(2)")
    add("--lr", type=float, default=0.01, help="learning rate (0.01)")
    add("--seed", type=int, default=0, help="of the parameters and of the windows (0)")
    add("--text", type=Path, metavar="FILE", help="plain text; Python's help topics by default")
    add("--report", type=positive, default=20, help="steps between two lines (20)")
    options = parser.parse_args(argv)
    if not 0 < options.density <= 1:
        parser.error(f"--density is {options.density}; it must be above 0 and at most 1")
    if options.every > 1 and options.method not in ROUNDS:
        parser.error(f"--every is for --method {' and '.join(ROUNDS)}, not {options.method}")
    if options.report % options.every:
        parser.error(f"--report is {options.report}; it must be a multiple of --every")
    if options.width % 16:
        parser.error(f"--width is {options.width}; it must be a multiple of 16")
    if options.text is not None and not options.text.is_file():
        parser.error(f"--text {options.text} is no file")
    return options


def main(argv: list[str] | None = None) -> int:
    """Runs the training; returns the exit status."""
    try:
        train(parse(argv))
    except InputError as error:
        print(f"train_sharded.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares steps of simulated workers on a GPU with the same steps on the CPU.

    python -m benchmarks.gpu.same_results [--size 1e5] [--json gpu_same_results.json]

Each contestant takes its steps with the same gradients on both devices. "difference" is the largest
one between the updates of the last step, as a share of their largest entry, and "entries" the share
of entries that only one of the two updates has. A sum in another order may move a threshold, so
that another entry is sent first. "lost" is the sum of all gradients minus the updates and the
residuals of all workers, on the GPU, at the worst entry, as a share of the largest sum. It has to
be a rounding error: above 1e-5 the status is 1.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import optax_ext
import sparse_collectives as sc

from .._common import options, reports
from .._common.contestants import Contestant
from .._common.display import show_rows
from ._contestants import AXIS, STEPS, gradients, shaped

# Their update is the mean of the delivered entries, and their residual has the rest.
CONSERVE = (
    "ok_topk",
    "ok_topk_reuse",
    "topk_a",
    "partitioned_topk",
    "partitioned_topk_few",
    "gtopk",
    "spardl",
)
CONSERVE += ("ssar_recursive_double", "ssar_split_allgather", "dsar_split_allgather")
ROUNDING = 1e-5


def run(
    made: Contestant, density: float, data: np.ndarray, device: Any
) -> tuple[np.ndarray, np.ndarray | None]:
    """The updates f32[steps, n], and the residuals of all workers added, f32[n].

    ``data f32[steps, P, n]``. The second is None without a residual of such a form.
    """
    workers, size = data.shape[1:]
    shared = {"axis": AXIS, "axis_size": workers}
    with jax.default_device(device):
        tx, params = made.make(density, AXIS), shaped(made, jnp.zeros(size))
        state = sc.simulate(tx.init, in_axes=None, **shared)(params)
        update = jax.jit(sc.simulate(tx.update, in_axes=(0, 0, None), **shared))
        updates = []
        for each in data:
            given = jax.vmap(lambda x: shaped(made, x))(jnp.asarray(each))
            found, state = update(given, state, params)
            leaves = [np.asarray(x[0]).ravel() for x in jax.tree.leaves(found)]
            updates.append(np.concatenate(leaves))
    held = jax.tree.leaves(getattr(optax_ext.get_state(state), "residual", None))
    whole = [np.asarray(x, np.float64) for x in held if x.size == workers * size]
    return np.stack(updates), whole[0].reshape(workers, size).sum(axis=0) if whole else None


def row(name: str, made: Contestant, density: float, data: np.ndarray) -> dict[str, Any]:
    """The comparison of a contestant."""
    here, left = run(made, density, data, jax.devices()[0])
    there, _ = run(made, density, data, jax.devices("cpu")[0])
    largest = np.abs(there[-1]).max()
    differing = np.mean((here[-1] != 0) != (there[-1] != 0))
    found = {"contestant": name, "entries": float(differing)}
    found["difference"] = float(np.abs(here[-1] - there[-1]).max() / largest)
    if name in CONSERVE and left is not None:
        given = data.sum(axis=(0, 1), dtype=np.float64)
        rest = given - data.shape[1] * here.sum(axis=0, dtype=np.float64) - left
        found["lost"] = float(np.abs(rest).max() / np.abs(given).max())
    return found


@options.program
def main(argv: list[str] | None = None) -> int:
    """Prints the table; status 1 if an exchange has lost something on the GPU."""
    parser = options.parser_of(__doc__, "json", workers=8, rounds=6)
    parser.add_argument("--size", type=options.at_least(16_384), default=100_000)
    parser.add_argument("--density", type=options.share, default=0.01)
    parser.add_argument("--only", nargs="+", choices=STEPS, help="these contestants")
    args = parser.parse_args(argv)
    each = [gradients(args.size, seed) for seed in range(args.workers)]
    data = np.stack([np.stack([x[i % 3] for x in each]) for i in range(args.rounds)])
    content = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "steps": args.rounds}
    content |= {name: getattr(args, name) for name in ("size", "density", "workers")}
    rows: list[dict[str, Any]] = []
    for name in args.only or STEPS:
        options.say(name)
        rows.append(row(name, STEPS[name], args.density, data))
        reports.write(args.json, content | {"rows": rows})
    title = "{device} and CPU, after {steps} steps, n = {size:,}, P = {workers}".format(**content)
    show_rows(title, rows)
    return int(any(x.get("lost", 0) > ROUNDING for x in rows))


if __name__ == "__main__":
    sys.exit(main())

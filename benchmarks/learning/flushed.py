"""The loss at the end of a training, and after `optax_ext.flush`, which applies the unsent updates.

    python -m benchmarks.learning.flushed --text FILE --runs FILE --options every=30 density=0.03

Simulated workers train with each learning rate, and with the best of them from the other seeds, as
in ``benchmarks.learning.steps``, which has the same losses before the flush. A flush is one dense
exchange of float32. The share of the bytes of dense AdamW is printed without it and with it.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

import optax_ext

from .._common import display, options
from ..training._simulated_training import AXIS, Task, order_of, start_of, step_of
from . import _lines, _tasks
from ._contestants import neighbour, option
from ._tasks import KINDS

# Steps in one program.
_PART = 200


def on_a_mesh(state: Any, like: Any) -> Any:
    """The state of simulated workers in the form of ``init_state``, which has ``like``'s shapes."""

    def form(rows: jax.Array, wanted: Any) -> jax.Array:
        # What all workers share has no axis of them, and is here once for each.
        return rows.reshape(wanted.shape) if rows.size == wanted.size else rows[0]

    return jax.tree.map(form, state, like)


def train(
    task: Task, make: Callable[[float, int], Any], rate: float, seed: int, **given: int
) -> dict[str, Any]:
    """Trains once: the values before and after the flush, and the words of a step."""
    steps, workers, batch = given["steps"], given["workers"], given["batch"]
    variant, params = make(rate, steps), task.init(seed)
    chosen = order_of(task, steps=steps, batch=batch, seed=seed)
    chosen = chosen.reshape(steps, workers, batch // workers)
    step = step_of(task, variant, workers, lax.map)
    part = jax.jit(lambda carry, batches: lax.scan(step, carry, batches))
    carry, words = start_of(variant, params, workers), []
    for begin in range(0, steps, _PART):
        carry, (_, sent) = part(carry, task.batch_of(chosen[begin : begin + _PART]))
        words.append(np.array(sent[0]))
    trained, state, _ = carry
    like = jax.eval_shape(
        lambda p: optax_ext.init_state(variant.exchange, p, {AXIS: workers}), params
    )
    flushed, _ = optax_ext.flush(trained, on_a_mesh(state, like))
    found = {"value": float(task.evaluate(trained)), "flushed": float(task.evaluate(flushed))}
    options.say(f"{rate:g}, seed {seed}: {found['value']:.4f}, flushed {found['flushed']:.4f}")
    found["size"] = sum(leaf.size for leaf in jax.tree.leaves(params))
    return found | {"words": float(np.concatenate(words).mean())}


def row_of(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the table."""
    (steps, p), words = (runs[0][key] for key in ("steps", "workers")), runs[0]["words"]
    dense = 2 * runs[0]["size"] * (p - 1) / p
    row = {"": name, "rate": runs[0]["rate"]}
    row |= {key: [run[key] for run in runs] for key in ("value", "flushed")}
    return row | {
        "1/share": dense / words,
        "1/share with the flush": dense / (words + dense / steps),
    }


@options.program
def main(argv: list[str] | None = None) -> None:
    """Trains the missing runs, and prints all of them."""
    usual: dict[str, Any] = {"workers": 8, "seeds": 3, "steps": 4000}
    usual |= {"task": ("text", "what to learn", tuple(KINDS)), "batch": (None, "of all workers")}
    usual |= {"show": (False, "what is in --runs, and train nothing")}
    parser = options.parser_of(__doc__, "text", "images", "runs", "rates", "width", **usual)
    more: dict[str, Any] = {"nargs": "+", "action": "append", "required": True}
    parser.add_argument("--options", type=option, metavar="NAME=VALUE", **more)
    args = parser.parse_args(argv, argparse.Namespace(only=[]))
    _lines.complete(parser, args, [], functools.partial(neighbour, args.task, 1.0))
    shared = {key: getattr(args, key) for key in ("task", "width", "workers", "batch", "steps")}
    needed = ("contestant", "rate", "seed", "value", "flushed", "words")
    store = _lines.Store(args.runs, needed, KINDS[args.task].large)
    if not args.show:
        task = _tasks.make(args.task, args.width, args.text, args.images)
        given = {key: shared[key] for key in ("workers", "batch", "steps")}
        for name, make in args.neighbours.items():
            run = functools.partial(train, task, make, **given)
            _lines.run_missing(store, args, shared | {"contestant": name}, run)
    names = dict.fromkeys([*args.neighbours, *(run["contestant"] for run in store.runs)])
    found = [(name, store.reported(**shared, contestant=name)) for name in names]
    title = f"{args.task}, {args.steps} steps, before and after a flush"
    display.show_rows(title, [row_of(name, runs) for name, runs in found if runs])


if __name__ == "__main__":
    raise SystemExit(main())

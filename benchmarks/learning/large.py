"""Loss of a GPT of 45M parameters on source code, over simulated workers on one GPU.

    python -m benchmarks.learning.large --json large.json [--only NAME ...] [--rates RATE ...]

The text is Python source, which this program collects from the installed packages: files in an
order that depends on their content, up to --megabytes. The last of them, 2 %, are held out, and the
tokens are bytes. Activations are bfloat16 and parameters float32. Each contestant trains with each
rate on the same windows in the same order, and the results of a run are written as soon as it ends.
"""

import functools
import hashlib
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_ext
from sparse_collectives import allreduce

from .._common import options, reports
from .._common.contestants import DECAY
from .._common.display import show_rows
from .._common.options import InputError
from ..gpu import train_step
from ..training._recorded_training import schedule
from ..training._simulated_training import AXIS, Curve, Task, Variant, train

_BYTES, _HELD_OUT, _WINDOWS = 256, 50, 256
RATES = (0.001, 0.002)


def _dense(rate: float, steps: int) -> Variant:
    behind = optax.adamw(schedule(rate, steps), weight_decay=DECAY)
    return Variant(optax_ext.dense(axis=AXIS), behind)


def _sparse(rate: float, steps: int, bits: tuple[int, int] | None = None) -> Variant:
    given = {} if bits is None else {"allreduce": allreduce.partitioned_topk(bits=bits)}
    at = schedule(rate, steps)
    made = optax_ext.sparse_adamw(at, weight_decay=DECAY, axis=AXIS, **given)
    return Variant(made, optax.identity())


MAKES: dict[str, Callable[[float, int], Variant]] = {
    "AdamW": _dense,
    "sparse_adamw": _sparse,
    "sparse_adamw, bits (1, 3)": functools.partial(_sparse, bits=(1, 3)),
}


def source_code(megabytes: int) -> np.ndarray:
    """Source code of the installed packages, ``u8[...]``; an InputError if there is too little."""
    found, size = {}, 0
    paths = sysconfig.get_paths()
    for folder in dict.fromkeys([paths["stdlib"], paths["purelib"], paths["platlib"]]):
        for path in sorted(Path(folder).rglob("*.py")):
            content = path.read_bytes()
            digest = hashlib.sha256(content).digest()
            size += 0 if digest in found else len(content)
            found[digest] = content
    if size < 1e6 * megabytes:
        raise InputError(f"--megabytes {megabytes}: the installed packages have {size / 1e6:.0f}")
    joined = b"".join(content for _, content in sorted(found.items()))
    return np.frombuffer(joined, np.uint8)[: megabytes * 1_000_000]


def task_of(text: np.ndarray, width: int, blocks: int, context: int) -> Task:
    """Predicts the next byte; its value is the loss on held-out files, in nats."""
    heads, cut = max(1, width // 64), len(text) - len(text) // _HELD_OUT
    loss = functools.partial(train_step.loss, heads)

    def windows_at(starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = text[starts[..., None] + np.arange(context + 1)].astype(np.int32)
        return found[..., :-1], found[..., 1:]

    starts = np.linspace(cut, len(text) - context - 1, _WINDOWS, dtype=np.int64)
    held_out = tuple(jnp.asarray(x.reshape(-1, 8, context)) for x in windows_at(starts))

    @jax.jit
    def measured(params):
        return jax.lax.map(lambda batch: loss(params, batch), held_out).mean()

    return Task(
        name="source code",
        init=lambda seed: train_step.gpt(width, blocks, _BYTES, context, seed),
        loss=loss,
        batch_of=windows_at,
        count=cut - context - 1,
        evaluate=lambda params: float(measured(params)),
        once=False,
    )


def row_of(name: str, rate: float, seed: int, curve: Curve, size: int) -> dict[str, Any]:
    """The results of a run."""
    row = {"contestant": name, "rate": rate, "seed": seed, "loss": curve.values[-1]}
    row |= {"steps": curve.steps, "losses": curve.values, "parameters": size}
    return row | {"words_per_parameter": None if curve.words is None else curve.words / size}


@options.program
def main(argv: list[str] | None = None) -> None:
    """Trains, and prints the table."""
    usual = {"workers": 8, "batch": 64, "seeds": 1, "steps": 1000, "points": 5}
    parser = options.parser_of(__doc__, "json", "rates", **usual)
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", help="; ".join(MAKES))
    add("--width", type=options.several, default=512)
    add("--blocks", type=options.at_least_one, default=14)
    add("--context", type=options.several, default=512)
    add("--megabytes", type=options.at_least_one, default=60, help="of source code")
    args = parser.parse_args(argv)
    options.check_names(parser, args.only, MAKES)
    options.check_batch(parser, args.batch, args.workers)
    task = task_of(source_code(args.megabytes), args.width, args.blocks, args.context)
    size = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda: task.init(0))))
    content = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "parameters": size}
    kept = ("workers", "batch", "steps", "context", "megabytes")
    content |= {name: getattr(args, name) for name in kept}
    rows = []
    for rate in args.rates or RATES:
        for name in args.only or MAKES:
            found = train(
                task,
                MAKES[name],
                rates=[rate],
                seeds=range(args.seeds),
                workers=args.workers,
                steps=args.steps,
                every=max(1, args.steps // args.points),
                batch=args.batch,
                label=f"{name} at {rate:g}",
            )
            rows += [row_of(name, rate, seed, x, size) for (rate, seed), x in found.items()]
            reports.write(args.json, content | {"rows": rows})
    title = f"{size:,} parameters, {args.workers} workers, {args.steps} steps of {args.batch} x "
    title += f"{args.context} bytes"
    show_rows(title, [{k: x for k, x in r.items() if k not in ("steps", "losses")} for r in rows])


if __name__ == "__main__":
    sys.exit(main())

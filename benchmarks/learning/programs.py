"""Programs of other people on eight workers, with several exchanges and as they were before.

    python -m benchmarks.learning.programs [--only LoRA] [--seeds 3] [--json FILE]
    python -m benchmarks.learning.programs --only LoRA --factors 1 3 --densities 0.2
    python -m benchmarks.learning.programs --exchanges before after

The programs of docs/gallery.md run as they stand there, before and after the change, and with
other exchanges before the optimizer of the original: `dense`, `powersgd(2)` and `quantized`. A seed
determines the parameters and the examples of a batch. ``--factors`` multiply the learning rates,
and each of ``--densities`` adds the page's optimizer with another density.

The result is the loss on held-out examples, or for PPO the steps of an episode, where more is
better. Words are 4-byte words that a worker receives in the last step.
"""

import itertools
import re

import jax
import numpy as np

import optax_ext

from .._common import display, options, reports
from . import _page_programs

WORKERS = 8
BEFORE, AFTER = "before", "after"
EXCHANGES = {
    "dense": "optax_ext.dense(axis=AXIS)",
    "powersgd(2)": "optax_ext.powersgd(2, axis=AXIS)",
    "quantized()": "optax_ext.quantized(axis=AXIS)",
}
KINDS = (BEFORE, *EXCHANGES, AFTER)


def arms_of(program: _page_programs.Program, densities: list[float]) -> dict[str, list[str]]:
    """The lines of a program by what exchanges its gradients."""
    arms = {BEFORE: program.before}
    arms |= {name: program.exchanged_by(text) for name, text in EXCHANGES.items()}
    arms[AFTER] = program.after
    for density in densities:
        text = "\n".join(program.after)
        text = re.sub(r" density=[\d.]+,", "", text)
        text = re.sub(r'axis="\w+"(?=[,)])', rf"\g<0>, density={density:g}", text, count=1)
        arms[f"density={density:g}"] = text.splitlines()
    return arms


def trained(lines: list[str], seed: int) -> dict[str, float | None]:
    """The result of a program, and the words of its last step."""
    names = _page_programs.names_after(lines, seed)
    result = names["steps_of_an_episode" if "steps_of_an_episode" in names else "held_out"]
    words = None
    if "optax_ext" in "\n".join(lines):
        words = float(np.max(optax_ext.get_info(_page_programs.held(names)).words))
    found = {"value": float(result), "words": words}
    # Programs hold a lot of memory, and none is run again.
    names.clear()
    jax.clear_caches()
    return found


@options.program
def main(argv: list[str] | None = None) -> None:
    """Runs the programs, and prints a table."""
    programs = _page_programs.programs_of(_page_programs.PAGES[1])
    parser = options.parser_of(__doc__, "only", "json", seeds=3)
    parser.add_argument("--factors", type=options.positive, nargs="+", default=[1.0])
    parser.add_argument("--exchanges", nargs="+", choices=KINDS)
    parser.add_argument("--densities", type=options.share, nargs="+", default=[])
    args = parser.parse_args(argv)
    options.check_names(parser, args.only, programs)
    jax.config.update("jax_num_cpu_devices", WORKERS)
    rows = []
    for name in args.only or programs:
        arms = arms_of(programs[name], args.densities)
        if args.exchanges:
            arms = {arm: arms[arm] for arm in arms if arm not in KINDS or arm in args.exchanges}
        for (arm, lines), factor in itertools.product(arms.items(), args.factors):
            runs = []
            for seed in range(args.seeds):
                options.say(f"{name}: {arm}, learning rate * {factor:g}, seed {seed}")
                runs.append(trained(_page_programs.scaled(lines, factor), seed))
            row = {"program": name, "exchange": arm, "factor": factor}
            rows.append(row | {key: [run[key] for run in runs] for key in ("value", "words")})
            # It takes long, and may be stopped.
            reports.write(args.json, {"seeds": args.seeds, "jax": jax.__version__, "rows": rows})
    display.show_rows("results of all seeds, and words", rows)


if __name__ == "__main__":
    raise SystemExit(main())

"""Writes docs/works_with.md from the table that the tests run, tests/optax_ext/combinations.py."""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs" / "works_with.md"

_HEAD = """# What it works with

For AdamW begin with `optax_ext.sparse_adamw(1e-3, axis="data")`, and for SGD with
`optax_ext.sparse_sgd(0.1, axis="data")`. Each stands for a whole optimizer, and can be put where
this page has a chain. A row here says that a combination works, not that it learns as well: a plain
sparse allreduce in front of Adam [learns least of all](training.md).

This page is written by `python tools/combination_matrix.py` from
`tests/optax_ext/combinations.py`. `tests/optax_ext/test_works_with.py` evaluates the code of each
row as it stands here and trains with it for 4 steps on 8 workers. In the code `reduce` is the
sparse allreduce, `optax_ext.ok_topk(density=0.1, axis="data")` or any other, and `dense` is
`optax_ext.dense(axis="data")`.

For every row it is checked that

- at density 1 (with `topk_a`) the parameters are those of the dense allreduce in its place, to
  rounding;
- at density 0.1 (with `ok_topk` in the rows with pmap and simulate, with `topk_a` in the others)
  the parameters have the same bits on every worker;
- what went into the allreduce is what came out of it plus the residuals, to rounding: nothing is
  lost;
- the loss is traced once for all steps.

That is under `jax.shard_map` with `check_vma=True`, by `optax_ext.make_train_step`. Rows with
pmap or simulate are run there too, at density 0.1: the parameters are the same, and have the same
bits on every worker. In rows with sharded, matrices are sharded over two devices of each of four
workers ([sharded.md](sharded.md)): at density 1 the parameters are those of the dense allreduce of
whole ones, and they stay where they were.
"""

_TAIL = """
## What has to be behind the allreduce

In front of the allreduce, or around it, a transformation sees the gradients of one worker.

- One that decides by them (`apply_if_finite`, the `should_skip_update_fn` of `MultiSteps`) may
  decide otherwise on another worker, and the workers then wait for each other for ever.
  `init_state`, `make_train_step` and `state_specs` raise an error for those that come with optax.
  Under `pmap` and `simulate` there is no such check. A function of your own has to agree, for
  example by `jax.lax.psum`.
- One that keeps something of them (`trace`, `ema`, `apply_every`, `zero_nans`,
  `contrib.mechanize`) has a state, or updates, that differ between the workers. `make_train_step`
  raises an error that names them. Give it to the sparse allreduce as `local=`, which keeps its
  state for each worker; or use `optax_ext.momentum_correction`, `optax_ext.multi_steps` and
  `nonfinite="drop"`.
- One without a state (`clip`, `scale`) works in front.
"""


def page() -> str:
    """The text of the page."""
    from tests.optax_ext import combinations

    lines, group = [_HEAD], None
    for row in combinations.ROWS:
        if row.group != group:
            group = row.group
            lines.append(f"## {group}\n")
            lines.append("| combination | how to write it | tested in | notes |")
            lines.append("|---|---|---|---|")
        how = f"`{row.code}`" + (f"; {row.how}" if row.how else "")
        modes = ", ".join(("shard_map", *row.also, *(("sharded",) if row.sharded else ())))
        lines.append(f"| {row.name} | {how} | {modes} | {row.note} |")
        following = combinations.ROWS[combinations.ROWS.index(row) + 1 :]
        if not following or following[0].group != group:
            lines.append("")
    return "\n".join(lines).rstrip("\n") + "\n" + _TAIL


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page())

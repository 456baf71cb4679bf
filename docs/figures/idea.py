"""Draws the figures of docs/idea.md: two steps of four workers, with the library's own numbers.

    python docs/figures/idea.py

This writes docs/images/idea_*.svg. The library computes every number in them.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import sparse_collectives as sc
from sparse_collectives.allreduce._parts import _hashed

IMAGES = Path(__file__).resolve().parents[1] / "images"
WORKERS, SIZE, DENSITY = 4, 16, 0.25
SEED = 8
SHOWN = 1  # the worker whose gradient is followed

PLAIN, SELECTED, DELIVERED, INK = "#f3f3f3", "#ffcf87", "#2b6cb0", "#222222"
# Pixels: the size of a cell, and the space to the left of the first one.
CELL, LEFT = 32, 76
PARTS = ("#f7d6d0", "#d8ecd0", "#d3e4f5", "#ece0f3")


class Step(NamedTuple):
    """One step of all workers, arrays of integers.

    Attributes:
      gradient, residual: ``[P, n]``, the inputs.
      acc: their sum.
      selected: ``bool[P, n]``.
      owner: ``[n]``, the worker that sums an index, or whose partition has it.
      sums: ``[n]``, of the selected entries.
      total: ``[n]``, P times the update that all workers apply.
      kept: ``[P, n]``, the new residual.
      words: received by each worker.
    """

    gradient: np.ndarray
    residual: np.ndarray
    acc: np.ndarray
    selected: np.ndarray
    owner: np.ndarray
    sums: np.ndarray
    total: np.ndarray
    kept: np.ndarray
    words: float


def gradients() -> np.ndarray:
    """Small integers ``[2, P, n]``: a vector that all workers share, plus noise."""
    rng = np.random.default_rng(SEED)
    shared = np.round(rng.standard_normal(SIZE) * 2.5)
    noise = np.round(rng.standard_normal((2, WORKERS, SIZE)) * 1.7)
    return np.clip(shared + noise, -9, 9).astype(np.float32)


def run(allreduce: sc.SparseAllreduce, owner_of: Any) -> Step:
    """The second of two steps with error feedback.

    Args:
      allreduce: any.
      owner_of: ``owner_of(state)``, the owner of each index.
    """
    selector = sc.select.topk(density=DENSITY)

    def step(acc: jax.Array, state: Any):
        shown = allreduce.local_view(acc, state, axis="workers")
        coo, _, _ = selector.select(shown, selector.init(shown.size))
        coo = allreduce.to_global(coo, SIZE, state, axis="workers")
        options = {"acc": acc} if allreduce.full_sums else {}
        total, undelivered, state, info = allreduce.reduce(coo, state, axis="workers", **options)
        assert isinstance(total, sc.PaddedCOO)
        selected = jnp.zeros(SIZE, bool).at[coo.indices].set(True, mode="drop")
        kept = undelivered.residual(acc, coo)
        return total.to_dense(), selected, kept, state, info

    workers = sc.simulate(step, axis_size=WORKERS, in_axes=(0, None))
    state, residual = allreduce.init(SIZE, WORKERS), np.zeros((WORKERS, SIZE), np.float32)
    for gradient in gradients():
        acc, before, owner = gradient + residual, residual, np.asarray(owner_of(state))
        out = jax.tree.map(np.asarray, workers(acc, state))
        total, selected, residual, states, info = out
        assert not info.overflow.any()
        assert (total == total[0]).all()
        # Nothing is lost.
        assert (acc.sum(0) == total[0] + residual.sum(0)).all()
        state = jax.tree.map(lambda x: x[0], states)
    sums = np.where(selected, acc, 0).sum(0)
    whole = (gradient, before, acc, sums, total[0], residual)
    gradient, before, acc, sums, total, residual = (x.astype(int) for x in whole)
    words = float(info.words[0])
    return Step(gradient, before, acc, selected, owner, sums, total, residual, words)


def ok_topk() -> Step:
    """A step of Ok-Topk."""

    def owner_of(state):
        return _hashed.row_and_owner(jnp.arange(SIZE), SIZE, WORKERS, state.count)[1]

    return run(sc.allreduce.ok_topk(density=DENSITY), owner_of)


def partitioned_topk() -> Step:
    """A step with agreed indices."""
    allreduce = sc.allreduce.partitioned_topk()

    def owner_of(state):
        parts = sc.simulate(
            lambda x: allreduce.local_view(x, state, axis="workers"),
            axis_size=WORKERS,
            in_axes=None,
        )(jnp.arange(SIZE, dtype=jnp.float32))
        owner = np.zeros(SIZE, int)
        for worker, part in enumerate(np.asarray(parts).astype(int)):
            owner[part] = worker
        return owner

    return run(allreduce, owner_of)


class Table:
    """Rows of numbered cells, one below the other, as SVG."""

    def __init__(self, title: str):
        self.parts = [_text(4, 22, title, 'font-weight="bold" font-size="17"')]
        self.y = CELL

    def heading(self, text: str) -> None:
        """Adds a line of text above the rows that follow."""
        self.y += CELL
        self.parts.append(_text(4, self.y - 8, text, 'font-size="15"'))

    def cells(self, label: str, values: Any, faces: Any, borders: Any = None) -> None:
        """Adds a row: a label, and a cell for each index; None leaves it empty."""
        self.parts.append(_text(LEFT - 8, self.y + 21, label, 'text-anchor="end"'))
        for index, (value, face) in enumerate(zip(values, faces)):
            x = LEFT + index * CELL
            stroke = f' stroke="{INK}"' if borders is not None and borders[index] else ""
            size = f'width="{CELL - 3}" height="{CELL - 3}"'
            self.parts.append(f'<rect x="{x + 1}" y="{self.y + 1}" {size} fill="{face}"{stroke}/>')
            if value is not None:
                white = ' fill="white"' if face == DELIVERED else ""
                number = f"{value}".replace("-", "\u2212")
                middle = x + CELL // 2
                self.parts.append(
                    _text(middle, self.y + 21, number, f'text-anchor="middle"{white}')
                )
        self.y += CELL

    def save(self, path: Path) -> None:
        """Writes the figure."""
        width, height = LEFT + SIZE * CELL + 4, self.y + 4
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="sans-serif" font-size="14" '
            f'fill="{INK}">',
            '<rect width="100%" height="100%" fill="white"/>',
            *self.parts,
            "</svg>",
        ]
        path.write_text("\n".join(lines) + "\n")


def _text(x: int, y: int, text: str, attributes: str) -> str:
    return f'<text x="{x}" y="{y}" {attributes}>{text}</text>'


def nonzero(values: np.ndarray) -> list[Any]:
    """The values, with None for zeros."""
    return [int(x) if x else None for x in values]


def faces_of(step: Step, worker: int) -> list[str]:
    """The fill of each cell, by whether its entry was selected and delivered."""
    in_total = step.total != 0
    return [
        DELIVERED if chosen and arrived else SELECTED if chosen else PLAIN
        for chosen, arrived in zip(step.selected[worker], in_total)
    ]


def draw_gradient(step: Step, path: Path) -> None:
    """Draws the way of one worker's gradient."""
    table = Table(f"One step, seen by worker {SHOWN}: 16 entries, 4 are sent")
    plain = [PLAIN] * SIZE
    table.heading("the residual of the step before, and the gradient")
    table.cells("residual", step.residual[SHOWN], plain)
    table.cells("gradient", step.gradient[SHOWN], plain)
    table.heading("their sum; 4 are selected: dark ones reach the total, the light one does not")
    table.cells("sum", step.acc[SHOWN], faces_of(step, SHOWN))
    table.heading("the total of 4 workers: 4 sums, which all divide by 4 and apply")
    totals = [DELIVERED if x else PLAIN for x in step.total]
    table.cells("total", nonzero(step.total), totals)
    table.heading("the new residual: entries that are not selected, or not in the total")
    waits = [SELECTED if s and not t else PLAIN for s, t in zip(step.selected[SHOWN], step.total)]
    table.cells("residual", step.kept[SHOWN], waits)
    table.save(path)


def draw_ok_topk(step: Step, path: Path) -> None:
    """Draws a step of Ok-Topk."""
    table = Table("A step of Ok-Topk: 4 workers, k = 4 of 16 entries")
    table.heading("1. each worker selects its 4 largest entries")
    for worker in range(WORKERS):
        faces = [SELECTED if s else PLAIN for s in step.selected[worker]]
        table.cells(f"worker {worker}", step.acc[worker], faces)
    table.heading("2. each index has an owner, which sums the selected entries of that index")
    table.cells("owner", step.owner, [PARTS[w] for w in step.owner])
    chosen = step.selected.any(0)
    sums = [int(x) if c else None for x, c in zip(step.sums, chosen)]
    table.cells("sum", sums, [SELECTED if c else PLAIN for c in chosen])
    table.heading("3. a threshold for all: the owners send the 4 largest sums to all workers")
    totals = [DELIVERED if x else PLAIN for x in step.total]
    table.cells("total", nonzero(step.total), totals)
    table.heading("4. the new residuals: entries that are not selected, or not in the total")
    for worker in range(WORKERS):
        waits = [
            SELECTED if s and not t else PLAIN for s, t in zip(step.selected[worker], step.total)
        ]
        table.cells(f"worker {worker}", step.kept[worker], waits)
    table.save(path)


def draw_partitioned_topk(step: Step, path: Path) -> None:
    """Draws a step with agreed indices."""
    table = Table("A step of partitioned_topk: 4 workers, 4 of 16 entries")
    table.heading("1. each worker selects 1 entry in its own partition (shaded); these rotate")
    for worker in range(WORKERS):
        faces = [
            SELECTED if s else PARTS[worker] if o == worker else PLAIN
            for s, o in zip(step.selected[worker], step.owner)
        ]
        table.cells(f"worker {worker}", step.acc[worker], faces, step.selected[worker])
    table.heading("2. all receive the 4 indices, and one dense sum adds up these columns")
    chosen = step.selected.any(0)
    for worker in range(WORKERS):
        values = [int(x) if c else None for x, c in zip(step.acc[worker], chosen)]
        table.cells(f"worker {worker}", values, [SELECTED if c else PLAIN for c in chosen])
    table.cells("total", nonzero(step.total), [DELIVERED if c else PLAIN for c in chosen])
    table.heading("3. the new residuals: 0 at these indices, on every worker")
    for worker in range(WORKERS):
        table.cells(f"worker {worker}", step.kept[worker], [PLAIN] * SIZE)
    table.save(path)


def main(folder: Path = IMAGES) -> None:
    """Writes the figures."""
    step = ok_topk()
    draw_gradient(step, folder / "idea_gradient.svg")
    draw_ok_topk(step, folder / "idea_ok_topk.svg")
    draw_partitioned_topk(partitioned_topk(), folder / "idea_partitioned_topk.svg")


if __name__ == "__main__":
    main()

"""How often to exchange, and how much: predictions of rounds of `sparse_adamw`.

The computation comes from measured steps (`_optimizers`), the exchange from the cost model, and the
loss from trainings of one small model (docs/between_sites.md). The time of a round can be predicted
for a link; the loss of a model cannot.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from sparse_collectives import _validation
from sparse_collectives.cost_model import Workload, predict
from sparse_collectives.cost_model._types import BYTES_PER_WORD, Estimate, Network
from sparse_collectives.planner._optimizers import OPTIMIZERS, computed
from sparse_collectives.planner._planner import CPU, LocalCost

# Percent above the loss of dense AdamW at every step, by H and density: means of three seeds,
# 4,000 steps, n = 421,697, eight workers. A test checks that docs/data/learning_bytes.jsonl agrees.
# H = 100 at 5 %, 12.5 % above, is left out: overlapping the exchange of a shorter round costs less.
ABOVE_DENSE: Mapping[tuple[int, float], float] = {
    (1, 0.05): -0.4,
    (1, 0.01): 0.3,
    (1, 0.003): 1.5,
    (1, 0.001): 4.6,
    (10, 0.5): 0.9,
    (10, 0.05): 4.8,
    (30, 0.5): 2.9,
    (30, 0.05): 6.5,
    (100, 0.5): 5.3,
}
# The largest share of a round to spend on waiting, before a round with a higher loss is better.
SHARE = 0.2


class Round(NamedTuple):
    """One way to exchange.

    The field ``beside`` has the seconds of a step if the exchange overlaps with the steps of the
    next round. With an exchange at every step there is no such overlap, and it equals ``step``.

    Attributes:
      every: H, steps from one exchange to the next.
      density: the density of the exchange.
      exchange: seconds of an exchange.
      step: seconds of a step, as a mean over a round at whose end all workers wait.
      words: words that a worker receives in a step, as a mean over a round.
      needed: bits per second with which the words of an exchange take as long as the computation
        of a round.
      above: percent above the loss of dense AdamW, measured for a small model.
      code: the expression that makes it.
    """

    every: int
    density: float
    exchange: float
    step: float
    beside: float
    words: float
    needed: float
    above: float
    code: str


class Rounds(NamedTuple):
    """All rounds, and the choice.

    Attributes:
      rows: by H, and the largest density first.
      recommended: the round with the lowest loss of those that wait for no more than ``SHARE`` of
        a round; if there is none, the round with the shortest ``beside``.
      hidden: whether the recommended exchange should overlap with steps.
      decides: whether latency or bytes limit an exchange, as a text.
      dense_needed: bits per second for a dense exchange at every step, in float32.
    """

    rows: tuple[Round, ...]
    recommended: Round
    hidden: bool
    decides: str
    dense_needed: float


def plan_rounds(
    size: int, workers: int, network: Network, *, compute: float, local: LocalCost = CPU
) -> Rounds:
    """Predicts rounds over a link and recommends one.

    Args:
      size: n.
      workers: P, sites.
      network: alpha and beta between them.
      compute: seconds of forward and backward pass, more than 0.
      local: costs on a worker, in addition to ``compute``.

    Raises:
      ValueError: ``compute`` is not above 0.
    """
    compute = _validation.check_number("compute", compute, 0.0, math.inf)
    if not compute:
        raise ValueError(
            "compute must be the seconds of a forward and backward pass, more than 0: how long an "
            "exchange may take depends on it."
        )
    (adamw,) = (option for option in OPTIMIZERS if option.name == "sparse_adamw")
    busy = compute + computed(adamw, size, local)
    rows = tuple(
        _row(size, workers, network, busy, every, density) for every, density in ABOVE_DENSE
    )
    patient = [row for row in rows if row.step <= busy / (1 - SHARE)]
    if patient:
        chosen = min(patient, key=lambda row: (row.above, row.step))
    else:
        chosen = min(rows, key=lambda row: (row.beside, row.above))
    every_step = rows[0].exchange
    latency = _estimate(size, workers, rows[0].density).expected.seconds(
        network._replace(seconds_per_word=0.0)
    )
    parts = f"{1e3 * latency:.3g} of {1e3 * every_step:.3g} ms of an exchange at every step"
    decides = (
        f"latency decides, with {parts}: increase H, and the density with it"
        if latency > every_step / 2
        else f"bytes decide, with latency {parts}: decrease the density before you increase H"
    )
    dense = 2 * size * BYTES_PER_WORD * 8 * (workers - 1) / workers / busy
    return Rounds(rows, chosen, not patient, decides, dense)


def _estimate(size: int, workers: int, density: float) -> Estimate:
    return predict("agreed(few)", Workload(size, max(1, round(density * size)), workers))


def _row(
    size: int, workers: int, network: Network, busy: float, every: int, density: float
) -> Round:
    cost = _estimate(size, workers, density).expected
    exchange = cost.seconds(network)
    step = busy + exchange / every
    more = "" if every == 1 else f", every={every}"
    return Round(
        every=every,
        density=density,
        exchange=exchange,
        step=step,
        beside=step if every == 1 else max(busy, exchange / every),
        words=cost.words / every,
        needed=8 * BYTES_PER_WORD * cost.words / (every * busy),
        above=ABOVE_DENSE[every, density],
        code=f'optax_ext.sparse_adamw(rate, density={density:g}{more}, axis="site")',
    )


def text(found: Rounds) -> str:
    """A table of at most 100 columns, and the recommendation."""
    head = ("H", "density", "step ms", "overlapped", "exchange ms", "words", "Mbit/s", "loss")
    body = [
        (
            str(row.every),
            f"{row.density:g}",
            f"{1e3 * row.step:,.1f}",
            "" if row.every == 1 else f"{1e3 * row.beside:,.1f}",
            f"{1e3 * row.exchange:,.1f}",
            f"{row.words:,.0f}",
            f"{row.needed / 1e6:,.1f}",
            f"{row.above:+.1f} %",
        )
        for row in found.rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in (head, *body)
    ]
    chosen = found.recommended
    why = (
        f"it has the lowest loss of the rows that wait for at most {SHARE:.0%} of a round"
        if not found.hidden
        else f"all rows wait for more than {SHARE:.0%} of a round, so overlap the exchange with "
        "optax_ext.make_train_round"
    )
    dense = f"{found.dense_needed / 1e6:,.0f}"
    notes = (
        "overlapped: step ms with optax_ext.make_train_round, exchanging during the next round",
        "words: received by a worker in a step, as a mean",
        "Mbit/s: the bandwidth that hides the words of an exchange in the computation of a round;",
        f"    a dense exchange at every step needs {dense}",
        "loss: above dense AdamW at every step, for one small model, eight workers, 4,000 steps,",
        "    three seeds; it was measured without overlapped exchanges",
        "",
        f"Here {found.decides}.",
        f"Use {chosen.code}:",
        f"{why}.",
        "On CPUs, call sparse_collectives.transport.use_direct_messages() first: the ring of Gloo",
        "sends more messages in a row than are counted here.",
    )
    return "\n".join([*lines, "", *notes])

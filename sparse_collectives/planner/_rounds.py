"""How often to exchange, and how much: what rounds of `sparse_adamw` are predicted to take.

What is computed comes from what was measured of a step (`_optimizers`), the exchange from the cost
model, and the loss from trainings of one small model (docs/between_sites.md): the time of a round
can be predicted for a link, and the loss of a model can not.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from sparse_collectives import _validation
from sparse_collectives.cost_model import Workload, predict
from sparse_collectives.cost_model._types import BYTES_PER_WORD, Estimate, Network
from sparse_collectives.planner._optimizers import OPTIMIZERS, computed
from sparse_collectives.planner._planner import CPU, LocalCost

# Percent above dense AdamW at every step, by H and density: docs/data/learning_bytes.jsonl, to
# which a test holds them equal. Means of three seeds, 4,000 steps, n = 31,745, eight workers.
ABOVE_DENSE: Mapping[tuple[int, float], float] = {
    (1, 0.05): -0.1,
    (1, 0.01): 2.7,
    (10, 0.5): 3.5,
    (10, 0.05): 6.05,
    (30, 0.5): 4.9,
    (30, 0.05): 7.3,
    (100, 0.5): 6.7,
}
# The share of a round that may be waiting, before another round is worth its loss.
SHARE = 0.2


class Round(NamedTuple):
    """One way to exchange.

    Attributes:
      every: H, steps from one exchange to the next.
      density: of the exchange.
      exchange: seconds of an exchange.
      step: seconds of a step, the mean of a round at whose end everyone waits.
      beside: the same where the exchange is beside the steps of the next round; as ``step`` with
        an exchange at every step, which has none to be beside.
      words: received by a worker in a step, in the mean of a round.
      needed: bits a second that hide the words of an exchange behind a round's computation.
      above: percent above the loss of dense AdamW, as it was measured for a small model.
      code: what makes it.
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
      recommended: the lowest loss of those that wait for no more than ``SHARE`` of a round; if
        there is none, the shortest step beside the exchange.
      hidden: whether the recommended one is to be beside its steps.
      decides: what an exchange waits for, in words.
      dense_needed: bits a second for a dense exchange every step, in float32.
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
      local: costs on a worker, which a step has besides.

    Raises:
      ValueError: no ``compute``.
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
        f"latency decides, {parts}: a larger H, and with it a larger density"
        if latency > every_step / 2
        else f"bytes decide, with latency {parts}: a smaller density costs less than a larger H"
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
    """A table of at most 100 columns, and what to use."""
    head = ("H", "density", "step ms", "beside", "exchange ms", "words a step", "Mbit/s", "loss")
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
        f"the lowest loss of those that wait for at most {SHARE:.0%} of a round"
        if not found.hidden
        else f"as all of them wait for more than {SHARE:.0%} of a round: the exchange beside the "
        "steps, optax_ext.make_train_round"
    )
    dense = f"{found.dense_needed / 1e6:,.0f}"
    notes = (
        "beside: with the exchange beside the steps, optax_ext.make_train_round. Mbit/s: what",
        "hides the words of an exchange behind the computation of a round; a dense exchange at",
        f"every step needs {dense}. loss: above dense AdamW at every step, of one small model,",
        "eight workers, 4,000 steps, three seeds; beside the steps it was not measured.",
        f"What decides: {found.decides}.",
        f"Use {chosen.code},",
        f"{why}.",
        "Sites of CPUs call sparse_collectives.transport.use_direct_messages() first: the ring of",
        "Gloo has more messages in a row than are counted here.",
    )
    return "\n".join([*lines, "", *notes])

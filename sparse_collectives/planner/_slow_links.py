"""How often to exchange, and how much, over slow links: predictions of rounds of `sparse_adamw`.

The computation comes from measured steps (`_optimizers`), the exchange from the cost model, and the
loss from trainings of one small model (docs/learning.md). The time of a round can be predicted
for a link; the loss of a model cannot.
"""

import math
from typing import NamedTuple

from sparse_collectives import _validation
from sparse_collectives.cost_model import Workload
from sparse_collectives.cost_model._costs import BYTES_PER_WORD, Network
from sparse_collectives.cost_model._numbers import NUMBERS
from sparse_collectives.planner._optimizers import CODES, SUMS, sparse
from sparse_collectives.planner._ways import CPU, LocalCost, Prediction, predict_step

# The largest share of a round to spend on waiting, before a round with a higher loss is better.
SHARE = 0.2


class Round(NamedTuple):
    """An exchange after every H steps."""

    # H, the density of an exchange, and the encoding of its messages.
    every: int
    density: float
    messages: str
    # Percent above the loss of dense AdamW, measured for a small model.
    above: float
    # Its times; a step is a mean over a round at whose end all workers wait.
    prediction: Prediction
    # Seconds of a step if the exchange overlaps with the steps of the next round, for which H is
    # at least 2.
    overlapped: float
    # Bits per second with which the words of an exchange take as long as the computation of a
    # round.
    needed: float


class RoundPlan(NamedTuple):
    """All rounds, and the choice."""

    # By encoding and H, and the largest density first.
    rows: tuple[Round, ...]
    # The lowest loss of the rounds that wait for no more than ``SHARE`` of a round; if there is
    # none, the shortest ``overlapped``.
    recommended: Round
    # Whether the recommended exchange should overlap with steps.
    overlaps: bool
    # Whether latency or bytes limit an exchange, as a text.
    decides: str
    # Bits per second for a dense exchange at every step, in float32.
    dense_needed: float


def plan_rounds(
    size: int, workers: int, network: Network, *, compute: float, local: LocalCost = CPU
) -> RoundPlan:
    """Predicts rounds over a link and recommends one.

    Args:
      size: n.
      workers: P, sites, at least 2: one alone exchanges nothing.
      network: alpha and beta between them.
      compute: seconds of forward and backward pass, more than 0.
      local: costs on a worker, in addition to ``compute``.

    Raises:
      ValueError: ``workers`` is below 2, or ``compute`` is not above 0.
    """
    _validation.check_positive_int("workers", workers, minimum=2)
    compute = _validation.check_number("compute", compute, 0.0, math.inf)
    if not compute:
        raise ValueError(
            "compute must be the seconds of a forward and backward pass, more than 0: how long an "
            "exchange may take depends on it."
        )

    def row(messages: str, every: int, density: float, above: float) -> Round:
        load = Workload(size, max(1, round(density * size)), workers)
        way = sparse("sparse_adamw", messages, load, local, axis="site", every=every)
        found = predict_step(way, network, compute)
        busy = compute + found.local
        words = found.estimate.expected.words
        return Round(
            every,
            density,
            messages,
            above,
            found,
            overlapped=found.step if every == 1 else max(busy, found.exchange / every),
            needed=8 * BYTES_PER_WORD * words / (every * busy),
        )

    rows = tuple(
        row(messages, *known)
        for messages, name in ((SUMS, "few_bits"), (CODES, "one_and_three"))
        for known in NUMBERS["rounds"][name]
    )
    busy = compute + rows[0].prediction.local
    patient = [row for row in rows if row.prediction.step <= busy / (1 - SHARE)]
    if patient:
        chosen = min(patient, key=lambda row: (row.above, row.prediction.step))
    else:
        chosen = min(rows, key=lambda row: (row.overlapped, row.above))
    every_step = rows[0].prediction
    latency = every_step.estimate.expected.seconds(network._replace(seconds_per_word=0.0))
    parts = (
        f"{1e3 * latency:.3g} of {1e3 * every_step.exchange:.3g} ms of an exchange at every step"
    )
    decides = (
        f"latency decides, with {parts}: increase H, and the density with it"
        if latency > every_step.exchange / 2
        else f"bytes decide, with latency {parts}: decrease the density before you increase H"
    )
    dense = 2 * size * BYTES_PER_WORD * 8 * (workers - 1) / workers / busy
    return RoundPlan(rows, chosen, not patient, decides, dense)

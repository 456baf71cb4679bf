"""Ways to get an update from gradients, and the predicted step of each."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sparse_collectives.cost_model._costs import Estimate, Network
from sparse_collectives.cost_model._numbers import LONGEST, NUMBERS, Program

# A sparse step costs convergence and memory, and the model is not exact. To be recommended,
# it has to be faster than a dense one by this factor.
MARGIN = 1.1
# The model cannot separate two steps that differ by less: its median error against measured
# steps is 21 % (docs/network.md).
TIE = 1.2
# The part of a training step during which gradients appear: a backward pass costs
# about twice a forward pass.
BACKWARD_SHARE = 2 / 3


class LocalCost(NamedTuple):
    """The cost of a worker's computation, without the exchange.

    Attributes:
      select: seconds per gradient component, for error feedback, selection and the
        update.
      merge: seconds per received pair.
      gpu: whether the worker is a GPU, whose steps are counted in launches and bytes; ``select``
        and ``merge`` are then added.
      sharing: workers for each core, which take turns on it, at least 1.
    """

    select: float
    merge: float
    gpu: bool = False
    sharing: float = 1.0

    def seconds(self, program: Program | None, entries: float, pairs: float) -> float:
        """Seconds of a step that selects from so many entries and receives so many pairs.

        ``program`` is the step on a GPU; None if it was not compiled.
        """
        given = (self.select * entries + self.merge * pairs) * self.sharing
        return given + ((program or LONGEST).seconds(entries) if self.gpu else 0.0)


CPU = LocalCost(**NUMBERS["cpu"])
GPU = LocalCost(0.0, 0.0, gpu=True)


class Way(NamedTuple):
    """A way to get an update: an exchange, and a worker's work around it."""

    name: str
    # The encoding of its messages, and the expression that makes it.
    codec: str
    code: str
    # An exchange, and seconds of a worker's work in a step.
    estimate: Estimate
    local: float
    # The exchange whose steps to the same loss it takes, "dense" for a dense one; None if they are
    # not known.
    steps_of: str | None = None
    # Into how many the exchange is cut: all but the last can overlap with the backward pass.
    buckets: int = 1
    # Steps from one exchange to the next.
    every: int = 1
    # Whether no message is rounded, except by the codec of an allreduce.
    exact: bool = True


class Prediction(NamedTuple):
    """The predicted times of one option.

    Attributes:
      name: the name of the algorithm.
      codec: its encoding.
      dense: whether nothing is selected.
      code: the expression that makes it.
      estimate: bounds and expectation of the exchange.
      exchange: seconds of the exchange, expected.
      local: seconds of selection and merging.
      hidden: seconds of the exchange that can overlap with the computation.
      step: seconds of a step: computation, local work and the exchange that is not hidden.
      steps: steps to the same loss, as a multiple of the steps of a dense run; 1 if no factors
        were given.
      speedup: the time of ``dense`` divided by the time of this option, for a step or to the
        same loss.
    """

    name: str
    codec: str
    dense: bool
    code: str
    estimate: Estimate
    exchange: float
    local: float
    hidden: float
    step: float
    steps: float
    speedup: float

    @property
    def to_loss(self) -> float:
        """Seconds to the loss of a dense step."""
        return self.step * self.steps


def predict_step(
    way: Way, network: Network, compute: float, *, steps: float = 1.0, base: float = math.nan
) -> Prediction:
    """The step of a way, with so many seconds of forward and backward pass.

    ``steps`` are those to the same loss, as a multiple of the steps of a dense run, and ``base`` is
    the dense step in seconds.
    """
    exchange = way.estimate.expected.seconds(network)
    # The last bucket is ready when the computation is over.
    hidden = min(exchange * (way.buckets - 1) / way.buckets, compute * BACKWARD_SHARE)
    step = compute + way.local + exchange / way.every - hidden
    return Prediction(
        name=way.name,
        codec=way.codec,
        dense=way.steps_of == "dense" and way.exact,
        code=way.code,
        estimate=way.estimate,
        exchange=exchange,
        local=way.local,
        hidden=hidden,
        step=step,
        steps=steps,
        speedup=base / (step * steps) if step > 0 else 1.0,
    )


def unless_clearly_slower(finer: Prediction | None, fastest: Prediction) -> Prediction:
    """A form that rounds less, or the fastest one if that is ``MARGIN`` times as fast."""
    if finer is not None and finer.to_loss < MARGIN * fastest.to_loss:
        return finer
    return fastest


def fastest_first(
    ways: Iterable[Way],
    base: Way,
    network: Network,
    compute: float,
    steps: Mapping[str, float] | None,
) -> tuple[Prediction, ...]:
    """Predicts ways relative to ``base``; those without known steps are left out."""
    dense = predict_step(base, network, compute).step
    found: list[Prediction] = []
    for way in ways:
        factor = 1.0
        if steps is not None and way.steps_of != "dense":
            factor = steps.get(way.steps_of or "")
        if factor is not None:
            found.append(predict_step(way, network, compute, steps=factor, base=dense))
    return tuple(sorted(found, key=lambda row: row.to_loss))

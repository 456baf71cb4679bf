"""A complete optimizer: the learning rate comes before the exchange, weight decay after it."""

import math
from typing import Any

import jax
import optax

from optax_ext._error_feedback import _options
from optax_ext._error_feedback._buffers import Elementwise
from optax_ext._error_feedback._residual import Residual
from optax_ext._optimizers import _rates
from optax_ext._optimizers._weight_decay import decayed
from optax_ext._state import _whole_optimizers
from optax_ext._transforms._residual import residual as how_kept
from optax_ext._transforms._sparse_allreduce import selection, sparse_allreduce
from sparse_collectives import AxisName, Selector, SparseAllreduce
from sparse_collectives.allreduce import partitioned_topk


def whole(
    scaling: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    density: float | None,
    *,
    axis: AxisName,
    weight_decay: float | jax.Array,
    mask: Any,
    gain: float | None,
    limit: float | None,
    selector: Selector | None,
    allreduce: SparseAllreduce | None,
    residual: Residual | None = None,
    elementwise: bool = True,
    every: int | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer with ``scaling`` and the learning rate before the accumulation.

    An argument that is None has the default that :func:`optax_ext.sparse_adamw` documents.
    ``options`` are options of :func:`optax_ext.sparse_allreduce`. ``elementwise`` says that
    ``scaling`` treats each entry independently of its leaf.
    """
    density = _rates.DENSITY if density is None else density
    steps = _options.check_every(every)
    local = optax.chain(scaling, _rates.in_front(learning_rate, gain, axis, steps))
    sparse = sparse_allreduce(
        selection(density, selector),
        partitioned_topk(bits=None) if allreduce is None else allreduce,
        axis=axis,
        local=Elementwise(local.init, local.update) if elementwise else local,
        residual=_ahead_by(steps) if residual is None else residual,
        every=every,
        limit=_rates.limit_of(limit, learning_rate, density, steps),
        **options,
    )
    return decayed(_whole_optimizers.whole(sparse), learning_rate, weight_decay, mask)


def _ahead_by(every: int) -> Residual:
    """The look-ahead: the worker's share of its residual, or in rounds all of the residual."""
    return how_kept(step_ahead=1.0 if every == 1 else math.inf)

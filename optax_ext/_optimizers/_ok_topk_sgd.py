"""Ok-Topk SGD, the optimizer of the paper."""

from typing import Any

import optax

from optax_ext._error_feedback import _options
from optax_ext._error_feedback._momentum_correction import MomentumCorrection
from optax_ext._error_feedback._options import FeedbackOptions, takes
from optax_ext._optimizers._arguments import rate_alone
from optax_ext._optimizers._weight_decay import decayed
from optax_ext._state._whole_optimizers import whole
from optax_ext._transforms._ok_topk import ok_topk
from sparse_collectives import AxisName, Selector, allreduce


@rate_alone
@takes(FeedbackOptions, allreduce.ok_topk)
def ok_topk_sgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    density: float,
    axis: AxisName,
    selector: Selector | None = None,
    correction: MomentumCorrection | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    r"""Ok-Topk SGD (Algorithm 2 of the paper).

    .. math::

      acc_t = \epsilon_{t-1} + \alpha_t g_t, \quad
      w_t = w_{t-1} - \tfrac{1}{P} u_t

    The learning rate, with its sign, is applied before the accumulation: each entry of a residual
    keeps the learning rate of the step that produced it, even if a schedule has changed it since.

    Args:
      learning_rate: a number, or a schedule of the step count; skipped steps do not count.
      density: k / n, the share of the gradient that is sent, in (0, 1].
      axis: the mesh axis (or a tuple of axes) of the data-parallel workers.
      selector: the local selection, as in :func:`ok_topk`.
      correction: momentum before the accumulation, from :func:`momentum_correction`.
      **options: ``nonfinite``, ``residual``, ``dense_steps`` and ``dense_leaves`` of
        :func:`sparse_allreduce`, and the options of
        :func:`sparse_collectives.allreduce.ok_topk`. ``paper=True`` is Algorithm 1 as published,
        with ``repartition_period`` for tau and ``global_period`` for tau'. (Section 5 has 64 and
        32, and for BERT 64 and 128.)

    Returns:
      An ``optax.GradientTransformationExtraArgs`` whose updates are ready for
      ``optax.apply_updates``; its state is a :class:`SparseAllreduceState`.

    Example:
      >>> tx = ok_topk_sgd(0.1, density=0.01, axis="data", paper=True, global_period=128)
    """
    learning_rate = _options.check_learning_rate(learning_rate)
    sparse = ok_topk(
        density,
        axis=axis,
        selector=selector,
        # Residuals are steps of the parameters, as in all optimizers here.
        local=optax.scale_by_learning_rate(learning_rate),
        correction=correction,
        **options,
    )
    # For parameters of 16 bits, whose rounding errors go back into the residuals.
    return decayed(whole(sparse), learning_rate, 0.0, None)

"""Ok-Topk SGD, the optimizer of the paper."""

from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext._error_feedback import _options
from optax_ext._error_feedback._momentum_correction import MomentumCorrection
from optax_ext._error_feedback._options import FeedbackOptions, takes
from optax_ext._optimizers._arguments import rate_alone
from optax_ext._state._whole_optimizers import whole
from optax_ext._transforms._ok_topk import ok_topk
from sparse_collectives import AxisName, Selector


@rate_alone
@takes(FeedbackOptions)
def ok_topk_sgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    density: float,
    axis: AxisName,
    selector: Selector | None = None,
    paper: bool | str = False,
    correction: MomentumCorrection | None = None,
    **options: Unpack[FeedbackOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""Ok-Topk SGD (Algorithm 2 of the paper).

    .. math::

      acc_t = \epsilon_{t-1} + \alpha_t g_t, \quad
      w_t = w_{t-1} - \tfrac{1}{P} u_t

    The learning rate is applied before the accumulation: each entry of a residual keeps the
    learning rate of the step that produced it, even if a schedule has changed it since.

    Args:
      learning_rate: a number, or a schedule of the step count; skipped steps do not count.
      density: k / n, the share of the gradient that is sent, in (0, 1].
      axis: the mesh axis (or a tuple of axes) of the data-parallel workers.
      selector: the local selection, as in :func:`ok_topk`.
      paper: True for Algorithm 1 as published, ``"corrected"`` for corrected thresholds; see
        :func:`sparse_collectives.allreduce.ok_topk`.
      correction: momentum before the accumulation, from :func:`momentum_correction`.
      **options: ``nonfinite``, ``residual``, ``dense_steps`` and ``dense_leaves`` of
        :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` whose updates are ready for
      ``optax.apply_updates``; its state is a :class:`SparseAllreduceState`. For other
      options of the exchange write the chain out: ``optax.chain(ok_topk(density, axis=axis,
      local=optax.scale(rate), ...), optax.scale(-1.0))``.
    """
    _options.check_learning_rate(learning_rate)
    if callable(learning_rate):
        local = optax.scale_by_schedule(learning_rate)
    else:
        # optax before 0.2.6 declares a float, but an array (of inject_hyperparams) works as well.
        local = optax.scale(cast(float, learning_rate))
    sparse = ok_topk(
        density,
        axis=axis,
        selector=selector,
        local=local,
        correction=correction,
        paper=paper,
        **options,
    )

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any):
        mean, state = sparse.update(gradients, state, params, **extra)
        return jax.tree.map(jnp.negative, mean), state

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    return whole(optax.GradientTransformationExtraArgs(sparse.init, cast(Any, update)))

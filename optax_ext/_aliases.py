"""Ready-made compositions of a selector, an allreduce and error feedback.

A system that is :func:`topk_a` with another selection has no name here: give that
selection as ``selector=``. docs/selectors.md lists which paper's system is which.
"""

from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext._optimizers._common import rate_alone
from optax_ext._state._whole import whole
from optax_ext._step import _options
from optax_ext._step._momentum_correction import MomentumCorrection
from optax_ext._step._options import FeedbackOptions, SparseOptions, takes
from optax_ext._transforms._sparse_allreduce import selection, sparse_allreduce
from sparse_collectives import AxisName, Codec, Selector, allreduce, select


@takes(SparseOptions, allreduce.ok_topk)
def ok_topk(
    density: float,
    *,
    axis: AxisName,
    selector: Selector | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Ok-Topk: O(k) words for each worker and step, whatever the number of workers.

    Args:
      density: k / n, the share of the gradient that is sent, in (0, 1]. 0.01 is
        what the paper uses for BERT, 0.02 for an LSTM.
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      selector: the local selection; by default ``select.topk(density=density)``,
        which is exact at every step. With ``paper=True`` it is that of the paper,
        ``select.threshold_reuse(density=density, servo=False, headroom=slack - 1)`` with a
        period of ``global_period``, and with ``paper="corrected"`` that with ``servo="fixed"``.
      **options: those of :func:`sparse_allreduce`, and of
        :func:`sparse_collectives.allreduce.ok_topk`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(ok_topk(density=0.01, axis="data"), optax.adam(1e-3))
      >>> as_published = ok_topk(density=0.01, axis="data", paper=True)
    """
    names = _options.names(SparseOptions)
    exchange = {name: value for name, value in options.items() if name not in names}
    if exchange.get("paper"):
        # One period and one room for the local half and the global one.
        given = {name: value for name, value in exchange.items() if value is not None}
        exchange = {"global_period": 32, "slack": 4.0} | given
        if selector is None:
            selector = select.threshold_reuse(
                density=density,
                period=exchange["global_period"],
                servo="fixed" if exchange["paper"] == "corrected" else False,
                headroom=exchange["slack"] - 1,
            )
    return sparse_allreduce(
        selection(density, selector),
        allreduce.ok_topk(density=density, **exchange),
        axis=axis,
        **{name: value for name, value in options.items() if name in names},
    )


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

    The learning rate enters before the accumulation: a residual keeps the rate of
    the step it comes from, also when a schedule has moved on.

    Args:
      learning_rate: a number, or a schedule of the step count; skipped steps don't count.
      density: k / n.
      axis: the mesh axis of the workers.
      selector: see :func:`ok_topk`, as for all that follow.
      paper: Algorithm 1 as published, or with corrected thresholds: see
        :func:`sparse_collectives.allreduce.ok_topk`.
      correction: momentum before the accumulation.
      **options: ``nonfinite``, ``residual``, ``dense_steps`` and ``dense_leaves`` of
        :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` whose updates are ready for
      ``optax.apply_updates``; its state is a :class:`SparseAllreduceState`. For other
      options of the exchange write it out: ``optax.chain(ok_topk(density, axis=axis,
      local=optax.scale(rate), ...), optax.scale(-1.0))``.
    """
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


@takes(SparseOptions)
def topk_a(
    density: float,
    *,
    axis: AxisName,
    selector: Selector | None = None,
    codec: Codec | None = None,
    **options: Unpack[SparseOptions],
) -> optax.GradientTransformationExtraArgs:
    """TopkA: everyone receives everyone's top k. The volume grows with P.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      selector: the local selection; by default ``select.topk(density=density)``.
      codec: see :func:`sparse_collectives.allreduce.topk_a`.
      **options: see :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(topk_a(density=0.01, axis="data"), optax.adam(1e-3))
    """
    selector = selection(density, selector)
    return sparse_allreduce(selector, allreduce.topk_a(codec=codec), axis=axis, **options)

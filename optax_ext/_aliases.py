"""Ready-made compositions of a selector, an allreduce and error feedback.

A system that is :func:`topk_a` with another selection has no name here: pass the
selection as ``selector=``. docs/selectors.md lists the systems of papers.
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
    """Ok-Topk: O(k) words per worker and step, for any number of workers.

    Args:
      density: k / n, the share of the gradient that is sent, in (0, 1]. The paper
        uses 0.01 for BERT and 0.02 for an LSTM.
      axis: the mesh axis (or a tuple of axes) of the data-parallel workers.
      selector: the local selection. The default is ``select.topk(density=density)``,
        which is exact at every step. With ``paper=True`` the default is the selection of the
        paper, ``select.threshold_reuse(density=density, servo=False, headroom=slack - 1)`` with a
        period of ``global_period``; with ``paper="corrected"`` it has ``servo="fixed"`` instead.
      **options: the options of :func:`sparse_allreduce` and of
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
        # The local and the global threshold have the same period and the same headroom.
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


@takes(SparseOptions)
def topk_a(
    density: float,
    *,
    axis: AxisName,
    selector: Selector | None = None,
    codec: Codec | None = None,
    **options: Unpack[SparseOptions],
) -> optax.GradientTransformationExtraArgs:
    """TopkA: an allgather of every worker's top k, whose volume grows with P.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of axes) of the data-parallel workers.
      selector: the local selection; by default ``select.topk(density=density)``.
      codec: the encoding of messages; see :func:`sparse_collectives.allreduce.topk_a`.
      **options: the options of :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(topk_a(density=0.01, axis="data"), optax.adam(1e-3))
    """
    selector = selection(density, selector)
    return sparse_allreduce(selector, allreduce.topk_a(codec=codec), axis=axis, **options)

"""Ready-made compositions, named as in the papers: those that differ by more than a selector.

A system that is :func:`topk_a` with another selection has no name here: give that
selection as ``selector=``. docs/selectors.md lists which paper's system is which.
"""

from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext._optimizers._arguments import rate_alone
from optax_ext._selection import selection
from optax_ext._state._whole import whole
from optax_ext._step import _options
from optax_ext._step._momentum_correction import MomentumCorrection, momentum_correction
from optax_ext._step._options import FeedbackOptions, LocalOptions, SparseOptions, takes
from optax_ext._transforms._local_clip import local_clip_by_global_norm
from optax_ext._transforms._sparse_allreduce import sparse_allreduce
from sparse_collectives import Codec, Selector, allreduce, select, wire
from sparse_collectives.extend import AxisName


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


@takes(SparseOptions)
def gtopk(
    density: float,
    *,
    axis: AxisName,
    selector: Selector | None = None,
    codec: Codec | None = None,
    **options: Unpack[SparseOptions],
) -> optax.GradientTransformationExtraArgs:
    """gTop-k: a tree that keeps k entries at each level; 4 k log2(P) words.

    Args:
      density: k / n, of each worker's selection and of the update, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      selector: the local selection; by default ``select.topk(density=density)``.
      codec: see :func:`sparse_collectives.allreduce.gtopk`.
      **options: see :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(gtopk(density=0.01, axis="data"), optax.adam(1e-3))
    """
    selector = selection(density, selector)
    exchange = allreduce.gtopk(density=density, codec=codec)
    return sparse_allreduce(selector, exchange, axis=axis, **options)


@takes(SparseOptions)
def topk_dsa(
    density: float,
    *,
    axis: AxisName,
    selector: Selector | None = None,
    codec: Codec | None = None,
    slack: float = 1.25,
    **options: Unpack[SparseOptions],
) -> optax.GradientTransformationExtraArgs:
    """TopkDSA: SparCML's dynamic sparse allreduce, which turns dense where that is shorter.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      selector: the local selection; by default ``select.topk(density=density)``.
      codec: see :func:`sparse_collectives.allreduce.dsar_split_allgather`.
      slack: see :func:`sparse_collectives.allreduce.dsar_split_allgather`.
      **options: see :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(topk_dsa(density=0.01, axis="data"), optax.adam(1e-3))
    """
    selector = selection(density, selector)
    exchange = allreduce.dsar_split_allgather(slack=slack, codec=codec)
    return sparse_allreduce(selector, exchange, axis=axis, **options)


@takes(SparseOptions)
def quantized_topk(
    density: float,
    *,
    axis: AxisName,
    bits: int = 4,
    bucket: int = 1024,
    dense_only: bool = False,
    feedback: bool = False,
    selector: Selector | None = None,
    slack: float = 1.25,
    **options: Unpack[SparseOptions],
) -> optax.GradientTransformationExtraArgs:
    """SparCML's quantized top-k SGD: :func:`topk_dsa` with QSGD values.

    As in its Algorithm 1 the residual is ``acc - TopK(acc)``: what rounding takes off, with a
    mean of 0, is kept by nobody, and total and residuals do not add up to the accumulators.

    Deviation: the algorithm accumulates ``eps + alpha * gradient``. Here gradients are accumulated
    and alpha is the rate of the optimizer behind, which is the same while it is constant;
    ``local=optax.scale_by_schedule(...)`` of ``-alpha``, and nothing behind, is the algorithm's.

    Args:
      density: k / n of each worker's selection, in (0, 1]; 8 / 512 for 8 of each 512.
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      bits: of a value; see :func:`sparse_collectives.wire.qsgd`.
      bucket: values that share a scale.
      dense_only: whether only sums that go dense are quantized, and pairs are exact, as
        section 6 says of SparCML in practice.
      feedback: whether the residuals keep what rounding takes off, so that nothing is lost.
        Use 4 or 8 bits with it: with 2 it diverges.
      selector: by default ``select.bucketed(density=density, bucket=512)``, as section 8 has it.
      slack: see :func:`topk_dsa`.
      **options: see :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to chain before an optimizer.

    Raises:
      ValueError: an argument out of its range.

    Example:
      >>> import optax
      >>> tx = optax.chain(quantized_topk(density=8 / 512, axis="data"), optax.sgd(0.1))

    References:
      Renggli et al., `SparCML <https://arxiv.org/abs/1802.08021>`_, SC 2019, Algorithm 1.
    """
    codec = wire.qsgd(bits=bits, bucket=bucket)
    if not feedback:
        codec = wire.without_feedback(codec)
    exchange = allreduce.dsar_split_allgather(
        slack=slack, codec=wire.raw() if dense_only else codec, dense_codec=codec
    )
    if selector is None:
        selector = select.bucketed(density=density, bucket=512)
    return sparse_allreduce(selection(density, selector), exchange, axis=axis, **options)


@takes(SparseOptions)
def hitopk(
    density: float, *, axis: AxisName, inner_axis: AxisName, **options: Unpack[SparseOptions]
) -> optax.GradientTransformationExtraArgs:
    """HiTopKComm: dense inside the nodes, MSTopK and an allgather between them.

    Args:
      density: k / n of the selection of each shard, in (0, 1].
      axis: the mesh axes of all workers, those of ``inner_axis`` among them.
      inner_axis: the mesh axis of the workers of a node.
      **options: see :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> sparse = hitopk(density=0.01, axis=("node", "device"), inner_axis="device")
      >>> tx = optax.chain(sparse, optax.adam(1e-3))
    """
    exchange = allreduce.hierarchical(inner_axis=inner_axis, outer=allreduce.topk_a())
    return sparse_allreduce(select.mstopk(density=density), exchange, axis=axis, **options)


@takes(LocalOptions)
def dgc(
    density: float,
    *,
    axis: AxisName,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    max_norm: float | None = None,
    selector: Selector | None = None,
    codec: Codec | None = None,
    **options: Unpack[LocalOptions],
) -> optax.GradientTransformationExtraArgs:
    """Deep Gradient Compression: sampled top-k, momentum correction, masking and clipping.

    Put it before an optimizer without momentum. The warm-up of the density is
    ``selector=select.scheduled(select.dgc(density=0.25), select.staged_density(...))`` with
    0.25, the largest density of the schedule, as ``density``.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      momentum: see :func:`momentum_correction`.
      nesterov: see :func:`momentum_correction`.
      masking: see :func:`momentum_correction`.
      max_norm: see :func:`local_clip_by_global_norm`; None: no clipping.
      selector: the local selection; by default ``select.dgc(density=density)``.
      codec: see :func:`sparse_collectives.allreduce.topk_a`.
      **options: see :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(dgc(density=0.001, axis="data", max_norm=1.0), optax.sgd(0.1))

    References:
      Lin et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_,
      ICLR 2018.
    """
    sparse = topk_a(
        density,
        axis=axis,
        selector=select.dgc(density=density) if selector is None else selector,
        codec=codec,
        correction=momentum_correction(momentum, nesterov=nesterov, masking=masking),
        **options,
    )
    if max_norm is None:
        return sparse
    return optax.chain(local_clip_by_global_norm(max_norm, axis=axis), sparse)

"""Systems that exchange at every step."""

from typing import Unpack

import optax

from optax_ext._error_feedback._options import LocalOptions, SparseOptions, takes
from optax_ext._transforms._local_clip import local_clip_by_global_norm
from optax_ext._transforms._momentum_correction import momentum_correction
from optax_ext._transforms._sparse_allreduce import selection, sparse_allreduce
from optax_ext._transforms._topk_a import topk_a
from sparse_collectives import AxisName, Codec, Selector, allreduce, select, wire


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
      codec: see :func:`sparse_collectives.allreduce.published.gtopk`.
      **options: see :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(gtopk(density=0.01, axis="data"), optax.adam(1e-3))
    """
    selector = selection(density, selector)
    exchange = allreduce.published.gtopk(density=density, codec=codec)
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
    """TopkDSA: SparCML's dynamic sparse allreduce, which turns dense if that is shorter.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      selector: the local selection; by default ``select.topk(density=density)``.
      codec: see :func:`sparse_collectives.allreduce.published.dsar_split_allgather`.
      slack: see :func:`sparse_collectives.allreduce.published.dsar_split_allgather`.
      **options: see :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(topk_dsa(density=0.01, axis="data"), optax.adam(1e-3))
    """
    selector = selection(density, selector)
    exchange = allreduce.published.dsar_split_allgather(slack=slack, codec=codec)
    return sparse_allreduce(selector, exchange, axis=axis, **options)


@takes(SparseOptions)
def quantized_topk(
    density: float,
    *,
    axis: AxisName,
    bits: int = 4,
    bucket: int = 1024,
    feedback: bool = False,
    selector: Selector | None = None,
    **options: Unpack[SparseOptions],
) -> optax.GradientTransformationExtraArgs:
    """SparCML's quantized top-k SGD: :func:`topk_dsa` with QSGD values.

    As in its Algorithm 1 the residual is ``acc - TopK(acc)``. No worker keeps the rounding error,
    whose mean is 0, so total and residuals do not add up to the accumulators.

    Deviation: the algorithm accumulates ``eps + alpha * gradient``. Here gradients are accumulated,
    and alpha is the learning rate of the optimizer that follows, which is equivalent while it
    is constant. For the form of the algorithm, use ``local=optax.scale_by_schedule(...)`` of
    ``-alpha``, with no optimizer after it.

    Args:
      density: k / n of each worker's selection, in (0, 1]; 8 / 512 for 8 of each 512.
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      bits: the bits of a value; see :func:`sparse_collectives.wire.qsgd`.
      bucket: how many values share a scale.
      feedback: whether the residuals keep the rounding error, so that nothing is lost.
        Use 4 or 8 bits with it: with 2 it diverges.
      selector: by default ``select.bucketed(density=density, bucket=512)``, as in section 8.
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
    exchange = allreduce.published.dsar_split_allgather(codec=codec)
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
      axis: the mesh axes of all workers, with the axes of ``inner_axis`` among them.
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
    return sparse_allreduce(
        select.published.mstopk(density=density), exchange, axis=axis, **options
    )


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

    Put it before an optimizer without momentum. The warm-up of the density is ``selector=
    select.scheduled(select.published.dgc(density=0.25), select.staged_density(...))`` with 0.25,
    the largest density of the schedule, as ``density``.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      momentum: see :func:`momentum_correction`.
      nesterov: see :func:`momentum_correction`.
      masking: see :func:`momentum_correction`.
      max_norm: see :func:`local_clip_by_global_norm`; None: no clipping.
      selector: the local selection; by default ``select.published.dgc(density=density)``.
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
        selector=select.published.dgc(density=density) if selector is None else selector,
        codec=codec,
        correction=momentum_correction(momentum, nesterov=nesterov, masking=masking),
        **options,
    )
    if max_norm is None:
        return sparse
    return optax.chain(local_clip_by_global_norm(max_norm, axis=axis), sparse)

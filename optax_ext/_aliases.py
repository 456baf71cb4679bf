"""Ready-made compositions, named as in the papers: those with an exchange of their own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_ext._step._momentum_correction import MomentumCorrection
from optax_ext._step._sparse_allreduce import sparse_allreduce
from sparse_collectives import Codec, Selector, allreduce, select, wire
from sparse_collectives._types import AxisName


def ok_topk(
    density: float,
    *,
    axis: AxisName,
    axis_size: int | None = None,
    selector: Selector | None = None,
    nonfinite: str = "skip",
    learning_rate: optax.ScalarOrSchedule | None = None,
    correction: MomentumCorrection | None = None,
    density_schedule: float | Callable[[jax.Array], Any] | None = None,
    dense_steps: int = 0,
    dense_leaves: Any = None,
    residual_dtype: Any = jnp.float32,
    residual_decay: float = 1.0,
    xi_every: int = 0,
    **allreduce_options: Any,
) -> optax.GradientTransformation:
    """Ok-Topk: O(k) words for each worker and step, whatever the number of workers.

    Args:
      density: k / n, the share of the gradient that is sent, in (0, 1]. 0.01 is
        what the paper uses for BERT, 0.02 for an LSTM.
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      axis_size: P, to call ``init`` outside of the mapped function.
      selector: the local selection; by default ``select.topk(density=density)``,
        which is exact at every step. The paper's is
        ``select.threshold_reuse(density=density)``.
      nonfinite: see :func:`sparse_allreduce`.
      learning_rate: see :func:`sparse_allreduce`.
      correction: see :func:`sparse_allreduce`.
      density_schedule: see :func:`sparse_allreduce`; ``density`` is its maximum.
      dense_steps: see :func:`sparse_allreduce`.
      dense_leaves: see :func:`sparse_allreduce`.
      residual_dtype: see :func:`sparse_allreduce`.
      residual_decay: see :func:`sparse_allreduce`.
      xi_every: see :func:`sparse_allreduce`.
      **allreduce_options: see :func:`sparse_collectives.allreduce.ok_topk`.

    Returns:
      An ``optax.GradientTransformation`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(ok_topk(density=0.01, axis="data"), optax.adam(1e-3))
    """
    if selector is None:
        selector = select.topk(density=density)
    return sparse_allreduce(
        selector,
        allreduce.ok_topk(density=density, **allreduce_options),
        axis=axis,
        axis_size=axis_size,
        learning_rate=learning_rate,
        nonfinite=nonfinite,
        correction=correction,
        density_schedule=density_schedule,
        dense_steps=dense_steps,
        dense_leaves=dense_leaves,
        residual_dtype=residual_dtype,
        residual_decay=residual_decay,
        xi_every=xi_every,
    )


def ok_topk_sgd(
    learning_rate: optax.ScalarOrSchedule, density: float, *, axis: AxisName, **options: Any
) -> optax.GradientTransformation:
    r"""Ok-Topk SGD (Algorithm 2 of the paper).

    .. math::

      acc_t = \epsilon_{t-1} + \alpha_t g_t, \quad
      w_t = w_{t-1} - \tfrac{1}{P} u_t

    The learning rate enters before the accumulation: a residual keeps the rate of
    the step it comes from, also when a schedule has moved on.

    Args:
      learning_rate: a number, or a schedule of the step count.
      density: k / n.
      axis: the mesh axis of the workers.
      **options: see :func:`ok_topk`.

    Returns:
      An ``optax.GradientTransformation`` whose updates are ready for
      ``optax.apply_updates``.
    """
    # optax.inject_hyperparams passes what it collected from **options by that name.
    options = {**options.pop("options", {}), **options}
    return optax.chain(
        ok_topk(density, axis=axis, learning_rate=learning_rate, **options), optax.scale(-1.0)
    )


def topk_a(
    density: float,
    *,
    axis: AxisName,
    axis_size: int | None = None,
    selector: Selector | None = None,
    codec: Codec | None = None,
    **options: Any,
) -> optax.GradientTransformation:
    """TopkA: everyone receives everyone's top k. The volume grows with P.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      axis_size: P, to call ``init`` outside of the mapped function.
      selector: the local selection; by default ``select.topk(density=density)``.
      codec: see :func:`sparse_collectives.allreduce.topk_a`.
      **options: see :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformation`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(topk_a(density=0.01, axis="data"), optax.adam(1e-3))
    """
    return sparse_allreduce(
        select.topk(density=density) if selector is None else selector,
        allreduce.topk_a(codec=codec),
        axis=axis,
        axis_size=axis_size,
        **options,
    )


def gtopk(
    density: float,
    *,
    axis: AxisName,
    axis_size: int | None = None,
    selector: Selector | None = None,
    codec: Codec | None = None,
    **options: Any,
) -> optax.GradientTransformation:
    """gTop-k: a tree that keeps k entries at each level; 4 k log2(P) words.

    Args:
      density: k / n, of each worker's selection and of the update, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      axis_size: P, to call ``init`` outside of the mapped function.
      selector: the local selection; by default ``select.topk(density=density)``.
      codec: see :func:`sparse_collectives.allreduce.gtopk`.
      **options: see :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformation`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(gtopk(density=0.01, axis="data"), optax.adam(1e-3))
    """
    return sparse_allreduce(
        select.topk(density=density) if selector is None else selector,
        allreduce.gtopk(density=density, codec=codec),
        axis=axis,
        axis_size=axis_size,
        **options,
    )


def topk_dsa(
    density: float,
    *,
    axis: AxisName,
    selector: Selector | None = None,
    codec: Codec | None = None,
    slack: float = 1.25,
    **options: Any,
) -> optax.GradientTransformation:
    """TopkDSA: SparCML's dynamic sparse allreduce, which turns dense where that is shorter.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      selector: the local selection; by default ``select.topk(density=density)``.
      codec: see :func:`sparse_collectives.allreduce.dsar_split_allgather`.
      slack: see :func:`sparse_collectives.allreduce.dsar_split_allgather`.
      **options: see :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformation`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(topk_dsa(density=0.01, axis="data"), optax.adam(1e-3))
    """
    return sparse_allreduce(
        select.topk(density=density) if selector is None else selector,
        allreduce.dsar_split_allgather(slack=slack, codec=codec),
        axis=axis,
        **options,
    )


def quantized_topk(
    density: float, *, axis: AxisName, bits: int = 8, bucket: int = 512, **options: Any
) -> optax.GradientTransformation:
    """SparCML's quantized top-k: :func:`topk_dsa` with QSGD values and error feedback.

    What rounding loses stays in the residuals.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      bits: of a value; see :func:`sparse_collectives.wire.qsgd`. Use 4 or 8.
      bucket: values that share a scale.
      **options: see :func:`topk_dsa`.

    Returns:
      An ``optax.GradientTransformation`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(quantized_topk(density=0.01, axis="data", bits=4), optax.adam(1e-3))
    """
    return topk_dsa(density, axis=axis, codec=wire.qsgd(bits=bits, bucket=bucket), **options)


def hitopk(
    density: float, *, axis: AxisName, inner_axis: AxisName, **options: Any
) -> optax.GradientTransformation:
    """HiTopKComm: dense inside the nodes, MSTopK and an allgather between them.

    Args:
      density: k / n of the selection of each shard, in (0, 1].
      axis: the mesh axes of all workers, those of ``inner_axis`` among them.
      inner_axis: the mesh axis of the workers of a node.
      **options: see :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformation`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> sparse = hitopk(density=0.01, axis=("node", "device"), inner_axis="device")
      >>> tx = optax.chain(sparse, optax.adam(1e-3))
    """
    exchange = allreduce.hierarchical(inner_axis=inner_axis, outer=allreduce.topk_a())
    return sparse_allreduce(select.mstopk(density=density), exchange, axis=axis, **options)

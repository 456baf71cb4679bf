"""Ready-made compositions named after their selection: each is :func:`topk_a` with another one."""

from typing import Any

import optax

from optax_ext._aliases import topk_a
from optax_ext._step._momentum_correction import momentum_correction
from optax_ext._transforms._local_clip import local_clip_by_global_norm
from sparse_collectives import select
from sparse_collectives._types import AxisName


def dgc(
    density: float,
    *,
    axis: AxisName,
    momentum: float = 0.9,
    nesterov: bool = False,
    masking: bool = True,
    max_norm: float | None = None,
    **options: Any,
) -> optax.GradientTransformation:
    """Deep Gradient Compression: sampled top-k, momentum correction, masking and clipping.

    Put it before an optimizer without momentum. The warm-up of the density is
    ``density_schedule=staged_density(...)``, with the largest density of it as ``density``.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      momentum: see :func:`momentum_correction`.
      nesterov: see :func:`momentum_correction`.
      masking: see :func:`momentum_correction`.
      max_norm: see :func:`local_clip_by_global_norm`; None: no clipping.
      **options: see :func:`topk_a`.

    Returns:
      An ``optax.GradientTransformation`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(dgc(density=0.001, axis="data", max_norm=1.0), optax.sgd(0.1))
    """
    correction = momentum_correction(momentum, nesterov=nesterov, masking=masking)
    defaults = {"selector": select.dgc(density=density), "correction": correction}
    sparse = topk_a(density, axis=axis, **{**defaults, **options})
    if max_norm is None:
        return sparse
    return optax.chain(local_clip_by_global_norm(max_norm, axis=axis), sparse)


def gaussian_k(density: float, *, axis: AxisName, **options: Any) -> optax.GradientTransformation:
    """Gaussiank: :func:`topk_a` with a threshold from a normal distribution.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      **options: see :func:`topk_a`; the selection is that of
        :func:`sparse_collectives.select.gaussian_k`.

    Returns:
      An ``optax.GradientTransformation`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(gaussian_k(density=0.01, axis="data"), optax.adam(1e-3))
    """
    return topk_a(density, axis=axis, **{"selector": select.gaussian_k(density=density), **options})


def redsync(density: float, *, axis: AxisName, **options: Any) -> optax.GradientTransformation:
    """RedSync: :func:`topk_a` with a threshold between mean and maximum.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      **options: see :func:`topk_a`; the selection is that of
        :func:`sparse_collectives.select.redsync`.

    Returns:
      An ``optax.GradientTransformation`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(redsync(density=0.01, axis="data"), optax.adam(1e-3))
    """
    return topk_a(density, axis=axis, **{"selector": select.redsync(density=density), **options})


def sidco(density: float, *, axis: AxisName, **options: Any) -> optax.GradientTransformation:
    """SIDCo: :func:`topk_a` with a threshold fitted in stages.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      **options: see :func:`topk_a`; the selection is that of
        :func:`sparse_collectives.select.sidco`.

    Returns:
      An ``optax.GradientTransformation`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(sidco(density=0.01, axis="data"), optax.adam(1e-3))
    """
    return topk_a(density, axis=axis, **{"selector": select.sidco(density=density), **options})


def mstopk(density: float, *, axis: AxisName, **options: Any) -> optax.GradientTransformation:
    """MSTopK: :func:`topk_a` with a threshold found by a few counts.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      **options: see :func:`topk_a`; the selection is that of
        :func:`sparse_collectives.select.mstopk`.

    Returns:
      An ``optax.GradientTransformation`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(mstopk(density=0.01, axis="data"), optax.adam(1e-3))
    """
    return topk_a(density, axis=axis, **{"selector": select.mstopk(density=density), **options})


def adtopk(density: float, *, axis: AxisName, **options: Any) -> optax.GradientTransformation:
    """ADTopk: :func:`topk_a` with the same share of each row of each layer.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      **options: see :func:`topk_a`; the selection is that of
        :func:`sparse_collectives.select.adtopk`.

    Returns:
      An ``optax.GradientTransformation`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(adtopk(density=0.01, axis="data"), optax.adam(1e-3))
    """
    return topk_a(density, axis=axis, **{"selector": select.adtopk(density=density), **options})


def adtopk_interleaved(
    density: float, *, axis: AxisName, **options: Any
) -> optax.GradientTransformation:
    """ADTopk: :func:`topk_a` by row and by layer in turn.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      **options: see :func:`topk_a`; the selection is that of
        :func:`sparse_collectives.select.adtopk_interleaved`.

    Returns:
      An ``optax.GradientTransformation`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(adtopk_interleaved(density=0.01, axis="data"), optax.adam(1e-3))
    """
    return topk_a(
        density, axis=axis, **{"selector": select.adtopk_interleaved(density=density), **options}
    )


def adtopk_threshold(
    density: float, *, axis: AxisName, steps: int, **options: Any
) -> optax.GradientTransformation:
    """ADTopk: :func:`topk_a` with a threshold reused between its turns.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      steps: of the whole run; see :func:`sparse_collectives.select.adtopk_threshold`.
      **options: see :func:`topk_a`; the selection is that of
        :func:`sparse_collectives.select.adtopk_threshold`.

    Returns:
      An ``optax.GradientTransformation`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(
      ...     adtopk_threshold(density=0.01, axis="data", steps=1000), optax.adam(1e-3)
      ... )
    """
    return topk_a(
        density,
        axis=axis,
        **{"selector": select.adtopk_threshold(density=density, steps=steps), **options},
    )

"""LARS and LAMB with the norms partitioned over the workers."""

from collections.abc import Callable
from typing import Any, cast

import jax
import optax

from optax_ext.contrib._trust_ratio import scale_by_trust_ratio
from sparse_collectives import AxisName

MaskOrFn = Any | Callable[[Any], Any] | None


def lars(
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: Any = 0.0,
    weight_decay_mask: MaskOrFn = True,
    trust_coefficient: float | jax.Array = 0.001,
    eps: float | jax.Array = 0.0,
    trust_ratio_mask: MaskOrFn = True,
    momentum: float | jax.Array = 0.9,
    nesterov: bool = False,
    *,
    axis: AxisName,
) -> optax.GradientTransformationExtraArgs:
    """``optax.lars`` with the norms partitioned over the workers.

    The arguments and the state are the same as for ``optax.lars``, and so is the result, up
    to rounding. For the cost, and for the functions inside which it runs, see
    :func:`scale_by_trust_ratio`, which computes the trust ratio.

    Args:
      learning_rate: a number, or a schedule of the step count.
      weight_decay: its strength; or a schedule, if this version of optax takes one.
      weight_decay_mask: which weights decay: a pytree of booleans, a prefix of the parameters,
        or a function of the parameters that returns one.
      trust_coefficient: gamma, ``f32[]``.
      eps: added to the norm of the update, ``f32[]``.
      trust_ratio_mask: as ``weight_decay_mask``: which layers are scaled by their ratio.
        Only their norms are computed.
      momentum: its decay rate.
      nesterov: whether the momentum is Nesterov's.
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to chain after the transformation that reduces
      the gradients.

    Raises:
      ValueError, TypeError: at ``update``, as :func:`scale_by_trust_ratio`.

    References:
      You et al., `Large Batch Training of Convolutional Networks
      <https://arxiv.org/abs/1708.03888>`_, 2017.

    Example:
      >>> import optax, optax_ext
      >>> tx = optax.chain(optax_ext.ok_topk(0.01, axis="data"), lars(0.1, axis="data"))
    """
    ratio = scale_by_trust_ratio(trust_coefficient=trust_coefficient, eps=eps, axis=axis)
    return optax.chain(
        optax.add_decayed_weights(weight_decay, mask=weight_decay_mask),
        optax.masked(ratio, mask=trust_ratio_mask),
        optax.scale_by_learning_rate(learning_rate),
        optax.trace(decay=cast(Any, momentum), nesterov=nesterov),
    )


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-6,
    eps_root: float | jax.Array = 0.0,
    weight_decay: Any = 0.0,
    mask: MaskOrFn = None,
    *,
    axis: AxisName,
) -> optax.GradientTransformationExtraArgs:
    """``optax.lamb`` with the norms partitioned over the workers.

    The arguments and the state are the same as for ``optax.lamb``, and so is the result, up
    to rounding. For the cost, and for the functions inside which it runs, see
    :func:`scale_by_trust_ratio`, which computes the trust ratio.

    Args:
      learning_rate: a number, or a schedule of the step count.
      b1: decay rate of the first moment.
      b2: decay rate of the second moment.
      eps: added to the root of the second moment.
      eps_root: added to the second moment under the root.
      weight_decay: its strength; or a schedule, if this version of optax takes one.
      mask: which weights decay: a pytree of booleans, a prefix of the parameters, or a
        function of the parameters that returns one.
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to chain after the transformation that reduces
      the gradients.

    Raises:
      ValueError, TypeError: at ``update``, as :func:`scale_by_trust_ratio`.

    References:
      You et al., `Large Batch Optimization for Deep Learning: Training BERT in 76
      minutes <https://arxiv.org/abs/1904.00962>`_, ICLR 2020.

    Example:
      >>> import optax, optax_ext
      >>> tx = optax.chain(optax_ext.ok_topk(0.01, axis="data"), lamb(1e-3, axis="data"))
    """
    return optax.chain(
        optax.scale_by_adam(*cast(Any, (b1, b2, eps, eps_root))),
        optax.add_decayed_weights(weight_decay, mask=mask),
        scale_by_trust_ratio(axis=axis),
        optax.scale_by_learning_rate(learning_rate),
    )

"""LARS and LAMB with the norms partitioned over the workers."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext.contrib._trust_ratio import ratios_of, scale_by_trust_ratio
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
    separate_norms: bool = False,
    axis: AxisName,
) -> optax.GradientTransformationExtraArgs:
    r"""``optax.lars`` with the norms partitioned over the workers.

    The arguments and the state are the same as for ``optax.lars``, and so is the result, up
    to rounding. For the cost, and for the functions inside which it runs, see
    :func:`scale_by_trust_ratio`, which computes the trust ratio.

    With weight decay there are two forms of the ratio. optax divides by the norm of gradient and
    decay together; the two papers divide by the sum of their norms, which ``separate_norms`` does:

    .. math::

        \lambda^{(l)} = \gamma \frac{\|w\|}{\|g + \beta w\| + \epsilon}
        \quad\text{or}\quad
        \lambda^{(l)} = \gamma \frac{\|w\|}{\|g\| + \beta \|w\| + \epsilon}

    for a weight decay of beta. Where the gradient of a layer and its decay are orthogonal, the
    first ratio is up to 1.4 times the second one. Where they cancel, the first grows to any size,
    and the second stays below gamma / beta. The first is the default, so that nothing changes for
    those who come from optax.

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
      separate_norms: whether a ratio has the sum of the norms of gradient and decay, by
        Equation 11 of Shi et al. It takes one norm more for each layer.
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to chain after the transformation that reduces
      the gradients.

    Raises:
      ValueError, TypeError: at ``update``, as :func:`scale_by_trust_ratio`.

    References:
      You et al., `Large Batch Training of Convolutional Networks
      <https://arxiv.org/abs/1708.03888>`_, 2017. Shi et al., `Towards Scalable Distributed
      Training of Deep Learning on Public Cloud Clusters <https://arxiv.org/abs/2010.10458>`_,
      MLSys 2021, Equation 11.

    Example:
      >>> import optax, optax_ext
      >>> tx = optax.chain(optax_ext.ok_topk(0.01, axis="data"), lars(0.1, axis="data"))
    """
    decay = optax.add_decayed_weights(weight_decay, mask=weight_decay_mask)
    if separate_norms:
        scaled = [_by_separate_norms(decay, trust_coefficient, eps, trust_ratio_mask, axis)]
    else:
        ratio = scale_by_trust_ratio(trust_coefficient=trust_coefficient, eps=eps, axis=axis)
        scaled = [decay, optax.masked(ratio, mask=trust_ratio_mask)]
    return optax.chain(
        *scaled,
        optax.scale_by_learning_rate(learning_rate),
        optax.trace(decay=cast(Any, momentum), nesterov=nesterov),
    )


def _by_separate_norms(
    decay: optax.GradientTransformation,
    trust_coefficient: float | jax.Array,
    eps: float | jax.Array,
    mask: MaskOrFn,
    axis: AxisName,
) -> optax.GradientTransformation:
    """Weight decay, and a trust ratio of two norms of each layer: of gradients and of decay."""

    def update(updates: Any, state: Any, params: Any = None):
        decayed, state = decay.update(updates, state, params)
        chosen = mask(params) if callable(mask) else mask
        # A mask may be a prefix of the parameters.
        chosen = jax.tree.map(lambda m, u: jax.tree.map(lambda _: m, u), chosen, decayed)

        def scaled_leaves(tree: Any) -> Any:
            return jax.tree.map(lambda m, x: x if m else None, chosen, tree)

        added = jax.tree.map(jnp.subtract, decayed, updates)
        parts = [scaled_leaves(tree) for tree in (updates, added)]
        ratios = ratios_of(scaled_leaves(params), parts, 0.0, trust_coefficient, eps, axis=axis)
        each = iter(ratios)
        return jax.tree.map(
            lambda m, u: u * next(each).astype(u.dtype) if m else u, chosen, decayed
        ), state

    return optax.GradientTransformation(decay.init, update)


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

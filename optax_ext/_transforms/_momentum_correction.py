"""Momentum correction: momentum before the residual instead of after the exchange."""

import jax
import jax.numpy as jnp

from optax_ext._error_feedback import _options
from optax_ext._error_feedback._momentum_correction import MomentumCorrection
from sparse_collectives import Spec


def momentum_correction(
    momentum: float = 0.9, *, nesterov: bool = False, masking: bool = True
) -> MomentumCorrection:
    r"""Momentum correction and momentum factor masking of DGC.

    Momentum after a sparse allreduce sees a gradient late and all at once, and begins to
    discount it then. Here each worker has its own velocity, which the residual accumulates:

    .. math::

        u_i &= m u_i + g_i \\
        residual_i &= residual_i + u_i \quad
            (\text{Nesterov: } residual_i + g_i + m u_i) \\
        u_i &= 0 \text{ where the entry of worker } i \text{ was sent and delivered}

    At density 1 without masking a step is the same as with ``optax.trace(m, nesterov)`` after
    a dense allreduce, because momentum is linear. Use it before an optimizer without
    momentum, such as ``optax.sgd(learning_rate)``.

    Masking sets the velocity of an entry to 0 once the entry has been sent, so that an old
    direction is not applied for long. It also removes the momentum of entries that
    are sent at every step: at density 1 with masking the result is SGD without
    momentum. Steps of a dense warm-up (``dense_steps``) mask nothing and have the usual
    momentum.

    DGC masks the entries that were sent. With its allgather all of these are delivered. Other
    allreduces return some entries to the worker, and the velocity of these continues. An entry
    that a codec delivered with rounding counts as delivered.

    Cost: n float32 for each worker in the state, read and written at each step, in
    place if the state is donated; the mask takes two random accesses for each
    selected entry.

    Args:
      momentum: m, in [0, 1).
      nesterov: whether the increment looks ahead by one step.
      masking: whether the velocity is zeroed where an entry was sent and delivered.

    Returns:
      A :class:`MomentumCorrection`, for ``sparse_allreduce(..., correction=)``.

    Raises:
      ValueError: the momentum is out of its range.

    Example:
      >>> import jax.numpy as jnp
      >>> correction = momentum_correction(0.5)
      >>> velocity, increment = correction.update(jnp.array([2.0, 4.0]), jnp.array([1.0, 0.0]))
      >>> increment.tolist()
      [2.0, 2.0]
      >>> correction.mask(velocity[None], jnp.array([1]), jnp.array([True])).tolist()
      [[2.0, 0.0]]

    References:
      Lin et al., `Deep Gradient Compression <https://arxiv.org/abs/1712.01887>`_,
      ICLR 2018, sections 3.1 and 3.3 and Algorithm 4.
    """
    momentum = _options.check_momentum(momentum)

    def init(size: int) -> jax.Array:
        return jnp.zeros((size,), jnp.float32)

    def update(velocity: jax.Array, gradient: jax.Array):
        if not hasattr(velocity, "shape"):
            raise ValueError(
                f"state.velocity is {velocity!r}, but the transformation has a correction: the "
                "state was made, or saved, without one. Make a state with optax_ext.init_state, "
                "and move the residuals of the old one with optax_ext.reshard(state, new_state)."
            )
        velocity = momentum * velocity + gradient
        return velocity, gradient + momentum * velocity if nesterov else velocity

    def mask(velocity: jax.Array, indices: jax.Array, delivered: jax.Array):
        if not masking:
            return velocity
        masked = jnp.where(delivered, indices, velocity.shape[1])
        return velocity.at[0, masked].set(0.0, mode="drop")

    spec = Spec.of("momentum_correction", momentum=momentum, nesterov=nesterov, masking=masking)
    return MomentumCorrection(init, update, mask, spec=spec)

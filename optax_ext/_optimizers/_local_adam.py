"""Adam's division by the root of the second moment, on each worker before the exchange."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_ext._error_feedback import _options
from optax_ext._optimizers import _moments
from sparse_collectives import AxisName, _validation, _varying, transport

# The square of a smaller number is not a normal number of float32.
_SMALLEST = 2.0**-63


def scale_by_local_adam(
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-8,
    *,
    axis: AxisName | None = None,
    average_every: int | None = None,
    moments: str = "entries",
) -> optax.GradientTransformationExtraArgs:
    r"""Divides each worker's gradient by the root of its own second moment.

    .. math::

        v_i = b_2 v_i + (1 - b_2) g_i^2, \quad u_i = g_i / (\sqrt{v_i / (1 - b_2^t)} + eps)

    Use it in a chain with the learning rate as ``sparse_allreduce(..., local=)``. Adam after a
    sparse allreduce sees an entry once in T steps, as the sum of T gradients, and divides it by
    a root that is sqrt(T) times too large. Here every gradient is divided in the step that
    computes it, and the residual holds updates of the parameters.

    The gradient of one worker has more noise than the mean gradient, and its second moment is
    larger: the root is larger by up to sqrt(P), if the gradient is all noise. The learning rate
    has to make up for that, as it does in :func:`sparse_adamw`.

    Cost: n float32 for each worker, read and written at each step; for a matrix [r, c], r + c
    with ``moments="factors"`` and r with ``"rows"``. No words, unless ``average_every`` is given.

    Args:
      b2: decay of the second moments, in [0, 1), or ``f32[]`` from ``optax.inject_hyperparams``.
      eps: added to the root, as in Adam, and at least 2^-63, the smallest gradient whose square
        float32 can hold: an entry whose gradient has always been 0 does not move.
      axis: the mesh axis of the workers, for ``average_every``.
      average_every: the second moments are averaged over the workers once in this many steps,
        by a dense allreduce of all numbers that ``moments`` stores. None: never. Use it if the
        workers have different data.
      moments: how the second moments are stored. ``"entries"``: one for each entry, as in Adam.
        ``"factors"``, for less memory: means over rows and over columns, as in Adafactor (Shazeer
        and Stern 2018, section 3). The product of two such means, divided by their overall mean,
        approximates the moment of an entry. b2, eps and the bias correction are as in Adam. One far
        larger entry would make the moments of other rows and columns far too small, so an update is
        divided by half its root mean square in a matrix, if that is above 1: Adafactor's clipping
        (section 6) with d = 2 instead of 1. ``"rows"``: means over rows only, one number for
        each row, the cheapest. In a leaf of more than two axes the two largest are the axes of
        the matrix, as in ``optax.adafactor``. A leaf without two axes longer than 1, such as a
        vector, has a moment for each entry. A checkpoint with other moments is refused.

    Returns:
      An ``optax.GradientTransformationExtraArgs``.

    Raises:
      ValueError: an argument is out of its range.
      ValueError: ``moments`` has another value.
      ValueError: ``average_every`` without ``axis``.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_local_adam()
      >>> scaled, _ = tx.update(jnp.array([4.0, -0.5]), tx.init(jnp.zeros(2)))
      >>> [round(float(x), 3) for x in scaled]
      [1.0, -1.0]
    """
    b2 = _options.check_decay_rate("b2", b2, "second moments")
    eps = at_least(_options.check_hyperparameter("eps", eps, 0.0, 1.0))
    _validation.check_choice("moments", moments, _moments.MOMENTS)
    if average_every is not None:
        average_every = _validation.check_positive_int("average_every", average_every)
        if axis is None:
            raise ValueError(
                f"average_every={average_every} averages over the workers, which needs their axis. "
                "Give the mesh axis of the workers as axis=."
            )

    def init(params: Any) -> Any:
        return _moments.state_of(moments, params)

    def learned(state: Any, updates: Any) -> tuple[Any, ...]:
        if moments == "entries":
            return (jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, updates),)
        _, *trees = state
        return tuple(
            jax.tree.map(lambda g, v: _moments.next_of(v, g, b2), updates, tree) for tree in trees
        )

    def update(updates: Any, state: Any, params: Any = None):
        del params
        count = state.count + 1
        if moments != "entries":
            updates = jax.tree.map(_moments.bounded, updates)
        kept = learned(state, updates)
        if average_every is not None:
            kept = _averaged(kept, count % average_every == 0, cast(AxisName, axis))
        correction = 1 - jnp.asarray(b2, jnp.float32) ** count.astype(jnp.float32)

        def scaled(gradient, moment, columns=None):
            update = gradient / (_moments.root_of(moment, columns, correction) + eps)
            return update if columns is None else _moments.clipped(update, moment, columns)

        return jax.tree.map(scaled, updates, *kept), type(state)(count, *kept)

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    tx = optax.GradientTransformation(cast(Any, init), cast(Any, update))
    return optax.with_extra_args_support(tx)


def at_least(eps: float | jax.Array) -> float | jax.Array:
    """``eps``, or the smallest that keeps a zero gradient from becoming 0 / 0."""
    return max(eps, _SMALLEST) if isinstance(eps, float) else jnp.maximum(eps, _SMALLEST)


def _averaged(nu: Any, now: jax.Array, axis: AxisName) -> Any:
    """The mean over the workers if ``now``, which is the same on all of them."""

    def mean(tree):
        return jax.tree.map(
            lambda v: _varying.to_varying(transport.pmean(v, axis), axis).astype(v.dtype), tree
        )

    # The count is typed as varying over the workers, although all of them have the same count.
    now = transport.psum(now.astype(jnp.int32), axis) > 0
    return lax.cond(now, mean, lambda tree: tree, nu)

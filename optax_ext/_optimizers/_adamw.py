"""AdamW with a sparse allreduce in the middle of it."""

from typing import Any, Unpack, cast

import jax
import optax

from optax_ext._error_feedback import _options
from optax_ext._error_feedback._options import FeedbackOptions, takes
from optax_ext._optimizers import _rates, _whole
from optax_ext._optimizers._arguments import rate_alone
from optax_ext._optimizers._local_adam import at_least, scale_by_local_adam
from sparse_collectives import AxisName, Selector, SparseAllreduce


@rate_alone
@takes(FeedbackOptions)
def sparse_adamw(
    learning_rate: optax.ScalarOrSchedule,
    *,
    density: float | None = None,
    axis: AxisName,
    b1: float | jax.Array | None = None,
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-8,
    weight_decay: float | jax.Array = 1e-4,
    mask: Any = None,
    gain: float | None = None,
    limit: float | None = 2.0,
    moments: str = "entries",
    every: int | None = None,
    selector: Selector | None = None,
    allreduce: SparseAllreduce | None = None,
    **options: Unpack[FeedbackOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""A variant of AdamW whose workers exchange a few entries at each step.

    Each worker divides its gradient by the root of its own second moment
    (:func:`scale_by_local_adam`), so its residual holds updates of the parameters:

    .. math::

        v_i &= b_2 v_i + (1 - b_2) g_i^2 \\
        acc_i &= residual_i - \alpha_t \, gain \, g_i / (\sqrt{\hat v_i} + eps) \\
        m &= \tfrac{1}{P} \, allreduce(select(acc_i)) \\
        w &= w + m - \tfrac{3}{4} (m - clip(m, \pm \alpha_t \, limit)) - \alpha_t \lambda w

    where g_i is the gradient at the look-ahead parameters ``w + a residual_i`` (see
    :func:`residual`). Updates that accumulated for many steps could overshoot if they were applied
    at once, so an entry moves by ``limit`` learning rates and by 25 % of the excess; the rest
    stays in the residuals. After a delivery, the residual of an entry is at most three times the
    largest sum that accumulated between two deliveries, so a steady direction moves as fast as
    with the dense optimizer. The exchange is
    :func:`sparse_collectives.allreduce.partitioned_topk` in few bits. At the default density a
    worker receives ``3.5 k (P-1)/P`` words for up to 8 workers and ``4.3 k (P-1)/P`` for up to 34,
    with k = 1 % of n, about as much as :func:`ok_topk` at 1 %.

    The data of the workers should be alike. The mean of updates that each worker has divided by
    its own second moments is not the update of the mean gradient, and with classes of their own
    the workers ended far below dense AdamW (docs/learning.md). There put :func:`quantized` before
    the optimizer, which then sees the mean gradient.

    There is no first moment, since accumulation in the residuals averages gradients already. In
    rounds (``every``) each worker has a first moment of its own gradients, since local steps are
    applied at once.

    In ``optax.inject_hyperparams`` the learning rate, b2, eps, weight_decay, gain and limit may
    change from step to step. Name ``density`` and ``dense_steps``, if they are given, and
    functions (``mask``, ``dense_leaves``) in its ``static_args=``. With parameters in 16 bits it
    needs ``hyperparam_dtype=jnp.float32``, since b2 would round to 1 in their dtype.

    Args:
      learning_rate: a number or a schedule. Begin with the learning rate of the dense AdamW.
      density: k / n, the share of the parameters that move at a step, in (0, 1]. None: 0.05.
      axis: the mesh axis (or a tuple of axes) of the data-parallel workers.
      b1: decay of the first moment, which exists in rounds only. None: 0.9, or no first moment if
        ``moments`` is not ``"entries"``.
      b2: decay of the second moments.
      eps: added to the root, as in :func:`scale_by_local_adam`.
      weight_decay: decoupled weight decay as in ``optax.adamw``, after the exchange.
      mask: the leaves with weight decay, as in ``optax.adamw``.
      gain: the learning-rate multiplier that makes up for the noise of one worker's gradient,
        greater than 0. None: sqrt(P / 2), but at least 1 and at most 2.
      limit: update clipping, as a multiple of the learning rate. If an entry of an update exceeds
        it, 75 % of the excess stays in the residuals. Below a density of 5 % the limit is
        multiplied by 0.05 / density, since an entry waits 1 / density steps for its turn. None:
        no clipping.
      moments: how second moments are stored, as in :func:`scale_by_local_adam`: ``"entries"``, or
        if n float32 for each worker are too many, ``"factors"`` (as Adafactor) or ``"rows"``.
      every: H, the steps from one exchange to the next (None: 1), for links on which a message
        takes longer than a step. Between exchanges each worker sends nothing and takes its
        gradients at parameters to which all of its own residual has been applied
        (:func:`sparse_allreduce`). It then has a first moment, n float32 more for each worker.
        The gain is 1 by default, ``step_ahead`` is infinite, and the limit is H times as large.
      selector: the local selection; by default ``select.topk(density=density)``.
      allreduce: the exchange; by default ``partitioned_topk(bits=None)``.
      **options: ``nonfinite``, ``residual``, ``dense_steps`` and ``dense_leaves`` of
        :func:`sparse_allreduce`. By default the residual is float32 with ``step_ahead=1.0``,
        or ``math.inf`` with ``every`` above 1.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` whose updates are ready for
      ``optax.apply_updates``. Its state is a :class:`SparseAllreduceState`. At the end of a
      training :func:`flush` applies a share of the residuals, or in rounds all of them.

    Raises:
      ValueError: an argument is out of its range.
      ValueError: ``b1`` without ``every``, or with other ``moments`` than ``"entries"``.
      ValueError: at ``update``, weight decay without ``params``.
      TypeError: an argument other than the learning rate is given without its name.

    Example:
      >>> import jax, jax.numpy as jnp, optax_ext
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = sparse_adamw(0.1, density=0.5, axis="data", weight_decay=0.0)
      >>> params = {"w": jnp.array([1.0, -2.0])}
      >>> opt_state = optax_ext.init_state(tx, params, mesh)
      >>> step = optax_ext.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh)
      >>> params, opt_state, loss = step(params, opt_state, jnp.eye(2))
      >>> [round(float(x), 3) for x in params["w"]]
      [0.9, -2.0]
    """
    _options.check_learning_rate(learning_rate)
    scaled = scale_by_local_adam(b2, eps, moments=moments)
    b1 = _rates.first_moment(b1, _options.check_every(every), moments)
    if b1 is not None:
        # optax before 0.2.6 declares floats, but arrays (of inject_hyperparams) work as well.
        scaled = cast(Any, optax.scale_by_adam)(b1, b2, at_least(eps))
    return _whole.whole(
        scaled,
        learning_rate,
        density,
        axis=axis,
        weight_decay=weight_decay,
        mask=mask,
        gain=gain,
        limit=limit,
        selector=selector,
        allreduce=allreduce,
        elementwise=moments == "entries",
        every=every,
        **options,
    )

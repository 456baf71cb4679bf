"""SGD with a sparse allreduce in the middle of it."""

from typing import Any, Unpack

import jax
import optax

from optax_ext._error_feedback._momentum_correction import MomentumCorrection
from optax_ext._error_feedback._options import FeedbackOptions, takes
from optax_ext._optimizers import _whole
from optax_ext._optimizers._arguments import rate_alone
from sparse_collectives import AxisName, Selector, SparseAllreduce


@rate_alone
@takes(FeedbackOptions)
def sparse_sgd(
    learning_rate: optax.ScalarOrSchedule,
    *,
    density: float | None = None,
    axis: AxisName,
    weight_decay: float | jax.Array = 0.0,
    mask: Any = None,
    every: int | None = None,
    selector: Selector | None = None,
    allreduce: SparseAllreduce | None = None,
    correction: MomentumCorrection | None = None,
    **options: Unpack[FeedbackOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""SGD whose workers exchange a few entries at each step.

    .. math::

        acc_i &= residual_i - \alpha_t \, g_i \\
        w &= w + \tfrac{1}{P} \, allreduce(select(acc_i)) - \alpha_t \lambda w

    where g_i is the gradient at the look-ahead parameters ``w + a residual_i`` (see
    :func:`residual`). The residual holds updates of the parameters, each scaled by the learning
    rate of the step that produced it, as in Algorithm 2 of Ok-Topk (:func:`ok_topk_sgd`). The
    exchange and its words are the same as in :func:`sparse_adamw`.

    Accumulation in the residuals acts as a momentum. To replace SGD with momentum m, begin
    with ``1 / (1 - m)`` times its learning rate and no momentum.

    Args:
      learning_rate: a number or a schedule.
      density: k / n, the share of the parameters that move at a step, in (0, 1]. None: 0.05.
      axis: the mesh axis (or a tuple of axes) of the data-parallel workers.
      weight_decay: decoupled weight decay as in ``optax.adamw``, after the exchange.
      mask: the leaves with weight decay, as in ``optax.adamw``.
      every: H, the steps from one exchange to the next, as in :func:`sparse_adamw`.
      selector: the local selection; by default ``select.topk(density=density)``.
      allreduce: the exchange; by default ``partitioned_topk(bits=None)``.
      correction: momentum before the accumulation, from :func:`momentum_correction`.
      **options: ``nonfinite``, ``residual``, ``dense_steps`` and ``dense_leaves``, with the same
        defaults as in :func:`sparse_adamw`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``, as from :func:`sparse_adamw`.

    Raises:
      ValueError: an argument is out of its range.
      ValueError: at ``update``, weight decay without ``params``.
      TypeError: ``momentum=`` is given, or an argument other than the learning rate is given
        without its name.

    Example:
      >>> import jax, jax.numpy as jnp, optax_ext
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = sparse_sgd(0.1, density=0.5, axis="data")
      >>> params = {"w": jnp.array([1.0, -2.0])}
      >>> opt_state = optax_ext.init_state(tx, params, mesh)
      >>> step = optax_ext.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh)
      >>> params, opt_state, loss = step(params, opt_state, jnp.eye(2))
      >>> [round(float(x), 3) for x in params["w"]]
      [1.0, -1.8]
    """
    return _whole.whole(
        optax.identity(),
        learning_rate,
        density,
        axis=axis,
        weight_decay=weight_decay,
        mask=mask,
        gain=1.0,
        limit=None,
        every=every,
        selector=selector,
        allreduce=allreduce,
        correction=correction,
        **options,
    )

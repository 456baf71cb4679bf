"""SGD with a sparse allreduce in the middle of it."""

from typing import Any, Unpack

import jax
import optax

from optax_ext._optimizers import _common
from optax_ext._optimizers._common import rate_alone
from optax_ext._step._momentum_correction import MomentumCorrection
from optax_ext._step._options import FeedbackOptions, takes
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

    where g_i is the gradient at ``w + a residual_i`` (step-ahead, see :func:`residual`).
    A residual keeps the rate of the step that it comes from, as in Algorithm 2 of Ok-Topk
    (:func:`ok_topk_sgd`), and is an update of the parameters. The exchange, and the words that
    it takes, are those of :func:`sparse_adamw`.

    The wait in the residuals is a momentum of its own. In place of SGD with momentum m begin
    with ``1 / (1 - m)`` times its rate, and no momentum.

    Args:
      learning_rate: a number or a schedule.
      density: see :func:`sparse_adamw`, as for all that is not said here.
      axis: the mesh axis of the workers.
      weight_decay: behind the exchange, decoupled as in ``optax.adamw``.
      mask: where there is weight decay.
      every: H, steps from one exchange to the next.
      selector: the local selection.
      allreduce: of what was selected.
      correction: momentum before the accumulation, from :func:`momentum_correction`.
      **options: as of :func:`sparse_adamw`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``, as :func:`sparse_adamw` returns it.

    Raises:
      ValueError: an argument out of its range; at ``update``, weight decay without ``params``.
      TypeError: ``momentum=``, or anything besides the rate without its name.

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
    return _common.whole(
        _common.in_front(learning_rate, 1.0, axis),
        learning_rate,
        _common.DENSITY if density is None else density,
        axis=axis,
        weight_decay=weight_decay,
        mask=mask,
        every=every,
        selector=selector,
        allreduce=allreduce,
        correction=correction,
        **options,
    )

"""AdamW with a sparse allreduce in the middle of it."""

from typing import Any, Unpack, cast

import jax
import optax

from optax_ext._optimizers import _common
from optax_ext._optimizers._common import rate_alone, scale_by_local_adam
from optax_ext._step import _checks
from optax_ext._step._options import FeedbackOptions, takes
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
    r"""AdamW whose workers exchange a few entries at each step.

    Each worker divides its gradient by the root of its own second moment
    (:func:`scale_by_local_adam`), and what it accumulates are updates of the parameters:

    .. math::

        v_i &= b_2 v_i + (1 - b_2) g_i^2 \\
        acc_i &= residual_i - \alpha_t \, gain \, g_i / (\sqrt{\hat v_i} + eps) \\
        m &= \tfrac{1}{P} \, allreduce(select(acc_i)) \\
        w &= w + m - \tfrac{3}{4} (m - clip(m, \pm \alpha_t \, limit)) - \alpha_t \lambda w

    where g_i is the gradient at ``w + a residual_i`` (step-ahead, see :func:`residual`). Updates
    that accumulated for many steps would arrive at once and could overshoot, so an entry moves
    by ``limit`` learning rates and by a quarter of what is beyond; the rest stays in the residuals.
    No more of an entry waits there after a delivery than three times the most that arrived between
    two of them: a steady direction moves at the rate of the dense optimizer.
    The exchange is :func:`sparse_collectives.allreduce.agreed` in few bits: at the default
    density ``4 k (P-1)/P`` words for up to 8 workers and 4.8 for up to 34, with k = 1 % of n,
    about what :func:`ok_topk` needs for 1 %.

    There is no first moment: the wait in the residuals averages gradients already. In rounds
    (``every``) there is one, that of each worker's own gradients, as local steps do not wait.

    In ``optax.inject_hyperparams`` the rate, b2, eps, weight_decay, gain and limit may change from
    step to step; ``density`` and ``dense_steps``, where they are given, and functions (``mask``,
    ``dense_leaves``) belong into its ``static_args=``.

    Args:
      learning_rate: a number or a schedule. Begin with the rate of the dense AdamW.
      density: k / n, the share of the parameters that move at a step, in (0, 1]. None: 0.05.
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      b1: decay of the first moment, in rounds alone. None: 0.9, or none with other ``moments`` than
        those of entries.
      b2: decay of the second moments.
      eps: as in Adam.
      weight_decay: as in ``optax.adamw``, behind the exchange.
      mask: where there is weight decay, as in ``optax.adamw``.
      gain: what the learning rate is multiplied with, for the noise of one worker's
        gradient. None: sqrt(P / 2), but 1 at least and 2 at most.
      limit: what an entry moves in a step before three quarters of the rest are held back, as a
        multiple of the learning rate; below a density of 5 % it is multiplied with
        0.05 / density, as an entry waits 1 / density steps for its turn. None: nothing is held
        back.
      moments: what is kept of the second moments, as in :func:`scale_by_local_adam`: ``"entries"``,
        or where n float32 for each worker are too many ``"factors"``, as Adafactor, or ``"rows"``.
      every: H, steps from one exchange to the next (None: 1), for links on which a message takes
        longer than a step. In between each worker goes on by itself: it takes its gradients at
        parameters to which all of its own residual has been applied, and sends nothing
        (:func:`sparse_allreduce`). There is a first moment then, n float32 more for each worker,
        the gain is 1 by default, ``step_ahead`` infinite, and the limit H times as large.
      selector: by default ``select.topk(density=density)``.
      allreduce: by default ``agreed(bits=None)``.
      **options: ``nonfinite``, ``residual``, ``dense_steps`` and ``dense_leaves`` of
        :func:`sparse_allreduce`. The residual is by default in float32, with
        ``step_ahead=1.0``, or ``math.inf`` with an exchange every so many steps.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` whose updates are ready for
      ``optax.apply_updates``. Its state is a :class:`SparseAllreduceState`. What waits at the end
      of a training is applied by :func:`flush`; with a rate that falls to 0 it is little.

    Raises:
      ValueError: an argument out of its range; at ``update``, weight decay without ``params``.
      TypeError: ``b1=``, or anything besides the rate without its name.

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
    density = _common.DENSITY if density is None else density
    steps = _checks.check_every(every)
    rate = _common.in_front(learning_rate, gain, axis, steps)
    scaled = scale_by_local_adam(b2, eps, moments=moments)
    b1 = _common.first_moment(b1, steps, moments)
    if b1 is not None:
        # optax before 0.2.6 declares floats, but arrays (of inject_hyperparams) work as well.
        scaled = cast(Any, optax.scale_by_adam)(b1, b2, eps)
    return _common.whole(
        optax.chain(scaled, rate),
        learning_rate,
        density,
        axis=axis,
        weight_decay=weight_decay,
        mask=mask,
        selector=selector,
        allreduce=allreduce,
        elementwise=moments == "entries",
        every=every,
        **options,
        limit=_common.limit_of(limit, learning_rate, density, steps),
    )

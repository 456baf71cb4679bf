"""SGD with a sparse allreduce in the middle of it."""

from typing import Any

import optax

from optax_ext._optimizers import _parts
from optax_ext._step._momentum_correction import MomentumCorrection
from optax_ext._step._residual import Residual
from optax_ext._step._sparse_allreduce import sparse_allreduce
from sparse_collectives import Selector, SparseAllreduce, allreduce, extend, select
from sparse_collectives.extend import AxisName


def sparse_sgd(
    learning_rate: optax.ScalarOrSchedule,
    density: float = 0.05,
    *,
    axis: AxisName,
    weight_decay: float = 0.0,
    mask: Any = None,
    selector: Selector | None = None,
    exchange: SparseAllreduce | None = None,
    correction: MomentumCorrection | None = None,
    residual: Residual | None = None,
    nonfinite: str = "skip",
    dense_steps: int = 0,
    dense_leaves: Any = None,
) -> optax.GradientTransformation:
    r"""SGD whose workers exchange a few entries at each step.

    .. math::

        acc_i &= residual_i - \alpha_t \, g_i \\
        w &= w + \tfrac{1}{P} \, allreduce(select(acc_i)) - \alpha_t \lambda w

    where g_i is the gradient at ``w + a residual_i`` (step-ahead, see :func:`residual`).
    A residual keeps the rate of the step that it comes from, as in Algorithm 2 of Ok-Topk
    (:func:`ok_topk_sgd`), and is an update of the parameters. The exchange is
    :func:`sparse_collectives.allreduce.agreed` in few bits: at the default density, for up
    to 34 workers, no more words than :func:`ok_topk` needs for 1 %.

    The wait in the residuals is a momentum of its own. In place of SGD with momentum m begin
    with ``1 / (1 - m)`` times its rate, and no momentum.

    Args:
      learning_rate: a number or a schedule.
      density: k / n, the share of the parameters that move at a step, in (0, 1].
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.
      weight_decay: behind the exchange, decoupled as in ``optax.adamw``.
      mask: where there is weight decay, as in ``optax.adamw``.
      selector: by default ``select.topk(density=density)``.
      exchange: by default ``allreduce.agreed(bits="few")``.
      correction: momentum before the accumulation, from :func:`momentum_correction`.
      residual: dtype, decay and step-ahead, by default float32 and ``step_ahead="auto"``.
      nonfinite: see :func:`sparse_allreduce`.
      dense_steps: how many steps to begin with are dense.
      dense_leaves: which leaves are exchanged densely.

    Returns:
      An ``optax.GradientTransformation`` whose updates are ready for
      ``optax.apply_updates``. Its state is a :class:`SparseAllreduceState`. What waits at the end
      of a training is applied by :func:`flush`; with a rate that falls to 0 it is little.

    Raises:
      ValueError: an argument out of its range; at ``update``, weight decay without ``params``.

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
    sparse = sparse_allreduce(
        select.topk(density=extend.check_density(density)) if selector is None else selector,
        allreduce.agreed(bits="few") if exchange is None else exchange,
        axis=axis,
        nonfinite=nonfinite,
        local=_parts.in_front(learning_rate, 1.0, axis),
        correction=correction,
        residual=_parts.kept(residual),
        dense_steps=dense_steps,
        dense_leaves=dense_leaves,
    )
    return _parts.decayed(sparse, learning_rate, weight_decay, mask)

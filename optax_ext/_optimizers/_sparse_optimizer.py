"""A sparse allreduce in the middle of any optimizer that scales gradients."""

import warnings
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from optax_ext._error_feedback._options import FeedbackOptions, takes
from optax_ext._optimizers import _whole
from sparse_collectives import AxisName, Selector, SparseAllreduce


@takes(FeedbackOptions)
def sparse_optimizer(
    scaling: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    *,
    density: float | None = None,
    axis: AxisName,
    weight_decay: float | jax.Array = 0.0,
    mask: Any = None,
    gain: float | None = None,
    limit: float | None = 2.0,
    every: int | None = None,
    selector: Selector | None = None,
    allreduce: SparseAllreduce | None = None,
    **options: Unpack[FeedbackOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""An optimizer whose workers scale their own gradients and exchange a few entries.

    An optimizer that divides by second moments goes wrong behind a sparse exchange, which delivers
    an entry once in T steps, as the sum of T gradients. Here each worker applies ``scaling`` to its
    own gradient, in the step that computes it, and the residual holds updates of the parameters:

    .. math::

        acc_i &= residual_i - \alpha_t \, gain \, scaling_i(g_i) \\
        m &= \tfrac{1}{P} \, allreduce(select(acc_i)) \\
        w &= w + m - \tfrac{3}{4} (m - clip(m, \pm \alpha_t \, limit)) - \alpha_t \lambda w

    :func:`sparse_adamw` is the case of :func:`scale_by_local_adam`, and documents look-ahead,
    limit, gain and words. For example::

        optax_ext.sparse_optimizer(optax.scale_by_factored_rms(), 1e-2, axis="data")  # Adafactor
        optax_ext.sparse_optimizer(optax.scale_by_yogi(b1=0.0), 1e-2, axis="data")

    **No momentum.** ``scaling`` should have none (``b1=0``), since the residuals average gradients
    already; with a momentum besides, updates come late twice. In rounds (``every``) there should be
    a momentum, because local steps are applied at once.

    **What it is for.** Transformations that divide by second moments. Signs
    (``optax.scale_by_lion``), orthogonal updates (Muon) and trust ratios make all entries of a
    worker's update alike, and their largest say little: put :func:`quantized` before such an
    optimizer, or use them in rounds.

    Args:
      scaling: an optax transformation, such as ``optax.scale_by_rms()``, whose updates point along
        the gradient and are about 1. It sees whole leaves, in float32, and has a state for each
        worker. An optimizer becomes one by a learning rate of 1 and a change of the sign:
        ``optax.chain(optax.contrib.muon(1.0), optax.scale(-1.0))``.
      learning_rate: a number or a schedule. Begin with the learning rate of the dense optimizer.
      density: k / n, the share of the parameters that move at a step, in (0, 1]. None: 0.05.
      axis: the mesh axis (or a tuple of axes) of the data-parallel workers.
      weight_decay: decoupled weight decay as in ``optax.adamw``, after the exchange.
      mask: the leaves with weight decay, as in ``optax.adamw``.
      gain: as in :func:`sparse_adamw`. 1.0 for a scaling whose size does not depend on the noise of
        the gradient.
      limit: as in :func:`sparse_adamw`, a multiple of the learning rate; None for a scaling whose
        updates are not about 1.
      every: H, the steps from one exchange to the next, as in :func:`sparse_adamw`.
      selector: the local selection; by default ``select.topk(density=density)``.
      allreduce: the exchange; by default ``partitioned_topk(bits=None)``.
      **options: ``nonfinite``, ``residual``, ``dense_steps`` and ``dense_leaves``, with the same
        defaults as in :func:`sparse_adamw`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``, as from :func:`sparse_adamw`. Extra arguments of
      ``update``, such as ``value=``, go to ``scaling``, with the value of one worker.

    Raises:
      ValueError: an argument is out of its range.
      ValueError: at ``update``, weight decay without ``params``.
      ValueError: ``scaling`` turns the sign of a gradient round, as a complete optimizer does.
      TypeError: ``scaling`` is no transformation.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_ext
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = sparse_optimizer(optax.scale_by_rms(decay=0.0), 0.1, density=0.5, axis="data")
      >>> params = {"w": jnp.array([1.0, -2.0])}
      >>> opt_state = optax_ext.init_state(tx, params, mesh)
      >>> step = optax_ext.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh)
      >>> params, opt_state, loss = step(params, opt_state, jnp.eye(2))
      >>> [round(float(x), 3) for x in params["w"]]
      [0.9, -2.0]
    """
    if not isinstance(scaling, optax.GradientTransformation):
        raise TypeError(
            f"scaling must be an optax transformation, got {scaling!r}. Write for example "
            "sparse_optimizer(optax.scale_by_rms(), 0.01, axis=...)."
        )
    _check_sign(scaling)
    return _whole.whole(
        scaling,
        learning_rate,
        density,
        axis=axis,
        weight_decay=weight_decay,
        mask=mask,
        gain=gain,
        limit=limit,
        selector=selector,
        allreduce=allreduce,
        elementwise=False,
        every=every,
        **options,
    )


def _check_sign(scaling: optax.GradientTransformation) -> None:
    """Checks the sign of a first update, if that can be computed for any parameters."""

    @jax.jit
    def first() -> jax.Array:
        ones = jnp.ones((2, 4))
        update, _ = scaling.update(ones, scaling.init(ones), ones)
        return jnp.all(jnp.asarray(update) < 0)

    with warnings.catch_warnings(), jax.ensure_compile_time_eval():
        warnings.simplefilter("ignore")
        try:
            is_turned = bool(first())
        except Exception:
            # It needs an axis, other parameters, or arguments of its own.
            return
    if is_turned:
        raise ValueError(
            "scaling makes negative updates of positive gradients: it is a complete optimizer, "
            "whose updates have the learning rate and its sign, and sparse_optimizer would climb. "
            "Give optax.chain(optimizer, optax.scale(-1.0)), with a learning rate of 1.0 in that "
            "optimizer; or its scaling alone, such as optax.scale_by_adam()."
        )

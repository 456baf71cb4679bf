"""Error feedback around a selector and an allreduce, as an optax transformation."""

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext._step import _checks, _density_schedule, _nonfinite, _residual, _settings
from optax_ext._step._error_feedback import ErrorFeedback
from optax_ext._step._momentum_correction import MomentumCorrection
from sparse_collectives import Selector, SparseAllreduce, _compat, _validation
from sparse_collectives._types import AxisName
from sparse_collectives.allreduce import Hierarchical


def sparse_allreduce(
    selector: Selector,
    allreduce: SparseAllreduce | Hierarchical,
    *,
    axis: AxisName,
    axis_size: int | None = None,
    learning_rate: optax.ScalarOrSchedule | None = None,
    nonfinite: str = "skip",
    correction: MomentumCorrection | None = None,
    density_schedule: float | Callable[[jax.Array], Any] | None = None,
    dense_steps: int = 0,
    dense_leaves: Any = None,
    residual_dtype: Any = jnp.float32,
    residual_decay: float = 1.0,
    xi_every: int = 0,
) -> optax.GradientTransformation:
    r"""Replaces the dense allreduce of gradients by a sparse one.

    At each step worker i does

    .. math::

        acc_i &= residual_i + g_i \\
        coo_i &= select(acc_i) \\
        total, undelivered_i &= allreduce(coo_i) \\
        residual_i &= acc_i - coo_i + undelivered_i \\
        update &= total / P

    so that nothing is lost: over the workers, the sum of ``acc`` is ``total``
    plus the sum of the new residuals. Give it *local* gradients, before any
    optimizer: ``optax.chain(sparse_allreduce(...), optax.adam(1e-3))``. The
    updates are the same bits on every worker.

    Args:
      selector: from :mod:`sparse_collectives.select`.
      allreduce: from :mod:`sparse_collectives.allreduce`. With ``hierarchical`` the
        gradients are summed inside the node first, and residual, selection and
        density are those of a shard.
      axis: the mesh axis (or a tuple of them), or the MPI communicator, over which
        gradients are averaged; with ``hierarchical`` both that of the nodes and its
        ``inner_axis``.
      axis_size: P. Needed to call ``init`` outside of the mapped function, where
        it makes the state of all workers; checked inside it.
      learning_rate: a number or a schedule of ``count``, applied to the gradient
        before it is accumulated, as in Algorithm 2 of Ok-Topk. The update is then
        to be subtracted from the parameters; see :func:`optax_ext.ok_topk_sgd`.
      nonfinite: what to do when a worker's gradient, or its sum with the residual, has
        an entry that is not finite. ``'skip'``: all workers skip the step by agreement
        (one word): the update is zero, no residual changes, and ``skipped`` grows.
        ``'drop'``: such entries are left out on the worker that has them, whose residual
        keeps what it had, and ``dropped`` counts them (one word). ``'raise'``: as
        ``'skip'``, and a host callback raises FloatingPointError; JAX reports it as a
        runtime error when a result, or ``jax.effects_barrier()``, is waited for.
        ``'propagate'`` or ``'ignore'``: it takes part like any large value and reaches
        the update of every worker, as it would in a dense allreduce.
      correction: from :func:`momentum_correction`: what is accumulated is the velocity of
        the gradients, and not they.
      density_schedule: a function of ``count``, or a number: of what the selector selects
        only the ``round(density * n)`` largest are sent, the rest stays in the residual.
        The selector's slots are the maximum; more is clipped, and ``clipped`` counts such
        steps. Shapes are static, so the words sent are those of the maximum.
      dense_steps: for so many first steps the gradients are averaged by a dense allreduce
        in the same program. The residual does not change, and no velocity is masked.
      dense_leaves: leaves that are averaged by one dense allreduce instead: a function of
        the parameters that labels their leaves ``"sparse"`` or ``"dense"``, such as
        :func:`small_leaves`, or a pytree of labels, as in ``optax.multi_transform``. They have
        no residual, and are no part of n; all other options hold for them too.
      residual_dtype: float32, or bfloat16, rounded stochastically: half the memory, and
        conservation holds in expectation.
      residual_decay: the residual is multiplied with it at each step that accumulates, in
        [0, 1]. Below 1 old gradients are forgotten, by intent; conservation then holds for
        ``acc_i = decay * residual_i + g_i``.
      xi_every: every so many steps ``info.xi`` is measured: how far the update is from the
        true global top-k, relative to the gradient (Equation 5 of Ok-Topk). That takes a
        dense allreduce of 2 n words; 0: never.

    Returns:
      An ``optax.GradientTransformation``. Its updates have the dtypes of the
      gradients. Memory: the residual, n float32 for each worker, and one n-sized
      buffer during the step. An empty pytree works and does nothing.

    Raises:
      ValueError: an axis that is not bound; gradients already summed over the
        axis; an update whose tree, shapes or dtypes differ from ``init``'s; a
        state of another number of workers; 2**31 entries or more; a leaf that
        ``dense_leaves`` has no label for.
      TypeError: leaves that are not float32, bfloat16 or float16.

    Example:
      >>> import jax.numpy as jnp, optax, sparse_collectives as sc
      >>> tx = sparse_allreduce(
      ...     sc.select.topk(density=0.5), sc.allreduce.ok_topk(density=0.5), axis="w"
      ... )
      >>> def step(gradient):
      ...     return tx.update(gradient, tx.init(gradient))[0]
      >>> gradients = jnp.array([[4.0, 1.0, 0.0, -2.0], [2.0, 0.0, 1.0, -4.0]])
      >>> sc.simulate(step, axis="w", axis_size=2)(gradients)[0].tolist()
      [3.0, 0.0, 0.0, -3.0]
    """
    nonfinite = _validation.check_choice("nonfinite", nonfinite, _nonfinite.POLICIES)
    if axis_size is not None:
        axis_size = _validation.check_positive_int("axis_size", axis_size)
    if isinstance(allreduce, Hierarchical):
        _checks.check_hierarchy(axis, allreduce.inner_axis)
    kept = _residual.residual(residual_dtype, residual_decay)
    feedback = ErrorFeedback(
        selector=selector,
        allreduce=allreduce,
        axis=axis,
        axis_size=axis_size,
        learning_rate=_as_schedule(learning_rate),
        nonfinite=nonfinite,
        correction=correction,
        density_schedule=_density_schedule.as_schedule(density_schedule),
        dense_steps=_validation.check_positive_int("dense_steps", dense_steps, minimum=0),
        dense_leaves=dense_leaves,
        residual=kept,
        xi_every=_validation.check_positive_int("xi_every", xi_every, minimum=0),
        settings=_settings.Settings(
            selector=_settings.describe(selector),
            allreduce=_settings.describe(allreduce),
            learning_rate=learning_rate is not None,
            residual=kept.describe(),
            correction="none" if correction is None else _settings.describe(correction),
            axis=_compat.static_axis(axis),
        ),
    )
    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    return optax.GradientTransformation(cast(Any, feedback.init), cast(Any, feedback.update))


def _as_schedule(
    learning_rate: optax.ScalarOrSchedule | None,
) -> Callable[[jax.Array], Any] | None:
    if learning_rate is None or callable(learning_rate):
        return learning_rate
    return lambda count: learning_rate

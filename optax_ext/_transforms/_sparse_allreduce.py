"""Error feedback around a selector and an allreduce, as an optax transformation."""

from typing import Any

import optax

from optax_ext._state import _init
from optax_ext._step import _accumulation, _checks, _contract
from optax_ext._step._error_feedback import ErrorFeedback
from optax_ext._step._momentum_correction import MomentumCorrection
from optax_ext._step._options import DenseSteps
from optax_ext._step._sparse_exchange import SparseExchange
from optax_ext._step._transformation import Transformation
from sparse_collectives import AxisName, Selector, SparseAllreduce, _validation, select


def sparse_allreduce(
    selector: Selector,
    allreduce: SparseAllreduce,
    *,
    axis: AxisName,
    nonfinite: str = "skip",
    local: optax.GradientTransformation | None = None,
    correction: MomentumCorrection | None = None,
    residual: _accumulation.Residual | None = None,
    dense_steps: DenseSteps | None = None,
    dense_leaves: Any = None,
    limit: optax.ScalarOrSchedule | None = None,
    every: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Replaces the dense allreduce of gradients with a sparse one.

    At each step worker i does

    .. math::

        acc_i &= residual_i + local(g_i) \\
        coo_i &= select(acc_i) \\
        total, undelivered_i &= allreduce(coo_i) \\
        residual_i &= acc_i - coo_i + undelivered_i \\
        update &= total / P

    so that nothing is lost: over the workers, the sum of ``acc`` is ``total``
    plus the sum of the new residuals. With ``every=H`` that is an exchange after each H-th
    increment. Give it *local* gradients, before any
    optimizer: ``optax.chain(sparse_allreduce(...), optax.adam(1e-3))``. The
    updates are the same bits on every worker.

    What of an update a 16-bit leaf rounds off goes back into the residuals, so the equality
    holds for what the parameters really get.

    What is not finite, by ``nonfinite``:

    ============= ===================== ====================== =========================
    policy        a gradient, or its    the sum of finite      an update too large for a
                  sum with the residual entries                16-bit leaf
    ============= ===================== ====================== =========================
    ``skip``      all workers skip the  each worker keeps its  saturates; the rest stays
                  step, by agreement    part of the entry      in the residuals
    ``drop``      the entry is left out as above               as above
                  on that worker
    ``raise``     as ``skip``, and an   as above               as above
                  error on the host
    ``propagate`` reaches the update of reaches the update     infinite
                  every worker
    ============= ===================== ====================== =========================

    An allreduce that ``keeps_others`` (:func:`spardl <sparse_collectives.allreduce.spardl>`,
    ``gtopk``, ``ring_sparse``, a bounded ``ssar_recursive_double``, and those that sum in regions
    with a lossy codec) leaves with a worker partial sums of what others sent. There a gradient of
    2^103 (1e31) or more counts as one that is not finite: at an index the residuals of all P
    workers then grow by less than P 2^103 in a step, and none overflows within 2^25 / P steps.
    In front of :func:`sparse_adamw` and :func:`sparse_sgd` one of 2^63 (9e18) or more does: what
    they accumulate is bounded by the gradients, so that these alone are looked at, and the square
    of a larger one would stay in its second moment for good.

    ``skipped``, ``dropped`` and ``withheld`` of the state count these. Leaves and steps that
    go dense have no residual: there an entry whose sum is not finite is left out, and counts
    as ``dropped``. (A sparse allreduce sums in such a way that nothing overflows.)

    Args:
      selector: from :mod:`sparse_collectives.select`. With a density that changes it is
        :func:`sparse_collectives.select.scheduled`.
      allreduce: from :mod:`sparse_collectives.allreduce`. With ``hierarchical`` the
        gradients are summed inside the node first, and residual, selection and
        density are those of a shard.
      axis: the mesh axis (or a tuple of them), or the MPI communicator, over which
        gradients are averaged; with ``hierarchical`` both that of the nodes and its
        ``inner_axis``.
      nonfinite: one of the policies above. ``skip`` takes one word for the agreement; of a
        skipped step nothing remains but the counter. ``drop`` takes one word to count. The
        error of ``raise`` is a FloatingPointError from a host callback; JAX reports it as a
        runtime error when a result, or ``jax.effects_barrier()``, is waited for.
      local: a transformation of each worker's own gradient, before it is accumulated:
        ``optax.scale_by_schedule(...)`` puts the learning rate there, as Algorithm 2 of
        Ok-Topk does (:func:`optax_ext.ok_topk_sgd`). It works in float32, and has a state
        for each worker, which a skipped step leaves as it is. The residual is in the unit of
        what it returns.
      correction: from :func:`momentum_correction`: what is accumulated is the velocity of
        the gradients, and not they.
      residual: from :func:`optax_ext.residual`: dtype, decay and step-ahead; by default
        float32 without either.
      dense_steps: for so many first steps the gradients are averaged by a dense allreduce
        in the same program; or a function of the steps that were not skipped which says what
        steps: ``lambda step: step >= 9000`` ends densely, as MSTopK's record run did. A dense
        step delivers what waits in the residuals, too, and masks no velocity.
      dense_leaves: leaves that are averaged by one dense allreduce instead: a function of
        the parameters that labels their leaves ``"sparse"`` or ``"dense"``, such as
        :func:`small_leaves`, or a pytree of labels, as in ``optax.multi_transform``. They have
        no residual, and are no part of n; all other options hold for them too, and a step is
        skipped for all leaves or for none.
      limit: a magnitude of an entry of a sparse update, beyond which three quarters of the rest
        stay in the residuals: a number, or a schedule of the steps that were not skipped. What has
        waited for long then comes in parts, and an update does not overshoot; no more of an entry
        waits after a delivery than three times the most that arrived between two of them. For
        residuals that are updates of the parameters, as ``local=`` with a learning rate makes them.
      every: H, steps from one exchange to the next; None: 1. At the steps in between each worker
        adds its own update to its residual, and nothing is sent: the program has no collective
        there, not even to agree on a step that is skipped. With ``nonfinite="skip"`` a worker then
        leaves out its own step alone, and ``missed`` of the state counts it. With
        ``residual(step_ahead=math.inf)`` the worker takes its gradients at its own parameters:
        local steps, of which an exchange takes over what was selected, and the rest stays applied
        at home (McMahan et al. 2017; with error feedback Basu et al., `Qsparse-local-SGD
        <https://arxiv.org/abs/1906.02367>`_, NeurIPS 2019, Algorithm 1). ``local=`` has to have the
        learning rate, as for ``limit``, and there are no ``dense_leaves``.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. Its updates have the dtypes of the
      gradients. Memory: the residual, n float32 for each worker, and one n-sized
      buffer during the step. An empty pytree works and does nothing.

    Raises:
      ValueError: a selector of a larger density than the allreduce's; a step-ahead, a limit or
        ``every`` where residuals are gradients; ``every`` with dense leaves; an axis that is not
        bound; gradients already summed over the axis; an update whose tree, shapes or dtypes
        differ from ``init``'s; a state of another number of workers; 2**31 entries or more; a
        leaf that ``dense_leaves`` has no label for.
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
    _checks.check_parts(selector, allreduce)
    _checks.check_shard_axis(axis, allreduce.shard_axis)
    _checks.check_densities(selector, allreduce)
    options = _contract.checked_options(
        axis=axis,
        nonfinite=nonfinite,
        local=local,
        residual=residual,
        dense_steps=dense_steps,
        dense_leaves=dense_leaves,
        limit=limit,
        every=every,
    )
    made = Transformation(
        ErrorFeedback(
            exchange=SparseExchange(selector, allreduce, correction, options),
            options=options,
            correction=correction,
            settings=_contract.settings_of(
                options,
                selector=_declared(selector),
                allreduce=_declared(allreduce),
                correction="none" if correction is None else _declared(correction),
                shard_axis=allreduce.shard_axis,
            ),
        )
    )
    return _init.transformation(made.init, made.update, options.axis)


def _declared(part: Any) -> str | None:
    return None if part.spec is None else str(part.spec)


def selection(density: float, selector: Selector | None) -> Selector:
    """The exact selection, or another one that selects no more."""
    density = _validation.check_density(density)
    if selector is None:
        return select.topk(density=density)
    spec = selector.spec if isinstance(selector, Selector) else None
    selected = None if spec is None else spec.number("density")
    if selected is not None and selected > density:
        raise ValueError(
            f"the selector has density={selected}, and density={density} is what is to be sent. "
            f"Give both density={selected}, or both density={density}."
        )
    return selector

"""Error feedback around a selector and an allreduce, as an optax transformation."""

from typing import Any

import optax

from optax_ext._error_feedback import _contract, _options, _residual
from optax_ext._error_feedback._momentum_correction import MomentumCorrection
from optax_ext._error_feedback._options import DenseSteps
from optax_ext._error_feedback._sparse_exchange import SparseExchange
from optax_ext._error_feedback._step import ErrorFeedback
from optax_ext._error_feedback._transformation import Transformation
from optax_ext._state import _init
from sparse_collectives import AxisName, Selector, SparseAllreduce, _validation, select


def sparse_allreduce(
    selector: Selector,
    allreduce: SparseAllreduce,
    *,
    axis: AxisName,
    nonfinite: str = "skip",
    local: optax.GradientTransformation | None = None,
    correction: MomentumCorrection | None = None,
    residual: _residual.Residual | None = None,
    dense_steps: DenseSteps | None = None,
    dense_leaves: Any = None,
    limit: optax.ScalarOrSchedule | None = None,
    every: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Replaces the dense allreduce of gradients with a sparse one, with error feedback.

    At each step worker i computes

    .. math::

        acc_i &= residual_i + local(g_i) \\
        coo_i &= select(acc_i) \\
        total, undelivered_i &= allreduce(coo_i) \\
        residual_i &= acc_i - coo_i + undelivered_i \\
        update &= total / P

    Nothing is lost: over the workers, the sum of ``acc`` is ``total`` plus the sum of the new
    residuals. With ``every=H`` there is an exchange after each H-th increment only. Give it
    *local* gradients, before any optimizer: ``optax.chain(sparse_allreduce(...),
    optax.adam(1e-3))``. The updates have the same bits on every worker.

    The rounding error of an update of a 16-bit leaf goes back into the residuals, so the equality
    holds for the updates that the parameters receive.

    ``nonfinite`` sets the treatment of numbers that are not finite:

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

    Allreduces that ``may_keep_partial_sums`` marks (:func:`spardl
    <sparse_collectives.allreduce.spardl>`, ``gtopk``, ``ring_sparse``, a bounded
    ``ssar_recursive_double``, and allreduces that sum in regions with a lossy codec) leave partial
    sums of other workers' entries with a worker. With a ``limit`` or a 16-bit leaf every worker
    keeps the part of a mean that is not applied. In these cases, a gradient of 2^103 (1e31) or more
    counts as not finite: at an index the residuals of all P workers then grow by less than P 2^103
    in a step, and none overflows within 2^25 / P steps. In :func:`sparse_adamw` and
    :func:`sparse_sgd` a gradient of 2^63 (9e18) or more counts as not finite. Their increments are
    bounded by the gradients, so only the gradients are
    checked, and the square of a larger gradient would stay in its second moment indefinitely.

    A dense leaf has no residual: an entry whose sum is not finite is left out, and one that is too
    large for 16 bits saturates. The state counts both as ``dropped``.

    With ``drop`` a ``local`` transformation gets 0 for such a gradient, and a ``correction`` leaves
    the velocity of the entry as it is.

    ``skipped``, ``dropped`` and ``withheld`` of the state count these cases. Dense leaves and
    dense steps have no residual: an entry whose sum is not finite is left out, and counts
    as ``dropped``. (A sparse allreduce sums such that nothing overflows.)

    Args:
      selector: the local selection, from :mod:`sparse_collectives.select`. For a density that
        changes, use :func:`sparse_collectives.select.scheduled`.
      allreduce: the exchange, from :mod:`sparse_collectives.allreduce`. With ``hierarchical`` the
        gradients are summed inside the node first, and residual, selection and
        density refer to a shard.
      axis: the mesh axis (or a tuple of axes), or the MPI communicator, over which
        gradients are averaged; with ``hierarchical`` both the axis of the nodes and its
        ``inner_axis``.
      nonfinite: one of the policies above. ``skip`` takes one word for the agreement, and a
        skipped step changes nothing except the counter. ``drop`` takes one word to count. The
        error of ``raise`` is a FloatingPointError from a host callback; JAX reports it as a
        runtime error when the program waits for a result or calls ``jax.effects_barrier()``.
      local: a transformation of each worker's own gradient, before it is accumulated:
        ``optax.scale_by_schedule(...)`` applies the learning rate there, as in Algorithm 2 of
        Ok-Topk (:func:`optax_ext.ok_topk_sgd`). It works in float32, and has a state
        for each worker, which a skipped step leaves unchanged. The residual has the unit of
        its output.
      correction: from :func:`momentum_correction`: the residual accumulates the velocity of
        the gradients instead of the gradients.
      residual: from :func:`optax_ext.residual`: dtype, decay and step-ahead. The default is
        float32 without decay or step-ahead.
      dense_steps: the number of first steps in which a dense allreduce averages the gradients,
        in the same program, or a function of the number of steps that were not skipped that
        returns whether a step is dense: ``lambda step: step >= 9000`` ends densely, as MSTopK's
        record run did. A dense step also delivers the residuals, and masks no velocity.
      dense_leaves: leaves that one dense allreduce averages instead: a function of
        the parameters that labels their leaves ``"sparse"`` or ``"dense"``, such as
        :func:`small_leaves`, or a pytree of labels, as in ``optax.multi_transform``. They have
        no residual and do not count toward n. All other options also apply to them, and a step is
        skipped for all leaves or for none.
      limit: update clipping: if an entry of a sparse update exceeds this magnitude, 75 % of the
        excess stays in the residuals. A number, or a schedule of the steps that were not skipped.
        Updates that accumulated for many steps are then applied in parts and do not overshoot.
        After a delivery, the residual of an entry is at most three times the largest sum that
        accumulated between two deliveries. The residuals have to be updates of the parameters, as
        with a learning rate in ``local=``.
      every: H, the steps from one exchange to the next; None: 1. Between exchanges each worker
        adds its own updates to its residual and sends nothing: the program has no collective
        there, not even to agree on a skipped step. With ``nonfinite="skip"`` a worker then
        leaves out its own step only, and ``missed`` of the state counts it; ``nonfinite="raise"``
        sends one word in each step, so that the error is on all workers. With
        ``residual(step_ahead=math.inf)`` the worker takes its gradients at its own parameters.
        These are local steps: an exchange delivers the selected entries to all workers, and the
        rest stays applied locally (McMahan et al. 2017; with error feedback Basu et al.,
        `Qsparse-local-SGD <https://arxiv.org/abs/1906.02367>`_, NeurIPS 2019, Algorithm 1).
        ``local=`` has to include the learning rate, as for ``limit``, and ``dense_leaves`` must be
        None.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. Its updates have the dtypes of the
      gradients. Memory: the residual, n float32 for each worker, and one n-sized
      buffer during the step. An empty pytree is valid, and nothing is exchanged for it.

    Raises:
      ValueError: the selector has a larger density than the allreduce, or its rows are along
        another axis.
      ValueError: a step-ahead, a limit or ``every`` without ``local``, for residuals of gradients.
      ValueError: ``every`` with dense leaves.
      ValueError: an axis that is not bound.
      ValueError: gradients already summed over the axis.
      ValueError: an update whose tree, shapes or dtypes differ from the parameters at ``init``.
      ValueError: a state of another number of workers.
      ValueError: 2**31 entries or more.
      ValueError: a leaf without a label in ``dense_leaves``.
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
    _options.check_parts(selector, allreduce)
    _options.check_shard_axis(axis, allreduce.shard_axis)
    _options.check_densities(selector, allreduce)
    _options.check_row_axes(selector, allreduce)
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
    """The exact selection, or a given one that selects no more."""
    density = _validation.check_density(density)
    if selector is None:
        return select.topk(density=density)
    spec = selector.spec if isinstance(selector, Selector) else None
    selected = None if spec is None else spec.number("density")
    if selected is not None and selected > density:
        raise ValueError(
            f"the selector has density={selected}, and the exchange only density={density}. "
            f"Give both density={selected}, or both density={density}."
        )
    return selector

"""PowerSGD and ACP-SGD as optax transformations."""

from typing import Any, Unpack

import optax

from optax_ext._error_feedback import _contract
from optax_ext._error_feedback._options import LocalOptions, takes
from optax_ext._error_feedback._step import ErrorFeedback
from optax_ext._error_feedback._transformation import Transformation
from optax_ext._low_rank._exchange import LowRankExchange
from optax_ext._state import _init
from sparse_collectives import AxisName, Spec, _validation


@takes(LocalOptions)
def powersgd(
    rank: int,
    *,
    axis: AxisName,
    seed: int = 0,
    **options: Unpack[LocalOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""PowerSGD: gradients exchanged as products of two thin matrices.

    At each step worker i computes for each matrix, with the Q of the previous step,

    .. math::

        acc_i &= residual_i + local(g_i) \\
        P &= orthonormal(\tfrac1W \sum_j acc_j Q) \\
        Q_i &= acc_i^T P \qquad Q = \tfrac1W \sum_j Q_j \\
        residual_i &= acc_i - P Q_i^T \\
        update &= P Q^T

    for W workers; the columns of P are orthonormal. Nothing is lost: over the workers, the sum of
    ``acc`` is W times the update plus the sum of the new residuals. Give it *local* gradients,
    before any optimizer: ``optax.chain(powersgd(4, axis="data"), optax.sgd(0.1, momentum=0.9))``.
    The update is dense and has the same bits on every worker.

    Words received by each worker: ``2 (W-1)/W (r sum(rows + cols) + d)`` in two allreduces, for d
    entries of the dense leaves, which travel with the first. The number does not grow with W.
    (:func:`acp_sgd` needs half as many.)

    A leaf of more than two dimensions is split into rows and columns such that their sum is
    smallest: a convolution ``(h, w, in, out)`` is a matrix ``(h w in, out)``. Leaves of fewer
    than two dimensions, and leaves with ``r (rows + cols) >= rows cols``, are always dense.

    ``nonfinite`` treats gradients that are not finite as in :func:`sparse_allreduce`. If a factor
    has an entry above 2**100 / r, the whole matrix stays in the residuals, and ``withheld`` counts
    its entries.

    Args:
      rank: r, the number of columns of the factors. The paper uses 1 to 4 for images and 4 to 32
        for text.
      axis: the mesh axis (or a tuple of axes), or the MPI communicator, of the workers.
      seed: the seed of the first Q, normal numbers that are the same on all workers.
      **options: ``nonfinite``, ``local``, ``residual``, ``dense_steps`` and ``dense_leaves`` of
        :func:`sparse_allreduce`. Dense steps leave the factors unchanged. ``dense_leaves`` adds
        to the leaves that are always dense.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`SparseAllreduceState`, whose
      ``allreduce`` has the factors. In its info ``selected`` counts the numbers that a
      worker sends for the matrices, and ``delivered`` the entries of their updates. An empty
      pytree is valid, and nothing is exchanged for it.

      Cost: 6 r flops for each entry, and two QR factorizations of a thin matrix for each leaf.
      Memory: the residual, n float32 for each worker, and two n-sized buffers during the step.

    Raises:
      ValueError: at ``init``, the rank makes no leaf smaller.
      ValueError: the axis is not bound.
      ValueError: the gradients are already summed over the axis.
      ValueError: updates or a state do not match.
      ValueError: a ``step_ahead`` without ``local``, for a residual of gradients.
      TypeError: leaves that are not float32, bfloat16 or float16.

    Example:
      >>> import jax.numpy as jnp, optax, sparse_collectives as sc
      >>> tx = powersgd(1, axis="w")
      >>> def step(gradient):
      ...     return tx.update(gradient, tx.init(gradient))[0]
      >>> one = jnp.array([1.0, 1.0, 2.0])
      >>> gradients = jnp.stack([jnp.outer(one, one), jnp.outer(one, 3 * one)])
      >>> update = sc.simulate(step, axis="w", axis_size=2)(gradients)[0]
      >>> update.round(4).tolist()  # their mean, which has rank 1
      [[2.0, 2.0, 4.0], [2.0, 2.0, 4.0], [4.0, 4.0, 8.0]]

    References:
      Vogels, Karimireddy and Jaggi, `PowerSGD: Practical Low-Rank Gradient Compression for
      Distributed Optimization <https://arxiv.org/abs/1905.13727>`_, NeurIPS 2019, Algorithms 1
      and 2.
    """
    return _low_rank("powersgd", rank, seed, axis=axis, **options)


@takes(LocalOptions)
def acp_sgd(
    rank: int,
    *,
    axis: AxisName,
    seed: int = 0,
    **options: Unpack[LocalOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""ACP-SGD: PowerSGD that sends one of the two factors at a step, in one allreduce.

    Odd and even steps alternate. With the factors of the previous step,

    .. math::

        \text{odd:} \quad Q &= orthonormal(Q), & P_i &= acc_i Q, & P &= \tfrac1W \sum_j P_j,
            & residual_i &= acc_i - P_i Q^T \\
        \text{even:} \quad P &= orthonormal(P), & Q_i &= acc_i^T P, & Q &= \tfrac1W \sum_j Q_j,
            & residual_i &= acc_i - P Q_i^T

    and the update is :math:`P Q^T` in both. Each worker keeps the error of its own product, so
    that nothing is lost: :math:`\sum_i P_i Q^T = W P Q^T`. A skipped step is repeated.

    Words received by each worker: ``2 (W-1)/W (r sum(rows) + d)`` at odd steps and ``2 (W-1)/W
    (r sum(cols) + d)`` at even ones, which is half of the words, products and messages of
    :func:`powersgd`.

    Args:
      rank: r, the number of columns of the factors.
      axis: the mesh axis (or a tuple of axes), or the MPI communicator, of the workers.
      seed: the seed of the first factors.
      **options: the options of :func:`powersgd`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``, as from :func:`powersgd`.

    Raises:
      ValueError: as in :func:`powersgd`.
      TypeError: leaves that are not float32, bfloat16 or float16.

    Example:
      >>> import optax
      >>> tx = optax.chain(acp_sgd(4, axis="data"), optax.sgd(0.1, momentum=0.9))

    References:
      Zhang, Zhang, Shi, Chu and Li, Evaluation and Optimization of Gradient Compression for
      Distributed Deep Learning, ICDCS 2023.
    """
    return _low_rank("acp_sgd", rank, seed, axis=axis, **options)


def _low_rank(
    name: str, rank: int, seed: int, **given: Any
) -> optax.GradientTransformationExtraArgs:
    rank = _validation.check_positive_int("rank", rank)
    seed = _validation.check_positive_int("seed", seed, minimum=0)
    options = _contract.checked_options(**given)
    made = Transformation(
        ErrorFeedback(
            exchange=LowRankExchange(rank, name == "acp_sgd", seed, options),
            options=options,
            correction=None,
            settings=_contract.settings_of(
                options,
                selector="none",
                allreduce=str(Spec.of(name, rank=rank, seed=seed)),
                correction="none",
            ),
        )
    )
    return _init.transformation(made.init, made.update, options.axis)

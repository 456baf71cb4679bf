r"""From each worker's matrices to factors that all workers have: PowerSGD and ACP-SGD.

Both need sums over the workers only. With the accumulator :math:`M_i` of worker i, and any
basis :math:`P` or :math:`Q` (orthonormal columns) that all workers have,

.. math::

    \sum_i P P^T M_i = P \sum_i P^T M_i, \qquad \sum_i M_i Q Q^T = (\sum_i M_i Q) Q^T

so the projections that the workers take out of their own matrices add up to the delivered sum,
and nothing is lost.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from optax_ext._low_rank import _factors
from optax_ext._low_rank._factors import Factors, basis, times, unit
from optax_ext._low_rank._matrices import Matrix


class Sum(NamedTuple):
    """The sums of the factors of one kind, as lists with an entry for each matrix.

    Attributes:
      mine: the factors of this worker, as they were sent; zero if nothing was delivered.
      mean: the means over the workers; zero if nothing was delivered.
      fits: ``bool[]`` each, the same on every worker: whether it was delivered.
      rider: ``f32[d]``, the sum of the riders of the same message.
    """

    mine: list[jax.Array]
    mean: list[jax.Array]
    fits: list[jax.Array]
    rider: jax.Array


# Sums factors of one kind, and a rider, over the workers.
Add = Callable[[Sequence[jax.Array], jax.Array], Sum]


class Product(NamedTuple):
    """Matrices as products ``left @ right``, as lists with an entry for each.

    Attributes:
      left: ``f32[rows, r]``, of this worker.
      right: ``f32[r, cols]``, of this worker.
      mean_left: ``left`` for the mean over the workers.
      mean_right: ``right`` for the mean over the workers.
      fits: ``bool[]`` each, whether it was delivered; if not, the products are zero.
      factors: the factors for the next step.
      rider: ``f32[d]``, the sum of the riders.
    """

    left: list[jax.Array]
    right: list[jax.Array]
    mean_left: list[jax.Array]
    mean_right: list[jax.Array]
    fits: list[jax.Array]
    factors: Factors
    rider: jax.Array


class Given(NamedTuple):
    """The inputs of a phase.

    Attributes:
      accs: ``f32[rows, cols]`` each, the accumulators of this worker.
      factors: the factors from the last step.
      matrices: the shapes of the matrices.
      rank: r.
      rider: ``f32[d]``, sent along with the first message.
    """

    accs: list[jax.Array]
    factors: Factors
    matrices: list[Matrix]
    rank: int
    rider: jax.Array

    @property
    def lefts(self) -> list[jax.Array]:
        """The left factors of the last step."""
        return _factors.split(self.factors.left, _factors.left_shapes(self.matrices, self.rank))

    @property
    def rights(self) -> list[jax.Array]:
        """The right factors of the last step."""
        return _factors.split(self.factors.right, _factors.right_shapes(self.matrices, self.rank))


def power_iteration(given: Given, add: Add) -> Product:
    """One step of subspace iteration (PowerSGD, Algorithm 1), with two sums.

    A worker keeps the error of its own product, ``M - P Q^T``. PyTorch's hook keeps
    ``M - P mean(Q)^T``. Over the workers both add up to the same, so the training is the same, but
    with the latter the disagreement of the workers would accumulate in the residuals, only to
    cancel in their sum.
    """
    rights = given.rights
    # P = M Q, and its mean. The lengths of the columns of Q do not matter to the space.
    sent = [times(acc, unit(right.T)) for acc, right in zip(given.accs, rights, strict=True)]
    first = add(sent, given.rider)
    # An orthonormal basis of it; Q = M^T P, and its mean.
    bases = [basis(mean) for mean in first.mean]
    sent = [times(base.T, acc) for base, acc in zip(bases, given.accs, strict=True)]
    second = add(sent, jnp.zeros((0,), jnp.float32))
    fits = [one & two for one, two in zip(first.fits, second.fits, strict=True)]
    mine, mean = where(fits, second.mine), where(fits, second.mean)
    factors = given.factors._replace(right=_next(fits, mean, rights))
    return Product(bases, mine, bases, mean, fits, factors, first.rider)


def project_rows(given: Given, add: Add) -> Product:
    """The first, third, ... step of ACP-SGD: ``P = M Q`` for an orthonormal Q, with one sum."""
    bases = [basis(right.T) for right in given.rights]
    sent = [times(acc, base) for acc, base in zip(given.accs, bases, strict=True)]
    total = add(sent, given.rider)
    across = [base.T for base in bases]
    factors = given.factors._replace(left=_next(total.fits, total.mean, given.lefts))
    return Product(total.mine, across, total.mean, across, total.fits, factors, total.rider)


def project_columns(given: Given, add: Add) -> Product:
    """The second, fourth, ... step: ``Q = M^T P`` for an orthonormal P, with one sum."""
    bases = [basis(left) for left in given.lefts]
    sent = [times(base.T, acc) for base, acc in zip(bases, given.accs, strict=True)]
    total = add(sent, given.rider)
    factors = given.factors._replace(right=_next(total.fits, total.mean, given.rights))
    return Product(bases, total.mine, bases, total.mean, total.fits, factors, total.rider)


def where(fits: Sequence[jax.Array], factors: Sequence[jax.Array]) -> list[jax.Array]:
    """The factors that were delivered, and zeros for the others."""
    return [jnp.where(ok, factor, 0.0) for ok, factor in zip(fits, factors, strict=True)]


def _next(
    fits: Sequence[jax.Array], new: Sequence[jax.Array], old: Sequence[jax.Array]
) -> jax.Array:
    """The new factors, or the old ones if nothing was delivered."""
    return _factors.joined([jnp.where(*x) for x in zip(fits, new, old, strict=True)])

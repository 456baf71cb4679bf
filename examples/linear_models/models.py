"""The models: the loss of a margin, its slope, and how much that can change."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Model(NamedTuple):
    """A linear classifier; its objective is ``mean(loss) + regularisation / 2 * |w|^2``.

    Attributes:
      loss: ``loss(margins f32[r], labels f32[r]) -> f32[r]``; 0 where the label is 0, as that of
        a row that is padding.
      slope: the derivative of the loss with respect to the margins, ``f32[r]``.
      curvature: a bound of its second derivative; None where there is none.
    """

    loss: Callable[[jax.Array, jax.Array], jax.Array]
    slope: Callable[[jax.Array, jax.Array], jax.Array]
    curvature: float | None


def logistic() -> Model:
    """Logistic regression: ``log(1 + exp(-y z))``."""
    return Model(
        loss=lambda z, y: y * y * jax.nn.softplus(-y * z),
        slope=lambda z, y: -y * jax.nn.sigmoid(-y * z),
        curvature=0.25,
    )


def svm() -> Model:
    """The support vector machine with a squared hinge, as LIBLINEAR has it by default."""
    return Model(
        loss=lambda z, y: y * y * jnp.square(jax.nn.relu(1 - y * z)),
        slope=lambda z, y: -2 * y * jax.nn.relu(1 - y * z),
        curvature=2.0,
    )


def hinge() -> Model:
    """The support vector machine with a hinge: ``max(0, 1 - y z)``."""
    return Model(
        loss=lambda z, y: y * y * jax.nn.relu(1 - y * z),
        slope=lambda z, y: jnp.where(y * z < 1, -y, jnp.zeros_like(y)),
        curvature=None,
    )


MODELS = {"logistic": logistic, "svm": svm, "hinge": hinge}

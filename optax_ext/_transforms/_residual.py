"""How the residual is kept."""

from typing import Any

import jax.numpy as jnp

from optax_ext._error_feedback._residual import DTYPES, Residual
from sparse_collectives import Spec, _validation


def residual(dtype: Any = jnp.float32, *, decay: float = 1.0, step_ahead: float = 0.0) -> Residual:
    """Options of the residual, for ``sparse_allreduce(..., residual=)``.

    Args:
      dtype: float32, or bfloat16 with stochastic rounding for half of the memory. With bfloat16,
        conservation holds in expectation. In a step, rounding changes the residual of an entry by
        less than 2^-7 of its value, up or down. Over many entries and steps the errors cancel:
        after 12 steps of five workers the sum of all entries was off by about 1e-4 of its value.
        The error does not depend on the size of the gradients: gradients of 1e-20 lose the same
        share as gradients of 1, to the bit.
      decay: the factor on the residual at each exchange, in [0, 1].
        Below 1 old gradients are forgotten, by intent; conservation then holds for
        ``acc_i = decay * residual_i + g_i``.
      step_ahead: worker i differentiates at the look-ahead parameters ``params + a residual_i``
        (Xu, Huo and Huang, `Step-Ahead Error Feedback <https://arxiv.org/abs/2008.05823>`_, AAAI
        2021). ``a`` is ``step_ahead`` times 1/P, the worker's own share of the mean of all
        residuals, or times 0.1 with more than ten workers, and at most 1. ``math.inf`` makes it 1
        for any number of workers; together with ``every`` this gives local steps. A node whose
        workers share a residual, the sum of theirs, counts as one worker with their mean. The
        residual has to be an update of the parameters: ``local=`` includes the learning rate and
        its sign, as in :func:`sparse_adamw` and :func:`sparse_sgd`, whose ``step_ahead`` is 1.
        :func:`make_train_step` takes gradients there; a loop of your own calls :func:`ahead`. At
        the end of a training :func:`flush` moves the parameters to the mean of these points.

    Returns:
      A :class:`Residual`.

    Raises:
      ValueError: another dtype, a decay out of [0, 1], a step_ahead below 0.

    Example:
      >>> residual(jnp.bfloat16, decay=0.99).spec
      Spec('residual(decay=0.99, dtype=bfloat16, step_ahead=0.0)')
    """
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        raise ValueError(
            f"dtype={name} of the residual is none of {DTYPES}. float16 would overflow where "
            "gradients add up; write optax_ext.residual(jnp.bfloat16) for half of the memory."
        )
    kept, decay = jnp.dtype(dtype), _validation.check_number("decay", decay, 0.0, 1.0)
    step_ahead = _validation.check_number("step_ahead", step_ahead, 0.0, float("inf"))
    spec = Spec.of("residual", dtype=kept, decay=decay, step_ahead=step_ahead)
    return Residual(kept, decay, step_ahead, spec)

"""All entries of the gradients in a few bits, as an optax transformation."""

from typing import Unpack

import optax

from optax_ext._error_feedback import _contract
from optax_ext._error_feedback._options import LocalOptions, takes
from optax_ext._error_feedback._step import ErrorFeedback
from optax_ext._error_feedback._transformation import Transformation
from optax_ext._quantized._exchange import QuantizedExchange
from optax_ext._state import _init
from sparse_collectives import AxisName, Spec, extend


@takes(LocalOptions)
def quantized(
    bits: tuple[int, int] = (2, 4),
    *,
    axis: AxisName,
    **options: Unpack[LocalOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""The mean gradient with a few bits for each entry, before any optimizer.

    A sparse exchange delivers an entry once in many steps, as the sum of many gradients. An
    optimizer that takes signs, orthogonalizes, or divides by second moments after the exchange then
    sees something else than gradients. Here every entry arrives at every step:

    .. math::

        acc_i &= residual_i + local(g_i) \\
        sent_i &= u \, Q_{up}(acc_i / u) \\
        update &= \tfrac{1}{P} u \, Q_{down}(\tfrac{1}{u} \sum_i sent_i) \\
        v &= v + \tfrac{1}{32} (update^2 - v) \\
        \log_2 u &= \lfloor \log_2 (\sqrt v + \tfrac 1 8 rms_{256}(\sqrt v)) \rfloor

    Each entry belongs to one worker, and at each step to the next one. A worker sends its entries
    to their owners in codes (Q up), the owner adds its own values, which are not rounded, and sends
    the sums to all in codes (Q down). Codes have scales for each 256 entries. The unit u of an
    entry is its own size in past updates, the same on every worker, so that the small entries of a
    block, which many optimizers enlarge, do not drown in the rounding of the large ones. It costs
    no words, and as a power of two it changes no digit of a value.

    Each worker keeps the errors of the codes that it made. So nothing is lost: over the workers,
    the sum of ``acc`` is P times the update plus the sum of the new residuals. Give it *local*
    gradients, before any optimizer:
    ``optax.chain(quantized(axis="data"), optax.contrib.muon(0.01))``. The update is dense and has
    the same bits on every worker. At the first step no unit is known, and small entries may be 0:
    an optimizer that divides by the second moments of the step before
    (``optax.contrib.acprop``) needs ``dense_steps=1``.

    Words received by each worker: ``(P-1)/P n (up + down) / 32`` and the scales, ``n / 256`` for
    up to two bytes each way (:func:`sparse_collectives.extend.words_of_sum_of_all`), in an
    all_to_all and an all_gather; a dense allreduce takes ``2 (P-1)/P n``. The default is 1/10 of
    that. The number does not grow with P.

    ``nonfinite`` treats gradients that are not finite as in :func:`sparse_allreduce`, and a
    gradient of 2^103 (1e31) or more counts as not finite, since owners keep errors of sums. What a
    narrow leaf cannot hold of a sum stays in the residuals, and ``withheld`` counts such entries.

    Args:
      bits: of the codes of a worker's values, 1 to 8, and of the codes of the sums, 3 to 8.
      axis: the mesh axis (or a tuple of axes), or the MPI communicator, of the workers.
      **options: ``nonfinite``, ``local``, ``residual``, ``dense_steps`` and ``dense_leaves`` of
        :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with a :class:`SparseAllreduceState`, whose
      ``allreduce`` has v. In its info ``selected`` and ``delivered`` count all entries. An empty
      pytree is valid, and nothing is exchanged for it.

      Memory: the residual, n float32 for each worker, and v, n float32.

    Raises:
      ValueError: other ``bits``.
      ValueError: the axis is not bound.
      ValueError: the gradients are already summed over the axis.
      ValueError: updates or a state do not match.
      ValueError: a ``step_ahead`` without ``local``, for a residual of gradients.
      TypeError: leaves that are not float32, bfloat16 or float16.

    Example:
      >>> import jax.numpy as jnp, sparse_collectives as sc
      >>> tx = quantized(axis="w")
      >>> def step(gradient):
      ...     return tx.update(gradient, tx.init(gradient))[0]
      >>> update = sc.simulate(step, axis="w", axis_size=2)(jnp.array([[1.0, -3.0], [5.0, -3.0]]))
      >>> update[0].tolist()
      [3.0, -3.0]

    References:
      Tang, Yu, Lian, Zhang and Liu, `DoubleSqueeze <https://arxiv.org/abs/1905.05957>`_, ICML 2019,
      for the errors that both sides keep. Units by past updates are this library's.
    """
    checked = _contract.checked_options(axis=axis, **options)
    bits = extend.check_bits(bits)
    made = Transformation(
        ErrorFeedback(
            exchange=QuantizedExchange(bits, checked),
            options=checked,
            correction=None,
            settings=_contract.settings_of(
                checked,
                selector="none",
                allreduce=str(Spec.of("quantized", bits=bits)),
                correction="none",
            ),
        )
    )
    return _init.transformation(made.init, made.update, checked.axis)

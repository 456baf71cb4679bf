"""Ok-Topk: its selection, its allreduce and error feedback."""

from typing import Any

import optax

from optax_ext._error_feedback import _options
from optax_ext._error_feedback._options import SparseOptions, takes
from optax_ext._transforms._sparse_allreduce import selection, sparse_allreduce
from sparse_collectives import AxisName, Selector, allreduce, select


@takes(SparseOptions, allreduce.ok_topk)
def ok_topk(
    density: float,
    *,
    axis: AxisName,
    selector: Selector | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Ok-Topk: O(k) words per worker and step, for any number of workers.

    Args:
      density: k / n, the share of the gradient that is sent, in (0, 1]. The paper
        uses 0.01 for BERT and 0.02 for an LSTM.
      axis: the mesh axis (or a tuple of axes) of the data-parallel workers.
      selector: the local selection. The default is ``select.topk(density=density)``,
        which is exact at every step. With ``paper=True`` the default is the selection of the
        paper, ``select.threshold_reuse(density=density, servo=False, headroom=slack - 1)`` with a
        period of ``global_period``; with ``paper="corrected"`` it has ``servo="fixed"`` instead.
      **options: the options of :func:`sparse_allreduce` and of
        :func:`sparse_collectives.allreduce.ok_topk`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(ok_topk(density=0.01, axis="data"), optax.adam(1e-3))
      >>> as_published = ok_topk(density=0.01, axis="data", paper=True)
    """
    names = _options.names(SparseOptions)
    exchange = {name: value for name, value in options.items() if name not in names}
    if exchange.get("paper"):
        # The local and the global threshold have the same period and the same headroom.
        given = {name: value for name, value in exchange.items() if value is not None}
        exchange = {"global_period": 32, "slack": 4.0} | given
        if selector is None:
            selector = select.threshold_reuse(
                density=density,
                period=exchange["global_period"],
                servo="fixed" if exchange["paper"] == "corrected" else False,
                headroom=exchange["slack"] - 1,
            )
    return sparse_allreduce(
        selection(density, selector),
        allreduce.ok_topk(density=density, **exchange),
        axis=axis,
        **{name: value for name, value in options.items() if name in names},
    )

"""TopkA: a selection, an allgather and error feedback.

A paper's system that is TopkA with another selection has no name here: pass the selection as
``selector=``. docs/selectors.md lists them.
"""

from typing import Unpack

import optax

from optax_ext._error_feedback._options import SparseOptions, takes
from optax_ext._transforms._sparse_allreduce import selection, sparse_allreduce
from sparse_collectives import AxisName, Codec, Selector, allreduce


@takes(SparseOptions)
def topk_a(
    density: float,
    *,
    axis: AxisName,
    selector: Selector | None = None,
    codec: Codec | None = None,
    **options: Unpack[SparseOptions],
) -> optax.GradientTransformationExtraArgs:
    """TopkA: an allgather of every worker's top k, whose volume grows with P.

    Args:
      density: k / n of each worker's selection, in (0, 1].
      axis: the mesh axis (or a tuple of axes) of the data-parallel workers.
      selector: the local selection; by default ``select.topk(density=density)``.
      codec: the encoding of messages; see :func:`sparse_collectives.allreduce.topk_a`.
      **options: the options of :func:`sparse_allreduce`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` to chain before an optimizer.

    Example:
      >>> import optax
      >>> tx = optax.chain(topk_a(density=0.01, axis="data"), optax.adam(1e-3))
    """
    selector = selection(density, selector)
    return sparse_allreduce(selector, allreduce.topk_a(codec=codec), axis=axis, **options)

"""Systems of the papers: those that differ from :func:`optax_ext.topk_a` by more than a selector.

They are compositions of what the library has anyway, here by the papers' names so that they can be
run and compared with. docs/selectors.md lists which paper's system is which.
"""

from optax_ext.published._rounds import diloco, sparse_loco, streaming_diloco
from optax_ext.published._sparse import dgc, gtopk, hitopk, quantized_topk, topk_dsa

__all__ = [
    "dgc",
    "diloco",
    "gtopk",
    "hitopk",
    "quantized_topk",
    "sparse_loco",
    "streaming_diloco",
    "topk_dsa",
]

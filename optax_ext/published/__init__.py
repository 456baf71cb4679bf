"""Systems from papers that differ from :func:`optax_ext.topk_a` by more than a selector.

They are compositions of the library's parts, under the names of the papers, to run them and to
compare with them. docs/selectors.md lists which paper's system is which.
"""

from optax_ext.published._diloco import diloco, sparse_loco, streaming_diloco
from optax_ext.published._every_step import dgc, gtopk, hitopk, quantized_topk, topk_dsa

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

"""What to begin with: one list of expressions, of which README and the manual show parts.

In the expressions `rate` is the learning rate of the dense run, `m` its momentum, `r` a rank and
`optimizer` any of optax; `axis=` is left out. tests/test_docs_advice.py builds each of them.
"""

import statistics

from . import _learning
from ._pages import Rows

ADAMW = "`sparse_adamw(rate)`"
SPARSE_GRADIENTS = "`sparse_adamw(rate, limit=None)`"
FEWER_BYTES = "`sparse_adamw(rate, density=0.01)`"
MOMENTUM = "`ok_topk_sgd(rate / (1 - m), density=0.01)`"
OTHER = "`optax.chain(ok_topk(0.01), optimizer)`"
LOW_RANK = "`optax.chain(powersgd(r), optax.adamw(rate))`"
DENSE = "`optax.chain(dense(), optax.adamw(rate))`"

WITH_WARM_UP = "with `dense_steps=` and `dense_leaves=`"
ON_THE_SITES = "the same, on the axis of the sites"


def readme() -> Rows:
    """The short form."""
    return [
        ["AdamW", f"{ADAMW}, with the learning rate of the dense run"],
        ["AdamW, and embeddings or other sparse gradients", SPARSE_GRADIENTS],
        ["SGD with momentum m", f"{MOMENTUM}, Algorithm 2 of the Ok-Topk paper"],
        ["another optimizer of optax", OTHER],
        [
            "parameters sharded inside hosts or sites",
            f"{ON_THE_SITES} ([docs/sharded.md](docs/sharded.md))",
        ],
        ["nothing to compare with", DENSE],
    ]


def choosing() -> Rows:
    """By optimizer, network and model."""
    above = _learning.above_dense("sparse_adamw density=0.01", 8)
    fewer = f"a quarter of the words; the loss ended {statistics.mean(above):.1f} % above dense"
    return [
        [
            "AdamW",
            "100 Mbit/s, 4 to 32 workers; or 1 Gbit/s, about a million parameters, 4 workers",
            f"{ADAMW} ([measured](#adamw))",
        ],
        [
            "AdamW",
            "slower than 100 Mbit/s, or every byte is paid for",
            f"{FEWER_BYTES}: {fewer} with 8 workers ([measured](#adamw))",
        ],
        [
            "AdamW",
            "most gradients are sparse by themselves (embeddings)",
            SPARSE_GRADIENTS,
        ],
        [
            "AdamW",
            "1 Gbit/s, ten million parameters, several workers on a core",
            f"{LOW_RANK}, r of 1 to 4, for its speed; its loss was not measured at that size "
            "([why](#when-the-cores-are-short))",
        ],
        [
            "SGD, momentum m",
            "up to 1 Gbit/s, density 1 %",
            f"{MOMENTUM} ([measured](#sgd-with-momentum))",
        ],
        [
            "SGD, momentum m",
            "much slower links, density 0.1 %",
            "`topk_a` or `ok_topk` with `correction=` and `dense_steps=`, SGD without momentum "
            "behind it",
        ],
        [
            "any other of optax",
            "up to 1 Gbit/s",
            f"{OTHER}, {WITH_WARM_UP} ([how](training.md#what-to-begin-with))",
        ],
        [
            "any",
            "two workers; or up to four, if messages cost more than bytes (a million parameters)",
            "`topk_a` in the place of `ok_topk`",
        ],
        [
            "any",
            "parameters sharded inside hosts or sites",
            f"{ON_THE_SITES} ([measured](#sharded-inside-a-site))",
        ],
        [
            "none: logistic regression, SVM on sparse rows",
            "any",
            "nothing is selected: [linear models](linear_models.md)",
        ],
        [
            "any",
            "10 Gbit/s and more, or GPUs",
            "`dense`, until you have measured otherwise ([why](#is-it-faster))",
        ],
    ]


def training() -> Rows:
    """By optimizer alone."""
    momentum = "a delay is a momentum of its own"
    return [
        ["SGD with momentum m, density of 1 % or so", f"{MOMENTUM}: {momentum}"],
        ["AdamW", f"{ADAMW}, with the same learning rate ([measured](learning.md))"],
        [
            "another adaptive optimizer",
            f"{OTHER}, with `dense_steps=s`, a tenth of the run, and `dense_leaves=small_leaves()`",
        ],
        [
            "SGD with momentum, density of 0.1 %",
            "`correction=momentum_correction(m), dense_steps=s` in front of SGD without momentum",
        ],
    ]

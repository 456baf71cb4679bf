"""The ways to train that are compared over real links, each as a function of the rate."""

from collections.abc import Callable, Mapping, Sequence

import optax

import optax_ext

from .._common.contestants import find, optimizer
from ._contestants import DENSE, DENSITY
from ._neighbours import Option, arguments, name_of

AXIS = "workers"
NOTHING = "nothing exchanged"
Make = Callable[[optax.Schedule], optax.GradientTransformation]
_RANKS = (1, 2, 4)
# Those of PyTorch, in front of its AdamW; see `_torch_trainer`.
TORCH = {
    "PyTorch, dense": "ddp",
    "PyTorch, float16": "ddp/fp16",
    **{f"PyTorch, PowerSGD({rank})": f"ddp/powersgd{rank}" for rank in _RANKS},
}


def contestants() -> dict[str, Make]:
    """By name, the dense one first."""
    names = {DENSE: "dense", "dense, float16": "dense16", "sparse_adamw": "sparse_adamw"}
    names |= {"ok_topk before AdamW": "ok_topk/reuse"}
    for low_rank in ("powersgd", "acp_sgd"):
        names |= {f"{low_rank}({rank}) before AdamW": f"{low_rank}{rank}" for rank in _RANKS}
    return _made(names)


def in_buckets() -> dict[str, Make]:
    """Exchanges that may begin before the gradient is whole, beside those that may not."""
    names = {DENSE: "dense", NOTHING: "nothing"}
    names |= {f"dense, {count} buckets": f"dense/buckets{count}" for count in (2, 4, 8)}
    names |= {"dense, each leaf": "dense/leaves", "ok_topk": "ok_topk/reuse"}
    names |= {f"ok_topk, {count} buckets": f"ok_topk/reuse/buckets{count}" for count in (2, 4)}
    return _made(names)


def with_norms() -> dict[str, Make]:
    """LAMB behind a dense exchange, by who computes the norms of the layers."""
    return _made({name: name for name in ("lamb, every worker", "lamb, slices", "lamb, layers")})


def neighbour(given: Sequence[Option]) -> tuple[str, Make]:
    """``sparse_adamw`` with options, and its name; a ValueError where an option is none."""
    make = optax_ext.sparse_adamw
    made = {"axis": AXIS, **arguments(make, given)}
    make(0.1, **made)
    return name_of(make, given), lambda rate: make(rate, **made)


def _made(names: Mapping[str, str]) -> dict[str, Make]:
    def made(name: str) -> Make:
        # A whole optimizer has a density of its own.
        density = None if find(name).whole else DENSITY
        return lambda rate: optimizer(f"{name}/adamw", density, AXIS, rate)

    return {name: made(contestant) for name, contestant in names.items()}

"""The contestants of all benchmarks: transformations and selectors, each under one name.

A benchmark chooses names from here. If its own table uses another name, it gives the mapping.
"""

import inspect
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_ext
from sparse_collectives import Selector, SparseAllreduce, allreduce, select, wire
from sparse_collectives.cost_model import ALGORITHMS

DECAY, RATE = 0.01, 1e-3
Make = Callable[..., optax.GradientTransformation]
Exchange = Callable[[float], SparseAllreduce]


class Contestant(NamedTuple):
    """A way to exchange gradients, or a complete optimizer.

    Attributes:
      make: ``make(density, axis, rate=, selector=)``, which ignores the arguments that it does not
        need. None for a hook of PyTorch's DistributedDataParallel, named after the slash.
      whole: whether it is a complete optimizer, so that nothing follows it in a chain.
      entries: the density as a multiple of the density at which Ok-Topk receives as many words.
      alone: whether nothing is exchanged, so that the workers diverge.
      matrices: whether it needs gradients of matrices.
    """

    make: Make | None
    whole: bool = False
    entries: float = 1.0
    alone: bool = False
    matrices: bool = False

    @property
    def torch(self) -> bool:
        """Whether it needs PyTorch."""
        return self.make is None


def find(name: str) -> Contestant:
    """The contestant; ``/adamw`` at the end of a name selects the optimizer after the exchange."""
    return CONTESTANTS[name.removesuffix("/adamw")]


def optimizer(
    name: str, density: float | None, axis: Any, rate: Any = RATE
) -> optax.GradientTransformation:
    """A contestant, followed by AdamW if its name says so, and otherwise by SGD."""
    contestant = find(name)
    made = contestant.make(density, axis, rate=rate)
    if contestant.whole:
        return made
    if name.endswith("/adamw"):
        return optax.chain(made, optax.adamw(rate, weight_decay=DECAY))
    return optax.chain(made, optax.sgd(rate))


def _free(function: Callable[..., Any], *fixed: Any, **options: Any) -> Make:
    """A contestant without a density."""
    return lambda density, axis, **unused: function(*fixed, axis=axis, **options)


def _sparse(function: Callable[..., Any], reuse: bool = False, **options: Any) -> Make:
    """A contestant that selects entries, exactly or by reused thresholds."""

    def make(density: float, axis: Any, selector: Any = None, **unused: Any) -> Any:
        if reuse:
            selector = selector or select.threshold_reuse(density=density)
        chosen = {"selector": selector} if selector else {}
        return function(density, axis=axis, **chosen, **options)

    return make


def _ok_topk(codec: str = "raw", **options: Any) -> Make:
    return _sparse(optax_ext.ok_topk, codec=getattr(wire, codec)(), **options)


def _around(exchange: Exchange) -> Make:
    """An allreduce that has no name in `optax_ext`."""

    def make(density: float, axis: Any, selector: Any = None, **unused: Any) -> Any:
        chosen = selector or select.topk(density=density)
        return optax_ext.sparse_allreduce(chosen, exchange(density), axis=axis)

    return make


def _whole(function: Make, exchange: Exchange | None = None, **options: Any) -> Make:
    def make(density: float | None, axis: Any, rate: Any = RATE, selector: Any = None) -> Any:
        more = {"allreduce": exchange(density)} if exchange else {}
        more |= {"selector": selector} if selector else {}
        return function(rate, density=density, axis=axis, **more, **options)

    return make


def _adamw(exchange: Exchange | None = None, **options: Any) -> Make:
    return _whole(optax_ext.sparse_adamw, exchange, weight_decay=DECAY, **options)


def _around_made(wrap: Callable[..., Any], make: Make, *more: Any) -> Make:
    """A contestant wrapped by ``wrap``."""
    return lambda *given, **options: wrap(make(*given, **options), *more)


def _of_sums(exchange: optax.GradientTransformation) -> optax.GradientTransformation:
    """Computes all gradients, but exchanges only one number for each leaf."""

    def init(params: Any) -> Any:
        return exchange.init(jax.tree.map(jnp.sum, params))

    def update(tree: Any, state: Any, params: Any = None):
        del params
        sums, state = exchange.update(jax.tree.map(jnp.sum, tree), state)
        return jax.tree.map(lambda x, like: jnp.broadcast_to(x, like.shape), sums, tree), state

    return optax.GradientTransformation(init, update)


def _lamb(ratio: Callable[..., optax.GradientTransformation]) -> Contestant:
    """LAMB after a dense exchange; ``ratio`` determines who computes the norms of the layers."""

    def make(density: float, axis: Any, rate: Any = RATE, **unused: Any) -> Any:
        decay, scaled = optax.add_decayed_weights(DECAY), optax.scale_by_learning_rate(rate)
        exchange = optax_ext.dense(axis=axis, buckets=1)
        return optax.chain(exchange, optax.scale_by_adam(), decay, ratio(axis=axis), scaled)

    return Contestant(make, whole=True)


def _by_layers(axis: Any) -> optax.GradientTransformation:
    """The trust ratio, each layer's computed by one worker."""

    def ratio(update: jax.Array, weights: jax.Array) -> jax.Array:
        norms = jnp.linalg.norm(weights), jnp.linalg.norm(update)
        return jnp.where((norms[0] == 0) | (norms[1] == 0), 1.0, norms[0] / norms[1])

    def scaled(updates: Any, params: Any) -> Any:
        ratios = optax_ext.contrib.distributed(ratio, axis=axis)(updates, params)
        return jax.tree.map(lambda x, scale: x * scale, updates, ratios)

    return optax.stateless(scaled)


def _exchange_of(density: float) -> SparseAllreduce:
    return allreduce.ok_topk(density=density)


# One allreduce of everything is the strongest dense exchange when messages have a latency.
_DENSE = _free(optax_ext.dense, buckets=1)
_LEAVES = _free(optax_ext.dense)
_AGREED = _around(lambda density: allreduce.partitioned_topk())
_OK_TOPK, _REUSE = _ok_topk(), _ok_topk(reuse=True)
# Five times the entries fit in the words of Ok-Topk, since only indices and sums are sent.
_ADAMW, _SGD = (
    Contestant(make, whole=True, entries=5) for make in (_adamw(), _whole(optax_ext.sparse_sgd))
)

# Exchanges of gradients only.
_EXCHANGES: dict[str, Make] = {
    "dense": _DENSE,
    "dense/leaves": _LEAVES,
    **{f"dense/buckets{n}": _free(optax_ext.dense, buckets=n) for n in (2, 4, 8)},
    # As PyTorch's hook does. XLA does not add bfloat16 values on a CPU.
    "dense16": _free(optax_ext.dense, buckets=1, dtype="float16"),
    "nothing": _around_made(_of_sums, _DENSE),
    "delayed(dense)": _around_made(optax_ext.delayed, _LEAVES),
    "ok_topk": _OK_TOPK,
    "ok_topk/rotation": _ok_topk(schedule="rotation"),
    **{f"ok_topk/{codec}": _ok_topk(codec) for codec in ("narrow16", "narrow8")},
    "ok_topk/reuse": _REUSE,
    **{f"ok_topk/reuse/{codec}": _ok_topk(codec, reuse=True) for codec in ("narrow16", "narrow8")},
    "ok_topk/reuse/global32": _ok_topk(reuse=True, global_period=32),
    **{f"ok_topk/reuse/buckets{n}": _around_made(optax_ext.bucketed, _REUSE, n) for n in (2, 4)},
    "ok_topk, residual in bfloat16": _ok_topk(residual=optax_ext.residual(jnp.bfloat16)),
    "ok_topk, small leaves dense": _ok_topk(dense_leaves=optax_ext.small_leaves()),
    "ok_topk, momentum correction": _ok_topk(correction=optax_ext.momentum_correction(0.9)),
    "ok_topk, nonfinite='drop'": _ok_topk(nonfinite="drop"),
    "ok_topk, xi every 100 steps": lambda density, axis: optax_ext.measure_xi(
        optax_ext.ok_topk(density, axis=axis), axis=axis, every=100
    ),
    "ok_topk, 100 dense steps first": _ok_topk(dense_steps=100),
    "ok_topk, 4 buckets": _around_made(optax_ext.bucketed, _OK_TOPK, 4),
    "delayed(ok_topk)": _around_made(optax_ext.delayed, _OK_TOPK),
    "partitioned_topk": _AGREED,
    "partitioned_topk/few": _around(lambda density: allreduce.partitioned_topk(bits=None)),
    "partitioned_topk, bits (1, 3)": _around(
        lambda density: allreduce.partitioned_topk(bits=(1, 3))
    ),
    "bucketed(partitioned_topk, 3)": _around_made(optax_ext.bucketed, _AGREED, 3),
    "delayed(partitioned_topk)": _around_made(optax_ext.delayed, _AGREED),
    "topk_a": _sparse(optax_ext.topk_a),
    "topk_a, adtopk": lambda density, axis: optax_ext.topk_a(
        density, axis=axis, selector=select.published.adtopk(density=density)
    ),
    "topk_dsa": _sparse(optax_ext.published.topk_dsa),
    "gtopk": _sparse(optax_ext.published.gtopk),
    "spardl": _around(lambda density: allreduce.spardl(density=density)),
    **{
        name: _around(lambda density, name=name: ALGORITHMS[name].factory())
        for name in ("ssar_recursive_double", "ssar_split_allgather", "dsar_split_allgather")
    },
    "hitopk": _sparse(optax_ext.published.hitopk, inner_axis="device"),
}

CONTESTANTS: dict[str, Contestant] = {
    **{name: Contestant(make) for name, make in _EXCHANGES.items()},
    # Exchanges nothing: the rest of a step, as if its exchange were free.
    "alone": Contestant(lambda *given, **options: optax.identity(), alone=True),
    **{
        f"{name}{rank}": Contestant(_free(getattr(optax_ext, name), rank), matrices=True)
        for name in ("powersgd", "acp_sgd")
        for rank in (1, 2, 4)
    },
    "quantized": Contestant(_free(optax_ext.quantized, (2, 4))),
    "quantized, bits (1, 3)": Contestant(_free(optax_ext.quantized, (1, 3))),
    "sparse_adamw": _ADAMW,
    "sparse_adamw, 32 bits": _ADAMW._replace(
        make=_adamw(lambda density: allreduce.partitioned_topk()), entries=5 / 3
    ),
    "sparse_adamw, bits (1, 3)": _ADAMW._replace(
        make=_adamw(lambda density: allreduce.partitioned_topk(bits=(1, 3)))
    ),
    "sparse_adamw, ok_topk": _ADAMW._replace(make=_adamw(_exchange_of), entries=1),
    "sparse_adamw, complete ok_topk": _ADAMW._replace(
        make=_adamw(lambda density: allreduce.full_sums(_exchange_of(density))), entries=1
    ),
    "sparse_adamw, delayed": _ADAMW._replace(make=_around_made(optax_ext.delayed, _ADAMW.make)),
    "sparse_adamw, factors": _ADAMW._replace(make=_adamw(moments="factors")),
    "sparse_adamw, no step-ahead": _ADAMW._replace(make=_adamw(residual=optax_ext.residual())),
    "sparse_sgd": _SGD,
    "sparse_sgd, bits (1, 3)": _SGD._replace(
        make=_whole(optax_ext.sparse_sgd, lambda density: allreduce.partitioned_topk(bits=(1, 3)))
    ),
    "sparse_sgd, ok_topk": Contestant(_whole(optax_ext.sparse_sgd, _exchange_of), whole=True),
    "ok_topk_sgd": Contestant(_whole(optax_ext.ok_topk_sgd), whole=True),
    "lamb, every worker": _lamb(lambda axis: optax.scale_by_trust_ratio()),
    "lamb, slices": _lamb(optax_ext.contrib.scale_by_trust_ratio),
    "lamb, layers": _lamb(_by_layers),
    **dict.fromkeys(("ddp", "ddp/fp16"), Contestant(None)),
    **{f"ddp/powersgd{rank}": Contestant(None) for rank in (1, 2, 4)},
}


def selector_factory(name: str) -> Callable[..., Selector]:
    """The factory of the selector of that name, which may be a published one."""
    return getattr(select, name, None) or getattr(select.published, name)


def selectors(density: float, magnitude: float | None = None) -> dict[str, Selector]:
    """All selectors by name, the default first; ``threshold`` defaults to normal entries."""
    made = {}
    for name in (*select.__all__, *select.published.__all__):
        factory = selector_factory(name)
        special = not name[0].islower() or name in ("published", "threshold", "adtopk_threshold")
        if not special and "density" in inspect.signature(factory).parameters:
            made[name] = factory(density=density)
    made["adtopk_threshold"] = select.published.adtopk_threshold(
        density=density, steps=10**9, warmup=2
    )
    made["layerwise(topk)"] = select.layerwise(select.topk(density=density))
    if magnitude is None:
        magnitude = statistics.NormalDist().inv_cdf(1 - min(density, 0.999) / 2)
    made["threshold"] = select.threshold(density=min(1.0, 1.5 * density), magnitude=magnitude)
    first = ("topk", "threshold_reuse")
    return {name: made[name] for name in (*first, *(x for x in made if x not in first))}

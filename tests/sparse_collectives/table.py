"""All allreduces, selectors and codecs, which the tests iterate over: a new one adds a row."""

import functools
import inspect
import math
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import sparse_collectives as sc
from tests.sparse_collectives import helpers

DENSITY = 0.05


def public(package: Any, kind: type) -> set[str]:
    """The names of a package, and of its ``published``, that are annotated to return that kind."""
    return {
        name
        for module in (package, package.published)
        for name in module.__all__
        if inspect.isfunction(function := getattr(module, name))
        and typing.get_type_hints(function)["return"] is kind
    }


ALL = {"slack": math.inf, "fill": math.inf}
# The allreduces over one axis, each once.
ALGORITHMS = {
    name: row
    for name, row in sc.cost_model.ALGORITHMS.items()
    if not row.two_level and "(" not in name
}
# Whose workers may keep sums of entries that others sent.
KEEPS_SUMS = ("gtopk", "spardl")
ALSO = {"dense_bucketed": {"buckets": 3}}


def parameters(name: str) -> Any:
    """The arguments of the factory of an allreduce, by name."""
    return inspect.signature(ALGORITHMS[name].factory).parameters


def make(
    name: str, density: float | None = None, codec: Any = None, **options
) -> sc.SparseAllreduce:
    """The allreduce of that name, with the density and the codec if it takes them."""
    takes = parameters(name)
    if density is None and "density" in takes and takes["density"].default is inspect._empty:
        density = DENSITY
    given = {"density": density, "codec": codec}
    given = {key: value for key, value in given.items() if key in takes}
    return ALGORITHMS[name].factory(**{**given, **ALSO.get(name, {}), **options})


class Row(NamedTuple):
    """An allreduce of DENSITY as it is made for the contract, and its properties."""

    allreduce: sc.SparseAllreduce
    # Whether every selected entry is delivered.
    delivers_all: bool
    # Whether workers may also keep rounding errors or sums of others' entries, besides the entries
    # that they selected.
    rounds: bool


def row(name: str, *, delivers_all: bool | None = None, **options) -> Row:
    algorithm = ALGORITHMS[name]
    if delivers_all is None:
        delivers_all = algorithm.room == {} and "codec" not in options
    rounds = name in KEEPS_SUMS or "codec" in options or "bits" in options
    return Row(make(name, **options), delivers_all, rounds)


def full_sums(name: str, **options) -> Row:
    inner = row(name, **options)
    return Row(sc.allreduce.full_sums(inner.allreduce), inner.delivers_all, inner.rounds)


def auto(**options) -> sc.SparseAllreduce:
    return sc.planner.auto(density=DENSITY, **options)


LOSSY = helpers.lossy_codec()
VARIANTS = {
    "partitioned_topk, few bits": row("partitioned_topk", density=DENSITY, bits=None),
    "partitioned_topk, few bits both ways": row("partitioned_topk", density=DENSITY, bits=(1, 3)),
    "full_sums ok_topk": full_sums("ok_topk"),
    "full_sums spardl": full_sums("spardl"),
    "full_sums ring_sparse": full_sums("ring_sparse", delivers_all=True, **ALL),
    "ok_topk rotation, 2 messages in flight": row(
        "ok_topk", schedule="rotation", messages_in_flight=2
    ),
    "ok_topk all_to_all": row("ok_topk", schedule="all_to_all"),
    "ok_topk, reused global threshold": row("ok_topk", global_period=3),
    "ok_topk, balanced regions": row("ok_topk", regions="balanced", repartition_period=2),
    "ok_topk, equal regions": row("ok_topk", regions="equal"),
    "ok_topk, no slack": row("ok_topk", slack=1.0),
    "ok_topk, as published": row("ok_topk", paper=True),
    "ssar_split_allgather, room for all": row("ssar_split_allgather", delivers_all=True, **ALL),
    "ring_sparse": row("ring_sparse", delivers_all=True, **ALL),
    **{
        f"{name}, lossy": row(name, codec=LOSSY)
        for name in ALGORITHMS
        if "codec" in parameters(name)
    },
    "dsar_split_allgather, dense lossy": row(
        "dsar_split_allgather", delivers_all=False, slack=math.inf, dense_codec=LOSSY
    )._replace(rounds=True),
    # `dense` for one worker, `topk_a` for two to four of them, and `spardl` for more.
    "auto, which may be spardl": Row(auto(latency="1ms", bandwidth="1Mbit"), False, True),
    "auto, ok_topk": Row(
        auto(latency=0.0, bandwidth="1kbit", candidates=["ok_topk"]), False, False
    ),
}
ALLREDUCES = {name: row(name) for name in ALGORITHMS} | VARIANTS
# The allreduces over two mesh axes, with every way to group the workers into nodes.
OUTER = {
    "topk_a": ALLREDUCES["topk_a"],
    "ok_topk": ALLREDUCES["ok_topk"],
    "ok_topk, as published": ALLREDUCES["ok_topk, as published"],
    "partitioned_topk, few bits": ALLREDUCES["partitioned_topk, few bits"],
    "partitioned_topk, few bits both ways": ALLREDUCES["partitioned_topk, few bits both ways"],
    "auto": Row(auto(latency="1us", bandwidth="1Gbit"), True, False),
}
OVER_NODES = {
    f"hierarchical {name}": outer._replace(
        allreduce=sc.allreduce.hierarchical(inner_axis="device", outer=outer.allreduce)
    )
    for name, outer in OUTER.items()
} | {"torus_2d": Row(sc.allreduce.published.torus_2d(), True, False)}

CODECS: dict[str, Callable[..., sc.Codec]] = {
    name: getattr(sc.wire, name) for name in helpers.CODECS
}
# With buckets that are short compared with the vectors of the tests.
SHORT_CODECS: dict[str, Callable[[], sc.Codec]] = {
    **{name: CODECS[name] for name in ("raw", "bf16", "narrow16", "narrow8")},
    **{f"qsgd{b}": functools.partial(sc.wire.qsgd, bits=b, bucket=16) for b in (2, 4, 8)},
}
LOSSY_CODECS = {name: make_codec() for name, make_codec in CODECS.items() if name != "raw"}
ENCODED = tuple(name for name in ALGORITHMS if "codec" in parameters(name))


def encoded(name: str, codec: sc.Codec) -> sc.SparseAllreduce:
    """An allreduce whose messages are encoded, the dense ones as well."""
    dense = {"dense_codec": codec} if "dense_codec" in parameters(name) else {}
    return make(name, codec=codec, **dense)


WITH_CODECS = {
    f"{name}, {codec}": Row(encoded(name, made), False, True)
    for name in ENCODED
    for codec, made in LOSSY_CODECS.items()
}

# Each with its steps or stages short enough for a few steps.
SELECTORS: dict[str, Callable[..., sc.Selector]] = {
    "topk": lambda d: sc.select.topk(density=d),
    "threshold_reuse": lambda d: sc.select.threshold_reuse(density=d, period=2),
    "threshold": lambda d: sc.select.threshold(magnitude=0.5, density=d),
    "bucketed": lambda d: sc.select.bucketed(density=d, bucket=16),
    "mstopk": lambda d: sc.select.published.mstopk(density=d),
    "redsync": lambda d: sc.select.published.redsync(density=d),
    "dgc": lambda d: sc.select.published.dgc(density=d),
    "gaussian_k": lambda d: sc.select.published.gaussian_k(density=d),
    "sidco": lambda d: sc.select.published.sidco(density=d),
    "random_k": lambda d: sc.select.random_k(density=d),
    "adtopk": lambda d: sc.select.published.adtopk(density=d),
    "adtopk_interleaved": lambda d: sc.select.published.adtopk_interleaved(density=d),
    "adtopk_threshold": lambda d: sc.select.published.adtopk_threshold(density=d, steps=4),
    "layerwise": lambda d: sc.select.layerwise(sc.select.topk(density=d)),
    "scheduled": lambda d: sc.select.scheduled(
        sc.select.topk(density=d), sc.select.staged_density(1, (d, d / 2))
    ),
}
SELECTOR_VARIANTS: dict[str, Callable[..., sc.Selector]] = {
    "gaussian_k, adjusted": lambda d: sc.select.published.gaussian_k(density=d, adjust=True),
    "sidco, gamma": lambda d: sc.select.published.sidco(density=d, distribution="gamma"),
    "sidco, pareto": lambda d: sc.select.published.sidco(density=d, distribution="pareto"),
}

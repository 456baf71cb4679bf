"""Optimizers composed in any way, with parameters, numbers of workers, and contents of states."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import strategies as st

import optax_ext
import sparse_collectives as sc
from tests.fuzz.configurations import SEEDS

STEPS, ROUND, AXIS = 4, 2, "data"
WORKERS = (4, 2, 3, 1, 8)
LEAVES = ("['body']['bias']", "['body']['kernel']", "['head']", "['scale']")
SHAPES = ((7,), (5, 4), (4, 5), (), (1,), (2, 1, 3), (1, 1), (0,))
DTYPES = ("float32", "float32", "bfloat16", "float16")
# Half a unit in the last place, as a share of the number.
HALF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# A float16 below this has a fixed spacing.
SMALLEST = 2.0**-24


def _sgd(**options: Any) -> Any:
    return optax_ext.sparse_sgd(0.1, axis=AXIS, density=0.3, **options)


def _adamw(**options: Any) -> Any:
    return optax_ext.sparse_adamw(0.03, axis=AXIS, density=0.3, **options)


def _injected(make: Any, **options: Any) -> Any:
    static = ("density", "every")
    made = optax.inject_hyperparams(make, static_args=static, hyperparam_dtype=jnp.float32)
    return made(learning_rate=0.05, axis=AXIS, **options)


def _local(inner: Any, outer: Any, **options: Any) -> Any:
    return optax_ext.local_steps(inner, outer, every=ROUND, **options)


RESIDUAL = optax_ext.residual
SMALL = optax_ext.small_leaves(min_size=6)
CORRECTION = optax_ext.momentum_correction(0.9)
# Residuals that are updates and looked ahead to, which `flush` applies.
AHEAD: dict[str, Callable[[], Any]] = {
    "sparse_sgd": _sgd,
    "sparse_adamw": lambda: _adamw(weight_decay=0.1),
    "sparse_adamw, factors": lambda: _adamw(moments="factors", limit=None),
    "sparse_sgd, bfloat16": lambda: _sgd(residual=RESIDUAL(jnp.bfloat16, step_ahead=1.0)),
    "sparse_sgd, twice ahead": lambda: _sgd(residual=RESIDUAL(step_ahead=2.0)),
    "sparse_sgd, correction": lambda: _sgd(correction=CORRECTION, dense_leaves=SMALL),
    "sparse_sgd, dense at first": lambda: _sgd(dense_steps=1, nonfinite="drop"),
    "sparse_sgd, ok_topk": lambda: _sgd(allreduce=sc.allreduce.ok_topk(density=0.3)),
    "sparse_sgd, every": lambda: _sgd(every=3),
    "sparse_adamw, every": lambda: _adamw(every=ROUND, weight_decay=0.1),
    "sparse_optimizer": lambda: optax_ext.sparse_optimizer(
        optax.scale_by_rms(), 0.03, axis=AXIS, density=0.3, every=3
    ),
    "injected sparse_adamw": lambda: _injected(optax_ext.sparse_adamw, density=0.3),
    "injected sparse_sgd": lambda: _injected(optax_ext.sparse_sgd, density=0.3, every=3),
    "bucketed sparse_sgd": lambda: optax_ext.bucketed(_sgd(), 2),
    "quantized ahead": lambda: optax_ext.quantized(
        axis=AXIS, local=optax.scale(-0.1), residual=RESIDUAL(step_ahead=1.0)
    ),
    "local_steps, sparse": lambda: _local(optax.adam(0.03), _sgd()),
}
# Residuals that `flush` refuses, or none.
OTHERS: dict[str, Callable[[], Any]] = {
    "ok_topk_sgd": lambda: optax_ext.ok_topk_sgd(0.1, density=0.3, axis=AXIS),
    "ok_topk, adam": lambda: optax.chain(optax_ext.ok_topk(0.3, axis=AXIS), optax.adam(0.03)),
    "topk_a, MultiSteps": lambda: optax.chain(
        optax_ext.topk_a(0.3, axis=AXIS, residual=RESIDUAL(jnp.bfloat16)),
        optax.MultiSteps(optax.sgd(0.1, momentum=0.9), 2).gradient_transformation(),
    ),
    "bucketed, if finite": lambda: optax.chain(
        optax_ext.bucketed(optax_ext.topk_a(0.3, axis=AXIS), 2),
        optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3),
    ),
    "quantized, lion": lambda: optax.chain(optax_ext.quantized(axis=AXIS), optax.lion(0.01)),
    "powersgd, ema": lambda: optax.chain(
        optax_ext.powersgd(1, axis=AXIS), optax.ema(0.9), optax.sgd(0.1)
    ),
    "measured, adam": lambda: optax.chain(
        optax_ext.measure_xi(optax_ext.topk_a(0.3, axis=AXIS), axis=AXIS, every=2),
        optax.adam(0.03),
    ),
    "delayed inside": lambda: optax.chain(
        optax_ext.delayed(optax_ext.topk_a(0.3, axis=AXIS)), optax.sgd(0.1)
    ),
    "dense, adam": lambda: optax.chain(optax_ext.dense(axis=AXIS), optax.adam(0.03)),
    "dense, sgd": lambda: optax.chain(optax_ext.dense(axis=AXIS), optax.sgd(0.1)),
    "local_steps, dense": lambda: _local(
        optax.sgd(0.1), optax.chain(optax_ext.dense(axis=AXIS), optax.sgd(1.0))
    ),
    "diloco": lambda: optax_ext.published.diloco(optax.adam(0.03), axis=AXIS, every=ROUND),
    "sparse_loco": lambda: optax_ext.published.sparse_loco(
        optax.adam(0.03), density=0.3, axis=AXIS, every=ROUND
    ),
    "streaming": lambda: optax_ext.published.streaming_diloco(
        optax.sgd(0.1, momentum=0.9), axis=AXIS, every=2 * ROUND, fragments=1, delay=1
    ),
}
BEFORE: dict[str, Callable[[], Any]] = {
    "clip": lambda: optax.clip(3.0),
    "clip norm": lambda: optax_ext.local_clip_by_global_norm(9.0, axis=AXIS),
    "decay": lambda: optax.add_decayed_weights(0.1),
    "scale": lambda: optax.scale(0.5),
}
# `flush` would leave them out, and refuses.
AFTER: dict[str, Callable[[], Any]] = {
    "clip": lambda: optax.clip(3.0),
    "ema": lambda: optax.ema(0.9, debias=False),
    "if finite": lambda: optax.apply_if_finite(optax.identity(), 3),
    "nothing": optax.identity,
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "multi_steps": lambda tx: optax_ext.multi_steps(tx, 2),
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "delayed": optax_ext.delayed,
    "chain": optax.chain,
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}


class Composed(NamedTuple):
    """A transformation, and what it refuses, as functions of the shapes of its leaves by name."""

    text: str
    tx: Any
    starts: Callable[[dict], bool] = lambda leaves: True  # whether there can be a state
    # The leaves whose updates something else would change before they are applied.
    follows: Callable[[dict], frozenset] = lambda leaves: frozenset()


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Case:
    """A composition and its parameters, the workers before and after, and the steps in between."""

    of: Composed
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    workers: tuple[int, int]
    steps: int
    moving: str  # how far workers have moved in a round of local steps
    scale: float  # a power of two, of the numbers that fill a state
    seed: int

    @property
    def leaves(self) -> dict[str, tuple[int, ...]]:
        return dict(zip(LEAVES, self.shapes, strict=True))

    def params(self) -> Any:
        rng = np.random.default_rng(self.seed)
        pairs = zip(self.shapes, self.dtypes, strict=True)
        made = [jnp.asarray(rng.uniform(0.5, 2, shape), dtype) for shape, dtype in pairs]
        bias, kernel, head, scale = made
        return {"body": {"bias": bias, "kernel": kernel}, "head": head, "scale": scale}

    def batch(self, workers: int, step: int) -> list[np.ndarray]:
        """The gradients of all workers, a leaf ``[P, ...]`` for each parameter."""
        rng = np.random.default_rng((self.seed, step))
        return [rng.standard_normal((workers, *s)).astype(np.float32) for s in self.shapes]

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(repr(self))

    def __repr__(self) -> str:
        return (
            f"{self.of.text}, {self.shapes}, {self.dtypes}, workers={self.workers}, "
            f"steps={self.steps}, moving={self.moving}, scale={self.scale}, seed={self.seed}"
        )


def _within(leaves: dict, names: frozenset) -> dict:
    return {name: shape for name, shape in leaves.items() if name in names}


def _by_name(names: frozenset, there: Any, elsewhere: Any) -> Callable[[Any], Any]:
    """A function of a tree that labels leaves by their names."""

    def labels(tree: Any) -> Any:
        def one(path: Any, _: Any) -> Any:
            return there if jax.tree_util.keystr(path) in names else elsewhere

        return jax.tree_util.tree_map_with_path(one, tree)

    return labels


@st.composite
def exchanges(draw: Any) -> Composed:
    name = draw(st.sampled_from((*AHEAD, *OTHERS)))
    made = (AHEAD | OTHERS)[name]()
    return Composed(name, made)


def _partition(draw: Any, inner: Composed) -> Composed:
    """Groups of leaves, of which some may have no leaves."""
    names = frozenset(name for name in LEAVES if draw(st.booleans()))
    frozen = Composed("frozen", optax.set_to_zero())
    other = draw(st.one_of(st.just(frozen), exchanges()))
    groups, text = {"a": inner.tx, "b": other.tx}, f"partition(a={inner.text}, b={other.text}"
    if draw(st.booleans()):
        unused = draw(exchanges())
        groups, text = {**groups, "unused": unused.tx}, f"{text}, unused={unused.text}"
    return Composed(
        f"{text}, a={sorted(names)})",
        optax.partition(groups, _by_name(names, "a", "b")),
        lambda leaves: inner.starts(_within(leaves, names)),
        lambda leaves: inner.follows(_within(leaves, names)),
    )


def _masked(draw: Any, inner: Composed) -> Composed:
    """Zeros for some of the leaves, and the others after it."""
    names = frozenset(name for name in LEAVES if draw(st.booleans()))
    zeros = optax.masked(optax.set_to_zero(), _by_name(names, False, True))
    return Composed(
        f"masked({inner.text}, {sorted(names)})",
        optax.chain(zeros, optax.masked(inner.tx, _by_name(names, True, False))),
        lambda leaves: inner.starts(_within(leaves, names)),
        lambda leaves: inner.follows(_within(leaves, names)),
    )


def _in_chain(draw: Any, inner: Composed) -> Composed:
    """Something before it, or after it, in a chain that may be named."""
    which = draw(
        st.sampled_from(("before", "before", "named", "named, masked", "named alone", "after"))
    )
    if which == "after":
        name = draw(st.sampled_from(tuple(AFTER)))
        text, tx = f"chain({inner.text}, {name})", optax.chain(inner.tx, AFTER[name]())
    elif which == "named alone":
        text, tx = f"named({inner.text})", optax.named_chain(("x", inner.tx))
    else:
        name = draw(st.sampled_from(tuple(BEFORE)))
        text, first = f"{which}({name}, {inner.text})", BEFORE[name]()
        if which.startswith("named"):
            parts = first, inner.tx
            if "masked" in which:
                parts = tuple(
                    optax.masked(x, _by_name(frozenset(LEAVES), True, False)) for x in parts
                )
            tx = optax.named_chain(*zip("za", parts, strict=True))
        else:
            tx = optax.chain(first, inner.tx)
    # The state of a named chain does not say its order.
    next_to = which in ("named", "named, masked", "after")
    return Composed(
        text,
        tx,
        inner.starts,
        lambda leaves: frozenset(leaves) if next_to else inner.follows(leaves),
    )


def _around(draw: Any, inner: Composed) -> Composed:
    name = draw(st.sampled_from((*AROUND, "multi_steps", "MultiSteps", "delayed", "chain")))

    def starts(leaves: dict) -> bool:
        # optax.MultiSteps has no axis for the workers in its accumulators.
        scalar = name == "MultiSteps" and () in leaves.values()
        return inner.starts(leaves) and name != "apply_if_finite" and not scalar

    return Composed(f"{name}({inner.text})", AROUND[name](inner.tx), starts, inner.follows)


@st.composite
def cases(draw: Any, *, most: int = 0) -> Case:
    """A composition of depth 1 to 3, with at most so many steps."""
    composed = draw(exchanges())
    for _ in range(draw(st.integers(1, 3))):
        composed = draw(st.sampled_from((_partition, _masked, _in_chain, _around)))(draw, composed)
    shapes = tuple(draw(st.sampled_from(SHAPES)) for _ in LEAVES)
    dtypes = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    return Case(
        of=composed,
        shapes=shapes,
        dtypes=(*dtypes, *dtypes),
        workers=(draw(st.sampled_from(WORKERS)), draw(st.sampled_from(WORKERS))),
        steps=draw(st.integers(0, most)),
        moving=draw(st.sampled_from(("not", "in a round", "rounding"))),
        scale=2.0 ** draw(st.sampled_from((0, -12, 13))),
        seed=draw(SEEDS),
    )


@st.composite
def pairs(draw: Any) -> tuple[Case, Case]:
    """Two cases with the same optimizer, parameters of the same shapes, or neither."""
    first, second = draw(cases()), draw(cases())
    common = draw(st.sampled_from((("of",), ("of", "dtypes"), ("shapes", "dtypes"), ())))
    return first, dataclasses.replace(second, **{x: getattr(first, x) for x in common})

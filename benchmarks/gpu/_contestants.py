"""The selectors and the steps that are compiled for a GPU, and timed on one."""

import inspect
import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import optax_ext
import sparse_collectives as sc
from sparse_collectives import Layout, Selector, select

# The width of matrices as in a transformer, and the most entries of one.
_WIDTH, _MATRIX = 1024, 2**22
# They need more than a density, or wrap another one.
_SPECIAL = {"threshold", "adtopk_threshold"}
_RANK, _RATE = 4, 1e-3


class Step(NamedTuple):
    """A contestant that is a whole step of error feedback.

    Attributes:
      made: the transformation, from the density and the axis.
      matrices: whether the gradient is one of matrices, instead of a single vector.
    """

    made: Callable[[float, str], optax.GradientTransformation]
    matrices: bool = False


def selectors(density: float, magnitude: float | None = None) -> dict[str, Selector]:
    """Every selector by name, that of the default first.

    Args:
      density: k / n.
      magnitude: what ``threshold`` selects from; None for normally distributed entries.
    """
    public = {name: getattr(select, name) for name in select.__all__ if name[0].islower()}
    made = {
        name: factory(density=density)
        for name, factory in public.items()
        if name not in _SPECIAL and "density" in inspect.signature(factory).parameters
    }
    made["adtopk_threshold"] = select.adtopk_threshold(density=density, steps=10**9, warmup=2)
    made["layerwise(topk)"] = select.layerwise(select.topk(density=density))
    if magnitude is None:
        magnitude = statistics.NormalDist().inv_cdf(1 - min(density, 0.999) / 2)
    made["threshold"] = select.threshold(density=min(1.0, 1.5 * density), magnitude=magnitude)
    first = ("topk", "threshold_reuse")
    return {name: made[name] for name in (*first, *(x for x in made if x not in first))}


def steps() -> dict[str, Step]:
    """Every step by name, the dense baseline first."""
    exchanges: dict[str, Callable[[float], Any]] = {
        "agreed": lambda density: sc.allreduce.agreed(),
        "agreed_few": lambda density: sc.allreduce.agreed(bits="few"),
        "spardl": lambda density: sc.allreduce.spardl(density=density),
        "ssar_recursive_double": lambda density: sc.allreduce.ssar_recursive_double(),
        "ssar_split_allgather": lambda density: sc.allreduce.ssar_split_allgather(),
        "dsar_split_allgather": lambda density: sc.allreduce.dsar_split_allgather(),
    }
    return {
        "dense": Step(lambda share, axis: optax_ext.dense(axis=axis)),
        "ok_topk": Step(lambda share, axis: optax_ext.ok_topk(share, axis=axis)),
        "ok_topk_reuse": Step(_ok_topk_reuse),
        "topk_a": Step(lambda share, axis: optax_ext.topk_a(share, axis=axis)),
        "sparse_adamw": Step(
            lambda share, axis: optax_ext.sparse_adamw(_RATE, density=share, axis=axis)
        ),
        "sparse_sgd": Step(
            lambda share, axis: optax_ext.sparse_sgd(_RATE, density=share, axis=axis)
        ),
        "gtopk": Step(lambda share, axis: optax_ext.gtopk(share, axis=axis)),
        "powersgd": Step(lambda share, axis: optax_ext.powersgd(_RANK, axis=axis), matrices=True),
        **{name: Step(_exchange(made)) for name, made in exchanges.items()},
    }


def layers(size: int) -> tuple[tuple[int, ...], ...]:
    """Shapes that hold ``size`` entries: matrices, wide and tall in turn, and what is left over."""
    entries = min(_MATRIX, max(_WIDTH, size // 2))
    wide = min(4 * _WIDTH, entries)
    pair = ((entries // wide, wide), (wide, entries // wide))
    full, rest = divmod(size, math.prod(pair[0]))
    shapes: list[tuple[int, ...]] = [pair[i % 2] for i in range(full)]
    if rest >= _WIDTH:
        shapes.append((rest // _WIDTH, _WIDTH))
        rest %= _WIDTH
    if rest:
        shapes.append((rest,))
    return tuple(shapes)


def layout(size: int) -> Layout:
    """What selectors by row and layer are told about the vector."""
    return Layout(layers(size))


def gradient(step: Step, size: int) -> Any:
    """The shapes of a worker's gradient."""
    if not step.matrices:
        return jax.ShapeDtypeStruct((size,), jnp.float32)
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in layers(size)]


def _ok_topk_reuse(density: float, axis: str) -> optax.GradientTransformation:
    selector = select.threshold_reuse(density=density)
    exchange = sc.allreduce.ok_topk(density=density, global_period=32)
    return optax_ext.sparse_allreduce(selector, exchange, axis=axis)


def _exchange(made: Callable[[float], Any]) -> Callable[..., optax.GradientTransformation]:
    def step(density: float, axis: str) -> optax.GradientTransformation:
        return optax_ext.sparse_allreduce(select.topk(density=density), made(density), axis=axis)

    return step

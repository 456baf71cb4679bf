"""Sparse allreduce for JAX: selectors, codecs, transports and algorithms.

Selectors, codecs and allreduces are NamedTuples of pure functions that factories make. They run
inside a mapped function (shard_map, pmap, vmap) or over MPI, and compile under ``jax.jit``.
"""

from sparse_collectives import allreduce, cost_model, planner, select, traffic, transport, wire
from sparse_collectives._data import Layout, PaddedCOO
from sparse_collectives._simulate import simulate
from sparse_collectives._spec import Spec
from sparse_collectives._types import (
    AxisName,
    Codec,
    Encoded,
    ReduceInfo,
    SelectInfo,
    Selector,
    SparseAllreduce,
    Undelivered,
)
from sparse_collectives.planner._measure import measure

__version__ = "0.1.0"

__all__ = [
    "AxisName",
    "Codec",
    "Encoded",
    "Layout",
    "PaddedCOO",
    "ReduceInfo",
    "SelectInfo",
    "Selector",
    "SparseAllreduce",
    "Spec",
    "Undelivered",
    "__version__",
    "allreduce",
    "cost_model",
    "measure",
    "planner",
    "select",
    "simulate",
    "traffic",
    "transport",
    "wire",
]

"""Fits alpha and beta of the running mesh to the times of its collectives."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sparse_collectives import transport
from sparse_collectives._types import AxisName
from sparse_collectives._validation import check_positive_int
from sparse_collectives.cost_model._costs import BYTES_PER_WORD, Network, log2_rounds
from sparse_collectives.transport import _dispatch

# Collectives in one program, so that its launch is a small part of its time.
_CHAIN = 8


class Sample(NamedTuple):
    """The time of one collective.

    Attributes:
      collective: psum, all_gather or ppermute.
      messages: how many times alpha is paid.
      words: 4-byte words that a worker receives.
      seconds: the median over the rounds.
      spread: the interquartile range over the median.
    """

    collective: str
    messages: float
    words: float
    seconds: float
    spread: float


class Measured(NamedTuple):
    """A fitted network.

    Attributes:
      latency: alpha, in seconds.
      bandwidth: 4 / beta, in bytes per second; infinite if the times did not grow with
        the size.
      error: median over the samples of abs(fitted - measured) / measured.
      spread: median of the samples' spread.
      workers: the number of workers on the measured axis.
      samples: the fitted samples.
    """

    latency: float
    bandwidth: float
    error: float
    spread: float
    workers: int
    samples: tuple[Sample, ...]

    def network(self) -> Network:
        """The network with this latency and bandwidth."""
        return Network(self.latency, BYTES_PER_WORD / self.bandwidth)


def fit(samples: Sequence[Sample]) -> tuple[float, float]:
    r"""Alpha and beta, both at least 0, from measured times.

    The fit uses least squares of the relative error, :math:`(m \alpha + w \beta) / t - 1`,
    because the times of small and large messages differ by orders of magnitude. It is
    reweighted so that in the end the absolute error counts instead of the squared one,
    and a few disturbed samples change nothing.
    """
    if len(samples) < 2:
        raise ValueError(f"samples must be at least 2, to fit two numbers, got {len(samples)}.")
    times = np.array([sample.seconds for sample in samples])
    if not np.all(times > 0):
        raise ValueError(
            f"samples must have times above 0, got {times.min():g}. Measure with more rounds."
        )
    rows = np.array([[s.messages, s.words] for s in samples]) / times[:, None]
    # Columns of one scale, so that neither unknown is lost to rounding.
    scale = np.maximum(rows.max(axis=0), np.finfo(float).tiny)
    rows = rows / scale
    weights = np.ones(len(samples))
    solution = np.zeros(2)
    for _ in range(30):
        solution = _nonnegative(rows, weights)
        weights = 1 / np.sqrt(np.maximum(np.abs(rows @ solution - 1), 1e-3))
    alpha, beta = solution / scale
    return float(alpha), float(beta)


def _nonnegative(rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted least squares of rows @ x = 1 with x >= 0, for two unknowns."""
    a, b = rows * weights[:, None], weights
    x = np.linalg.lstsq(a, b, rcond=None)[0]
    if np.all(x >= 0):
        return x
    # One unknown is then 0: take the better of the two fits with the other.
    norms = np.maximum(np.sum(a * a, axis=0), np.finfo(float).tiny)
    candidates = np.diag(np.maximum(0.0, b @ a / norms))
    return min(candidates, key=lambda x: float(np.sum((a @ x - b) ** 2)))


def measure(
    mesh: Mesh | None = None,
    axis: AxisName | None = None,
    *,
    sizes: Sequence[int] = (256, 4096, 65_536, 1_048_576),
    rounds: int = 9,
) -> Measured:
    """Times collectives on a mesh and fits latency and bandwidth to them.

    psum, all_gather and ppermute of several sizes run in turn, in ``rounds``
    rounds, so that a disturbance of the machine affects all of them. Their median
    times are fitted by seconds = messages * alpha + words * beta, with the message
    and word counts of :mod:`sparse_collectives.cost_model`. Check ``error``, which
    shows how well two numbers describe this network. Devices that share a host
    measure its memory instead of a network.

    Args:
      mesh: the devices. None: all devices in one row.
      axis: the mesh axis, or several. None: all axes of the mesh.
      sizes: words of one worker's operand, in any order; at least two sizes, which
        should be far apart.
      rounds: how often each collective is timed.

    Returns:
      A :class:`Measured`. Under ``jax.distributed`` each process has its own, so use
      the numbers of one process.

    Raises:
      ValueError: the axis does not exist or has fewer than two workers, there are
        fewer than two sizes, or a count is below 1.

    Examples:
      ``m = sc.measure(mesh)``, then ``sc.planner.auto(density=0.01,
      latency=m.latency, bandwidth=m.bandwidth)``.
    """
    rounds = check_positive_int("rounds", rounds)
    sizes = sorted({check_positive_int("sizes", size) for size in sizes})
    if len(sizes) < 2:
        raise ValueError(f"sizes must hold at least 2 different sizes, got {sizes}.")
    if mesh is None:
        mesh = jax.make_mesh((jax.device_count(),), ("workers",), axis_types=(AxisType.Auto,))
    names = mesh.axis_names if axis is None else axis if isinstance(axis, tuple) else (axis,)
    missing = [name for name in names if name not in mesh.axis_names]
    if missing:
        known = ", ".join(map(str, mesh.axis_names))
        raise ValueError(f"axis must be one or several of {known}, got {missing[0]!r}.")
    workers = int(np.prod([mesh.shape[name] for name in names]))
    if workers < 2:
        raise ValueError(
            f"axis must have at least 2 workers, got {workers}. Pass a mesh of several devices (on "
            "a CPU: --devices, or jax.config.update('jax_num_cpu_devices', N))."
        )
    programs = [
        (name, messages, words(size, workers), *_program(body, size, mesh, names))
        for size in sizes
        for name, messages, words, body in _collectives(workers, names)
    ]
    for *_, run, operand in programs:
        jax.block_until_ready(run(operand))
    times: list[list[float]] = [[] for _ in programs]
    for _ in range(rounds):
        for i, (*_, run, operand) in enumerate(programs):
            start = time.perf_counter()
            jax.block_until_ready(run(operand))
            times[i].append((time.perf_counter() - start) / _CHAIN)
    samples = tuple(
        Sample(name, messages, words, statistics.median(seconds), _spread(seconds))
        for (name, messages, words, *_), seconds in zip(programs, times, strict=True)
    )
    alpha, beta = fit(samples)
    errors = [abs(s.messages * alpha + s.words * beta - s.seconds) / s.seconds for s in samples]
    return Measured(
        latency=alpha,
        bandwidth=BYTES_PER_WORD / beta if beta > 0 else float("inf"),
        error=statistics.median(errors),
        spread=statistics.median(s.spread for s in samples),
        workers=workers,
        samples=samples,
    )


def _collectives(workers: int, axis: AxisName) -> list[tuple[str, int, Callable, Callable]]:
    """Name, messages, words for a size and P, and a step that keeps the shape of its operand."""
    rounds = log2_rounds(workers)
    pairs = [(source, (source + 1) % workers) for source in range(workers)]

    def gather(x):
        # The barrier keeps XLA from fetching only the row that is used.
        everyone = lax.optimization_barrier(transport.all_gather(x, axis))
        return everyone[(transport.axis_index(axis) + 1) % workers]

    def psum(x):
        return transport.psum(x, axis) / workers

    def permute(x):
        return transport.ppermute(x, axis, pairs)

    return [
        ("psum", 2 * rounds, _dispatch.words_of_all_reduce, psum),
        ("all_gather", rounds, _dispatch.words_of_all_gather, gather),
        ("ppermute", 1, _dispatch.words_of_ppermute, permute),
    ]


def _program(body: Callable, size: int, mesh: Mesh, axis: tuple) -> tuple[Callable, jax.Array]:
    """A jitted chain of one collective, and an operand sharded over the workers."""
    spec = PartitionSpec(axis)
    workers = int(np.prod([mesh.shape[name] for name in axis]))

    def chain(x):
        for _ in range(_CHAIN):
            x = body(x)
        return x

    run = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    # Each device makes its own part, so that no host holds all of it.
    make = jax.jit(
        lambda: jnp.ones((workers * size,), jnp.float32), out_shardings=NamedSharding(mesh, spec)
    )
    return run, make()


def _spread(seconds: list[float]) -> float:
    if len(seconds) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(seconds, n=4)
    return (high - low) / middle

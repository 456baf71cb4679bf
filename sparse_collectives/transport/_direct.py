"""Sums and gathers whose messages go straight to where they are needed.

Gloo, which XLA uses between the processes of CPUs, sums and gathers in a ring: with P workers a sum
is 2 (P-1) messages, each of which waits for the one before it. Here a sum is two exchanges in which
everyone sends to everyone at once, parts of the vector to those who add them up and the sums back,
and a gather is one. The words are those of the ring, in as many messages.

Large sums stay in the ring: there a worker receives from one other at a time, and nobody's messages
crowd each other out.
"""

import contextlib
from collections.abc import Generator

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import _compat
from sparse_collectives._types import AxisName

# What a worker may receive in an exchange, about what is on its way over 100 Mbit/s while a message
# goes there and back in 100 ms.
MOST_BYTES = 1 << 20
_in_use = False


def use_direct_messages(use: bool = True) -> None:
    """Says that a message between workers takes long, as it does between sites.

    Programs that are traced from then on send small sums and gathers straight to where they are
    needed, in one or two exchanges, in place of a ring in which ``2 (P-1)`` messages wait for each
    other. Over links of 100 Mbit/s and 50 ms a step of ``sparse_adamw`` with four workers then took
    0.48 s in place of 1.31 s, and with ``every=10`` 68 ms in place of 120 ms (one run of a model
    with n = 1.08M; `python -m benchmarks.network.sums` has the sums alone). Within a data center
    leave it off: there a sum of one number is slower so.

    Call it once, before the first step, in all processes alike: those that disagree wait for each
    other for ever. It is for meshes of CPUs, whose processes meet over Gloo: the libraries of GPUs
    choose among algorithms themselves (``NCCL_ALGO``), and so does MPI, which it leaves alone. Sums
    of which a worker receives more than 1 MiB stay in the ring. The results are the same on all
    workers, to the bit; floats are added in another order than in a ring.

    Args:
      use: whether to, or to go back to the ring.

    Example:
      >>> from sparse_collectives import transport
      >>> transport.use_direct_messages()
      >>> transport.use_direct_messages(False)
    """
    global _in_use
    if not isinstance(use, bool):
        raise ValueError(f"use must be True or False, got {use!r}.")
    _in_use = use


@contextlib.contextmanager
def traced_with(use: bool) -> Generator[None]:
    """As :func:`use_direct_messages`, for what is traced within."""
    before = _in_use
    use_direct_messages(use)
    try:
        yield
    finally:
        use_direct_messages(before)


def is_in_use() -> bool:
    """Whether small sums and gathers are sent directly."""
    return _in_use


def is_worth(axis: AxisName, received: float) -> bool:
    """Whether to send directly what makes a worker receive so many bytes in an exchange."""
    return _in_use and received <= MOST_BYTES and not _compat.is_simulated(axis)


def all_gather(x: jax.Array, axis: AxisName) -> jax.Array:
    """``[P, *x.shape]``, the same on every worker; in one exchange, of ``L (P-1)`` words."""
    workers = lax.axis_size(axis)
    return _compat.to_invarying(_received(jnp.broadcast_to(x, (workers, *x.shape)), axis), axis)


def psum_scatter(x: jax.Array, axis: AxisName) -> jax.Array:
    """Part j of the sum of ``x[P * m]`` on worker j; in one exchange, of ``L (P-1)/P`` words."""
    parts = x.reshape(lax.axis_size(axis), -1, *x.shape[1:])
    # In the order of the workers, and by one of them: everyone has the same bits.
    return jnp.sum(_received(parts, axis), axis=0, dtype=x.dtype)


def psum(x: jax.Array, axis: AxisName) -> jax.Array:
    """The sum over the workers, the same bits on each.

    In two exchanges, of ``2 L (P-1)/P`` words; in one of ``L (P-1)`` for less than P entries.
    """
    workers = lax.axis_size(axis)
    if x.size < workers:
        return jnp.sum(all_gather(x, axis), axis=0, dtype=x.dtype)
    flat = jnp.pad(x.reshape(-1), (0, -x.size % workers))
    return all_gather(psum_scatter(flat, axis), axis).reshape(-1)[: x.size].reshape(x.shape)


def _received(parts: jax.Array, axis: AxisName) -> jax.Array:
    """Row i came from worker i, whose row for this one it was."""
    parts = _compat.to_varying(parts, axis)
    return lax.all_to_all(parts, axis, split_axis=0, concat_axis=0)

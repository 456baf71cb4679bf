"""Checks of arguments, each with one line that names the argument, its value and what it may be."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from optax_ext._state import _batch_checks
from sparse_collectives import _validation

# The largest C int, which is how jax and XLA take numbers; and what fits in the memory of one
# machine, with room to spare: jax keeps a record of each process, and starts a thread per device.
_MOST = {"num_processes": 100_000, "--processes": 100_000, "devices": 1000}
_INT = 2**31 - 1


def check_counts(**counts: Any) -> None:
    """Raises a ValueError for an argument that is no whole number of at least 1, or too large."""
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}.")
        if value > (most := _MOST.get(name, _INT)):
            raise ValueError(f"{name} must be at most {most}, got {value!r}.")


def check_seconds(name: str, value: Any) -> None:
    """Raises a ValueError for an argument that is no positive number; infinity is one."""
    if not isinstance(value, int | float) or math.isnan(value) or value <= 0:
        raise ValueError(f"{name} must be a positive number of seconds, got {value!r}.")


def host_and_port(address: Any, name: str = "address") -> tuple[str, int]:
    """The two parts of an address; a ValueError if it is no address."""
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError(
            f"{name} must be 'host:port' with a port from 1 to 65535, got {address!r}."
        )
    return host.strip("[]"), int(port)


def check_finite(name: str, tree: Any) -> None:
    """Raises a ValueError for arrays that are not finite, from which no step could be taken."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        if not jnp.isfinite(x).all():
            raise ValueError(f"{name}{jax.tree_util.keystr(path)} must be finite.")


def without_addresses(text: str) -> str:
    """A text of a tree, the same in all processes, though it may have functions in it."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def check_batch(batch: Any, axis: str, before: Any, step: int) -> Any:
    """The batch of one worker, in NumPy but for its keys; ``before`` has the shapes of an earlier.

    Raises:
      ValueError: it is empty or can't be split, or its shapes have changed.
    """
    if not jax.tree.leaves(batch):
        raise ValueError(f"batch_of must return arrays, and at step {step} it returned {batch!r}.")
    # As a batch of one worker: each worker gives its own part.
    _batch_checks.check_batch(batch, AbstractMesh((1,), (axis,)), axis)
    batch = jax.tree.map(lambda x: x if _validation.is_key(x) else np.asarray(x), batch)
    shapes = jax.tree.map(jax.typeof, batch)
    if before is not None and shapes != before:
        raise ValueError(
            f"batch_of returned {shapes} at step {step}, and for as many workers {before} before: "
            "shapes and dtypes may depend on request.size alone. Drop or pad the last examples."
        )
    return batch

"""Checks of arguments, made at trace time and before anything is computed.

Each message names the argument, the given value, the expected one and the code to write instead.
"""

import numbers
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import core as jax_core

MAX_SIZE = 2**31 - 1


def check_density(density: Any) -> float:
    """A density in (0, 1] as a Python float.

    The integer 1 is rejected: users who think in percent write it for 1 %, and would
    send everything.
    """
    if isinstance(density, jax_core.Tracer):
        raise TypeError(
            "density must be a Python number, but a traced value was given: it fixes the shapes of "
            "the buffers. Pass it as a static argument, or close over a Python float. (With "
            "optax.inject_hyperparams name it in static_args=.)"
        )
    if isinstance(density, bool) or not isinstance(density, numbers.Real):
        raise TypeError(
            f"density must be a number in (0, 1], got {density!r} of type "
            f"{type(density).__name__}. Write for example density=0.01 to send 1 % of the entries."
        )
    if isinstance(density, numbers.Integral) and density == 1:
        raise ValueError(
            f"density must be a float, got the integer {density!r}, which may mean 100 % "
            "or 1 %. Write density=1.0 to send all entries, or density=0.01 for 1 %."
        )
    value = float(density)
    if not 0.0 < value <= 1.0:
        raise ValueError(
            f"density must be in (0, 1], got {density!r}. It is the share k/n of the entries that "
            "are sent: write density=0.01 for 1 %."
        )
    return value


def check_positive_int(name: str, value: Any, *, minimum: int = 1, most: int = MAX_SIZE) -> int:
    """A static integer of at least ``minimum``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        raise ValueError(
            f"{name} must be an integer of at least {minimum}{_static(value)}, got {value!r}."
        )
    if int(value) > most:
        why = ": programs count in int32" if most == MAX_SIZE else ""
        bits = most.bit_length()
        raise ValueError(f"{name} must be an integer below 2**{bits}, got {value!r}{why}.")
    return int(value)


def check_integer(name: str, value: Any) -> int:
    """A static integer of any sign."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name} must be an integer, got {value!r}.")
    return int(value)


def check_number(name: str, value: Any, low: float, high: float) -> float:
    """A static number in [low, high]."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not low <= float(value) <= high:
        raise ValueError(
            f"{name} must be a number in [{low}, {high}]{_static(value)}, got {value!r}."
        )
    return float(value)


def _static(value: Any) -> str:
    if not isinstance(value, jax.Array):
        return ""
    # optax.inject_hyperparams makes arrays of numbers that static_args= does not name.
    return (
        " of Python, and static (write int or float around an array; with optax.inject_hyperparams "
        "name it in static_args=)"
    )


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """The value, which must be one of a few words or other values."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")
    return value


def check_size(size: int) -> int:
    """The length of a buffer, which must be within the range of an int32 index."""
    if not _is_length(size):
        raise TypeError(f"size must be an integer, the length of a vector, got {size!r}.")
    if size < 1:
        raise ValueError(
            f"size must be at least 1, got {size}. An empty buffer has nothing to select."
        )
    if size > MAX_SIZE:
        raise ValueError(
            f"size must be below 2**31 = {MAX_SIZE + 1} entries in one buffer, got {size}: indices "
            "are int32. Split the parameters into several buffers."
        )
    return size


def _is_length(size: Any) -> bool:
    if isinstance(size, numbers.Integral):
        return not isinstance(size, bool)
    from jax import export  # Slow to import, and only needed here.

    return export.is_symbolic_dim(size)


def check_is_array(name: str, x: Any) -> None:
    """Lists and numbers have no dtype."""
    if not hasattr(x, "ndim") or not hasattr(x, "dtype"):
        raise TypeError(f"{name} must be an array, got {x!r:.60}. Pass it through jnp.asarray.")


def as_vector(name: str, x: Any) -> jax.Array:
    """A one-dimensional array of a float type that fits a 32-bit word."""
    check_is_array(name, x)
    if x.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {x.shape}. Ravel it first.")
    check_float(name, x.dtype)
    check_size(x.shape[0])
    return jnp.asarray(x)


def check_float(name: str, dtype: Any, *, float64: bool = False) -> None:
    """Accepts float32, bfloat16 and float16, and float64 if the caller can sum it."""
    if not jnp.issubdtype(dtype, jax.dtypes.extended):
        dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        other = " (An optimizer takes them in optax.contrib.split_real_and_imaginary(tx).)"
        raise TypeError(
            f"{name} must be of a real floating type, got {dtype}. Keep such leaves out of the "
            "parameters, as nnx.split(model, nnx.Param, ...) does, or cast them to "
            f"float32.{other if is_complex else ''}"
        )
    if dtype.itemsize not in ((2, 4, 8) if float64 else (2, 4)):
        wider = (
            " (Only the allreduces of SparCML and topk_a, ring_sparse and dense sum float64, of "
            "pairs from PaddedCOO.from_pairs.)"
        )
        raise TypeError(
            f"{name} must be float32, bfloat16 or float16, got {dtype}: values travel in 32-bit "
            f"words. Cast it to float32.{wider if name.startswith('coo') else ''}"
        )


@jax.custom_jvp
def without_derivative(tree: Any) -> Any:
    """The tree itself, but a derivative with respect to it is an error."""
    return tree


@without_derivative.defjvp
def _no_derivative(primals: Any, tangents: Any) -> NoReturn:
    raise TypeError(
        "A sparse exchange has no derivative: values travel as integers. Differentiate the loss "
        "outside of it, or put jax.lax.stop_gradient around what it takes."
    )


def is_key(leaf: Any) -> bool:
    """Whether it is typed keys of ``jax.random``."""
    # JAX cannot read the dtypes of PyTorch and TensorFlow.
    typed = isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct))
    return typed and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def check_arrays(name: str, tree: Any, advice: str, *, keys: bool = True) -> None:
    """The leaves are arrays of numbers or numbers, and random keys if ``keys``."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None:
            taken = isinstance(leaf, (bool, int, float, complex))
        elif is_key(leaf):
            taken = keys
        else:
            numeric = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.number)
            taken = numeric or dtype == jnp.bool_
        if not taken:
            given = f"{leaf!r:.60}, a {type(leaf).__name__}" if dtype is None else f"of {dtype}"
            raise TypeError(
                f"{name}{jax.tree_util.keystr(path)} is {given}, and must be an array of numbers. "
                f"{advice}"
            )


def count_from_density(density: float, size: int) -> int:
    """K = max(1, round(density * n)), at most n."""
    return min(size, max(1, round(density * check_size(size))))

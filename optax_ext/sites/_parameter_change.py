"""The parameters of a run as one vector, and a change of them as the body of a payload."""

import functools
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext.sites._payload import PayloadError
from sparse_collectives import Codec, select

_LARGEST = np.finfo(np.float32).max


class Model(NamedTuple):
    """The parameters of a run as one vector.

    Attributes:
      treedef: the tree of the parameters.
      names: the paths of the leaves.
      shapes: their shapes.
      size: the number of entries.
      digest: a digest of the names and shapes.
    """

    treedef: Any
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    size: int
    digest: str

    def flat(self, params: Any) -> np.ndarray:
        """The leaves concatenated, ``f32[n]``; a ValueError if they are another model's."""
        if (found := model_of(params)).digest != self.digest:
            here, there = (dict(zip(x.names, x.shapes, strict=True)) for x in (found, self))
            name = next(n for n in (*here, *there) if here.get(n) != there.get(n))
            now, then = (f"shape {x[name]}" if name in x else "no leaf" for x in (here, there))
            raise ValueError(
                f"params are those of another model: {found.size} entries, and the run has "
                f"{self.size}. params{name} is {now}, and in the run it is {then}."
            )
        leaves = [np.asarray(x, np.float32).ravel() for x in jax.tree.leaves(params)]
        return np.concatenate(leaves) if leaves else np.zeros(0, np.float32)

    def tree(self, vector: np.ndarray) -> Any:
        """The inverse of :meth:`flat`, as arrays on the host."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])[:-1]
        parts = zip(np.split(vector, ends), self.shapes, strict=True)
        return jax.tree.unflatten(self.treedef, [part.reshape(shape) for part, shape in parts])


def model_of(params: Any) -> Model:
    """The :class:`Model` of a tree of float32.

    Raises:
      TypeError: a leaf has another type.
      ValueError: there are no entries.
    """
    paths = jax.tree_util.tree_leaves_with_path(params)
    for path, leaf in paths:
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | float):
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} is {leaf!r:.80}: sites exchange arrays of "
                "float32. Give the parameters only, as nnx.state(model, nnx.Param) has them."
            )
        if jnp.result_type(leaf) != jnp.float32:
            raise TypeError(
                f"params{jax.tree_util.keystr(path)} is {jnp.result_type(leaf)}: sites exchange "
                "parameters in float32. Keep those, and cast them in the loss."
            )
    shapes = tuple(np.shape(leaf) for _, leaf in paths)
    names = tuple(jax.tree_util.keystr(path) for path, _ in paths)
    described = list(zip(names, shapes, strict=True))
    digest = hashlib.sha256(repr(described).encode()).hexdigest()[:16]
    size = sum(int(np.prod(shape)) for shape in shapes)
    if not size:
        raise ValueError(f"params have no entries, got {params!r:.80}: give those of the model.")
    return Model(jax.tree.structure(params), names, shapes, size, digest)


class Change(NamedTuple):
    """``i64[k]`` indices, each once, and ``f32[k]`` values."""

    indices: np.ndarray
    values: np.ndarray


class Messages:
    """Encodes and decodes the changes of a model at a density."""

    def __init__(self, size: int, density: float, codec: Codec):
        self._size = size
        selector = select.topk(density)

        @jax.jit
        def encode(moved: jax.Array, seed: jax.Array) -> jax.Array:
            chosen, _, _ = selector.select(moved, selector.init(size))
            return codec.encode(chosen, seed).message

        self._encode = encode
        self._decode = jax.jit(functools.partial(codec.decode, size=size, dtype=jnp.float32))
        shape = jax.eval_shape(
            encode,
            jax.ShapeDtypeStruct((size,), jnp.float32),
            jax.ShapeDtypeStruct((), jnp.uint32),
        )
        # All payloads have this size.
        self.bytes = 4 * shape.size
        self._device = jax.local_devices(backend="cpu")[0]

    def encode(self, moved: np.ndarray, seed: int) -> bytes:
        """The body of the largest entries of ``f32[n]``; the seed is for rounding."""
        with jax.default_device(self._device):
            message = self._encode(jnp.asarray(moved), np.uint32(seed % 2**32))
        return np.asarray(message).astype("<i4").tobytes()

    def decode(self, body: bytes) -> Change:
        """The content of a body, with the same bits on every machine.

        Raises:
          PayloadError: it has another size, an index out of range or twice, or a value that is not
            finite.
        """
        if len(body) != self.bytes:
            raise PayloadError(f"it has {len(body)} bytes of entries, and the run {self.bytes}")
        message = np.frombuffer(body, "<i4").astype(np.int32)
        with jax.default_device(self._device):
            decoded = self._decode(message)
        indices, values = np.asarray(decoded.indices, np.int64), np.asarray(decoded.values)
        kept = indices < self._size
        indices, values = indices[kept], values[kept]
        if not np.isfinite(values).all():
            raise PayloadError("a value is not finite")
        if (indices < 0).any() or len(np.unique(indices)) != len(indices):
            raise PayloadError("an index is out of range, or there twice")
        return Change(indices, values)


def add(params: np.ndarray, change: Change, weight: float) -> None:
    """Adds to ``f32[n]`` in place, with the same bits on every machine."""
    values = np.float32(weight) * change.values
    params[change.indices] = finite_sum(params[change.indices], values)


def finite_sum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The sum in float32, or its largest number."""
    with np.errstate(over="ignore"):
        return np.clip(x + y, -_LARGEST, _LARGEST)

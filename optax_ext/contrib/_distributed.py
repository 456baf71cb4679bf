"""The parallel tensor operator: a function of each layer, computed by one worker for all."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparse_collectives import AxisName, _axes, _varying, transport


def distributed(fn: Callable[..., Any], *, axis: AxisName) -> Callable[..., Any]:
    """``fn`` of each leaf of replicated trees, computed by one worker for all of them.

    After an allreduce every worker holds the same arrays, and would compute the same of each.
    Here the leaves are dealt out, the largest first, each to the worker that has the least so far.
    Each worker computes ``fn`` of its own leaves, and one allreduce brings the results to all:
    the parallel tensor operator (PTO) of Shi et al. This pays if ``fn`` is expensive and its
    result is small: norms, spectra, statistics of layers.

    A leaf is computed by one worker, however large it is. For an operator on entries you may pass
    pieces of a leaf as leaves, as in the paper's Equations 12 to 14; see the second example. The
    result then has as many words as the leaf, so this pays only if computing an entry takes longer
    than sending it. :func:`scale_by_trust_ratio` computes norms of pieces of each leaf.

    Args:
      fn: ``fn(leaf, *others)``, a pytree of arrays whose shapes depend only on the shapes of the
        arguments. It must not communicate.
      axis: the mesh axis (or a tuple of them) of the workers.

    Returns:
      A function of one or several trees of the same structure. It returns a tree of that
      structure with the result of ``fn`` instead of each leaf: the same bits on every worker,
      as ``fn`` gives them. It runs inside ``jax.shard_map``, ``jax.pmap`` or
      ``sparse_collectives.simulate``.

    Raises:
      ValueError: ``axis`` is not bound.
      ValueError: trees of different structures.

    Cost: ``fn`` of about 1/P of the entries (at least of the largest leaf). For r words of results
    ``2 r (P-1)/P`` words are received in one allreduce. The program contains ``fn`` of every
    leaf, in P branches; under ``vmap`` all of them are computed.

    References:
      Shi et al., `Towards Scalable Distributed Training of Deep Learning on Public
      Cloud Clusters <https://arxiv.org/abs/2010.10458>`_, MLSys 2021, section 4.2.

    Example:
      >>> import jax.numpy as jnp, sparse_collectives as sc
      >>> norms = distributed(jnp.linalg.norm, axis="w")
      >>> params = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([1.0])}
      >>> sc.simulate(norms, axis="w", axis_size=2, in_axes=None)(params)["a"].tolist()
      [5.0, 5.0]
      >>> def roots(x):
      ...     return jnp.concatenate(distributed(jnp.sqrt, axis="w")(jnp.array_split(x, 2)))
      >>> sc.simulate(roots, axis="w", axis_size=2, in_axes=None)(jnp.array([4.0, 9.0, 16.0]))[0]
      Array([2., 3., 4.], dtype=float32)
    """

    def apply(tree: Any, *rest: Any) -> Any:
        workers = workers_of(axis, "leaves", "jax.tree.map")
        leaves, treedef = jax.tree.flatten(tree)
        arguments = [leaves, *(treedef.flatten_up_to(other) for other in rest)]
        of_leaves = list(zip(*arguments, strict=True))
        if workers == 1 or not leaves:
            return treedef.unflatten([fn(*each) for each in of_leaves])
        owners = deal([math.prod(jnp.shape(leaf)) for leaf in leaves], workers)
        results = [jax.eval_shape(fn, *each) for each in of_leaves]

        def of(worker: int) -> Callable[[], list[jax.Array]]:
            def run() -> list[jax.Array]:
                made = [
                    fn(*each)
                    if owner == worker
                    else jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
                    for each, owner, like in zip(of_leaves, owners, results, strict=True)
                ]
                return _varying.to_varying([_bits(x) for x in jax.tree.leaves(made)], axis)

            return run

        mine = lax.switch(transport.axis_index(axis), [of(worker) for worker in range(workers)])
        flat, structure = jax.tree.flatten(results)
        # All workers but one have zeros, so the sum of the bits is the bits.
        sums = iter(_summed(mine, axis))
        found = [_from_bits(next(sums), like) for like in flat]
        return treedef.unflatten(jax.tree.unflatten(structure, found))

    return apply


def workers_of(axis: AxisName, shared: str, instead: str) -> int:
    """P of the bound axis; a ValueError names what they share, and what to use instead."""
    if not _axes.axis_is_bound(axis):
        raise ValueError(
            f"axis={axis!r} is not bound here: its workers share the {shared} inside a mapped "
            f"function. Call it under jax.shard_map over a mesh with an axis named {axis!r}, under "
            f"jax.pmap(..., axis_name={axis!r}), or through sparse_collectives.simulate(..., "
            f"axis={axis!r}, axis_size=P); in a program of one worker use {instead}."
        )
    return transport.axis_size(axis)


def deal(sizes: Sequence[int], workers: int) -> list[int]:
    """The worker of each leaf: the largest first, to the worker that has the least so far."""
    loads, owners = [0] * workers, [0] * len(sizes)
    for leaf in sorted(range(len(sizes)), key=lambda leaf: -sizes[leaf]):
        owners[leaf] = min(range(workers), key=loads.__getitem__)
        loads[owners[leaf]] += sizes[leaf]
    return owners


def _bits(x: jax.Array) -> jax.Array:
    """The bits as 32-bit integers, or as 64-bit integers for numbers of that width."""
    if x.dtype == jnp.bool_:
        return x.ravel().astype(jnp.int32)
    width = x.dtype.itemsize
    unsigned = jnp.dtype(f"uint{8 * width}")
    bits = lax.bitcast_convert_type(x, unsigned).ravel()
    return bits.astype(jnp.uint64 if width == 8 else jnp.uint32)


def _from_bits(bits: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    if like.dtype == jnp.bool_:
        return bits.reshape(like.shape).astype(jnp.bool_)
    unsigned = jnp.dtype(f"uint{8 * like.dtype.itemsize}")
    return lax.bitcast_convert_type(bits.astype(unsigned), like.dtype).reshape(like.shape)


def _summed(parts: Sequence[jax.Array], axis: AxisName) -> list[jax.Array]:
    """The sums over the workers, one allreduce for each width."""
    sums: list[Any] = [None] * len(parts)
    for dtype in dict.fromkeys(part.dtype for part in parts):
        chosen = [i for i, part in enumerate(parts) if part.dtype == dtype]
        total = transport.psum(jnp.concatenate([parts[i] for i in chosen]), axis)
        start = 0
        for i in chosen:
            sums[i] = total[start : start + parts[i].size]
            start += parts[i].size
    return sums

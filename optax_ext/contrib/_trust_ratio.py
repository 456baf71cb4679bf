"""Trust ratios whose layer-wise norms are computed by all workers together.

After the allreduce every worker holds the same updates and parameters, and with optax each of them
computes the same norms of all layers. Here a worker computes 1/P of each norm, and one small sum
over the workers completes them (the parallel tensor operator of Shi et al.).
"""

from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_ext.contrib._distributed import workers_of
from sparse_collectives import AxisName, _axes, _validation, _varying, transport

# Entries of a leaf below which every worker computes the whole norm: a pass over so
# few costs no more than the slice, and the leaf needs no slot in the exchange.
SMALL = 1 << 14


def scale_by_trust_ratio(
    min_norm: float | jax.Array = 0.0,
    trust_coefficient: float | jax.Array = 1.0,
    eps: float | jax.Array = 0.0,
    *,
    axis: AxisName,
) -> optax.GradientTransformationExtraArgs:
    r"""``optax.scale_by_trust_ratio`` with the norms partitioned over the workers.

    For layer l with parameters w and update u

    .. math::

        u^{(l)} \leftarrow \lambda^{(l)} u^{(l)}, \quad
        \lambda^{(l)} = \gamma \frac{\|w^{(l)}\|}{\|u^{(l)}\| + \epsilon}

    with a ratio of 1 if a norm is zero. For a leaf of n entries, worker i reads the i-th
    n/P entries of parameters and update and sums their squares; one allreduce of two
    numbers for each leaf gives all workers the norms. The paper gives whole layers
    to the workers and gathers the ratios; with slices the work is balanced whatever
    the layers are, and every worker runs the same program. Leaves of fewer than 2^14
    entries, and the remainders of up to P - 1 entries of other leaves, are summed by
    every worker.

    Updates and parameters must be the same on every worker: put this after the
    transformation that reduces the gradients, and not after one that differs
    between the workers. It runs inside ``jax.shard_map``, ``jax.pmap`` or
    ``sparse_collectives.simulate``; ``init`` runs anywhere.

    Cost: for n entries in all leaves it reads 2 n / P entries, and optax 2 n. It receives
    ``4 L (P-1)/P`` words for L leaves of 2^14 entries or more, in one allreduce of
    about ``2 log2(P)`` latencies. It has no n-sized buffer.

    Args:
      min_norm: the smallest norm, of parameters and updates, ``f32[]``.
      trust_coefficient: gamma, ``f32[]``.
      eps: added to the norm of the update, ``f32[]``.
      axis: the mesh axis (or a tuple of them) of the data-parallel workers.

    Returns:
      A stateless ``optax.GradientTransformation``. Its updates equal optax's up to
      rounding and have the same bits on every worker. Squares are summed in float32:
      with bfloat16 and float16 leaves that is more accurate than optax, which rounds
      each norm to the dtype of the leaf (and overflows at a float16 norm of 256).

    Raises:
      ValueError: ``axis`` is not bound.
      ValueError: no params.
      ValueError: updates or params that differ between the workers, if types show it
        (``shard_map(check_vma=True)``).
      TypeError: leaves that are not float32, bfloat16 or float16.

    References:
      Shi et al., `Towards Scalable Distributed Training of Deep Learning on Public
      Cloud Clusters <https://arxiv.org/abs/2010.10458>`_, MLSys 2021, Section 4.2.

    Example:
      >>> import jax.numpy as jnp, sparse_collectives as sc
      >>> tx = scale_by_trust_ratio(axis="w")
      >>> params, updates = {"a": jnp.array([3.0, 4.0])}, {"a": jnp.array([0.0, 2.0])}
      >>> step = sc.simulate(
      ...     lambda u, p: tx.update(u, tx.init(p), p)[0], axis="w", axis_size=2, in_axes=None
      ... )
      >>> step(updates, params)["a"].tolist()  # 5 / 2 times the update, on both workers
      [[0.0, 5.0], [0.0, 5.0]]
    """

    def init(params: Any) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(updates: Any, state: optax.EmptyState, params: Any = None):
        ratios = ratios_of(params, [updates], min_norm, trust_coefficient, eps, axis=axis)
        leaves, treedef = jax.tree.flatten(updates)
        weights = treedef.flatten_up_to(params)
        scaled = [
            # In the dtype of optax's ratio.
            u * r.astype(jnp.result_type(u, w, min_norm, trust_coefficient, eps))
            for u, w, r in zip(leaves, weights, ratios, strict=True)
        ]
        return jax.tree.unflatten(treedef, scaled), state

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    tx = optax.GradientTransformation(cast(Any, init), cast(Any, update))
    return optax.with_extra_args_support(tx)


def ratios_of(
    params: Any,
    parts: Sequence[Any],
    min_norm: float | jax.Array,
    trust_coefficient: float | jax.Array,
    eps: float | jax.Array,
    *,
    axis: AxisName,
) -> jax.Array:
    """The trust ratio of each layer, ``f32[L]``.

    Args:
      params: the same on every worker.
      parts: trees like the parameters. The norm of an update is the sum of the norms of its parts.
      min_norm: the smallest norm, of parameters and parts.
      trust_coefficient: gamma.
      eps: added to the norm of an update.
      axis: of the workers.
    """
    if params is None:
        raise ValueError(
            "params=None was given, but a trust ratio needs them: call "
            "tx.update(updates, state, params)."
        )
    workers = workers_of(axis, "norms", "the function of the same name in optax")
    _check_leaves("updates", parts[0], axis)
    _check_leaves("params", params, axis)
    structure = jax.tree.structure(parts[0])
    leaves = [leaf for tree in (params, *parts) for leaf in structure.flatten_up_to(tree)]
    if not leaves:
        return jnp.zeros((0,))
    partial, whole = partial_squares(leaves, transport.axis_index(axis), workers)
    squares = complete_squares(partial, whole, axis).reshape(1 + len(parts), -1)
    return trust_ratios(squares, min_norm, trust_coefficient, eps)


def partial_squares(
    leaves: list[jax.Array], worker: jax.Array, workers: int
) -> tuple[list[jax.Array | None], list[jax.Array]]:
    """One worker's part of the sum of squares of each leaf.

    Args:
      leaves: M arrays of any shape.
      worker: ``i32[]``, the number of this worker.
      workers: P, static.

    Returns:
      ``(partial, whole)``, M scalars f32 each: the sum over the workers of ``partial``,
      plus ``whole``, which is the same on each, is the sum of squares. ``partial`` is
      None if ``whole`` is the whole sum.
    """
    partial: list[jax.Array | None] = []
    whole = []
    for leaf in leaves:
        flat = jnp.ravel(leaf)
        share = flat.size // workers
        if workers == 1 or flat.size < SMALL or not share:
            partial.append(None)
            whole.append(_sum_of_squares(flat))
            continue
        # Equal slices, and a remainder that every worker adds, need no mask.
        partial.append(_sum_of_squares(lax.dynamic_slice(flat, (worker * share,), (share,))))
        whole.append(_sum_of_squares(flat[share * workers :]))
    return partial, whole


def complete_squares(
    partial: list[jax.Array | None], whole: list[jax.Array], axis: AxisName
) -> jax.Array:
    """The sums of squares in one allreduce, ``f32[M]``, with the same bits on every worker."""
    shared = [i for i, part in enumerate(partial) if part is not None]
    squares = jnp.stack(whole)
    if not shared:
        return squares
    sums = transport.psum(jnp.stack([part for part in partial if part is not None]), axis)
    return squares.at[jnp.asarray(shared)].add(sums)


def trust_ratios(
    squares: jax.Array,
    min_norm: float | jax.Array,
    trust_coefficient: float | jax.Array,
    eps: float | jax.Array,
) -> jax.Array:
    """``f32[L]`` from ``squares f32[1 + m, L]`` of the parameters and the parts of the updates."""
    clipped = jnp.sqrt(squares) <= min_norm
    # Two choices, so that the derivative at a norm of zero is zero, as in optax.
    norms = jnp.where(clipped, min_norm, jnp.sqrt(jnp.where(clipped, 1.0, squares)))
    param_norm, update_norm = norms[0], jnp.sum(norms[1:], axis=0)
    ratio = trust_coefficient * param_norm / (update_norm + eps)
    return jnp.where((param_norm == 0.0) | (update_norm == 0.0), 1.0, ratio)


def _sum_of_squares(x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def _check_leaves(name: str, tree: Any, axis: AxisName) -> None:
    """Checks that leaves are real numbers and, if types show it, the same on every worker."""
    typed = _varying.checks_varying(axis)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        where = f"{name}{jax.tree_util.keystr(path)}"
        _validation.check_float(where, jnp.result_type(leaf))
        if typed and set(_axes.axis_names(axis)) & _varying.varying_axes(leaf):
            raise ValueError(
                f"{where} differs between the workers of axis {axis!r}, so that their parts of its "
                "norm can't be added up. Reduce the gradients first, with "
                f"optax_ext.ok_topk(density=..., axis={axis!r}) or optax_ext.dense(axis={axis!r}) "
                "before this transformation in the chain, and give update the replicated params, "
                "without a jax.lax.pcast."
            )

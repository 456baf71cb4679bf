"""Rounds of local steps: an optimizer for each worker, and another for what they exchange."""

import warnings
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext._state import _calls, _find
from optax_ext._step import _gradient_checks, _groups, _sparse_state
from optax_ext._transforms import _branch
from sparse_collectives import _compat, _validation


class LocalStepsState(NamedTuple):
    """State of :func:`local_steps`.

    Attributes:
      count: ``i32[]``, local steps.
      missed: ``i32[1]`` for each worker: steps that it left out, as they were not finite.
      inner: the state of the inner optimizer, for each worker: every array has a leading axis, of
        size 1 inside the mapped function and of size P outside.
      moved: how far each worker has gone from the common parameters: in the tree of these, float32,
        with such a leading axis.
      outer: the states of the outer optimizer, one for each fragment.
      late: with a delay the outer updates that wait, in the tree of the parameters and in float32;
        ``()`` without.
    """

    count: jax.Array
    missed: jax.Array
    inner: Any
    moved: Any
    outer: tuple[Any, ...]
    late: Any


def local_steps(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    *,
    every: int,
    fragments: int = 1,
    delay: int = 0,
    mixing: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""H steps of each worker by itself, then one of all of them: DiLoCo and its kin.

    Worker i takes steps of ``inner`` from the common parameters w. Every ``every`` steps what it
    has moved is a gradient, with the sign turned round, for ``outer``, which exchanges it:

    .. math::

        d_i &= d_i + inner(g_i), \quad g_i \text{ the gradient at } w + d_i \\
        w &= w + outer(-d_1, \dots, -d_P), \quad d_i = 0 \quad \text{every } H \text{ steps}

    With ``optax.chain(dense(axis=...), optax.sgd(1.0))`` outside it is the mean of the workers,
    with a momentum it is DiLoCo, and with a :func:`sparse_allreduce` in the place of :func:`dense`
    SparseLoCo: see :mod:`optax_ext.published`. With ``sparse_sgd(1.0, axis=...)`` outside, what
    an exchange does not deliver waits in a residual, of which a share is applied at home.
    (:func:`sparse_adamw` with ``every=`` has one residual for both, all of it applied.)

    The steps in between exchange nothing. The parameters that a loop holds are the common ones,
    the same on every worker; a gradient is taken at :func:`ahead`, as :func:`make_train_step` does.
    A step that is not finite is left out by the worker that made it. Train for whole rounds: what
    was moved since the last exchange is in no parameters, and :func:`flush` refuses to lose it.

    With F fragments these are exchanged in turn, one every H / F steps, so that no burst is larger
    than a fragment. With a delay of tau steps the outer update arrives so many steps after its
    gradient was taken: what a worker has moved in these steps is lost, but for a share of
    ``mixing``, as it is published (with ``mixing=0`` all of it). All of this is one program for
    each step: that a device computes while the exchange is on its way is not promised by a delay.

    Args:
      inner: an optimizer of each worker, learning rate included; any of optax.
      outer: the chain for what is exchanged, with :func:`dense` or :func:`sparse_allreduce` in it.
        Of a momentum mu and a rate eta the effective rate is eta / (1 - mu): 7 for 0.7 and 0.9.
      every: H, steps in a round.
      fragments: F, groups of leaves of about equal size, in the order of the tree.
      delay: tau, less than H / F.
      mixing: alpha in [0, 1]: where an outer update arrives, a worker goes on from
        ``(1 - alpha)`` times the new common parameters and ``alpha`` times its own.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. Extra arguments go to ``inner``, and parameters
      to both. Memory for each worker: the state of ``inner``, n float32, with a delay n more.

    Raises:
      ValueError: an H that the fragments do not divide; a delay of H / F or more; mixing out of
        [0, 1]; at ``init``, an ``outer`` without an exchange, or with rounds of its own, and more
        fragments than leaves.
      TypeError: at ``update``, a state of another transformation.

    Example:
      >>> import jax.numpy as jnp, optax, optax_ext, sparse_collectives as sc
      >>> outer = optax.chain(optax_ext.dense(axis="w"), optax.sgd(1.0))
      >>> tx = local_steps(optax.sgd(1.0), outer, every=2)
      >>> def train(first, second):
      ...     updates_1, state = tx.update(first, tx.init(first))
      ...     return updates_1, tx.update(second, state)[0]
      >>> gradients = jnp.array([1.0, 3.0]), jnp.array([5.0, 3.0])  # of two workers
      >>> [u.tolist() for u in sc.simulate(train, axis="w", axis_size=2)(*gradients)]
      [[0.0, 0.0], [-6.0, -6.0]]

    References:
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023, Algorithm 1; Douillard
      et al., `Streaming DiLoCo <https://arxiv.org/abs/2501.18512>`_, 2025, Algorithm 2.
    """
    every = _validation.check_positive_int("every", every)
    fragments = _validation.check_positive_int("fragments", fragments)
    delay = _validation.check_positive_int("delay", delay, minimum=0)
    mixing = _validation.check_number("mixing", mixing, 0.0, 1.0)
    if every % fragments:
        raise ValueError(
            f"every={every} is no multiple of fragments={fragments}, which are exchanged in turn "
            f"at equal distances. Write every={-(-every // fragments) * fragments}, or other "
            "fragments."
        )
    span = every // fragments
    if delay >= span:
        raise ValueError(
            f"delay={delay} has to be less than every / fragments = {span}, the steps from one "
            "exchange to the next: one fragment is on its way at a time."
        )
    inside, outside = map(optax.with_extra_args_support, (inner, outer))

    def parts(tree: Any) -> list[Any]:
        sizes = [leaf.size for leaf in jax.tree.leaves(tree)]
        return _groups.parts(tree, _groups.split(sizes, fragments))

    def init(params: Any) -> LocalStepsState:
        leaves = len(jax.tree.leaves(params))
        if fragments > max(1, leaves):
            raise ValueError(
                f"fragments={fragments} are groups of leaves, and the parameters have {leaves}. "
                f"Write fragments={leaves} at most."
            )
        whole = jax.tree.map(_in_float32, params)
        states = tuple(outside.init(part) for part in parts(whole))
        _check_outer(states)
        moved = _find.accumulators(states, whole)
        workers = next((x.shape[0] for x in jax.tree.leaves(moved)), 1)
        kept = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (workers, *jnp.shape(x))), inside.init(whole)
        )
        axis, missed = _find.axis_of(states), jnp.zeros((workers,), jnp.int32)
        if _compat.axis_is_bound(axis):
            kept, missed = _compat.to_varying((kept, missed), axis)
        return LocalStepsState(
            count=jnp.zeros((), jnp.int32),
            missed=missed,
            inner=kept,
            moved=moved,
            outer=states,
            late=jax.tree.map(jnp.zeros_like, whole) if delay else (),
        )

    def update(updates: Any, state: LocalStepsState, params: Any = None, **extra_args: Any):
        if not isinstance(state, LocalStepsState):
            raise TypeError(
                f"state is a {type(state).__name__}, and not that of optax_ext.local_steps: make "
                "it with optax_ext.init_state(tx, params, mesh)."
            )
        _calls.check_before_accumulation(updates, state.outer, params)
        _warn_without_ahead(updates, state, params)
        state = _stepped(state, updates, params, extra_args)
        at = (state.count + 1) % every
        whole = None if params is None else parts(jax.tree.map(_in_float32, params))
        moved = parts(state.moved)
        made, outer_states = [], []
        for f, before in enumerate(state.outer):

            def exchange(f=f, before=before):
                gradient = jax.tree.map(lambda m: -m[0], moved[f])
                given = None if whole is None else whole[f]
                with warnings.catch_warnings():
                    # What was moved is no gradient, to be taken a step ahead.
                    warnings.filterwarnings("ignore", "the gradients were taken at params")
                    return outside.update(gradient, before, given)

            result, after = _branch.only_if(
                at == ((f + 1) * span - delay) % every,
                exchange,
                _find.at_rest(before),
                scope=f"local_steps.every{every}",
            )
            made.append(result)
            outer_states.append(after)
        # One is on its way at a time, and of all others the updates are zeros.
        late = state.late
        if delay:
            sent = [at == ((f + 1) * span - delay) % every for f in range(fragments)]
            late = _chosen(sent, made, parts(late), late)
            made = parts(late)
        arrives = [at == ((f + 1) * span) % every for f in range(fragments)]
        arrived = _groups.joined(state.moved, made)
        if delay:
            nothing = jax.tree.map(jnp.zeros_like, arrived)
            arrived = _chosen(arrives, made, parts(nothing), nothing)
        applied = jax.tree.map(lambda u, g: u.astype(g.dtype), arrived, updates)

        def gone(moved, update, narrow):
            # What a narrow leaf rounds off goes with the next round.
            return mixing * (moved - update[None]) + (update - _in_float32(narrow))[None]

        there = jax.tree.map(gone, state.moved, arrived, applied)
        return applied, state._replace(
            count=state.count + 1,
            moved=_chosen(arrives, parts(there), moved, state.moved),
            outer=tuple(outer_states),
            late=late,
        )

    def _stepped(state: LocalStepsState, updates: Any, params: Any, extra: Any) -> LocalStepsState:
        """With the step of this worker, unless that is not finite."""
        gradients = jax.tree.map(_in_float32, updates)
        local = None
        if params is not None:
            local = jax.tree.map(lambda p, m: _in_float32(p) + m[0], params, state.moved)
        before = _sparse_state.without_lead(state.inner)
        made, kept = inside.update(gradients, before, local, **extra)
        finite = jnp.ones((), jnp.bool_)
        for leaf in jax.tree.leaves((gradients, made)):
            finite &= jnp.all(jnp.isfinite(leaf))

        def if_finite(new: Any, old: Any) -> Any:
            return jax.tree.map(
                lambda a, b: jnp.where(finite, a[None].astype(b.dtype), b), new, old
            )

        moved = jax.tree.map(lambda m, u: m[0] + u, state.moved, made)
        return state._replace(
            missed=state.missed + (~finite).astype(jnp.int32),
            inner=if_finite(kept, state.inner),
            moved=if_finite(moved, state.moved),
        )

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))


def _in_float32(x: Any) -> jax.Array:
    return jnp.asarray(x).astype(jnp.float32)


def _chosen(which: list[jax.Array], yes: list[Any], no: list[Any], like: Any) -> Any:
    """Of each fragment the one or the other, joined."""
    picked = [
        jax.tree.map(lambda a, b, now=now: jnp.where(now, a, b), *pair)
        for now, *pair in zip(which, yes, no, strict=True)
    ]
    return _groups.joined(like, picked)


def _check_outer(states: tuple[Any, ...]) -> None:
    if not _find.reductions(states):
        raise ValueError(
            "outer of optax_ext.local_steps has no sparse allreduce, and no optax_ext.dense, in "
            "it. Write for example outer=optax.chain(optax_ext.dense(axis=...), optax.sgd(1.0))."
        )
    every = max((state.settings.every for state in _find.get_states(states)), default=1)
    if every > 1:
        raise ValueError(
            f"outer of optax_ext.local_steps has every={every}, and is called once in a round: "
            "give that number to local_steps alone. (optax_ext.sparse_adamw(..., every=) is an "
            "optimizer without local_steps.)"
        )


def _warn_without_ahead(updates: Any, state: LocalStepsState, params: Any) -> None:
    """A gradient that was seen to be taken at the common parameters."""
    leaves, depends_on = jax.tree.leaves(updates), _gradient_checks.depends_on
    if params is None or not depends_on(leaves, jax.tree.leaves(params)):
        return
    if not depends_on(leaves, jax.tree.leaves(state.moved)):
        warnings.warn(
            "the gradients were taken at params, and local steps take them at the worker's own "
            "parameters: write jax.grad(loss_fn)(optax_ext.ahead(params, opt_state), batch).",
            stacklevel=3,
        )

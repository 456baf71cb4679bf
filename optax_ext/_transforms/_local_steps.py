"""Rounds of local steps: an inner optimizer for each worker, an outer one for the exchange."""

import warnings
from typing import Annotated, Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from optax_ext._error_feedback import (
    _buffers,
    _groups,
    _layout,
    _roles,
    _rounded,
    _sparse_state,
    _trace_checks,
)
from optax_ext._error_feedback._roles import MOVED, OF_WORKER, SHARED, STATISTIC, SUMMED
from optax_ext._state import _find, _held, _host_checks, _wrappers
from optax_ext._transforms import _branch
from sparse_collectives import _axes, _validation, _varying


@_roles.declared
class LocalStepsState(NamedTuple):
    """State of :func:`local_steps`.

    Attributes:
      count: ``i32[]``, local steps.
      missed: ``i32[1]`` for each worker: steps that it left out because they were not finite.
      inner: the state of the inner optimizer, for each worker: every array has a leading axis, of
        size 1 inside the mapped function and of size P outside.
      moved: the difference between each worker's parameters and the common ones: in the tree of
        the parameters, float32, with such a leading axis.
      outer: the states of the outer optimizer, one for each fragment.
      late: with a delay, the outer updates that are not applied yet, in the tree of the parameters
        and in float32; ``()`` without a delay.
    """

    count: Annotated[jax.Array, SHARED]
    missed: Annotated[jax.Array, SUMMED, OF_WORKER]
    inner: Annotated[Any, STATISTIC, OF_WORKER]
    moved: Annotated[Any, MOVED, OF_WORKER]
    outer: Annotated[tuple[Any, ...], SHARED]
    late: Annotated[Any, SHARED]


def local_steps(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    *,
    every: int,
    fragments: int = 1,
    delay: int = 0,
    mixing: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    r"""H local steps of each worker, then one outer step of all: DiLoCo and its variants.

    Worker i takes steps of ``inner`` from the common parameters w. After every H steps, its
    total movement with the sign reversed is the gradient that ``outer`` exchanges:

    .. math::

        d_i &= d_i + inner(g_i), \quad g_i \text{ the gradient at } w + d_i \\
        w &= w + outer(-d_1, \dots, -d_P), \quad d_i = 0 \quad \text{every } H \text{ steps}

    With ``outer=optax.chain(dense(axis=...), optax.sgd(1.0))`` the result is the mean of the
    workers' parameters. With momentum it is DiLoCo, and with a :func:`sparse_allreduce` instead of
    :func:`dense` it is SparseLoCo; see :mod:`optax_ext.published`. With
    ``outer=sparse_sgd(1.0, axis=...)`` undelivered entries stay in a residual, and each worker
    applies a share of its own to its parameters. (:func:`sparse_adamw` with ``every=`` has a
    single residual for both purposes and applies all of it.)

    Steps within a round exchange nothing. The parameters that a loop holds are the common ones,
    the same on every worker; take gradients at :func:`ahead`, as :func:`make_train_step` does.
    A worker leaves out its own step if it is not finite. Train for whole rounds: the movement
    since the last exchange is in no parameters. :func:`flush` applies it if ``outer`` keeps
    nothing, as :func:`dense`, or residuals that are updates, as :func:`sparse_sgd`. With another
    ``outer``, or while an update is on its way, it raises an error rather than lose anything.

    F fragments are exchanged in turn, one every H / F steps, so that no burst is larger than a
    fragment. With a delay of tau steps, an outer update is applied tau steps after its gradient
    was taken. A worker's movement during these steps is lost except for a share of ``mixing``, as
    in the published algorithm; with ``mixing=0`` all of it is lost. Each step is one program, and
    a delay does not guarantee that a device computes during the exchange.

    Args:
      inner: the optimizer of each worker, learning rate included; any optimizer of optax.
      outer: the chain for the exchange, with :func:`dense` or :func:`sparse_allreduce` in it.
        With momentum mu and learning rate eta, the effective learning rate is eta / (1 - mu), for
        example 7 for mu = 0.9 and eta = 0.7.
      every: H, the number of steps in a round.
      fragments: F, the number of groups of leaves of about equal size, in the order of the tree.
      delay: tau, less than H / F.
      mixing: alpha in [0, 1]: when an outer update arrives, a worker continues from
        ``(1 - alpha)`` times the new common parameters plus ``alpha`` times its own.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. Extra arguments go to ``inner``, and parameters
      to both. Memory for each worker: the state of ``inner``, n float32, and n more with a delay.

    Raises:
      ValueError: H is not a multiple of F.
      ValueError: the delay is H / F or more.
      ValueError: mixing is out of [0, 1].
      ValueError: at ``init``, ``outer`` has no exchange or has rounds of its own, or there are more
        fragments than leaves.
      TypeError: leaves that are not float32, bfloat16 or float16.
      TypeError: at ``update``, the state is one of another transformation.

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
    inside, outside = optax.with_extra_args_support(inner), _held.held(outer)

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
        _layout.check_floats(params, "params")
        whole = jax.tree.map(_in_float32, params)
        states = tuple(outside.init(part) for part in parts(whole))
        _check_outer(states)
        moved = _find.accumulators(states, whole)
        workers = next((x.shape[0] for x in jax.tree.leaves(moved)), 1)
        kept = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (workers, *jnp.shape(x))), inside.init(whole)
        )
        axis, missed = _find.axis_of(states), jnp.zeros((workers,), jnp.int32)
        if _axes.axis_is_bound(axis):
            kept, missed = _varying.to_varying((kept, missed), axis)
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
                f"state must be a state of optax_ext.local_steps, got a {type(state).__name__}. "
                "Make it with optax_ext.init_state(tx, params, mesh)."
            )
        _host_checks.check_before_accumulation(updates, state.outer, params)
        _layout.check_floats(updates, "updates")
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
                    # A movement is no gradient, so the look-ahead does not apply to it.
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
        # One update is on its way at a time, and all others are zeros.
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
            late = _chosen(arrives, parts(nothing), made, late)
        given = jax.tree.map(jnp.zeros_like, updates) if params is None else params
        leaves, tree = jax.tree.flatten(arrived)
        likes, places = tree.flatten_up_to(updates), tree.flatten_up_to(given)
        taken = [_taken(*leaf) for leaf in zip(leaves, likes, places, strict=True)]
        applied, errors = (tree.unflatten([leaf[i] for leaf in taken]) for i in range(2))

        def gone(moved, update, error):
            # What a narrow parameter does not take goes into the next round.
            return mixing * (moved - update[None]) + error[None]

        there = jax.tree.map(gone, state.moved, arrived, errors)
        return applied, state._replace(
            count=state.count + 1,
            moved=_chosen(arrives, parts(there), moved, state.moved),
            outer=tuple(outer_states),
            late=late,
        )

    def _stepped(state: LocalStepsState, updates: Any, params: Any, extra: Any) -> LocalStepsState:
        """The state with the step of this worker, unless that step is not finite."""
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
        taken = jax.tree.map(lambda a, b: a[None].astype(b.dtype), kept, state.inner)
        return state._replace(
            missed=state.missed + (~finite).astype(jnp.int32),
            inner=_buffers.with_schedules(if_finite(kept, state.inner), taken),
            moved=if_finite(moved, state.moved),
        )

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    return optax.GradientTransformationExtraArgs(cast(Any, init), cast(Any, update))


def _taken(update: jax.Array, like: jax.Array, parameter: Any) -> tuple[jax.Array, jax.Array]:
    """The update in the dtype of the gradient, and what the parameter does not take of it."""
    if parameter.dtype != like.dtype:
        parameter = jnp.zeros_like(like)
    narrow, error = _rounded.of_leaf(update, like, parameter)
    return narrow, jnp.zeros_like(update) if error is None else error


def _in_float32(x: Any) -> jax.Array:
    return jnp.asarray(x).astype(jnp.float32)


def _chosen(which: list[jax.Array], yes: list[Any], no: list[Any], like: Any) -> Any:
    """For each fragment one of the two trees, joined."""
    picked = [
        jax.tree.map(lambda a, b, now=now: jnp.where(now, a, b), *pair)
        for now, *pair in zip(which, yes, no, strict=True)
    ]
    return _groups.joined(like, picked)


def _check_outer(states: tuple[Any, ...]) -> None:
    if not _wrappers.reductions(states):
        raise ValueError(
            "outer of optax_ext.local_steps has no sparse allreduce, and no optax_ext.dense, in "
            "it. Write for example outer=optax.chain(optax_ext.dense(axis=...), optax.sgd(1.0))."
        )
    every = max((state.settings.every for state in _wrappers.get_states(states)), default=1)
    if every > 1:
        raise ValueError(
            f"outer of optax_ext.local_steps has every={every}, and is called once in a round: "
            "give that number to local_steps alone. (optax_ext.sparse_adamw(..., every=) is an "
            "optimizer without local_steps.)"
        )


def _warn_without_ahead(updates: Any, state: LocalStepsState, params: Any) -> None:
    """Warns about a gradient that was evidently taken at the common parameters."""
    leaves, depends_on = jax.tree.leaves(updates), _trace_checks.depends_on
    if params is None or not depends_on(leaves, jax.tree.leaves(params)):
        return
    if not depends_on(leaves, jax.tree.leaves(state.moved)):
        warnings.warn(
            "the gradients were taken at params, but local steps expect them at the worker's own "
            "parameters: write jax.grad(loss_fn)(optax_ext.ahead(params, opt_state), batch).",
            stacklevel=_trace_checks.level_of_caller(),
        )

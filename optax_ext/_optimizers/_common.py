"""Common parts of the optimizers.

The preconditioner and the learning rate come before the exchange, weight decay after it.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax

from optax_ext._optimizers import _moments
from optax_ext._state import _whole
from optax_ext._step import _options
from optax_ext._step._accumulation import Residual
from optax_ext._step._accumulation import residual as how_kept
from optax_ext._step._buffers import Elementwise
from optax_ext._step._sparse_state import SparseAllreduceState
from optax_ext._transforms._sparse_allreduce import selection, sparse_allreduce
from sparse_collectives import AxisName, Selector, SparseAllreduce, _compat, _validation, transport
from sparse_collectives.allreduce import agreed


def scale_by_local_adam(
    b2: float | jax.Array = 0.999,
    eps: float | jax.Array = 1e-8,
    *,
    axis: AxisName | None = None,
    average_every: int | None = None,
    moments: str = "entries",
) -> optax.GradientTransformationExtraArgs:
    r"""Divides each worker's gradient by the root of its own second moment.

    .. math::

        v_i = b_2 v_i + (1 - b_2) g_i^2, \quad u_i = g_i / (\sqrt{v_i / (1 - b_2^t)} + eps)

    Use it in a chain with the learning rate as ``sparse_allreduce(..., local=)``. Adam after a
    sparse allreduce sees an entry once in T steps, as the sum of T gradients, and divides it by
    a root that is sqrt(T) times too large. Here every gradient is divided in the step that
    computes it, and the residual holds updates of the parameters.

    The gradient of one worker has more noise than the mean gradient, and its second moment is
    larger: the root is larger by up to sqrt(P), if the gradient is all noise. The learning rate
    has to make up for that, as it does in :func:`sparse_adamw`.

    Cost: n float32 for each worker, read and written at each step; for a matrix [r, c], r + c
    with ``moments="factors"`` and r with ``"rows"``. No words, unless ``average_every`` is given.

    Args:
      b2: decay of the second moments, in [0, 1), or ``f32[]`` from ``optax.inject_hyperparams``.
      eps: added to the root, as in Adam.
      axis: the mesh axis of the workers, for ``average_every``.
      average_every: the second moments are averaged over the workers once in this many steps,
        by a dense allreduce of all numbers that ``moments`` stores. None: never. Use it if the
        workers have different data.
      moments: how the second moments are stored. ``"entries"``: one for each entry, as in Adam.
        ``"factors"``, for less memory: means over rows and over columns, as in Adafactor (Shazeer
        and Stern 2018, section 3). The product of two such means, divided by their overall mean,
        approximates the moment of an entry. b2, eps and the bias correction are as in Adam, and
        Adafactor's update clipping is left out. ``"rows"``: means over rows only, one number for
        each row, the cheapest. In a leaf of more than two axes the two largest are the axes of
        the matrix, as in ``optax.adafactor``. A leaf without two axes longer than 1, such as a
        vector, has a moment for each entry. A checkpoint with other moments is refused.

    Returns:
      An ``optax.GradientTransformationExtraArgs``.

    Raises:
      ValueError: an argument is out of its range; ``moments`` has another value;
        ``average_every`` without ``axis``.

    Example:
      >>> import jax.numpy as jnp
      >>> tx = scale_by_local_adam()
      >>> scaled, _ = tx.update(jnp.array([4.0, -0.5]), tx.init(jnp.zeros(2)))
      >>> [round(float(x), 3) for x in scaled]
      [1.0, -1.0]
    """
    b2 = _options.check_hyperparameter("b2", b2, 0.0, 1.0)
    if isinstance(b2, float) and b2 == 1.0:
        raise ValueError("b2 must be less than 1, got 1.0: second moments would ignore gradients.")
    eps = _options.check_hyperparameter("eps", eps, 0.0, 1.0)
    _validation.check_choice("moments", moments, _moments.MOMENTS)
    if average_every is not None:
        average_every = _validation.check_positive_int("average_every", average_every)
        if axis is None:
            raise ValueError(
                f"average_every={average_every} averages over the workers, which needs their axis. "
                "Give the mesh axis of the workers as axis=."
            )

    def init(params: Any) -> Any:
        return _moments.state_of(moments, params)

    def learned(state: Any, updates: Any) -> tuple[Any, ...]:
        if moments == "entries":
            return (jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state.nu, updates),)
        _, *trees = state
        return tuple(
            jax.tree.map(lambda g, v: _moments.next_of(v, g, b2), updates, tree) for tree in trees
        )

    def update(updates: Any, state: Any, params: Any = None):
        del params
        count = state.count + 1
        if moments != "entries":
            updates = jax.tree.map(_moments.bounded, updates)
        kept = learned(state, updates)
        if average_every is not None:
            kept = _averaged(kept, count % average_every == 0, cast(AxisName, axis))
        correction = 1 - jnp.asarray(b2, jnp.float32) ** count.astype(jnp.float32)

        def scaled(gradient, moment, columns=None):
            return gradient / (_moments.root_of(moment, columns, correction) + eps)

        return jax.tree.map(scaled, updates, *kept), type(state)(count, *kept)

    # optax types a state as any pytree, which NamedTuples of arrays are at run time.
    tx = optax.GradientTransformation(cast(Any, init), cast(Any, update))
    return optax.with_extra_args_support(tx)


def _averaged(nu: Any, now: jax.Array, axis: AxisName) -> Any:
    """The mean over the workers if ``now``, which is the same on all of them."""

    def mean(tree):
        return jax.tree.map(
            lambda v: _compat.to_varying(transport.pmean(v, axis), axis).astype(v.dtype), tree
        )

    # The count is typed as varying over the workers, although all of them have the same count.
    now = transport.psum(now.astype(jnp.int32), axis) > 0
    return lax.cond(now, mean, lambda tree: tree, nu)


# The default stands here, and the argument is None: optax.inject_hyperparams would make an array
# of a number.
DENSITY = 0.05
# The default b1 of local steps.
FIRST_MOMENT = 0.9


def in_front(
    learning_rate: optax.ScalarOrSchedule, gain: float | None, axis: AxisName, every: int = 1
) -> optax.GradientTransformationExtraArgs:
    """Updates of the parameters: incoming values times minus the learning rate and the gain.

    Args:
      learning_rate: a number, or a schedule of the steps that were not skipped.
      gain: None: :func:`default_gain`, or 1 for local steps.
      axis: the mesh axis of the workers.
      every: steps from one exchange to the next.
    """
    _options.check_learning_rate(learning_rate)
    if gain is None and every > 1:
        gain = 1.0

    def update(updates: Any, state: Any, params: Any = None):
        del params
        factor = default_gain(transport.axis_size(axis)) if gain is None else gain
        return jax.tree.map(lambda u: factor * u, updates), state

    scale = optax.GradientTransformation(lambda params: optax.EmptyState(), cast(Any, update))
    # optax before 0.2.6 declares a float, but an array (of inject_hyperparams) works as well.
    return optax.chain(scale, optax.scale_by_learning_rate(cast(Any, learning_rate)))


def default_gain(workers: int) -> float:
    """The learning-rate multiplier for the noise of one worker: sqrt(P / 2), from 1 to 2."""
    return min(2.0, max(1.0, (workers / 2) ** 0.5))


def first_moment(b1: Any, every: int, moments: str) -> float | jax.Array | None:
    """The decay of the first moment; None if there is no first moment."""
    if b1 is None:
        return FIRST_MOMENT if every > 1 and moments == "entries" else None
    if every == 1:
        raise ValueError(
            f"b1={b1!r} is for rounds (every=), and with an exchange at every step there is no "
            "first moment, because the residuals average gradients already. Leave b1 out."
        )
    if moments != "entries":
        raise ValueError(
            f'b1={b1!r} goes with moments="entries", and moments is {moments!r}. Leave one of them '
            "out."
        )
    return _options.check_hyperparameter("b1", b1, 0.0, 1.0)


def limit_of(
    limit: float | None, learning_rate: optax.ScalarOrSchedule, density: float, every: int
) -> optax.ScalarOrSchedule | None:
    """The limit of an entry of an update, from its multiple of the learning rate."""
    if limit is None:
        return None
    if callable(limit):
        raise ValueError(
            "limit must be a number greater than 0 or None, got a function: it is a multiple of "
            "the learning rate, which may be a schedule."
        )
    _options.check_positive_limit(limit)
    # An entry waits 1 / density exchanges for its turn, and has accumulated as many updates then.
    factor = limit * max(1.0, DENSITY / _validation.check_density(density)) * every
    if callable(learning_rate):
        return lambda count: factor * learning_rate(count)
    return lambda count: factor * learning_rate


def whole(
    local: optax.GradientTransformation,
    learning_rate: optax.ScalarOrSchedule,
    density: float,
    *,
    weight_decay: float | jax.Array,
    mask: Any,
    selector: Selector | None,
    allreduce: SparseAllreduce | None,
    residual: Residual | None = None,
    elementwise: bool = True,
    every: int | None = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer with ``local``, which applies the learning rate, before the accumulation.

    An argument that is None has the default that :func:`optax_ext.sparse_adamw` documents.
    ``options`` are options of :func:`optax_ext.sparse_allreduce`. ``elementwise`` says that
    ``local`` treats each entry independently of its leaf.
    """
    sparse = sparse_allreduce(
        selection(density, selector),
        agreed(bits=None) if allreduce is None else allreduce,
        local=Elementwise(local.init, local.update) if elementwise else local,
        residual=_ahead_by(_options.check_every(every)) if residual is None else residual,
        every=every,
        **options,
    )
    return decayed(_whole.whole(sparse), learning_rate, weight_decay, mask)


def _ahead_by(every: int) -> Residual:
    """The look-ahead: the worker's share of its residual, or in rounds all of the residual."""
    return how_kept(step_ahead=1.0 if every == 1 else math.inf)


def decayed(
    sparse: optax.GradientTransformationExtraArgs,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float | jax.Array,
    mask: Any,
) -> optax.GradientTransformationExtraArgs:
    """``sparse`` followed by weight decay, which every worker computes locally.

    The state is the state of ``sparse``; a step that ``sparse`` skips decays nothing.

    Args:
      sparse: a :func:`sparse_allreduce` whose output are updates of the parameters.
      learning_rate: the factor on the decay.
      weight_decay: the decay of the parameters for a learning rate of 1.
      mask: a tree of booleans like the parameters, or a function from the parameters to one;
        True marks leaves that decay. None: all leaves.
    """
    weight_decay = _options.check_hyperparameter("weight_decay", weight_decay, 0.0, float("inf"))
    if isinstance(weight_decay, float) and not weight_decay:
        return sparse

    def update(updates: Any, state: Any, params: Any = None, **extra: Any):
        if params is None:
            raise ValueError(
                "weight_decay needs the parameters: call tx.update(gradients, state, params)."
            )
        updates, updated = sparse.update(updates, state, params, **extra)
        new = cast(SparseAllreduceState, updated)
        stepped = (new.count - state.count).astype(jnp.float32)
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        factor = stepped * rate * weight_decay

        def decay(update, parameter, decays):
            if not decays:
                return update
            return update - (factor * parameter.astype(jnp.float32)).astype(update.dtype)

        where = mask(params) if callable(mask) else mask
        if where is None:
            where = jax.tree.map(lambda _: True, params)
        return jax.tree.map(decay, updates, params, where), new

    return optax.GradientTransformationExtraArgs(sparse.init, cast(Any, update))


_P = ParamSpec("_P")

_T = TypeVar("_T")

_MOMENTUM = {
    "b1": "there is no first moment, because the residuals average gradients already. Leave b1 out",
    "momentum": "the residuals act as momentum already. Leave momentum out, and begin with "
    "1 / (1 - momentum) times the learning rate",
}


def rate_alone(factory: Callable[_P, _T]) -> Callable[_P, _T]:
    """The factory with errors that help users of the optimizers of optax.

    A second positional argument could be meant as ``b1``, as in ``optax.adamw``, as the momentum,
    as in ``optax.sgd``, or as the density, and 0.9 is valid for each of them.

    Args:
      factory: its first parameter is the learning rate, and all others are keywords.
    """
    name, known = getattr(factory, "__name__", ""), inspect.signature(factory).parameters

    @functools.wraps(factory)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if len(args) > 1:
            raise TypeError(
                f"{name} takes the learning rate and keywords, got {args[1]!r} as well: write "
                f"{name}(learning_rate, density={args[1]!r}, axis=...), if it is the density that "
                "you mean. (The second argument is b1 in optax.adamw and momentum in optax.sgd; "
                "neither is valid here.)"
            )
        for momentum, reason in _MOMENTUM.items():
            if momentum in kwargs and momentum not in known:
                raise TypeError(f"{name} has no {momentum}=: {reason}.")
        return factory(*args, **kwargs)

    return checked

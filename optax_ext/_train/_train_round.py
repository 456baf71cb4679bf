"""A round of a training loop in one call, with its exchange during its local steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

from optax_ext._state import _held, _host_checks, _placement
from optax_ext._train import _arrays, _elsewhere, _mapped
from optax_ext._train._round_parts import Parts
from optax_ext._train._train_step import TrainStep


def make_train_round(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    exchange_mesh: Mesh | None = None,
    has_aux: bool = False,
    check_vma: bool = True,
    donate: bool = True,
    steps_in_flight: int | None = None,
) -> TrainStep:
    r"""A ``round(params, opt_state, batches) -> (params, opt_state, losses)`` of H steps.

    ``tx`` exchanges ``every`` H steps. :func:`make_train_step` does so at the end of a round, and
    all workers wait. Here the exchange sends the residuals from the beginning of the round, and
    the workers take H steps meanwhile, so a round lasts as long as the longer of the two:

    .. math::

        total &= exchange(r_1, \dots, r_P), \qquad
        d_i = \text{change by worker } i \text{ in H steps from } w + r_i \\
        w &= w + total / P, \qquad r_i = d_i + \text{undelivered part of } r_i

    Updates from other workers arrive one round later, and nothing is lost: no worker applies an
    update before it has arrived, and its own change in the meantime is in its residual. At the
    end of a run one round is still in the residuals; :func:`flush` applies it.

    In one program, the default, the exchange and the steps do not depend on each other, and the
    compiler decides whether they overlap. XLA for GPUs has asynchronous collectives; XLA for CPUs
    waits in each collective. With an ``exchange_mesh`` there are three programs, and the exchange
    runs on other devices of the same hosts: it overlaps whatever the compiler does.

    Args:
      loss_fn: as for :func:`make_train_step`.
      tx: an optimizer with ``every=``, such as :func:`sparse_adamw`.
      mesh: the mesh of the workers, whose parameters are whole on each of them.
      exchange_mesh: a mesh with the same axes, of other devices of the same processes, for the
        exchange: with ``jax.config.update("jax_num_cpu_devices", 2)`` the second device of each
        host, or the CPU devices of hosts with GPUs, which we have not tried. The residuals are
        copied to these devices, n float32 each way.
      has_aux: whether the loss also returns auxiliary values. The values of each worker at each
        step are a fourth result, with leading axes ``[H, P]``.
      check_vma: as for :func:`make_train_step`.
      donate: as for :func:`make_train_step`.
      steps_in_flight: as for :func:`make_train_step`: how many rounds may be pending.

    Returns:
      The round. ``batches`` are the batches of H steps, stacked: leaves of shape ``[H, B, ...]``,
      whose second dimension is split over the workers. ``losses`` is ``f32[H, P]``, the loss of
      each worker at each step. Parameters and state are as after H calls of a step, and complete
      after each round: save them, reshard them, or go on with :func:`make_train_step`. Memory: 4 n
      float32 more than a step, in one program for CPUs (n = 1M, four workers).

    Raises:
      ValueError: an ``exchange_mesh`` of another kind.
      ValueError: at the first call of a shape, a ``tx`` without ``every=``, with a wrapper that
        accumulates gradients, with a decay of residuals, with ``dense_steps`` or with an allreduce
        that shards its buffer.
      ValueError: parameters that are sharded.
      ValueError: batches of another number of steps.
      ValueError: a state from the middle of a round.
      TypeError: as for :func:`make_train_step`.

    Example:
      >>> import jax, jax.numpy as jnp, optax_ext
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = optax_ext.sparse_sgd(0.1, density=1.0, every=2, axis="data")
      >>> params = {"w": jnp.array([1.0, -2.0])}
      >>> opt_state = optax_ext.init_state(tx, params, mesh)
      >>> take_round = make_train_round(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh)
      >>> batches = jnp.stack([jnp.eye(2)] * 2)
      >>> for _ in range(2):
      ...     params, opt_state, losses = take_round(params, opt_state, batches)
      >>> losses.shape, [round(float(x), 2) for x in params["w"]]
      ((2, 1), [0.81, -1.62])

    References:
      The delay of one round is as in Douillard et al., `Streaming DiLoCo
      <https://arxiv.org/abs/2501.18512>`_, 2025, Section 2.3, which loses or mixes the change
      by a worker in the meantime.
    """
    call = "optax_ext.make_train_round(loss_fn, tx, mesh)"
    _host_checks.check_transformation(call, tx, mesh)
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (params, batch), got {loss_fn!r}.")
    given, mesh = mesh, _placement.with_auto_axes(mesh)
    parts = Parts(_mapped.Step(_held.held(tx), loss_fn, has_aux, mesh, check_vma))
    if exchange_mesh is None:
        jitted: Any = jax.jit(
            lambda params, opt_state, batches, places: _kept(
                parts.round(*_begin(params, opt_state, batches, places)), places
            ),
            static_argnames="places",
            donate_argnums=(0, 1) if donate else (),
        )
    else:
        _elsewhere.check(exchange_mesh, mesh)
        jitted = _Beside(parts, mesh, _placement.with_auto_axes(exchange_mesh), donate=donate)
    in_flight = _arrays.limit(steps_in_flight, mesh)
    return TrainStep(jitted, tx, given, in_flight, None, donates=donate, in_rounds=True)


def _begin(params: Any, opt_state: Any, batches: Any, places: Any) -> tuple[Any, Any, Any]:
    """The arguments of a round as its parts take them."""
    if places is not None:
        return places.on_auto_axes(params, opt_state, batches)
    return params, opt_state, batches


def _kept(results: tuple[Any, ...], places: Any) -> tuple[Any, ...]:
    """The results of a round where the arguments were; losses have the workers second."""
    if places is None:
        return results
    own = _mapped.Workers.of(results[1]).own
    return places.constrain(results, PartitionSpec(None, *own))


class _Beside:
    """A round in three programs, with the exchange on devices of its own."""

    def __init__(self, parts: Parts, mesh: Mesh, exchange_mesh: Mesh, *, donate: bool):
        self._mesh, self._exchange_mesh = mesh, exchange_mesh
        taken = (0, 1) if donate else ()
        self._local = jax.jit(parts.local, donate_argnums=taken)
        # The results of the local steps and of the exchange have no other user.
        self._last = jax.jit(parts.last, donate_argnums=(0, 1, 4))
        self._exchange = jax.jit(
            lambda waiting, skeleton: parts.exchange(
                exchange_mesh, skeleton.shapes, skeleton.filled(waiting)
            ),
            static_argnums=1,
            donate_argnums=0,
        )

    def __call__(self, params: Any, opt_state: Any, batches: Any, *, places: Any) -> Any:
        if _host_checks.is_traced((params, opt_state, batches)):
            self.trace()
        params, opt_state, batches = _begin(params, opt_state, batches, places)
        waiting, skeleton = _elsewhere.split(params, opt_state)
        there = _elsewhere.moved(waiting, self._exchange_mesh)
        # The local steps overwrite the arrays that these are copied from.
        jax.block_until_ready(there)
        arrived = self._exchange(there, skeleton)
        stepped = self._local(params, opt_state, batches)
        results = self._last(*stepped, batches, _elsewhere.moved(arrived, self._mesh))
        return _kept(results, places)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Raises an error: a round in three programs can't be traced as one."""
        raise TypeError(
            "a round with an exchange_mesh is three programs, which can't be traced as one. To "
            "look at its traffic, trace optax_ext.make_train_round(loss_fn, tx, mesh), which "
            "exchanges the same."
        )

    lower = trace

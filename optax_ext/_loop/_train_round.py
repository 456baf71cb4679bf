"""A round of a training loop in one call, with its exchange beside its local steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from optax_ext._loop import _arrays, _elsewhere
from optax_ext._loop._round_parts import Parts
from optax_ext._loop._train_step import TrainStep
from optax_ext._state import _calls, _placement


def make_train_round(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    exchange_mesh: Mesh | None = None,
    check_vma: bool = True,
    donate: bool = True,
) -> TrainStep:
    r"""A ``round(params, opt_state, batches) -> (params, opt_state, losses)`` of H steps.

    ``tx`` exchanges ``every`` H steps. :func:`make_train_step` does so at the end of a round, and
    all workers wait. Here the exchange is that of what waited at the beginning of the round, and
    the workers take H steps meanwhile, so that a round lasts as long as the longer of the two:

    .. math::

        total &= exchange(r_1, \dots, r_P), \qquad
        d_i = \text{what worker } i \text{ moves in H steps from } w + r_i \\
        w &= w + total / P, \qquad r_i = d_i + \text{what was not delivered of } r_i

    What others have done arrives later by a round, and nothing is lost: no worker moves by it
    before it has arrived, and what moved meanwhile is in its residual. At the end of a run a
    round waits, as ever what is in the residuals does; :func:`flush` delivers it.

    In one program, the default, the exchange does not depend on the steps nor they on it, and it
    is the compiler's choice whether they overlap. XLA for GPUs has asynchronous collectives; XLA
    for CPUs waits in each. With an ``exchange_mesh`` there are three programs, and the exchange
    runs on other devices of the same hosts: it overlaps whatever the compiler does.

    Args:
      loss_fn: as of :func:`make_train_step`, without ``aux``.
      tx: such as :func:`sparse_adamw` with ``every=``.
      mesh: the mesh of the workers, whose parameters are whole on each of them.
      exchange_mesh: a mesh with the same axes, of other devices of the same processes, for the
        exchange: with ``jax.config.update("jax_num_cpu_devices", 2)`` the second of each host, or
        the CPU devices of hosts with GPUs, which was not tried. What waits is copied to them, n
        float32 each way.
      check_vma: as of :func:`make_train_step`.
      donate: as of :func:`make_train_step`.

    Returns:
      The round. ``batches`` are the batches of H steps, stacked: leaves of shape ``[H, B, ...]``,
      of which the second dimension is split over the workers. ``losses`` is ``f32[H, P]``, that of
      each worker at each step. Parameters and state are as behind H calls of a step, at all times
      complete: save them, reshard them, or go on with :func:`make_train_step`. Memory: 4 n
      float32 more than a step, in one program for CPUs (n = 1M, four workers).

    Raises:
      ValueError: no ``exchange_mesh`` of such a kind; at the first call of a shape, a ``tx``
        without ``every=``, with a wrapper that accumulates gradients, with a decay of residuals,
        with ``dense_steps`` or with an allreduce that shards its buffer; parameters that are
        sharded; batches of another number of steps; a state from the middle of a round.
      TypeError: as of :func:`make_train_step`.

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
      Delayed by a round as in Douillard et al., `Streaming DiLoCo
      <https://arxiv.org/abs/2501.18512>`_, 2025, Section 2.3, which loses or mixes what a worker
      moves meanwhile.
    """
    call = "optax_ext.make_train_round(loss_fn, tx, mesh)"
    _calls.check_transformation(call, tx, mesh)
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (params, batch), got {loss_fn!r}.")
    mesh = _placement.with_auto_axes(mesh)
    parts = Parts(optax.with_extra_args_support(tx), loss_fn, check_vma)
    if exchange_mesh is None:
        jitted: Any = jax.jit(
            lambda *args, places: parts.round(mesh, *args),
            static_argnames="places",
            donate_argnums=(0, 1) if donate else (),
        )
    else:
        _elsewhere.check(exchange_mesh, mesh)
        jitted = _Beside(parts, mesh, _placement.with_auto_axes(exchange_mesh), donate=donate)
    in_flight = _arrays.limit(None, mesh)
    return TrainStep(jitted, tx, mesh, in_flight, None, donates=donate, in_rounds=True)


class _Beside:
    """A round in three programs, the exchange among them on devices of its own."""

    def __init__(self, parts: Parts, mesh: Mesh, exchange_mesh: Mesh, *, donate: bool):
        self._mesh, self._exchange_mesh = mesh, exchange_mesh
        taken = (0, 1) if donate else ()
        self._local = jax.jit(lambda *args: parts.local(mesh, *args), donate_argnums=taken)
        # What comes from the local steps, and from the exchange, is nobody else's.
        self._last = jax.jit(lambda *args: parts.last(mesh, *args), donate_argnums=(0, 1, 4))
        self._exchange = jax.jit(
            lambda waiting, skeleton: parts.exchange(
                exchange_mesh, skeleton.shapes, skeleton.filled(waiting)
            ),
            static_argnums=1,
            donate_argnums=0,
        )

    def __call__(self, params: Any, opt_state: Any, batches: Any, *, places: Any) -> Any:
        del places
        waiting, skeleton = _elsewhere.split(params, opt_state)
        there = _elsewhere.moved(waiting, self._exchange_mesh)
        # The local steps write where these are copied from.
        jax.block_until_ready(there)
        arrived = self._exchange(there, skeleton)
        params, opt_state, losses = self._local(params, opt_state, batches)
        here = _elsewhere.moved(arrived, self._mesh)
        return self._last(params, opt_state, batches, losses, here)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """A round in three programs is not traced as one."""
        raise TypeError(
            "a round with an exchange_mesh is three programs. To look at its traffic, trace that "
            "of optax_ext.make_train_round(loss_fn, tx, mesh), which exchanges the same."
        )

    lower = trace

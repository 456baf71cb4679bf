"""The training step of a data-parallel loop, for the most common case."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import Mesh, PartitionSpec

from optax_ext._state import _batch_checks, _held, _host_checks, _index, _placement
from optax_ext._train import _arrays, _mapped, _other_state, _places, _same_program, _skipped


def make_train_step(
    loss_fn: Callable[..., Any],
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    has_aux: bool = False,
    weighted: bool = False,
    check_vma: bool = True,
    donate: bool = True,
    steps_in_flight: int | None = None,
    batch_spec: PartitionSpec | None = None,
) -> TrainStep:
    """A jitted ``step(params, opt_state, batch) -> (params, opt_state, loss)``.

    Each worker differentiates the loss of its part of the batch; ``tx`` turns the
    local gradients into one update for all workers. The workers are along the axis of ``tx``; the
    leaves of a batch are split over it along their leading dimension.

    Parameters keep their placement: replicated, or sharded over other axes of the mesh (tensor
    parallelism, FSDP). The compiler handles those axes, so ``loss_fn`` and the transformations
    after the exchange see whole arrays; only the exchange runs on each device's part.

    Args:
      loss_fn: ``loss_fn(params, batch) -> scalar``, the mean over the batch it is
        given; with ``has_aux``, ``(scalar, aux)``.
      tx: a transformation that starts with :func:`sparse_allreduce` or
        :func:`dense`. If it takes extra arguments, it gets the mean loss as ``value``, as
        ``optax.contrib.reduce_on_plateau`` needs.
      mesh: the mesh, with the axis of ``tx``.
      has_aux: whether the loss also returns auxiliary values; their mean over the
        workers is returned as a fourth result.
      weighted: whether the loss returns the weight of its worker as well, ``(loss, weight)``, or
        ``((loss, weight), aux)`` with ``has_aux``: with padded examples, the mean over the real
        ones and their number. Then gradient, loss and auxiliary values are means over the whole
        batch, ``sum(weight_i * x_i) / sum(weight_i)``, for one word in a sum; a worker of weight 0
        adds nothing. Without it the workers count alike.
      check_vma: as in ``jax.shard_map``. It proves at trace time that the new
        parameters are the same on every worker.
      donate: whether params and opt_state are donated: updated in place, and not
        to be used again by the caller. A step inside ``jax.jit`` or ``jax.lax.scan`` needs False.
        An array that is given twice is copied first: tied weights that are two leaves become two
        weights, as with any optimizer of optax. (To keep weights tied, have them once in the
        parameters, and use them twice in the loss.)
      steps_in_flight: how many steps may be pending when a call returns; a call waits for older
        ones. None: 2 on CPU, and as many as JAX allows elsewhere. On CPU, XLA ends the process
        if the devices of a collective do not all reach it within 40 seconds, which happens when
        many steps are queued on few cores.
      batch_spec: the spec of the leaves of a batch, by default ``PartitionSpec(axis)``. With FSDP
        the devices of a worker share its examples: ``PartitionSpec(("replica", "fsdp"))``, the
        axis of ``tx`` first.

    Returns:
      The step. The loss is the mean over the workers, evaluated where gradients are taken. With
      :func:`sparse_adamw` and :func:`sparse_sgd` these are look-ahead parameters, which include a
      share of the worker's own residual, and so of updates from its own batches. In short runs this
      loss is lower than on held-out data. If ``tx`` exchanges ``every`` so many steps, it is
      the loss where the workers are, which ``params`` are not between two exchanges. On a mesh of
      several processes it is then returned for each worker, ``f32[P]``, and so is ``aux``, since a
      mean would be a message at every step: compute ``loss.mean()`` when the loop reads it.

    Raises:
      TypeError: arguments of another kind.
      TypeError: a loss that is not a scalar, or with ``has_aux`` not a pair.
      ValueError: fewer than one step in flight.
      ValueError: arrays that an earlier step has taken over.
      ValueError: a loss that is a mean over the workers already.
      ValueError: an axis that the mesh does not have.
      ValueError: a batch whose leading dimension P does not divide.
      ValueError: a ``tx`` that does not reduce the gradients over the axis, or keeps a state that
        differs between the workers.
      ValueError: ``weighted`` with a ``tx`` that exchanges ``every`` so many steps.
      ValueError: on a mesh over several processes, a batch that is not a global array.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optax_ext
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> tx = optax.chain(optax_ext.ok_topk(density=0.5, axis="data"), optax.sgd(0.1))
      >>> params = {"w": jnp.array([1.0, -2.0])}
      >>> opt_state = optax_ext.init_state(tx, params, mesh)
      >>> step = make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh)
      >>> params, opt_state, loss = step(params, opt_state, jnp.eye(2))
      >>> float(loss), params["w"].tolist()
      (2.5, [1.0, -1.7999999523162842])
    """
    call = "optax_ext.make_train_step(loss_fn, tx, mesh)"
    _host_checks.check_transformation(call, tx, mesh)
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (params, batch), got {loss_fn!r}.")
    in_flight = _arrays.limit(steps_in_flight, mesh)
    given, mesh = mesh, _placement.with_auto_axes(mesh)

    parts = _mapped.Step(_held.held(tx), loss_fn, has_aux, mesh, check_vma, weighted)

    def step(params, opt_state, batch, places):
        axis = _host_checks.axis_on(mesh, opt_state)
        _batch_checks.check_batch(batch, mesh, axis)
        # With sharded parameters the compiler handles the other axes.
        sharded = places is not None and places.sharded
        if places is not None:
            params, opt_state, batch = places.on_auto_axes(params, opt_state, batch)
        workers = _mapped.Workers.of(opt_state, sharded=sharded)
        if weighted and workers.of_each:
            raise ValueError(
                "weighted=True adds up the weights of all workers at each step, and between the "
                "exchanges of tx no worker waits for another. Divide the sum of the losses by the "
                "same number on every worker instead, such as the mean number of examples."
            )
        made = parts.gradients(workers, params, opt_state, batch)
        params, opt_state, loss = parts.update(workers, params, opt_state, made)
        of_loss = workers.of_loss
        if workers.of_each and not mesh.is_multi_process:
            loss, of_loss = jax.tree.map(lambda x: jnp.mean(x, axis=0), loss), PartitionSpec()
        results = (params, opt_state, *loss) if has_aux else (params, opt_state, loss)
        return results if places is None else places.constrain(results, of_loss)

    jitted = jax.jit(step, static_argnames="places", donate_argnums=(0, 1) if donate else ())
    return TrainStep(jitted, tx, given, in_flight, batch_spec, donates=donate)


log = logging.getLogger("optax_ext")
# JAX's refusal of a program with two types of axes in which something needs the devices: a callback
# with a result, an attention of cuDNN, a custom_partitioning.
_OF_ONE_MESH = "mesh should be the same across the entire program"


def _tell_of_rounds(opt_state: Any) -> None:
    """Says in the log which parameters a step returns between two exchanges."""
    index = _index.of(opt_state)
    if index.takes_local_steps:
        every = max(index.every, default=1)
        after = f"after {every}, {2 * every}, ... steps" if every > 1 else "at the end of a round"
        flushed = " At another step evaluate optax_ext.flush(params, opt_state)[0]."
        log.warning(
            "tx lets the workers take steps of their own between its exchanges, and params change "
            "at an exchange only: evaluate and save them %s.%s",
            after,
            "" if index.has_gradients else flushed,
        )


class TrainStep:
    """A jitted training step; see :func:`make_train_step`."""

    def __init__(
        self,
        step: Any,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        in_flight: int | None,
        batch_spec: PartitionSpec | None,
        *,
        donates: bool,
        in_rounds: bool = False,
    ):
        self._step = step
        self._tx = tx
        self._given = mesh
        self._mesh = _placement.with_auto_axes(mesh)
        self._batch_spec = batch_spec
        self._queue = _arrays.Queue(in_flight)
        self._skipped = _skipped.Watch()
        self._compared = False
        self._types_outside = False
        self._donates = donates
        self._in_rounds = in_rounds
        self._returned = _arrays.Returned((), (), None)
        self._places: dict[Any, _places.Places] = {}

    def __call__(self, params: Any, opt_state: Any, batch: Any, *more: Any) -> tuple[Any, ...]:
        """``(params, opt_state, loss)``, and with ``has_aux`` the auxiliary values.

        Raises:
          TypeError: a batch of several arguments instead of one pytree.
          TypeError: a call inside ``jax.jit`` or another transformation, of a step that donates.
        """
        if more:
            names = ", ".join("xyzuvw"[: len(more) + 1])
            raise TypeError(
                f"step takes one batch, which may be any pytree, got {len(more) + 1} arguments. "
                f"Write step(params, opt_state, ({names})), and loss_fn(params, batch) with "
                f"{names} = batch."
            )
        known = self._returned.places_of(params, opt_state, batch)
        if known and not known.explicit and known.mesh != _placement.of_program(self._given, batch):
            known = None
        if known is None:
            _batch_checks.check_examples(batch)
            _host_checks.check_not_donated(params=params, opt_state=opt_state, batch=batch)
            if self._donates:
                _host_checks.check_not_traced((params, opt_state, batch), self._in_rounds)
        _batch_checks.check_global(batch, self._mesh, opt_state, self._in_rounds)
        if self._in_rounds and known is None:
            _host_checks.check_begins(opt_state)
        if not self._compared:
            # Before anything is placed, since processes wait for each other there as well.
            self._compared = True
            compared = {"params": params, "opt_state": opt_state, "batch": batch}
            _same_program.check(self._mesh, opt_state, **compared)
        places = known
        if places is None:
            params, opt_state, places = self._placed(params, opt_state, batch)
        batch = places.put_batch(batch)
        if known is None and self._donates:
            (params, opt_state), batch = _arrays.unshared((params, opt_state), batch)
        self._queue.wait()
        try:
            with _placement.around(self._mesh):
                results = self._run(params, opt_state, batch, places)
        except (AttributeError, TypeError, ValueError) as error:
            if known is None:
                _other_state.check(error, self._tx, params, opt_state, self._given)
            raise
        self._returned = _arrays.Returned(results[0], results[1], places)
        # The loss is new at each step, and is never donated.
        self._queue.add(results[2])
        self._skipped.see(results[1], 2)
        return results

    def _run(self, params: Any, opt_state: Any, batch: Any, places: _places.Places) -> Any:
        if not (self._types_outside and places.explicit):
            try:
                return self._step(params, opt_state, batch, places=places.if_kept)
            except ValueError as error:
                if not places.explicit or _OF_ONE_MESH not in str(error):
                    raise
                self._types_outside = True
        typed_outside = _placement.on_auto_axes(self._step)
        return typed_outside(params, opt_state, batch, places=places.auto.if_kept)

    @property
    def jitted(self) -> Any:
        """The jitted function, for callers that place and check its arguments themselves."""
        return self._step

    def trace(self, params: Any, opt_state: Any, batch: Any) -> jax.stages.Traced:
        """As ``jax.jit(f).trace``, for example for :mod:`sparse_collectives.traffic`."""
        params, opt_state, places = self._placed(params, opt_state, batch)
        batch = places.put_batch(batch)
        with _placement.around(self._mesh):
            return self._step.trace(params, opt_state, batch, places=places.if_kept)

    def lower(self, params: Any, opt_state: Any, batch: Any) -> jax.stages.Lowered:
        """As ``jax.jit(f).lower``."""
        params, opt_state, places = self._placed(params, opt_state, batch)
        batch = places.put_batch(batch)
        with _placement.around(self._mesh):
            return self._step.lower(params, opt_state, batch, places=places.if_kept)

    def _placed(self, params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, _places.Places]:
        # The type of an array includes its placement: with arrays that are not on the mesh at
        # the first call, the second call would be another program.
        traced = [x for x in jax.tree.leaves(opt_state) if isinstance(x, Tracer)]
        mesh = _placement.of_program(self._given, (params, batch, traced))
        structure = jax.tree.structure((params, opt_state)), mesh
        places = self._places.get(structure)
        if places is None or not places.holds(params):
            _host_checks.check_order("step(params, opt_state, batch)", params, opt_state)
            _host_checks.check_differentiable(params)
            _host_checks.check_workers(opt_state, self._mesh)
            if isinstance(params, optax.LookaheadParams):
                raise ValueError(
                    "params are the two of optax.LookaheadParams, and this step moves one set. "
                    "Write a step with @optax_ext.data_parallel, with gradients at params.fast."
                )
            if not self._in_rounds:
                _tell_of_rounds(opt_state)
            places = _places.of(params, opt_state, mesh, self._batch_spec)
            self._places[structure] = places
        if not places.holds_state(opt_state):
            _host_checks.check_workers(opt_state, self._mesh)
            opt_state = places.put_state(opt_state)
        return places.put(params), opt_state, places

"""Functions of one worker, run by all workers of a mesh: all that the loops compile begins here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from optax_ext._error_feedback import _sparse_state, _trace_checks
from optax_ext._state import _index, _specs, _wrappers
from optax_ext._state._residual_tree import ahead
from optax_ext._train import _common, _weights
from sparse_collectives import AxisName, _axes, transport

WHOLE = PartitionSpec()


def mapped(
    function: Callable[..., Any],
    mesh: Mesh,
    ins: Any,
    outs: Any,
    *,
    check_vma: bool,
    manual: AxisName = (),
) -> Callable[..., Any]:
    """``function`` of one worker, run by all workers of a mesh.

    The compiler handles all axes but ``manual``, the axes of the workers; ``()`` stands for all.
    """
    names = {"axis_names": set(_axes.axis_names(manual))} if manual else {}
    return jax.shard_map(
        function, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=check_vma, **names
    )


class Workers(NamedTuple):
    """The workers for which a state was made.

    Attributes:
      axis: their axis.
      specs: the specs of the state.
      mapped_specs: the same, over the axes that a mapped function makes manual.
      of_each: whether they take steps on their own between two exchanges.
      manual: as in :func:`mapped`.
    """

    axis: Any
    specs: Any
    mapped_specs: Any
    of_each: bool
    manual: AxisName

    @classmethod
    def of(cls, opt_state: Any, *, sharded: bool = False) -> Workers:
        """The workers of a state; ``sharded`` if the compiler handles the other axes."""
        index, specs = _index.of(opt_state), _specs.state_specs(opt_state)
        manual = _axes.axis_names(index.axis) if sharded else ()
        inside = _specs.on_axes(specs, manual or None)
        return cls(index.axis, specs, inside, index.takes_local_steps, manual)

    @property
    def own(self) -> PartitionSpec:
        """The spec of values with a leading axis of the workers."""
        return PartitionSpec(self.axis)

    @property
    def of_loss(self) -> PartitionSpec:
        """The spec of the losses of a step."""
        return self.own if self.of_each else WHOLE


class Step(NamedTuple):
    """One step of all workers, in two parts.

    The loss may be any program for one device. JAX types what a worker computes as its own, and
    then a scan that starts from zeros, as in every recurrent layer, is an error. So a worker takes
    its gradient without these types. The second part has them: all of the gradient is typed as the
    worker's own, and JAX proves from that that the new parameters are the same on all workers.

    Attributes:
      chain: the transformation.
      loss_fn: the loss of a worker.
      has_aux: whether it also returns auxiliary values.
      mesh: the mesh.
      check_vma: whether the second part has types.
      weighted: whether the loss is a pair with the weight of its worker.
    """

    chain: optax.GradientTransformationExtraArgs
    loss_fn: Callable[..., Any]
    has_aux: bool
    mesh: Mesh
    check_vma: bool
    weighted: bool = False

    def gradients(self, workers: Workers, params: Any, opt_state: Any, batch: Any) -> Any:
        """The loss, a pair with ``has_aux``, and the gradients: ``[P, ...]``, of each worker."""

        def of_worker(params: Any, opt_state: Any, batch: Any) -> Any:
            def loss_fn(params: Any) -> Any:
                result, weight = self.loss_fn(params, batch), None
                if self.weighted:
                    result, weight = _weights.separated(result, self.has_aux)
                result = _trace_checks.check_loss(result, self.has_aux)
                loss, *aux = result if self.has_aux else (result,)
                return loss, (*aux, weight)

            differentiated = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, (*aux, weight)), gradients = differentiated(ahead(params, opt_state))
            made = (loss, *aux) if self.has_aux else loss, gradients
            if self.check_vma:
                _trace_checks.check_loss_is_local(loss, workers.axis)
            # JAX returns the conjugate of the direction in which a loss of complex leaves rises.
            made = made[0], jax.tree.map(_ascent, made[1])
            if self.weighted:
                made = _weights.shared(made, weight, workers.axis)
            return _sparse_state.with_lead(jax.tree.map(jnp.asarray, made))

        ins = WHOLE, workers.mapped_specs, workers.own
        return self._mapped(of_worker, workers, ins, workers.own, check_vma=False)(
            params, opt_state, batch
        )

    def update(
        self,
        workers: Workers,
        params: Any,
        opt_state: Any,
        made: Any,
        *more: Any,
        specs: tuple[Any, ...] = (),
        before: Callable[..., Any] | None = None,
    ) -> tuple[Any, Any, Any]:
        """``(params, opt_state, loss)`` from ``made``, the result of :meth:`gradients`.

        The loss is the mean over the workers, or of each if they take steps on their own. If it is
        given, ``before(opt_state, *more)`` is the state for the step; ``more`` has the ``specs``.
        """
        if workers.of_each:
            _check_no_reader(opt_state)

        def of_worker(params: Any, opt_state: Any, made: Any, *more: Any) -> Any:
            loss, gradients = _sparse_state.without_lead(made)
            if not workers.of_each:
                loss = jax.tree.map(lambda x: transport.pmean(x, workers.axis), loss)
            value = loss[0] if self.has_aux else loss
            opt_state = opt_state if before is None else before(opt_state, *more)
            updates, opt_state = self._updated(gradients, opt_state, params, value)
            updates = _common.updates_of(updates, workers.axis)
            opt_state = _common.state_of(opt_state, workers.specs, workers.axis)
            params = optax.apply_updates(params, updates)
            opt_state = _sparse_state.strongly_typed(opt_state)
            return params, opt_state, _sparse_state.with_lead(loss) if workers.of_each else loss

        ins = WHOLE, workers.mapped_specs, workers.own, *specs
        outs = WHOLE, workers.mapped_specs, workers.of_loss
        return self._mapped(of_worker, workers, ins, outs, check_vma=self.check_vma)(
            params, opt_state, made, *more
        )

    def _updated(self, gradients: Any, opt_state: Any, params: Any, value: Any) -> Any:
        try:
            return self.chain.update(gradients, opt_state, params, value=value)
        except TypeError as error:
            if "pcast" in str(error):
                raise TypeError(
                    "a branch or a loop in tx has results that JAX types as the same on all "
                    "workers in one place and as a worker's own in another, as in "
                    "optax.contrib.reduce_on_plateau as an optimizer of each worker. Write "
                    "check_vma=False in optax_ext.make_train_step or make_train_round, which "
                    f"leaves these types out. JAX says: {error}"
                ) from error
            missing = re.search(r"missing \d+ required keyword-only arguments?: (.*)", str(error))
            if missing is None:
                raise
            if missing[1] == "'value'":
                raise TypeError(
                    "a transformation in outer of optax_ext.local_steps needs 'value' in its "
                    "update, and the loss reaches inner only: each worker has a loss of its own. "
                    "Put the transformation into inner, or give a schedule."
                ) from error
            raise TypeError(
                f"a transformation in tx needs {missing[1]} in its update, and a step of all "
                "workers gives it only value, the mean loss: a line search would evaluate the loss "
                "of all workers at many parameters in one step. Take an optimizer without it, such "
                "as optax.adamw, or optax.contrib.momo, which sets its learning rate from the loss."
            ) from error

    def _mapped(
        self, function: Any, workers: Workers, ins: Any, outs: Any, *, check_vma: bool
    ) -> Callable[..., Any]:
        return mapped(function, self.mesh, ins, outs, check_vma=check_vma, manual=workers.manual)


def _ascent(gradient: Any) -> Any:
    return jnp.conj(gradient) if jnp.iscomplexobj(gradient) else gradient


# States of optax's transformations that read ``value=``.
_READERS = {
    *("ReduceLROnPlateauState", "MomoState", "MomoAdamState"),
    *("ScaleByBacktrackingLinesearchState", "ScaleByZoomLinesearchState"),
}


def _check_no_reader(opt_state: Any) -> None:
    """Checks that nothing outside of a worker's own steps depends on its own loss."""

    def is_reader(node: Any) -> bool:
        return type(node).__name__ in _READERS

    def is_found(node: Any) -> bool:
        return is_reader(node) or _wrappers.is_state(node) or _wrappers.is_moving(node)

    for node in filter(is_reader, jax.tree.leaves(opt_state, is_leaf=is_found)):
        name = type(node).__name__.removesuffix("State")
        raise ValueError(
            f"tx has {name} next to an exchange in rounds (every=, or local steps): it reads the "
            "loss, which in a round each worker has of its own, so that the workers would come to "
            "have different parameters. Give a schedule of the learning rate instead, or put it "
            "into inner of optax_ext.local_steps."
        )

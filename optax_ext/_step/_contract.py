"""What error feedback asks of an exchange, and what it gives to one."""

from typing import Any, NamedTuple, Protocol

import jax
import optax

from optax_ext._step import _accumulation, _checks, _layout, _sparse_state
from optax_ext._step._accumulation import Pending
from optax_ext._step._options import DenseSteps
from optax_ext._step._sparse_state import SparseAllreduceState
from sparse_collectives import AxisName, _compat, _validation


class Options(NamedTuple):
    """Checked options that every exchange has; :func:`sparse_allreduce` documents them."""

    axis: AxisName
    nonfinite: str
    local: optax.GradientTransformation | None
    residual: _accumulation.Residual
    dense_steps: DenseSteps
    dense_leaves: Any
    limit: optax.ScalarOrSchedule | None = None
    every: int = 1

    @property
    def dense_first(self) -> int:
        """How many steps to begin with are dense."""
        return 0 if callable(self.dense_steps) else self.dense_steps


class Accumulated(NamedTuple):
    """What is to be exchanged in a step.

    Attributes:
      acc: ``f32[1, m]``, the accumulator; nothing in a dense step, and the residual alone in a
        step that is skipped.
      pending: what it was made of; in a dense step its increment is all of the accumulator.
      dense_pending: of the leaves that go dense; None where there are none.
      state: before the step.
      layout: of the leaves.
      proceeds: ``bool[]``, the same on every worker; where it is False nothing may be delivered.
        None: every step proceeds.
      is_dense: ``bool[]``, the same on every worker: whether the increments are to be averaged.
        None: no step is.
      due: ``bool[]``, the same on every worker: whether there is an exchange at this step. Where it
        is False nothing may be sent. None: there is one at every step.
    """

    acc: jax.Array
    pending: Pending
    dense_pending: Pending | None
    state: SparseAllreduceState
    layout: _layout.TreeLayout
    proceeds: jax.Array | None
    is_dense: jax.Array | None
    due: jax.Array | None = None


# The mean ``f32[n]`` of the sparse buffer, that of the leaves that go dense ``f32[d]``, the state.
Reduced = tuple[jax.Array, jax.Array, SparseAllreduceState]


class Exchange(Protocol):
    """How accumulators become a mean that every worker has."""

    @property
    def keeps_others(self) -> bool:
        """Whether a worker may be left with parts of what others sent."""
        ...

    @property
    def shard_axis(self) -> AxisName:
        """The axes along which the workers of a node hold shards of one buffer; ``()`` of none."""
        ...

    def dense(self, params: Any, labels: tuple[bool, ...] | None) -> tuple[bool, ...] | None:
        """Which leaves go dense, those that the user has labelled among them."""
        ...

    def part_size(self, size: int) -> int:
        """m, entries that one worker holds of a buffer of n."""
        ...

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """The part ``f32[m]`` of this worker of the gradients ``f32[n]``."""
        ...

    def init(self, layout: _layout.TreeLayout, workers: int) -> tuple[Any, Any]:
        """What it keeps for each worker, and what all have in common; without leading axes."""
        ...

    def reduce(self, step: Accumulated) -> Reduced:
        """One step: the means, and the state with what is kept.

        The means are the same bits on every worker. In the state the residual is in float32, and
        the info has no leading axes. Over the workers, the sum of the residuals and P times the
        mean is the sum of the accumulators.
        """
        ...


def checked_options(
    *,
    axis: AxisName,
    nonfinite: str = "skip",
    local: optax.GradientTransformation | None = None,
    residual: _accumulation.Residual | None = None,
    dense_steps: DenseSteps | None = None,
    dense_leaves: Any = None,
    limit: optax.ScalarOrSchedule | None = None,
    every: int | None = None,
) -> Options:
    """The options as they were given, or an error that says what to write instead."""
    nonfinite = _validation.check_choice("nonfinite", nonfinite, _accumulation.POLICIES)
    _checks.check_residual_option(residual)
    _checks.check_step_ahead(residual, local)
    _checks.check_limit(limit, local)
    every = _checks.check_rounds(every, local, dense_leaves)
    dense_steps = 0 if dense_steps is None else dense_steps
    if not callable(dense_steps):
        dense_steps = _validation.check_positive_int("dense_steps", dense_steps, minimum=0)
    return Options(
        axis=axis,
        nonfinite=nonfinite,
        local=local,
        residual=_accumulation.residual() if residual is None else residual,
        dense_steps=dense_steps,
        dense_leaves=dense_leaves,
        limit=limit,
        every=every,
    )


def settings_of(
    options: Options,
    *,
    selector: str | None,
    allreduce: str | None,
    correction: str | None,
    shard_axis: AxisName = (),
) -> _sparse_state.Settings:
    """What a state is made for, but for the local transformation."""
    return _sparse_state.Settings(
        selector=selector,
        allreduce=allreduce,
        local="none",  # What it keeps is known at init.
        residual=str(options.residual.spec),
        correction=correction,
        axis=_compat.static_axis(options.axis),
        shard_axis=_compat.axis_names(_compat.static_axis(shard_axis)),
        decay=options.residual.decay,
        step_ahead=options.residual.step_ahead,
        every=options.every,
    )

"""The interface between error feedback and an exchange."""

from typing import Any, NamedTuple, Protocol

import jax
import optax

from optax_ext._error_feedback import _layout, _nonfinite, _options, _sparse_state
from optax_ext._error_feedback._nonfinite import Pending
from optax_ext._error_feedback._options import DenseSteps
from optax_ext._error_feedback._residual import Residual
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from sparse_collectives import AxisName, _axes, _validation


class Options(NamedTuple):
    """Checked options of every exchange; :func:`sparse_allreduce` documents them."""

    axis: AxisName
    nonfinite: str
    local: optax.GradientTransformation | None
    residual: Residual
    dense_steps: DenseSteps
    dense_leaves: Any
    limit: optax.ScalarOrSchedule | None = None
    every: int = 1

    @property
    def dense_first(self) -> int:
        """The number of dense steps at the beginning."""
        return 0 if callable(self.dense_steps) else self.dense_steps


class Accumulated(NamedTuple):
    """The input of an exchange in a step.

    Attributes:
      acc: ``f32[1, m]``, the accumulator; zeros in a dense step, and only the residual in a
        skipped step.
      pending: the parts of the accumulator; in a dense step the increment is all of it.
      dense_pending: the same for the dense leaves; None if there are none.
      state: the state before the step.
      layout: the layout of the leaves.
      all_finite: ``bool[]``, the same on every worker; if it is False nothing may be delivered.
        None: every step proceeds.
      is_dense: ``bool[]``, the same on every worker: whether the increments are averaged densely.
        None: no step is dense.
      is_exchange: ``bool[]``, the same on every worker: whether this step has an exchange. If it
        is False nothing may be sent. None: every step has one.
    """

    acc: jax.Array
    pending: Pending
    dense_pending: Pending | None
    state: SparseAllreduceState
    layout: _layout.TreeLayout
    all_finite: jax.Array | None
    is_dense: jax.Array | None
    is_exchange: jax.Array | None = None


# The mean ``f32[n]`` of the sparse buffer, the mean ``f32[d]`` of the dense leaves, the state.
Reduced = tuple[jax.Array, jax.Array, SparseAllreduceState]


class Exchange(Protocol):
    """The reduction of accumulators to a mean that is the same on every worker."""

    def may_keep_of_others(self, layout: _layout.TreeLayout) -> bool:
        """Whether a worker may keep partial sums of what others sent, or parts of the mean."""
        ...

    @property
    def shard_axis(self) -> AxisName:
        """The axes along which the workers of a node hold shards of a buffer; ``()`` if none."""
        ...

    def dense(self, params: Any, labels: tuple[bool, ...] | None) -> tuple[bool, ...] | None:
        """Which leaves are dense, including the leaves that the user has labeled."""
        ...

    def part_size(self, size: int) -> int:
        """m, the number of entries that one worker holds of a buffer of n."""
        ...

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """This worker's part ``f32[m]`` of the gradients ``f32[n]``."""
        ...

    def init(self, layout: _layout.TreeLayout, workers: int) -> tuple[Any, Any]:
        """The state of each worker and the common state, without leading axes."""
        ...

    def reduce(self, step: Accumulated) -> Reduced:
        """One step: the means, and the state with the new residual.

        The means have the same bits on every worker. In the state the residual is in float32, and
        the info has no leading axes. Over the workers, the sum of the residuals plus P times the
        mean is the sum of the accumulators.
        """
        ...


class WholeBuffer:
    """What an :class:`Exchange` has of which every worker holds the whole buffer."""

    @property
    def shard_axis(self) -> AxisName:
        """There are no shards."""
        return ()

    def part_size(self, size: int) -> int:
        """All entries."""
        return size

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """The whole gradient of this worker."""
        return gradient


def checked_options(
    *,
    axis: AxisName,
    nonfinite: str = "skip",
    local: optax.GradientTransformation | None = None,
    residual: Residual | None = None,
    dense_steps: DenseSteps | None = None,
    dense_leaves: Any = None,
    limit: optax.ScalarOrSchedule | None = None,
    every: int | None = None,
) -> Options:
    """The checked options, or an error that names the fix."""
    nonfinite = _validation.check_choice("nonfinite", nonfinite, _nonfinite.POLICIES)
    _options.check_residual_option(residual)
    _options.check_step_ahead(residual, local)
    _options.check_limit(limit, local)
    every = _options.check_rounds(every, local, dense_leaves)
    dense_steps = 0 if dense_steps is None else dense_steps
    if not callable(dense_steps):
        dense_steps = _validation.check_positive_int("dense_steps", dense_steps, minimum=0)
    return Options(
        axis=axis,
        nonfinite=nonfinite,
        local=local,
        residual=Residual() if residual is None else residual,
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
    """The settings of a state, without the local transformation."""
    return _sparse_state.Settings(
        selector=selector,
        allreduce=allreduce,
        local="none",  # The kind of its state is known at init.
        residual=str(options.residual.spec),
        correction=correction,
        axis=_axes.static_axis(options.axis),
        shard_axis=_axes.axis_names(_axes.static_axis(shard_axis)),
        decay=options.residual.decay,
        step_ahead=options.residual.step_ahead,
        every=options.every,
    )

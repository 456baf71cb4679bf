"""Monitoring of a training run: numbers from the state, and where to write them."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_ext._error_feedback import _owner
from optax_ext._state import _find, _nnx, _placement, _wrappers
from optax_ext._train import _skipped
from optax_ext._transforms import _xi
from sparse_collectives import _axes, _validation

Writer = Callable[[int, dict[str, float]], Any]


@_placement.on_auto_axes
def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Statistics of the last step and of the residuals, as scalars.

    They cover all workers, and all buckets or groups together. They are computed by one compiled
    program, since JAX on a CPU can hang in several reductions over processes without waiting.

    Args:
      opt_state: the state of all workers, outside of the mapped function, or an ``nnx.Optimizer``.

    Returns:
      A dict of ``f32[]``; empty without a sparse allreduce:

      - ``steps``, ``skipped``, ``dropped``, ``withheld``: the counters of the state, and
        ``missed``, summed over the workers.
      - ``copied``: workers that received the residual of another one and left it out, or whose
        residual is not in the state, as after ``jax.pmap(..., out_axes=None)``.
      - ``clipped``: counts selections whose scheduled density was out of range
        (:func:`sparse_collectives.select.scheduled`). All entries below describe the last step;
        with ``every``, read them after a step that has an exchange.
      - ``effective_density``: selected entries / n, as a mean over the workers.
      - ``delivered_density``: entries in the update / n.
      - ``delivered_share``: the share of the selected entries that is in the update.
      - ``overflow``: capacity overflow, the entries of all workers that found no slot.
      - ``residual_norm``: the root of the mean over the workers of the squared norm.
      - ``local_threshold`` (mean), ``threshold_drift`` (mean), ``global_threshold``.
      - ``words``, which each worker received, and ``occupancy``, the share that is not padding.
      - ``xi``, if :func:`measure_xi` measures it; else 0.

    Cost: reads the residuals once.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> state = optax_ext.init_state(optax_ext.ok_topk(0.5, axis="w"), jnp.zeros(4), {"w": 2})
      >>> float(metrics(state)["residual_norm"])
      0.0
    """
    opt_state = _nnx.arrays(opt_state)
    return _measured(opt_state) if _wrappers.get_states(opt_state) else {}


@jax.jit
def _measured(opt_state: Any) -> dict[str, jax.Array]:
    states, info = _wrappers.get_states(opt_state), _find.get_info(opt_state)
    assert info is not None
    size = sum(x.residual.shape[1] * x.devices for x in states if x.layout.size)
    largest = max(states, key=lambda state: state.layout.size)

    def share(part, whole):
        return jnp.where(whole > 0, part / jnp.where(whole > 0, whole, 1), 0)

    squares = sum(
        jnp.sum(jnp.square(state.residual.astype(jnp.float32))) / state.workers for state in states
    )
    values = {
        "steps": largest.count,
        "skipped": largest.skipped,
        "dropped": sum(state.dropped for state in states),
        "withheld": sum(state.withheld for state in states),
        "missed": sum(
            jnp.sum(x)
            for state in (*states, *_wrappers.moving(opt_state))
            for x in jax.tree.leaves(state.missed)
        ),
        "copied": jnp.sum(_owner.has_left_out(largest.owner)) + _absent(largest),
        "clipped": _clipped(states),
        "effective_density": jnp.mean(info.selected) / max(size, 1),
        "delivered_density": info.delivered / max(sum(s.layout.size for s in states), 1),
        "delivered_share": share(jnp.sum(info.arrived), jnp.sum(info.selected)),
        "overflow": jnp.sum(info.overflow),
        "residual_norm": jnp.sqrt(squares),
        "local_threshold": jnp.mean(info.local_threshold),
        "threshold_drift": jnp.mean(info.threshold_drift),
        "global_threshold": jnp.mean(info.global_threshold),
        "words": jnp.mean(info.words),
        "occupancy": share(jnp.mean(info.useful), jnp.mean(info.words)),
        "xi": _xi.last(opt_state),
    }
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}


def _absent(state: Any) -> int:
    """The workers without a row, seen from outside of the mapped function."""
    axis = state.settings.axis
    inside = bool(_axes.ranks(axis)) or _axes.axis_is_bound(axis)
    return 0 if inside else max(state.settings.workers - state.workers, 0)


def _clipped(states: list[Any]) -> jax.Array | int:
    """The count of all scheduled selectors, which every worker has alike."""

    def is_scheduled(node: Any) -> bool:
        return "clipped" in getattr(node, "_fields", ())

    found = filter(is_scheduled, jax.tree.leaves(states, is_leaf=is_scheduled))
    return sum(jnp.max(node.clipped) for node in found)


class Monitor:
    """Writes :func:`metrics` every so many steps, from the training loop.

    Between two writes it does nothing, and so does not wait for steps. With several processes each
    process has to call it, since the residuals are spread over all of them; only the first one
    writes. It warns once if copies of a residual were left out (``copied``), and if all steps from
    one write to the next, ten or more, were skipped.

    Args:
      write: called with the step and a dict of floats, as the ``write_scalars`` of
        ``clu.metric_writers``.
      every: the number of steps from one write to the next.
      prefix: the prefix of the names.

    Example:
      >>> import jax.numpy as jnp, optax_ext
      >>> state = optax_ext.init_state(optax_ext.ok_topk(0.5, axis="w"), jnp.zeros(4), {"w": 2})
      >>> monitor = Monitor(lambda step, values: print(step, values["sparse/words"]), every=2)
      >>> for _ in range(4):
      ...     monitor(state)
      2 0.0
      4 0.0
    """

    def __init__(self, write: Writer, *, every: int = 1, prefix: str = "sparse/"):
        if not callable(write):
            raise TypeError(
                f"write must be callable as write(step, values), got {write!r}. Give for example "
                "print, or the write_scalars of a clu.metric_writers."
            )
        if not isinstance(prefix, str):
            raise TypeError(f"prefix must be a string, such as 'sparse/' or '', got {prefix!r}.")
        self._write = write
        self._every = _validation.check_positive_int("every", every)
        self._prefix = prefix
        self._calls = 0
        self._warned = False
        self._seen = 0.0, 0.0
        self._all_skipped = False

    def __call__(self, opt_state: Any, step: int | None = None) -> None:
        """Writes if ``step`` is a multiple of ``every``; by default the calls are counted."""
        self._calls += 1
        step = self._calls if step is None else step
        if step % self._every:
            return
        values = jax.device_get(metrics(opt_state))
        # In a state of pmap every worker has a copy of what all have alike.
        values = {name: float(np.max(x)) for name, x in values.items()}
        now = values.get("steps", 0.0), values.get("skipped", 0.0)
        if not self._all_skipped:
            counts = [new - old for new, old in zip(now, self._seen, strict=True)]
            self._all_skipped = _skipped.warn_if_all(counts, 2)
        self._seen = now
        if values.get("copied", 0) and not self._warned:
            self._warned = True
            warnings.warn(
                f"{int(values['copied'])} workers were given the residual of another one and left "
                "it out, or the state has one row for all workers: the state of one was copied to "
                "all, as flax.jax_utils.unreplicate and replicate around a checkpoint do, or "
                "jax.pmap returned it with out_axes=None, so that a checkpoint has worker 0's "
                "residual only. Give the state in_axes=0 and out_axes=0, and save it whole, with "
                "its leading axis (docs/checkpoints.md, pmap).",
                stacklevel=2,
            )
        if jax.process_index() == 0:
            self._write(step, {self._prefix + name: x for name, x in values.items()})

"""A training loop that goes on with whoever is there."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from optax_ext.elastic import _training_state
from optax_ext.elastic._arguments import check_batch, check_counts, check_finite, check_seconds
from optax_ext.elastic._checkpoints import Checkpoints
from optax_ext.elastic._job import Job, log
from optax_ext.elastic._meeting import Decision, Report, assigned
from optax_ext.elastic._programs import FAILURES, Group, Programs, said_by_others
from optax_ext.elastic._training_state import TrainingState, own, placed, restored
from optax_ext.elastic._waiting import Waiting


class BatchRequest(NamedTuple):
    """Whose batch is asked for.

    Attributes:
      step: the number of the step, from 0.
      rank: the place of this worker among those that are there, in ``[0, size)``.
      size: how many there are.
    """

    step: int
    rank: int
    size: int


class Lost(NamedTuple):
    """A worker that ended without handing its residual over.

    Attributes:
      process_id: its number in the job.
      step: the step at which the others went on without it.
      waited: the sum of the magnitudes of its residual at the last check (``check_every``), which
        is lost; NaN before the first check.
    """

    process_id: int
    step: int
    waited: float


class Training:
    """Trains with the workers that are present, through deaths, hangs and returns.

    When a worker dies in a step, the others repeat the step without it, from the state before it.
    A worker that returns under its number gets the parameters and the shared state, to the bit, the
    mean of the second moments, and an empty residual. A worker that leaves hands its residual over,
    and the last ones that leave write a checkpoint. The residual of a worker that dies is lost, and
    ``lost`` says how large it was. Every ``check_every`` exchanges the parameters are compared,
    which all living workers have to the same bits.

    Args:
      job: the result of :func:`connect`.
      loss_fn: as in :func:`optax_ext.make_train_step`.
      tx: as in :func:`optax_ext.make_train_step`, with parameters that are whole on each worker.
      params: parameters before the first step. All workers begin with the first worker's.
      batch_of: ``batch_of(request) -> batch`` returns this worker's part of the batch of a
        :class:`BatchRequest`: arrays whose shapes depend on ``request.size`` alone. It is called
        again when a step is repeated.
      axis: the axis of ``tx``.
      check_every: exchanges from one check to the next. A check compares the parameters, and lets
        workers in and out.
      folder: a folder of checkpoints, which every process can read and write. A training begins
        from the newest whole checkpoint, which any number of workers may have written, of the
        same model and optimizer. If one can't be written, a line says so and the training goes on.
      save_every: steps from one checkpoint to the next.
      min_workers: with fewer workers no step is taken, and the ones that are present wait.
      leave_on: signals on which this worker hands its residual over and leaves, such as
        ``signal.SIGTERM``.
      give_up: seconds without a step after which it is an error.

    Raises:
      ValueError: ``tx`` has a state that cannot be handed over, such as ``local_steps``.
      ValueError: an argument out of range or without its pair, or ``params`` that are not finite.
      RuntimeError: the job has a training already.

    Cost: a second copy of parameters and optimizer state, because a failed step must not have
    changed them; a program compiled for each number of workers; three numbers per parameter and
    worker when a worker returns.
    """

    def __init__(
        self,
        job: Job,
        loss_fn: Callable[[Any, Any], Any],
        tx: optax.GradientTransformation,
        params: Any,
        batch_of: Callable[[BatchRequest], Any],
        *,
        axis: str = "data",
        check_every: int = 10,
        folder: str | Path | None = None,
        save_every: int | None = None,
        min_workers: int = 1,
        leave_on: Sequence[signal.Signals] = (),
        give_up: float = 600.0,
    ):
        check_counts(check_every=check_every, min_workers=min_workers)
        check_seconds("give_up", give_up)
        if isinstance(leave_on, signal.Signals):
            raise ValueError(f"leave_on must be a sequence of signals, got {leave_on!r}.")
        if min_workers > job.num_processes:
            raise ValueError(
                f"min_workers is {min_workers}, but the job has {job.num_processes} processes."
            )
        if (folder is None) != (save_every is None):
            raise ValueError(
                f"folder is {folder!r} and save_every {save_every!r}: checkpoints need both."
            )
        self._job = job
        self._batch_of = batch_of
        self._axis = axis
        self._rows = PartitionSpec(axis)
        self._check_every = check_every
        self._min_workers = min_workers
        self._give_up = give_up
        mine = job.devices_of(job.process_id)[0]
        others = [x for x in jax.devices() if x.process_index != job.process_id]
        # A device of each process.
        devices = {x.process_index: x for x in (mine, *reversed(others))}
        self._programs = Programs(loss_fn, tx, axis, [*devices.values()])
        with jax.default_device(mine):
            self._initial = jax.tree.map(jnp.asarray, params)
        check_finite("params", self._initial)
        initial, state_of = self._initial, self._programs.state_of
        state = state_of(1, initial)
        self._every = _training_state.steps_in_round(state)
        self._model = _training_state.description(initial, state)
        self._checkpoints = Checkpoints(folder, save_every, job.process_id, initial, state_of)
        self._now: TrainingState | None = None
        self._before: TrainingState | None = None
        self._decision: Decision | None = None
        self._group: Group | None = None
        self._batch: Any = None
        # The shapes of a batch, by the number of workers.
        self._shapes: dict[int, Any] = {}
        self._magnitudes: dict[int, float] = {}
        self._lost: list[Lost] = []
        # Those that have handed over since the last meeting.
        self._goodbyes: set[int] = set()
        self._leaves = self._gone = False
        self._failures = 0
        self._waits: Waiting | None = None
        for number in leave_on:
            signal.signal(number, lambda *_: self.leave())
        job.begin()

    @property
    def step(self) -> int:
        """Steps that have been taken; 0 before the workers have met."""
        return self._now.step if self._now else 0

    @property
    def params(self) -> Any:
        """Parameters after the last step, as arrays of this process."""
        return own(self._now.params) if self._now else self._initial

    @property
    def opt_state(self) -> Any:
        """The state of all workers, of which this process has its own part; None at first."""
        return self._now.opt_state if self._now else None

    @property
    def members(self) -> tuple[int, ...]:
        """The numbers of the processes that take part."""
        return self._decision.members if self._decision else ()

    @property
    def lost(self) -> list[Lost]:
        """The workers that were lost while this process took part."""
        return list(self._lost)

    def leave(self) -> None:
        """Asks this worker to hand its residual over and to leave, at the next check."""
        self._leaves = True

    def run(self, steps: int) -> Iterator[tuple[int, jax.Array]]:
        """Trains until so many steps have been taken in all.

        Yields:
          ``(step, loss)`` after each step that this worker takes part in: the number of steps, and
          the loss as in :func:`optax_ext.make_train_step`. It ends early if this worker leaves.

        Raises:
          RuntimeError: this process can't take part, or another process has its number.
          RuntimeError: parameters of workers differ.
          RuntimeError: a step fails again and again with the same workers.
          TimeoutError: no step for ``give_up`` seconds.
          ValueError: the checkpoint is damaged, or of another model or optimizer.
          OSError: the last workers leave, and can't write their checkpoint.
        """
        check_counts(steps=steps)
        if (over := self._job.ended()) is not None and over >= steps:
            log.warning("the job is over after step %d, and params are of step %d", over, self.step)
            return
        since = time.monotonic()
        try:
            while self.step < steps and not self._gone:
                self._job.restart_deadline()
                loss = self._attempt()
                if loss is not None:
                    yield self.step, loss
                    since = time.monotonic()
                elif time.monotonic() - since > self._give_up:
                    raise TimeoutError(
                        f"no step for {self._give_up:g} s, after step {self.step}: of the "
                        f"{self._job.num_processes} processes {len(self.members)} met last, and "
                        f"min_workers is {self._min_workers}. A larger give_up= waits for longer."
                    )
        finally:
            self._job.lift_deadline()
        if not self._gone:
            self._checkpoints.wait()
            self._job.end(steps)

    def _attempt(self) -> jax.Array | None:
        """The loss of a step; None where the workers have met instead."""
        group, before = self._group, self._now
        if group is None or before is None:
            return self._meet()
        batch, self._batch = self._batch, None
        if batch is None:
            batch = self._next_batch(self.members, before.step)
        loss = None
        try:
            now, loss = self._take(group, before, batch)
            if now.version != before.version and now.version % self._check_every == 0:
                self._poll(group, now)
        except FAILURES as error:
            log.warning("after step %d: %s", self.step, said_by_others(error))
            self._group = None
            self._failures += loss is None
            if self._failures > 10:
                raise RuntimeError(
                    f"step {self.step} has failed {self._failures} times with the same workers, "
                    f"{self.members}."
                ) from error
        # Also if all have taken the step, and the check after it failed.
        return loss

    def _take(
        self, group: Group, before: TrainingState, batch: Any
    ) -> tuple[TrainingState, jax.Array]:
        batch = placed(batch, self._rows, group.mesh)
        params, opt_state, loss = jax.block_until_ready(
            group.step(before.params, before.opt_state, batch)
        )
        exchanged = _training_state.exchanges(before.opt_state, self._every)
        if exchanged:
            # Older states are not needed: all have begun this exchange, so finished the last one.
            self._before = before
        now = TrainingState(before.version + exchanged, before.step + 1, params, opt_state)
        self._now, self._failures = now, 0
        if self._checkpoints.is_due(now.step):
            self._save(now)
        return now, own(loss).reshape(())

    def _next_batch(self, members: tuple[int, ...], step: int) -> Any:
        rank, size = members.index(self._job.process_id), len(members)
        batch = self._batch_of(BatchRequest(step, rank, size))
        batch = check_batch(batch, self._axis, self._shapes.get(size), step)
        self._shapes[size] = jax.tree.map(jax.typeof, batch)
        return batch

    def _poll(self, group: Group, now: TrainingState) -> None:
        """Who would like to come, or to go, and whether all have the same."""
        waits = self._job.someone_waits()
        polled = _training_state.poll(group, now, waits=waits, leaves=self._leaves)
        meets, leaves, self._magnitudes = polled
        if leaves.any():
            self._part(group, now, leaves)
        if meets:
            self._group = None

    def _part(self, group: Group, now: TrainingState, leaves: np.ndarray) -> None:
        """Those that leave hand over what they hold; if all leave, to a checkpoint."""
        if not leaves.all():
            given = placed(leaves, PartitionSpec(), group.mesh)
            opt_state = jax.block_until_ready(group.release(now.opt_state, given))
            self._before = now
            self._now = now._replace(version=now.version + 1, opt_state=opt_state)
            self._goodbyes = {x for x, goes in zip(group.order, leaves, strict=True) if goes}
            return
        if self._checkpoints.folder is not None:
            self._save(now)
            if error := self._checkpoints.wait():
                raise error
        else:
            log.warning("all leave, and without a folder their residuals are lost")
        self._go(self._job.meet(Report(self._model, leaves=True)))

    def _go(self, decision: Decision) -> None:
        log.warning("leaves after step %d", self.step)
        self._gone = True
        self._checkpoints.wait()
        # The others learn it here, and need not wait until its heartbeats are missed.
        self._job.ready(decision)

    def _save(self, now: TrainingState) -> None:
        mark = self._decision.mark if self._decision else ""
        self._checkpoints.save(now.step, self.members, mark, own(now.params), own(now.opt_state))

    def _meet(self) -> None:
        """Makes a group of those that are there."""
        me = self._job.process_id
        states = [x for x in (self._now, self._before) if x is not None]
        versions, steps = (tuple(getattr(x, of) for x in states) for of in ("version", "step"))
        # A process with a state needs no checkpoint, whose folder may be gone.
        saved = -1 if states else self._checkpoints.newest()
        report = Report(self._model, versions, steps, leaves=me in self._goodbyes, saved=saved)
        decision = self._job.meet(report)
        if me in decision.refused:
            raise RuntimeError(f"this process can't take part: {decision.refused[me]}.")
        if me not in decision.members:
            return self._go(decision)
        if len(decision.members) < self._min_workers:
            self._waits = self._waits or Waiting(self._give_up)
            here, least = [*decision.members], self._min_workers
            self._waits.say(lambda: f"more workers: {here} are here, and min_workers is {least}")
            time.sleep(1.0)
            self._job.announce()
            return
        devices = assigned(decision, self._job.devices_of)
        if devices is None:
            self._checkpoints.wait()
            self._job.start_over(decision.members)
        # Until the new group is complete, this worker keeps the state of the old one.
        self._batch = self._next_batch(decision.members, decision.step)
        group = self._programs.load(devices, self._initial, self._batch)
        if not self._job.ready(decision):
            return
        holds = me in decision.holders
        held = next((x for x in states if holds and x.version == decision.version), None)
        try:
            given = self._job, self._programs, self._checkpoints, self._initial
            now = restored(decision, held, group, *given)
        except FAILURES as error:
            log.warning("the workers meet again: %s", said_by_others(error))
            return
        # A residual that was handed over is lost if all go back to the state before.
        goodbyes = self._goodbyes if held is self._now else set()
        gone = {*self.members} - {*decision.members} - goodbyes | {*decision.lost}
        for process in sorted(gone):
            waited = self._magnitudes.get(process, float("nan"))
            self._lost.append(Lost(process, decision.step, waited))
        if gone or self.members != decision.members:
            self._failures = 0
        self._decision, self._goodbyes, self._waits = decision, set(), None
        self._now, self._before, self._group = now, None, group
        log.warning("step %d, workers %s", decision.step, decision.members)

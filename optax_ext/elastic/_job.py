"""One process of a job whose processes may die and come back."""

import contextlib
import faulthandler
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import jax

from optax_ext.elastic import _jax_internals, _meeting
from optax_ext.elastic._arguments import check_counts, host_and_port
from optax_ext.elastic._jax_internals import Device
from optax_ext.elastic._meeting import Decision, Report
from optax_ext.elastic._waiting import log, waiting

# EX_TEMPFAIL of sysexits.h: the failed work may succeed when it is started again.
EXIT_STATUS = 75
# Keys of the coordinator: the first ones end with the number of a process, or of a step.
_REPORT, _DECISION, _READY, _WAITING, _HERE, _OVER = (
    f"optax_ext/{x}/" for x in ("report", "decision", "ready", "waiting", "here", "over")
)
_GROUPS, _PROCESSES = "optax_ext/groups/", "optax_ext/processes"


def connect(
    address: str,
    num_processes: int,
    process_id: int,
    *,
    heartbeat_seconds: int = 10,
    collective_seconds: int = 10,
    connect_seconds: int = 300,
    stuck_seconds: int = 600,
    devices: int = 8,
) -> "Job":
    """Makes this process one of a job that goes on when others die, and that lets them come back.

    Call it instead of ``jax.distributed.initialize``, and as early: before jax looks for
    devices. The coordinator is a process of its own, so that each of the workers may die:
    ``python -m optax_ext.elastic --address ADDRESS --processes N``. All processes have to be there
    once, at the beginning; then each may go and come back under its number. Make the
    :class:`Training` soon afterwards: until then the others wait for this process when they meet.

    Args:
      address: ``host:port`` of the coordinator.
      num_processes: the largest number of workers, the same as the coordinator's ``--processes``.
      process_id: the number of this process, in ``[0, num_processes)``. No two running processes
        may have the same.
      heartbeat_seconds: after so many seconds without a sign of life a process is considered dead.
        A process that was stopped for longer ends with status 75 when it goes on.
      collective_seconds: after so many seconds in a collective the others consider a worker gone.
        It has to be longer than any step, and than the time between the arrivals of two workers.
      connect_seconds: how long to wait for the coordinator, and at the beginning for all others.
      stuck_seconds: a process that hangs in Python for so long, with a data loader for example,
        ends with status 1 and the stacks of its threads. Its heartbeats would go on, and the
        others would wait for it. It has to be longer than anything the loop does between two steps.
      devices: CPU devices of this process, one of which is used at a time. XLA keeps a group of
        CPU devices indefinitely, even one that broke, so each new group takes others: the same w
        workers of d devices may meet ``w d**w`` times. Then they end with status 75.

    Returns:
      The job, for :class:`Training`.

    Raises:
      ConnectionError: there is no answer at ``address``.
      RuntimeError: jax has looked for devices already.
      RuntimeError: the job has another number of processes.
      ValueError: an ``address`` without a host or with a port out of range.
      ValueError: a number of processes, devices or seconds, or a ``process_id``, that is out of
        range.
    """
    check_counts(
        num_processes=num_processes,
        heartbeat_seconds=heartbeat_seconds,
        collective_seconds=collective_seconds,
        connect_seconds=connect_seconds,
        stuck_seconds=stuck_seconds,
        devices=devices,
    )
    place = host_and_port(address)
    if not isinstance(process_id, int) or not 0 <= process_id < num_processes:
        raise ValueError(
            f"process_id must be in [0, {num_processes}), as there are num_processes="
            f"{num_processes} at most, got {process_id!r}. For more workers start the coordinator "
            "with a larger --processes."
        )
    if _jax_internals.backends_are_initialized():
        raise RuntimeError(
            "optax_ext.elastic.connect comes too late: jax has looked for devices already. Call it "
            "before anything that computes, before jax.devices and before jax.random.key."
        )
    _check_listens(address, place, num_processes, connect_seconds)
    flag = f"--xla_cpu_collective_timeout_seconds={collective_seconds}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    jax.config.update("jax_num_cpu_devices", devices)
    # Before all have connected, the service has no list of those that are missing.
    missing = (
        f"all workers to connect to {address}: this is process_id={process_id} of num_processes="
        f"{num_processes}. Start the others, each with a process_id of its own, and give the same "
        "number (1 to train alone) as num_processes= to each and as --processes to the coordinator"
    )
    with waiting(lambda: missing, connect_seconds):
        given = address, process_id, num_processes, heartbeat_seconds, connect_seconds
        client = _jax_internals.connect(*given, on_lost=_lost)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(_PROCESSES, str(num_processes))
    expected = int(client.blocking_key_value_get(_PROCESSES, 1000 * connect_seconds))
    if expected != num_processes:
        raise RuntimeError(
            f"num_processes is {num_processes}, but the job at {address} has {expected}: give all "
            "processes, and the coordinator, the same number."
        )
    # Initialize devices now, so that the wait is logged.
    with waiting(lambda: "the devices of a worker that had connected: start it again"):
        jax.devices()
    return Job(client, process_id, num_processes, stuck_seconds)


def _check_listens(address: str, place: tuple[str, int], processes: int, seconds: float) -> None:
    """Raises a ConnectionError in cases in which jax would end the process with a stack of C++."""
    command = f"python -m optax_ext.elastic --address {address} --processes {processes}"
    deadline = time.monotonic() + seconds
    with waiting(lambda: f"the coordinator at {address}; start it there with {command}", seconds):
        while True:
            try:
                socket.create_connection(place, timeout=5).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ConnectionError(
                        f"no coordinator answers at address={address!r} ({error}). Start it there "
                        f"first: {command}."
                    ) from None
            time.sleep(0.2)


def _lost(status: Any) -> None:
    """Ends the process: the coordinator is gone, or takes this process for dead."""
    reason = str(status).splitlines()[0][:200]
    _end(f"this process is no longer in the job: {reason}. Start it again.")


def _end(text: str) -> NoReturn:
    """Ends the process with a line, for a launcher to start it again."""
    print(f"optax_ext.elastic: {text}", file=sys.stderr, flush=True)
    os._exit(EXIT_STATUS)


class Job:
    """A process of a job; :func:`connect` makes it."""

    def __init__(self, client: Any, process_id: int, num_processes: int, stuck_seconds: float):
        self.process_id = process_id
        self.num_processes = num_processes
        self._client = client
        self._stuck = stuck_seconds
        self._has_training = False
        self._announced = ""
        # An earlier life may have died in a group that is not complete yet.
        client.key_value_delete(f"{_READY}{process_id}")
        self.restart_deadline()

    def devices_of(self, process_id: int) -> list[Device]:
        """The devices of a process, living or dead."""
        found = (device for device in jax.devices() if device.process_index == process_id)
        return sorted(found, key=lambda device: device.id)

    def meet(self, report: Report) -> Decision:
        """Waits for all living processes, and returns what they do next.

        A process that begins while others meet may find that it is not in the decision. It meets
        again.
        """
        me = self.process_id
        while True:
            nonce = secrets.token_hex(8)
            self._set(f"{_REPORT}{me}", _meeting.written(report._replace(nonce=nonce)))
            try:
                waiting = self._waiting()
                present = self._present()
                first = min(present)
                decision = self._decide(present) if first == me else self._decision_of(first)
                # Otherwise the others were at the end of an earlier meeting, not in this one.
                if decision and decision.nonces.get(me) == nonce:
                    if first == me:
                        self._forget(waiting)
                    return decision
            except jax.errors.JaxRuntimeError as error:
                # The first process has died, or has gone on to the next meeting.
                log.info("meets again, as there was no decision: %s", str(error).splitlines()[0])

    def ready(self, decision: Decision) -> bool:
        """Waits for the members of a decision; whether all of them are there to follow it.

        All members get the same answer: none can go on to another decision before all have it.
        """
        self._set(f"{_READY}{self.process_id}", decision.nonces[self.process_id])
        present, ready = self._present(), self._all(_READY)
        return all(p in present and ready.get(p) == decision.nonces[p] for p in decision.members)

    def _present(self) -> set[int]:
        """Waits for all living processes; all get the same set.

        Some may be in :meth:`meet` and others in :meth:`ready`, which the service does not
        distinguish.
        """
        # The processes that it waits for are alive, or will be found dead soon.
        self.lift_deadline()
        mine = f"{_HERE}{self.process_id}"
        self._set(mine, "")
        with waiting(self._others):
            living = self._client.get_live_nodes(list(range(self.num_processes)))
        self._client.key_value_delete(mine)
        self.restart_deadline()
        return {*living}

    def _others(self) -> str:
        here = sorted(self._all(_HERE))
        return (
            f"workers: {len(here)} of {self.num_processes} are here, {here}; each of the others "
            "has to come, or to miss its heartbeats; no other running process may have "
            f"process_id={self.process_id}"
        )

    def begin(self) -> None:
        """Announces the training of this process; a RuntimeError if it has had one."""
        if self._has_training:
            raise RuntimeError(
                "this job has a Training: another one of the same job would take no step. Go on "
                "with run() of the first, to a larger number of steps, or begin a job with "
                "processes and a coordinator of its own."
            )
        self._has_training = True
        self.announce()

    def announce(self) -> None:
        """Announces that this process would like to take part."""
        self._announced = secrets.token_hex(8)
        self._set(f"{_WAITING}{self.process_id}", self._announced)

    def someone_waits(self) -> bool:
        """Whether a process has announced itself since the last meeting."""
        return bool(self._waiting())

    def _waiting(self) -> dict[int, str]:
        """The processes that have announced themselves; a RuntimeError if it is another life."""
        found = self._all(_WAITING)
        if found.get(self.process_id, self._announced) != self._announced:
            raise RuntimeError(
                f"another process has begun with process_id={self.process_id}, and takes the place "
                "of this one: no two running processes may have the same."
            )
        return found

    def start_over(self, members: tuple[int, ...]) -> NoReturn:
        """Ends the process where all groups of devices have been used; all members do so.

        The coordinator forgets the groups, which are unknown to the next lives of the members.
        """
        for folder in (_GROUPS, _jax_internals.GROUPS):
            self._client.key_value_delete(folder)
        _end(
            f"the groups of devices of workers {members} are used up, since XLA can't use one "
            "again. Start them again; devices= of optax_ext.elastic.connect allows for more."
        )

    def end(self, step: int) -> None:
        """Leaves a note for processes that come too late."""
        self._set(f"{_OVER}{step}", "")

    def ended(self) -> int | None:
        """The step at which the training was over; None while it goes on."""
        return max(self._all(_OVER), default=None)

    def restart_deadline(self) -> None:
        """Ends the process, with the stacks of its threads, unless it is called again in time.

        It is for a process that hangs in Python: its heartbeats go on, and all others wait for it.
        """
        faulthandler.dump_traceback_later(self._stuck, exit=True)

    def lift_deadline(self) -> None:
        """Lifts that deadline: the process may take as long as it likes."""
        faulthandler.cancel_dump_traceback_later()

    def _decide(self, present: set[int]) -> Decision | None:
        """The decision of the first process; None if some of the others are not in a meeting."""
        texts, ready = self._all(_REPORT), self._all(_READY)
        reports = {process: _meeting.report_of(texts[process]) for process in present}
        if any(ready.get(process) == report.nonce for process, report in reports.items()):
            return None
        decision = _meeting.decide(reports)
        number = self._client.key_value_increment(f"{_GROUPS}{decision.members}", 1)
        decision = decision._replace(number=int(number))
        nonce = decision.nonces[self.process_id]
        self._set(f"{_DECISION}{self.process_id}/{nonce}", _meeting.written(decision))
        return decision

    def _decision_of(self, first: int) -> Decision:
        """The decision that the first process has made, or will make soon."""
        nonce = _meeting.report_of(self._client.key_value_try_get(f"{_REPORT}{first}")).nonce
        key = f"{_DECISION}{first}/{nonce}"
        return _meeting.decision_of(self._client.blocking_key_value_get(key, 10_000))

    def _forget(self, waiting: Mapping[int, str]) -> None:
        """Removes the announcements of processes that have met, or have died since."""
        # A process that has come back in the meantime has announced itself again.
        now = self._all(_WAITING)
        for process, said in waiting.items():
            if now.get(process) == said:
                self._client.key_value_delete(f"{_WAITING}{process}")

    def _all(self, folder: str) -> dict[int, str]:
        """The values of such keys, by the number at their end."""
        said = self._client.key_value_dir_get(folder)
        return {int(key.rpartition("/")[2]): value for key, value in said}

    def _set(self, key: str, value: str) -> None:
        self._client.key_value_set(key, value, allow_overwrite=True)

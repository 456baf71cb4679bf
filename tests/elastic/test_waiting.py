"""What a process says while it waits for others."""

import functools
import sys

import jax
import jax.numpy as jnp
import pytest

import optax_ext
from benchmarks._common.processes import coordinator, started, wait
from optax_ext import elastic
from optax_ext.elastic import _meeting, _training, _waiting


class Clock:
    """A clock that only ``sleep`` advances."""

    now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_the_pauses_between_two_lines_grow_to_a_minute(caplog):
    clock = Clock()
    waits = _waiting.Waiting(300, clock)
    said = []
    for second in range(300):
        waits.say(lambda: "more")
        said += [second] * len(caplog.messages)
        if caplog.messages:
            assert caplog.messages == [f"waiting up to {300 - second} s more for more"]
            assert caplog.records[0].levelname == "WARNING"
        caplog.clear()
        clock.sleep(1)
    assert said == [5, 15, 35, 75, 135, 195, 255]


def test_a_coordinator_that_is_gone_is_no_error(caplog):
    def what():
        raise jax.errors.JaxRuntimeError("UNAVAILABLE")

    clock = Clock()
    waits = _waiting.Waiting(clock=clock)
    clock.sleep(5)
    waits.say(what)
    assert not caplog.messages


class Job:
    """A job of three processes of which one is there."""

    process_id, num_processes = 0, 3

    def __getattr__(self, name):
        return lambda *_: None

    def devices_of(self, process_id):
        return jax.devices()

    def meet(self, report):
        return _meeting.decide({0: report})


def test_with_too_few_workers(caplog, monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_training, "Waiting", functools.partial(_waiting.Waiting, clock=clock))
    monkeypatch.setattr(_training.time, "monotonic", clock)
    monkeypatch.setattr(_training.time, "sleep", clock.sleep)
    tx = optax_ext.sparse_adamw(0.1, axis="data")
    params = {"w": jnp.zeros((4, 3))}
    training = elastic.Training(
        Job(), lambda p, x: 0.0, tx, params, lambda request: None, min_workers=2, give_up=30.0
    )
    with pytest.raises(TimeoutError, match="no step for 30 s"):
        next(training.run(1))
    more = "s more for more workers: [0] are here, and min_workers is 2"
    assert caplog.messages == [f"waiting up to 25 {more}", f"waiting up to 15 {more}"]


WORKER = """
import json, sys
from optax_ext import elastic
from optax_ext.elastic import _waiting

_waiting.FIRST = 0.2
_waiting.log.warning = lambda text, *given: print(json.dumps({{"event": text % given}}), flush=True)
job = elastic.connect({address!r}, 2, {number})
sys.stdin.readline() if {number} else None
job._present()
"""


@pytest.mark.slow
def test_for_the_other_of_two_workers():
    with coordinator() as (address, _):
        serve = [sys.executable, "-m", "optax_ext.elastic", "--address", address]
        worker = [sys.executable, "-c", WORKER.format(address=address, number=0)]
        other = [sys.executable, "-c", WORKER.format(address=address, number=1)]

        def says(process, text):
            found = wait([process], lambda: any(text in x["event"] for x in process.events), 120)
            assert found, process.output

        with started([worker]) as (first,):
            says(first, f"s more for the coordinator at {address}; start it there with python -m ")
            with started([[*serve, "--processes", "2"]]):
                says(
                    first,
                    "process_id=0 of num_processes=2. Start the others, each with a ",
                )
                with started([other]) as (second,):
                    says(first, "waiting for workers: 1 of 2 are here, [0]")
                    second.send("")
                    assert first.wait_for_end(60)
                    assert first.status == 0

"""Three processes of sites are killed, stopped and started again at random moments."""

import contextlib
import json
import os
import signal
import sys
import threading

import numpy as np
import pytest

from benchmarks._common import processes as launcher
from optax_ext.sites._contents import digest_of
from optax_ext.sites._objects import name_of
from tests import groups
from tests.sites.helpers import flat, site

pytestmark = pytest.mark.slow
KILLS, ROUNDS = int(os.environ.get("KILLS", "20")), 300


def test_no_round_has_two_digests_whoever_dies_or_sleeps(tmp_path):
    rng, changed = np.random.default_rng(0), threading.Condition()
    lives: dict[str, list[launcher.Process]] = {name: [] for name in "abc"}
    every: list[launcher.Process] = []

    def start(name: str) -> None:
        given = {"store": str(tmp_path), "name": name, "seed": len(every)}
        command = [sys.executable, "-m", "tests.sites._racer", json.dumps(given)]
        process = launcher.Process(command, changed, env=launcher.environment(), cwd=launcher.ROOT)
        lives[name].append(process)
        every.append(process)

    def newest() -> int:
        return max((x.events[-1]["round"] for x in every if x.events), default=0)

    kills = stops = 0
    asleep: launcher.Process | None = None
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [process.close() for process in every])
        for name in lives:
            start(name)
        while kills < KILLS or newest() < ROUNDS:
            wanted = newest() + int(rng.integers(2, 14))
            assert launcher.wait(every, lambda wanted=wanted: newest() >= wanted, groups.TIMEOUT)
            if asleep is not None:
                asleep.signal(signal.SIGCONT)
                asleep = None
            name = str(rng.choice(list(lives)))
            if rng.random() < 0.25:
                asleep = lives[name][-1]
                asleep.signal(signal.SIGSTOP)
                stops += 1
            else:
                lives[name][-1].signal(signal.SIGKILL)
                kills += 1
                start(name)
        if asleep is not None:
            asleep.signal(signal.SIGCONT)
    assert {process.status for process in every} == {-signal.SIGKILL}
    assert not any("Traceback" in process.errors for process in every)
    digests: dict[int, set[str]] = {}
    for process in every:
        for event in process.events:
            digests.setdefault(event["round"], set()).add(event["digest"])
    last = site(tmp_path, "last")
    digests.setdefault(last.round, set()).add(digest_of(flat(last.params)))
    assert all(len(x) == 1 for x in digests.values()), digests
    # A site that starts or wakes skips the rounds of the meantime: up to 20 % on a busy machine.
    assert len(digests) >= ROUNDS / 2
    # Old rounds were removed.
    rest = {
        name.number for path in last._member._run.store.sizes("round") if (name := name_of(path))
    }
    print(
        f"{kills} kills, {stops} stops, {newest()} rounds, {len(digests)} digests, {len(rest)} kept"
    )
    assert len(rest) <= 60

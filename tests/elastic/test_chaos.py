"""Workers of a job are killed, stopped and started again; nothing is lost that is not counted."""

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

from benchmarks.elastic.cluster import Cluster, cluster

pytestmark = pytest.mark.slow
# Seconds without a sign of life; a busy machine may be late by a few.
HEARTBEAT = 12
WORKER = "tests.elastic._worker"


def job(size: int, **settings: Any):
    """A job whose workers stay near each other on a busy machine."""
    given = {"pause": 0.05, "steps": 1_000_000, "collective": 15, **settings}
    return cluster(WORKER, size, heartbeat=HEARTBEAT, **given)


def final(of: Cluster) -> dict[int, dict[int, dict[str, Any]]]:
    """For each step, what the group that took it last has reported, by worker."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for event in sorted(of.events("step"), key=lambda event: event["time"]):
        steps.setdefault(event["step"], []).append(event)
    taken = {}
    for step, events in sorted(steps.items()):
        members = events[-1]["members"]
        taken[step] = {e["number"]: e for e in events if e["members"] == members}
    return taken


def check(of: Cluster, goodbyes: int = 0, *, exact: bool = True) -> None:
    """All workers have the same bits at each step, which is applied once; nothing is lost."""
    taken = final(of)
    assert list(taken) == list(range(min(taken), max(taken) + 1))
    previous: dict[int, dict[str, Any]] = {}
    changed = 0
    for step, by_worker in taken.items():
        events = list(by_worker.values())
        # The last of a group may have been killed before it could say so.
        assert {*by_worker} <= {*events[0]["members"]}
        assert len({event["digest"] for event in events}) == 1, step
        if not exact:
            continue
        whole = {*by_worker} == {*events[0]["members"]}
        for event in events:
            before = previous.get(event["number"])
            if before is None or before["life"] != event["life"]:
                if step > min(taken):
                    assert event["before"]["residual"]["sum"] == 0, step
                continue
            assert event["before"]["params"] == before["after"]["params"], step
            changed += event["before"]["residual"] != before["after"]["residual"]
        for number in ("sum", "weighted"):
            entered = sum(e["before"]["residual"][number] + e["gradient"][number] for e in events)
            waits = sum(e["after"]["residual"][number] for e in events)
            moved = events[0]["before"]["params"][number] - events[0]["after"]["params"][number]
            if whole:
                assert entered == len(events) * moved + waits, step
        previous = by_worker
    # A residual changes between two steps only if another one has been handed over.
    assert bool(changed) == bool(goodbyes)


def steps_of(of: Cluster, number: int) -> int:
    """The step at which a worker is."""
    return of.step_of(number)


def test_each_may_die_and_come_back_the_first_among_them():
    with job(3) as of:
        of.wait_for_step(20)
        for number in (1, 0):
            others = [x for x in range(3) if x != number]
            at = steps_of(of, 2)
            of.kill(number)
            of.wait_for_step(at + 10, others)
            of.start(number)
            of.wait_for_step(at + 20)
            # It takes part again.
            joined = of.lives[number][-1].find("step")
            assert joined["members"] == [0, 1, 2]
        check(of)
        lost = of.lives[2][-1].events[-1]["lost"]
        assert [x["process_id"] for x in lost] == [1, 0]
        assert all(np.isfinite(x["waited"]) and x["waited"] > 0 for x in lost)


def test_they_end_where_the_steps_are_taken_and_who_comes_late_ends_too():
    with job(2, steps=12) as of:
        of.wait_for("the end", lambda: not of.living)
        assert [lives[-1].status for lives in of.lives] == [0, 0]
        check(of)
        assert max(final(of)) == 12
        late = of.start(1)
        of.wait_for("its end", lambda: late.ended_at)
        assert late.status == 0
        assert late.find("done", step=0)


def test_of_two_one_is_alone_for_a_while():
    with job(2) as of:
        for _ in range(2):
            at = max(0, steps_of(of, 0)) + 20
            of.wait_for_step(at)
            of.kill(1)
            of.wait_for_step(at + 10, [0])
            of.start(1)
            of.wait_for("its step", lambda: of.lives[1][-1].find("step"))
        check(of)


def test_two_die_at_once_and_a_newcomer_dies_while_it_joins():
    with job(4) as of:
        of.wait_for_step(15)
        of.kill(0)
        of.kill(3)
        at = steps_of(of, 1)
        of.wait_for_step(at + 10, [1, 2])
        for place in ("admit", "compile"):
            of.start(3, die_at=place)
            of.wait_for("its death", lambda: of.lives[3][-1].ended_at)
            assert of.lives[3][-1].find("dies", place=place)
            at = steps_of(of, 1)
            of.wait_for_step(at + 5, [1, 2])
        of.start(0)
        of.start(3)
        of.wait_for("all four", lambda: all(x[-1].find("step") for x in of.lives))
        of.wait_for_step(steps_of(of, 1) + 5)
        check(of)


def test_the_first_comes_back_while_the_other_is_between_a_meeting_and_its_group():
    with job(2) as of:
        of.wait_for_step(10)
        of.kill(1)
        of.wait_for_step(steps_of(of, 0) + 5, [0])
        of.start(1, loads_after=0)
        of.wait_for("its step", lambda: of.lives[1][-1].find("step"))
        other = of.lives[1][-1]
        loads = len([x for x in other.events if x["event"] == "loads"])
        of.kill(0)
        of.wait_for(
            "its meeting",
            lambda: len([x for x in other.events if x["event"] == "loads"]) > loads,
        )
        of.start(0)
        # They meet for different reasons first, and together afterwards.
        of.wait_for("its step", lambda: of.lives[0][-1].find("step"))
        at = steps_of(of, 1)
        of.wait_for_step(at + 10)
        check(of)


def test_one_that_hangs_is_left_behind_and_ends():
    with job(3, check_every=1000) as of:
        of.wait_for_step(10)
        of.signal(2, signal.SIGSTOP)
        at = steps_of(of, 0)
        of.wait_for_step(at + 20, [0, 1])
        of.signal(2, signal.SIGCONT)
        of.wait_for("its end", lambda: of.lives[2][-1].ended_at)
        # It does not go on with parameters of its own.
        # jax may abort it before it can say so itself.
        assert of.lives[2][-1].status in (75, -signal.SIGABRT)
        check(of)


def test_one_that_hangs_in_python_ends_itself():
    with job(2, stuck=600) as of:
        of.wait_for_step(5)
        of.kill(1)
        of.wait_for_step(steps_of(of, 0) + 5, [0])
        at = steps_of(of, 0)
        of.start(1, stuck=60, hang_at=at + 25)
        of.wait_for("its end", lambda: of.lives[1][-1].ended_at)
        assert of.lives[1][-1].find("hangs")
        assert "batch_of" in of.lives[1][-1].errors
        check(of)


@pytest.mark.parametrize("fails_at", [None, 0])
def test_one_that_says_goodbye_hands_its_residual_over(fails_at):
    with job(3, release_fails=fails_at) as of:
        of.wait_for_step(12)
        of.signal(1, signal.SIGTERM)
        of.wait_for("its end", lambda: of.lives[1][-1].ended_at)
        assert of.lives[1][-1].status == 0
        of.wait_for_step(steps_of(of, 0) + 5, [0, 2])
        # If it fails at one worker, all go back, and the next one is whole.
        assert bool(of.lives[0][-1].find("fails")) == (fails_at == 0)
        check(of, goodbyes=1)
        taken = final(of)
        last = max(step for step, by_worker in taken.items() if len(by_worker) == 3)

        def waits(step: int, when: str) -> float:
            return sum(event[when]["residual"]["weighted"] for event in taken[step].values())

        assert waits(last, "after") == waits(last + 1, "before")
        assert not of.lives[0][-1].events[-1]["lost"]


def test_rounds_go_on_without_one():
    with job(3, optimizer="sparse_adamw every", check_every=2) as of:
        of.wait_for_step(20)
        at = steps_of(of, 0)
        of.kill(1)
        of.wait_for_step(at + 12, [0, 2])
        of.start(1)
        of.wait_for("its step", lambda: of.lives[1][-1].find("step"))
        check(of, exact=False)


def test_all_begin_again_from_the_newest_whole_checkpoint(tmp_path):
    settings = {"folder": str(tmp_path), "save_every": 10}
    with job(3, **settings) as of:
        of.wait_for_step(35)
        of.kill(1)
        of.wait_for_step(steps_of(of, 0) + 5, [0, 2])
        # It dies while it writes; the others have written, and go on.
        of.start(1, die_at="save")
        of.wait_for("its death", lambda: of.lives[1][-1].ended_at)
        assert of.lives[1][-1].find("dies", place="save")
        at = steps_of(of, 0)
        of.wait_for_step(at + 15, [0, 2])
        for number in (0, 2):
            of.kill(number)
        of.wait_for("all ends", lambda: not of.living)
        before = final(of)
    with job(2, steps=max(before) + 30, min_workers=2, **settings) as of:
        of.wait_for("the end", lambda: all(x[-1].ended_at for x in of.lives))
        after = final(of)
        begun = min(after) - 1
        # At most one interval is lost, and the checkpoint that was being written.
        assert begun % 10 == 0
        assert begun >= max(before) - 20
        check(of)

        def waits(taken: Any, step: int, when: str) -> float:
            return sum(event[when]["residual"]["weighted"] for event in taken[step].values())

        assert waits(before, begun, "after") == waits(after, begun + 1, "before")
        one = next(iter(after[begun + 1].values()))
        assert one["before"]["params"] == next(iter(before[begun].values()))["after"]["params"]


def test_where_all_leave_nothing_is_lost(tmp_path):
    # No checkpoint but the one at the end.
    settings = {"folder": str(tmp_path), "save_every": 10**6}
    with job(2, **settings) as of:
        of.wait_for_step(13)
        for number in range(2):
            of.signal(number, signal.SIGTERM)
        of.wait_for("the end", lambda: not of.living)
        assert [lives[-1].status for lives in of.lives] == [0, 0]
        before = final(of)
    with job(2, min_workers=2, **settings) as of:
        of.wait_for_step(max(before) + 5)
        after = final(of)
        assert min(after) == max(before) + 1

        def waits(events: Any, when: str) -> float:
            return sum(event[when]["residual"]["weighted"] for event in events.values())

        # The last step of both workers, or of one, to which the other handed over its residual.
        assert waits(before[max(before)], "after") == waits(after[min(after)], "before")


def test_one_with_another_model_is_refused_and_the_others_go_on():
    with job(2) as of:
        of.wait_for_step(10)
        of.kill(1)
        of.wait_for_step(steps_of(of, 0) + 5, [0])
        of.start(1, other_model=True)
        of.wait_for("its end", lambda: of.lives[1][-1].ended_at)
        assert of.lives[1][-1].status == 1
        assert "can't take part: it trains a model of 125 parameters" in of.lives[1][-1].errors
        check(of)


def test_where_the_groups_of_devices_are_used_up_all_end_to_be_started_again():
    with job(2) as of:
        of.wait_for_step(10)
        of.kill(1)
        of.wait_for_step(steps_of(of, 0) + 5, [0])
        of.start(1, groups_used=2 * 8**2)
        of.wait_for("all ends", lambda: not of.living)
        for lives in of.lives:
            assert lives[-1].status == 75
            (said,) = (x for x in lives[-1].errors.splitlines() if "optax_ext.elastic: " in x)
            assert "the groups of devices of workers (0, 1) are used up" in said
        # The coordinator goes on, without a record of the old groups.
        for number in range(2):
            of.start(number)
        of.wait_for_step(10)


def test_a_second_process_of_the_same_number_takes_its_place():
    with job(2) as of:
        of.wait_for_step(10)
        of.start(1)
        first, second = of.lives[1]
        of.wait_for("the end of the first", lambda: first.ended_at)
        assert first.status == 1
        assert "another process has begun with process_id=1" in first.errors
        of.wait_for("its step", lambda: second.find("step"))
        check(of)


def test_a_disk_that_is_full_for_one_worker_ends_nobody(tmp_path):
    with job(2, folder=str(tmp_path), save_every=5, full_at=10) as of:
        of.wait_for_step(40)
        said = of.lives[0][0].errors
        assert "the checkpoint of step 10 is not written: [Errno 28] No space left" in said
        check(of)
    steps = sorted(int(x.name) for x in tmp_path.iterdir())
    assert steps[0] >= 15


def test_all_end_when_the_coordinator_ends():
    with job(2) as of:
        of.wait_for_step(10)
        assert of.coordinator is not None
        of.coordinator.signal(signal.SIGKILL)
        began = time.monotonic()
        of.wait_for("all ends", lambda: not of.living)
        assert time.monotonic() - began < 60
        for lives in of.lives:
            assert lives[-1].status in (75, -signal.SIGABRT)


@pytest.mark.skipif(os.geteuid() != 0, reason="a link is taken down in a network namespace: root")
def test_a_link_that_is_gone_for_ten_seconds():
    from benchmarks._common.namespaces import network

    with (
        network(4) as hosts,
        cluster(WORKER, 3, hosts, heartbeat=HEARTBEAT, pause=0.05, steps=1_000_000) as of,
    ):
        hosts.limit("100mbit")
        of.wait_for_step(15)
        hosts.link_down(2)
        at = steps_of(of, 0)
        time.sleep(10)
        hosts.link_up(2)
        of.wait_for_step(at + 20, [0, 1])
        check(of)

"""Sites that are late, away, asleep or different return, and lose nothing."""

import functools

import numpy as np
import pytest

from optax_ext import sites
from optax_ext.sites._contents import digest_of
from tests.sites.helpers import (
    PARAMS,
    SIZE,
    catch_up,
    delivered,
    flat,
    memory,
    moved,
    site,
    slow_payloads,
    stored,
    together,
)


def test_one_that_comes_later_has_the_parameters_of_all():
    store = memory()
    first = site(store, "first", snapshot_every=2)
    params = first.params
    for step in range(5):
        params = first.exchange(moved(params, step), tokens=1, wait=True)
    first.close()
    late = site(store, "late", {name: x + 3 for name, x in PARAMS.items()})
    assert late.round == 5
    assert flat(late.params).tobytes() == flat(first.params).tobytes()


def test_one_whose_rounds_are_removed_keeps_what_it_has_moved():
    store = memory()
    fast, sleepy = site(store, "fast", snapshot_every=2), site(store, "sleepy")
    at_sleepy = moved(sleepy.params, 0, 1)
    params = fast.params
    for step in range(9):
        params = fast.exchange(moved(params, step), tokens=1, wait=True)
        stored(fast)
    before = flat(fast.params)
    assert min(fast._member._run.store.sizes("round")).startswith("round/00000006/")
    names = sorted(fast._member._run.store.sizes("snapshot"))
    assert names == ["snapshot/00000006", "snapshot/00000008"]
    got = sleepy.exchange(at_sleepy, tokens=1, wait=True)
    assert sleepy.last.delivered
    given = delivered(sleepy, 10, 9)
    np.testing.assert_allclose(flat(sleepy.params), before + given, atol=1e-5)
    waits = flat(at_sleepy) - flat(PARAMS) - given
    np.testing.assert_allclose(flat(got) - flat(sleepy.params), waits, atol=1e-5)


def test_one_that_was_delivered_while_it_was_away_does_not_deliver_it_again():
    store = memory()
    fast = site(store, "fast", snapshot_every=2, grace=0.0)
    sleepy = site(store, "sleepy", quorum=3, give_up=0.2)
    at_sleepy = moved(sleepy.params, 0, 1)
    with pytest.raises(TimeoutError):
        # It has put its payload, and leaves.
        sleepy.exchange(at_sleepy, tokens=1, wait=True)
    sleepy._give_up = 30.0
    params = fast.exchange(moved(fast.params, 0), tokens=1, wait=True)
    assert fast.last.sites == ("fast", "sleepy")
    given = delivered(sleepy, 1)
    assert np.abs(given).sum() > 0
    for step in range(1, 9):
        params = fast.exchange(moved(params, step), tokens=1, wait=True)
    fast.close()
    got = sleepy.exchange(at_sleepy, tokens=1, wait=True)
    waits = flat(at_sleepy) - flat(PARAMS) - given
    np.testing.assert_allclose(flat(got) - flat(sleepy.params), waits, atol=1e-5)


@pytest.mark.parametrize("others", [1, 2])
def test_one_whose_parameters_differ_takes_those_of_the_run(others):
    store = memory()
    each = [site(store, name, quorum=others + 1) for name in "abc"[: others + 1]]
    each[-1]._member.params[3] += 1
    calls = [
        functools.partial(one.exchange, moved(PARAMS, 0, number), tokens=1, wait=True)
        for number, one in enumerate(each)
    ]
    got = together(*calls)
    shared = flat(each[0].params)
    assert all(flat(one.params).tobytes() == shared.tobytes() for one in each)
    given = sum(delivered(one, 1) for one in each)
    np.testing.assert_allclose(shared, flat(PARAMS) + given / len(each), atol=1e-5)
    # The moves of its own parameters are still there.
    wrong = np.eye(1, SIZE, 3)[0]
    waits = flat(moved(PARAMS, 0, others)) - flat(PARAMS) - wrong - delivered(each[-1], 1)
    np.testing.assert_allclose(flat(got[-1]) - shared, waits, atol=1e-5)


def test_one_that_begins_again_from_an_older_snapshot_keeps_what_waits():
    store = memory()
    both = [site(store, name, quorum=2) for name in "ab"]
    params, total = [one.params for one in both], np.zeros(SIZE)
    for step in range(4):
        if step == 3:
            both[1]._member.params[3] += 1
        before = flat(params[1])
        params = [moved(x, step, number) for number, x in enumerate(params)]
        total += flat(params[1]) - before
        calls = [
            functools.partial(one.exchange, x, tokens=1, wait=True)
            for one, x in zip(both, params, strict=True)
        ]
        params = together(*calls)
    assert flat(both[0].params).tobytes() == flat(both[1].params).tobytes()
    # The rounds that it applies a second time take nothing from its unsent entries.
    wrong = np.eye(1, SIZE, 3)[0]
    waits = flat(params[1]) - flat(both[1].params)
    given = delivered(both[1], 4)
    np.testing.assert_allclose(given + waits, total - wrong, atol=1e-5)


def test_what_a_life_before_has_put_is_not_taken_from_this_one(caplog):
    store = memory()
    dead, other = site(store, "a", quorum=2), site(store, "b", quorum=2)
    dead._member._run.put(
        0,
        dead._member._run.messages.encode(flat(moved(PARAMS, 0)) - 1, 0),
        1,
        digest_of(dead._member.params),
    )
    again = site(store, "a", quorum=2)
    mine = moved(again.params, 5)
    got, _ = together(
        functools.partial(again.exchange, mine, tokens=1, wait=True),
        functools.partial(other.exchange, moved(PARAMS, 0, 1), tokens=1, wait=True),
    )
    assert again.last.sites == ("a", "b")
    assert not again.last.delivered
    # The life before is not another site of this name.
    assert not caplog.records
    np.testing.assert_array_equal(flat(got) - flat(again.params), flat(mine) - flat(PARAMS))


@pytest.mark.parametrize("away", [1, 9])
def test_a_site_that_returns_while_the_store_fails_changes_nothing(monkeypatch, away):
    """The store fails at each operation in turn, until the site gives up; then it calls again."""
    monkeypatch.setattr("optax_ext.sites._member._AGAIN", 0.001)
    for fails_at in range(40):
        store = memory()
        one = site(store, snapshot_every=2, grace=0.0)
        back = site(store, "b", grace=0.0, give_up=0.0)
        params, mine = one.params, back.params
        for step in range(away):
            params = one.exchange(moved(params, step), tokens=5, wait=True)
            stored(one)
        of, calls = back._member._run.store, []

        def failing(function, calls=calls, fails_at=fails_at):
            def call(*args):
                calls.append(args[0])
                if len(calls) > fails_at:
                    raise sites.StoreError("is down")
                return function(*args)

            return call

        for what in ("get", "create", "sizes"):
            monkeypatch.setattr(of, what, failing(getattr(of, what)))
        ended = None
        try:
            mine = back.exchange(mine, tokens=5, wait=True)
        except TimeoutError as error:
            ended = error
        monkeypatch.undo()
        monkeypatch.setattr("optax_ext.sites._member._AGAIN", 0.001)
        back._member._give_up = 30.0
        if ended is not None:
            # It has the rounds that it has read, or none.
            allowed = [flat(params).tobytes() for params in (PARAMS, one.params)]
            assert flat(back.params).tobytes() in allowed
            mine = back.exchange(mine, tokens=5, wait=True)
        back.exchange(mine, tokens=5, wait=True)
        # It has not moved, so it changes nothing.
        assert back.round > away
        np.testing.assert_array_equal(flat(back.params), flat(one.params))
        if ended is None:
            break
    assert 3 < fails_at < 39


def test_a_site_that_slept_through_the_removal_of_its_round_loses_nothing(monkeypatch):
    """It is stopped before each operation of its round in turn, while the others go on."""
    for stops_at in range(40):
        store = memory()
        fast = site(store, "fast", snapshot_every=2, grace=0.0)
        sleepy = site(store, "sleepy", grace=0.0, density=0.1)
        at_sleepy = moved(sleepy.params, 0, 1)
        of, calls, given = sleepy._member._run.store, [], np.zeros(SIZE)

        def noted(found, *args, apply=fast._member._apply, given=given):
            for shares in found.rounds:
                for share in shares:
                    if share.site == "sleepy":
                        given[share.change.indices] += share.change.values
            apply(found, *args)

        fast._member._apply = noted

        def stopped(function, calls=calls, stops_at=stops_at, fast=fast):
            def call(*args):
                calls.append(args[0])
                if len(calls) == stops_at + 1:
                    for step in range(9):
                        fast.exchange(moved(fast.params, step), tokens=1, wait=True)
                        stored(fast)
                return function(*args)

            return call

        for what in ("get", "create", "sizes"):
            monkeypatch.setattr(of, what, stopped(getattr(of, what)))
        got = sleepy.exchange(at_sleepy, tokens=1, wait=True)
        monkeypatch.undo()
        # What it has moved was delivered in rounds that all have applied, or waits.
        waits = flat(got) - flat(sleepy.params)
        for each in (fast, sleepy):
            catch_up(each)
        assert sleepy.round == fast.round
        assert flat(sleepy.params).tobytes() == flat(fast.params).tobytes()
        np.testing.assert_allclose(given + waits, flat(at_sleepy) - flat(PARAMS), atol=1e-4)
        if len(calls) <= stops_at:
            break
    assert 3 < stops_at < 39


def test_a_payload_that_a_failing_store_has_written_is_the_one_that_counts(monkeypatch):
    store = memory()
    fast = site(store, "fast", snapshot_every=2, grace=0.0)
    sleepy = site(store, "sleepy", give_up=0.0)
    of = sleepy._member._run.store

    def fails(*args, create=of.create):
        create(*args)
        raise sites.StoreError("is down")

    first = moved(sleepy.params, 0, 1)
    second = moved(first, 1, 1)
    monkeypatch.setattr(of, "create", fails)
    for mine in (first, second):
        with pytest.raises(TimeoutError, match="is down"):
            sleepy.exchange(mine, tokens=1, wait=True)
    monkeypatch.undo()
    fast.exchange(moved(fast.params, 0), tokens=1, wait=True)
    given = delivered(sleepy, 1)
    assert np.abs(given).sum() > 0
    for step in range(1, 9):
        fast.exchange(moved(fast.params, step), tokens=1, wait=True)
        stored(fast)
    sleepy._member._give_up = 30.0
    got = sleepy.exchange(second, tokens=1, wait=True)
    waits = flat(second) - flat(PARAMS) - given
    np.testing.assert_allclose(flat(got) - flat(sleepy.params), waits, atol=1e-5)


def test_a_payload_that_comes_after_its_round_was_removed_forks_no_run():
    """The round has no list any more, and the rounds after it are there."""
    store = memory()
    late, other = (site(store, x, density=1.0, grace=0.0, snapshot_every=1) for x in "ab")
    begins, arrives = slow_payloads(late)
    mine = late.exchange(moved(PARAMS, 5), tokens=1)
    assert begins.wait(60)
    theirs = other.params
    for step in range(2):
        theirs = other.exchange(moved(theirs, step), tokens=1, wait=True)
        stored(other)
    assert min(other._member._run.store.sizes("round")).startswith("round/00000001/")
    arrives.set()
    mine = late.finish(mine)
    assert flat(late.params).tobytes() == flat(other.params).tobytes()
    assert late.last is None or not late.last.delivered
    mine = late.exchange(mine, tokens=1, wait=True)
    other.finish(other.exchange(theirs, tokens=1))
    expected = flat(theirs) + flat(moved(PARAMS, 5)) - flat(PARAMS)
    np.testing.assert_array_equal(flat(late.params), expected)
    np.testing.assert_array_equal(flat(mine), expected)

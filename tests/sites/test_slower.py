"""Sites that are slower than the others take part in a round for each of their calls."""

import functools
import time

import numpy as np
import pytest

from tests.sites.helpers import (
    PARAMS,
    delivered,
    flat,
    memory,
    moved,
    site,
    slow_payloads,
    stored,
    together,
    waiting,
)


def test_what_comes_too_late_goes_with_the_round_that_is_open():
    store = memory()
    fast, slow = site(store, "fast", grace=0.0), site(store, "slow", grace=0.0)
    at_slow = moved(slow.params, 0, 1)
    fast.exchange(moved(fast.params, 0), tokens=1, wait=True)
    got = slow.exchange(at_slow, tokens=5, wait=True)
    assert (slow.last.number, slow.last.sites, slow.last.delivered) == (1, ("slow",), True)
    given = delivered(slow, 2)
    assert np.abs(given).sum() > 0
    np.testing.assert_array_equal(flat(slow.params), flat(fast.params) + given)
    waits = flat(at_slow) - flat(PARAMS) - given
    np.testing.assert_array_equal(flat(got) - flat(slow.params), waits)


@pytest.mark.parametrize("snapshot_every", [1000, 1])
@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("turns", [2, 5])
def test_a_site_that_is_slower_is_delivered_at_every_call(turns, wait, snapshot_every):
    store, options = memory(), {"density": 1.0, "snapshot_every": snapshot_every}
    fast = site(store, "fast", grace=0.0, **options)
    # If it does not wait for its round, the fast one closes that.
    slow = site(store, "slow", grace=0.0 if wait else 30.0, **options)
    params, at_slow = fast.params, slow.params
    for call in range(4):
        for step in range(turns):
            params = fast.exchange(moved(params, turns * call + step), tokens=1, wait=True)
            stored(fast)
        at_slow = slow.exchange(moved(at_slow, call, 1), tokens=1, wait=wait)
        if not wait:
            while "slow" not in waiting(fast):
                assert not slow._member._pending.done()
                time.sleep(0.001)
            params = fast.exchange(params, tokens=1, wait=True)
            assert fast.last.sites == ("fast", "slow")
            stored(fast)
        at_slow = slow.finish(at_slow)
        assert slow.last.delivered
        np.testing.assert_array_equal(flat(at_slow), flat(slow.params))


def test_one_whose_payload_came_too_late_is_expected_in_the_next_round():
    store = memory()
    late, other = (site(store, x, density=1.0, grace=30.0) for x in ("late", "other"))
    begins, arrives = slow_payloads(late)
    mine = late.exchange(moved(PARAMS, 0, 1), tokens=1)
    assert begins.wait(60)
    theirs = other.exchange(moved(PARAMS, 0), tokens=1, wait=True)
    arrives.set()
    mine = late.finish(mine)
    assert not late.last.delivered
    theirs = other.exchange(moved(theirs, 1), tokens=1)
    mine = late.exchange(moved(mine, 1, 1), tokens=1, wait=True)
    assert (late.last.number, late.last.sites) == (1, ("late", "other"))
    theirs = other.finish(theirs)
    for params in (mine, theirs, other.params):
        np.testing.assert_array_equal(flat(params), flat(late.params))


def test_one_whose_round_is_not_closed_has_the_rounds_before_it():
    store, options = memory(), {"quorum": 2, "density": 1.0, "grace": 0.0}
    first, second = (site(store, name, **options) for name in "ab")
    last = site(store, "c", **options, give_up=0.05)
    mine = moved(PARAMS, 0, 2)
    for step in range(2):
        calls = [
            functools.partial(one.exchange, moved(one.params, step, i), tokens=1, wait=True)
            for i, one in enumerate((first, second))
        ]
        together(*calls)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="round 2 .* has 1 of the quorum=2 payloads"):
            last.exchange(mine, tokens=1, wait=True)
        assert last.round == 2
        assert flat(last.params).tobytes() == flat(first.params).tobytes()
    # The calls that failed have put one payload, which counts once.
    theirs = first.exchange(first.params, tokens=1, wait=True)
    got = last.exchange(mine, tokens=1, wait=True)
    assert last.last.sites == ("a", "c")
    np.testing.assert_array_equal(flat(got), flat(last.params))
    np.testing.assert_array_equal(flat(last.params), flat(theirs))
    assert last._member._run.closed(2)[1].tokens == 1

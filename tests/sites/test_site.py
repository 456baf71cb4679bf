"""Sites come, go and are late, and lose nothing; all have the same bits."""

import functools
import time

import jax
import numpy as np
import pytest

from optax_ext import sites
from optax_ext.sites._run import digest_of
from sparse_collectives import wire
from tests.sites.helpers import PARAMS, SIZE, flat, memory, moved, site, together


def delivered(of: sites.Site, rounds: int) -> np.ndarray:
    """The sum of a site's deliveries in the first rounds, read from the store."""
    total = np.zeros(SIZE, np.float64)
    for number in range(rounds):
        for share in of._member._run.closed(number):
            if share.site == of.name:
                total[share.change.indices] += share.change.values
    return total


def test_two_have_the_same_bits_and_nothing_is_lost():
    store = memory()
    both = [site(store, name, quorum=2, snapshot_every=100) for name in "ab"]
    assert all(np.array_equal(flat(one.params), flat(PARAMS)) for one in both)
    params = [one.params for one in both]
    total = np.zeros((2, SIZE))
    for step in range(12):
        before = [flat(x) for x in params]
        params = [moved(x, step, number) for number, x in enumerate(params)]
        total += [flat(x) - y for x, y in zip(params, before, strict=True)]
        wait = step % 3 != 1
        calls = [
            functools.partial(one.exchange, x, tokens=7, wait=wait)
            for one, x in zip(both, params, strict=True)
        ]
        params = together(*calls)
    params = [one.finish(x) for one, x in zip(both, params, strict=True)]
    assert both[0].round == both[1].round == 12
    shared = flat(both[0].params)
    assert shared.tobytes() == flat(both[1].params).tobytes()
    given = [delivered(one, 12) for one in both]
    # Halves of whole numbers are exact.
    np.testing.assert_array_equal(shared - flat(PARAMS), (given[0] + given[1]) / 2)
    for one in range(2):
        np.testing.assert_array_equal(given[one] + flat(params[one]) - shared, total[one])
        assert np.abs(flat(params[one]) - shared).sum() > 0
    assert both[0].last.sites == ("a", "b")
    assert both[0].last.delivered


def test_weights_are_shares_of_the_tokens():
    store = memory()
    both = [site(store, name, quorum=2, density=1.0) for name in "ab"]
    step = [{"a": x + PARAMS["a"], "b": PARAMS["b"]} for x in (np.float32(4), np.float32(-8))]
    calls = [
        functools.partial(one.exchange, x, tokens=tokens, wait=True)
        for one, x, tokens in zip(both, step, (3, 1), strict=True)
    ]
    together(*calls)
    np.testing.assert_array_equal(both[0].params["a"], 0.75 * 4 - 0.25 * 8)


def test_what_comes_too_late_goes_with_the_next_round():
    store = memory()
    fast, slow = site(store, "fast", grace=0.0), site(store, "slow", grace=0.0)
    at_slow = moved(slow.params, 0, 1)
    fast.exchange(moved(fast.params, 0), tokens=1, wait=True)
    got = slow.exchange(at_slow, tokens=5, wait=True)
    assert slow.last.number == 0
    assert not slow.last.delivered
    shared = flat(fast.params)
    assert flat(slow.params).tobytes() == shared.tobytes()
    np.testing.assert_array_equal(flat(got) - shared, flat(at_slow) - flat(PARAMS))
    slow.exchange(got, tokens=2, wait=True)
    assert slow.last.delivered
    # The tokens of the round that it missed also count.
    assert slow._member._run.closed(1)[0].tokens == 7


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
    fast.close()
    names = [name for name in fast._member._run.store.sizes("round") if "payload" in name]
    assert min(names) >= "00000006"
    assert sorted(fast._member._run.store.sizes("snapshot")) == ["00000006", "00000008"]
    got = sleepy.exchange(at_sleepy, tokens=1, wait=True)
    shared = flat(sleepy.params)
    assert shared.tobytes() == flat(fast.params).tobytes()
    np.testing.assert_allclose(flat(got) - shared, flat(at_sleepy) - flat(PARAMS), atol=1e-5)


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


def test_a_round_waits_for_the_quorum_and_for_those_of_the_last_one():
    store = memory()
    both = [site(store, name, quorum=2, give_up=0.3) for name in "ab"]
    first = moved(PARAMS, 0)
    with pytest.raises(
        TimeoutError, match="round 0 .* within 0.3 s: it has 1 payload.*quorum is 2"
    ):
        both[0].exchange(first, tokens=1, wait=True)
    both[1]._give_up = 30.0
    got = both[1].exchange(moved(PARAMS, 0, 1), tokens=1, wait=True)
    # The payload of the first was there.
    assert both[1].last.sites == ("a", "b")
    # It finds the round closed, with its payload in it, and continues.
    more = moved(first, 1)
    again = both[0].exchange(more, tokens=1, wait=True)
    assert both[0].last.delivered
    assert flat(both[0].params).tobytes() == flat(both[1].params).tobytes()
    given = delivered(both[0], 1)
    np.testing.assert_array_equal(
        given + flat(again) - flat(both[0].params), flat(more) - flat(PARAMS)
    )
    both[1]._member._run.quorum, both[1]._member._run.grace = 1, 0.2
    began = time.monotonic()
    both[1].exchange(got, tokens=1, wait=True)
    assert time.monotonic() - began >= 0.2
    assert both[1].last.sites == ("b",)


def test_what_a_life_before_has_put_is_not_taken_from_this_one():
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
    np.testing.assert_array_equal(flat(got) - flat(again.params), flat(mine) - flat(PARAMS))


def test_many_come_and_go_and_all_agree():
    store, rng = memory(), np.random.default_rng(0)
    living = {name: site(store, name, snapshot_every=3, grace=0.05) for name in "abcd"}
    params = {name: one.params for name, one in living.items()}
    for step in range(20):
        names = [name for name in living if rng.random() < 0.7]
        if not names:
            continue
        calls = [
            functools.partial(
                living[name].exchange,
                moved(params[name], step, ord(name)),
                tokens=int(rng.integers(1, 9)),
                wait=bool(rng.random() < 0.5),
            )
            for name in names
        ]
        params |= dict(zip(names, together(*calls), strict=True))
        if step == 8:
            living.pop("b").close()
        if step == 10:
            living["e"] = site(store, "e", snapshot_every=3, grace=0.05)
            params["e"] = living["e"].params
    for name, one in living.items():
        params[name] = one.finish(params[name])
    for name, one in living.items():
        # The sites that were away catch up.
        params[name] = one.exchange(params[name], tokens=1, wait=True)
    newest = max(one.round for one in living.values())
    for name, one in living.items():
        while one.round < newest:
            params[name] = one.exchange(params[name], tokens=1, wait=True)
            newest = max(x.round for x in living.values())
    at = {flat(one.params).tobytes() for one in living.values() if one.round == newest}
    assert len(at) == 1


@pytest.mark.parametrize("codec", [wire.narrow8(), wire.narrow16(), wire.two_bits()])
def test_what_a_codec_rounds_is_kept(codec):
    store = memory()
    one = site(store, codec=codec, density=0.2)
    params = jax.tree.map(
        lambda x: x + np.float32(0.37) * np.arange(x.size, dtype=np.float32).reshape(x.shape),
        PARAMS,
    )
    got = one.exchange(params, tokens=1, wait=True)
    np.testing.assert_allclose(flat(got), flat(params), atol=1e-5)
    assert not np.array_equal(flat(one.params), flat(PARAMS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a/b"}, "name must be 1 to 64 letters"),
        ({"name": ""}, "name must be"),
        ({"quorum": 0}, "quorum must be a whole number of at least 1, got 0"),
        ({"snapshot_every": 1.5}, "snapshot_every must be a whole number"),
        ({"grace": -1.0}, "grace must be seconds of at least 0"),
        ({"key": "word"}, "key must be bytes"),
        ({"density": 0.0}, "density"),
    ],
)
def test_arguments_that_are_none(options, message):
    with pytest.raises(ValueError, match=message):
        site(memory(), **options)


def test_a_run_of_something_else_is_refused():
    store = memory()
    site(store)
    for options, message in [
        ({"density": 0.2}, "has density 0.1, and this site 0.2"),
        ({"codec": wire.narrow16()}, "has codec 'raw.*', and this site 'narrow16"),
        ({"params": {"c": np.zeros(4, np.float32)}}, "has model .*, and this site"),
        ({"key": b"secret"}, "its signature is not that of the key"),
    ]:
        with pytest.raises(ValueError, match=message):
            site(store, "b", **options)
    assert [*site(store)._member._run.store.sizes("snapshot")] == ["00000000"]


def test_parameters_that_are_none():
    with pytest.raises(TypeError, match=r"params\['a'\] is bfloat16: sites exchange.*float32"):
        site(memory(), params={"a": jax.numpy.zeros(3, "bfloat16")})
    one = site(memory())
    with pytest.raises(ValueError, match="params are those of another model: 3 entries"):
        one.exchange({"a": np.zeros(3, np.float32)}, tokens=1)
    bad = moved(PARAMS, 0)
    bad["b"][3] = np.nan
    with pytest.raises(ValueError, match="params are not finite, and nothing was sent"):
        one.exchange(bad, tokens=1)
    for tokens in (0, 1.5, True):
        with pytest.raises(ValueError, match="tokens must be a whole number of at least 1"):
            one.exchange(PARAMS, tokens=tokens)
    assert not one._member._run.store.sizes("round")

"""Sites come and go, and lose nothing; all have the same bits."""

import functools
import time

import jax
import numpy as np
import pytest

from optax_ext import sites
from sparse_collectives import wire
from tests.sites.helpers import (
    PARAMS,
    SIZE,
    catch_up,
    delivered,
    flat,
    memory,
    moved,
    site,
    stored,
    together,
)


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


def test_a_round_waits_for_the_quorum_and_for_those_of_the_last_one():
    store = memory()
    both = [site(store, name, quorum=2, give_up=0.3) for name in "ab"]
    first = moved(PARAMS, 0)
    with pytest.raises(
        TimeoutError, match="round 0 .* within give_up=0.3 s: it has 1 of the quorum=2"
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
    for one in living.values():
        catch_up(one)
    assert len({(one.round, flat(one.params).tobytes()) for one in living.values()}) == 1


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


def test_sums_of_changes_stay_in_the_range_of_float32():
    store = memory()
    begin = {"w": np.zeros(SIZE, np.float32)}
    both = [site(store, name, params=begin, density=1.0, grace=0.0) for name in "ab"]
    large = {"w": np.full(SIZE, 3e38, np.float32)}
    both[0].exchange(large, tokens=1, wait=True)
    both[1].exchange(large, tokens=1, wait=True)
    assert both[1].round == 2
    np.testing.assert_array_equal(both[1].params["w"], np.finfo(np.float32).max)


def test_tokens_of_a_call_that_failed_count_once():
    store = memory()
    one = site(store, quorum=2, give_up=0.05)
    mine = moved(PARAMS, 0)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            one.exchange(mine, tokens=100, wait=True)
    one._member._give_up = 30.0
    other = functools.partial(site(store, "b", quorum=2).exchange, moved(PARAMS, 1), tokens=7)
    together(functools.partial(one.exchange, mine, tokens=100), functools.partial(other, wait=True))
    got = one.finish(mine)
    assert [share.tokens for share in one._member._run.closed(0)] == [100, 7]
    assert one.last.delivered
    # Fewer tokens than it has counted before never make a payload that every site refuses.
    one._member._run.quorum = 1
    one.exchange(got, tokens=1, wait=True)
    assert one._member._run.closed(1)[0].tokens == 1
    for tokens in (2**53, 2**60):
        with pytest.raises(ValueError, match=r"tokens must be an integer below 2\*\*53"):
            one.exchange(got, tokens=tokens)


def test_two_sites_of_one_name_are_noticed(caplog):
    store = memory()
    first, second = site(store, "a", grace=0.0), site(store, "a", grace=0.0)
    params = [first.params, second.params]
    for step in range(4):
        for number, one in enumerate((first, second)):
            params[number] = one.exchange(moved(params[number], step, number), tokens=1, wait=True)
    said = [x.getMessage() for x in caplog.records if "another site is called a too" in x.message]
    # Once by each that has seen it.
    assert 1 <= len(said) <= 2
    caplog.clear()
    # One that has taken the place of one that has ended is not.
    third = site(store, "a", grace=0.0)
    params = third.params
    for step in range(3):
        params = third.exchange(moved(params, step), tokens=1, wait=True)
    assert not caplog.records


def test_old_rounds_leave_no_folder(tmp_path):
    one = site(tmp_path, snapshot_every=2)
    params = one.params
    # A part of an object that a killed site has left.
    (tmp_path / "round/00000001/payload").mkdir(parents=True)
    (tmp_path / "round/00000001/payload/b#1").write_bytes(b"part")
    (tmp_path / "snapshot/00000001#2").write_bytes(b"part")
    for step in range(9):
        params = one.exchange(moved(params, step), tokens=1, wait=True)
        stored(one)
    assert sorted(x.name for x in (tmp_path / "round").iterdir()) == [
        f"{number:08d}" for number in (6, 7, 8)
    ]
    assert sorted(x.name for x in (tmp_path / "snapshot").iterdir()) == ["00000006", "00000008"]


def fails(*_):
    raise sites.StoreError("can't be reached")


def cut_off(one, monkeypatch):
    """The site can't reach its store from now on."""
    for name in ("create", "get", "sizes"):
        monkeypatch.setattr(one._member._run.store, name, fails)


def test_a_call_that_fails_after_it_has_applied_a_round_is_made_again(monkeypatch):
    store = memory()
    one, other = (site(store, name, density=1.0, grace=0.0) for name in "ab")
    # Both take part in round 0, whose result the first one has not applied yet.
    for each in (one, other):
        each._member._run.quorum = 2
    mine = one.exchange(moved(PARAMS, 0), tokens=1)
    theirs = other.exchange(moved(PARAMS, 1), tokens=1, wait=True)
    one._member._pending.exception()
    for each in (one, other):
        each._member._run.quorum = 1
        each._member._give_up = 0.0
    mine = moved(mine, 2)
    cut_off(one, monkeypatch)
    with pytest.raises(TimeoutError, match="can't be reached"):
        one.exchange(mine, tokens=1, wait=True)
    with pytest.raises(TimeoutError, match="can't be reached"):
        one.finish(mine)
    # The steps in between are not lost either.
    more = moved(mine, 3)
    assert one.round == 1
    monkeypatch.undo()
    with pytest.raises(ValueError, match="params are not finite"):
        one.exchange({**more, "a": more["a"] * np.nan}, tokens=1)
    for each in (one, other):
        each._member._give_up = 30.0
    mine = one.exchange(more, tokens=1, wait=True)
    mine = one.exchange(mine, tokens=1, wait=True)
    theirs = other.exchange(theirs, tokens=1, wait=True)
    theirs = other.finish(theirs)
    # In round 0 each counts half, and then the first is alone.
    alone = flat(more) - flat(moved(PARAMS, 0))
    both = flat(moved(PARAMS, 0)) + flat(moved(PARAMS, 1))
    np.testing.assert_array_equal(flat(one.params), both / 2 + alone)
    np.testing.assert_array_equal(flat(one.params), flat(mine))
    np.testing.assert_array_equal(flat(other.params), flat(theirs))


def test_a_site_that_can_not_finish_finishes_later(monkeypatch):
    store = memory()
    one = site(store, density=1.0, give_up=0.0)
    mine = moved(PARAMS, 0)
    cut_off(one, monkeypatch)
    mine = one.exchange(mine, tokens=5)
    for _ in range(2):
        with pytest.raises(TimeoutError, match="can't be reached"):
            one.finish(mine)
    monkeypatch.undo()
    np.testing.assert_array_equal(flat(one.finish(mine)), flat(mine))
    assert one.last.delivered
    np.testing.assert_array_equal(flat(site(store, "b", density=1.0).params), flat(mine))
    # The tokens of the call that has failed count once, and the tokens of the next one in full.
    one._member._give_up = 30.0
    mine = one.exchange(moved(mine, 1), tokens=7, wait=True)
    assert [one._member._run.closed(x)[0].tokens for x in range(2)] == [5, 7]


def test_a_call_that_gives_up_before_the_grace_is_over_goes_on_when_it_is_made_again():
    store = memory()
    both = [site(store, name, quorum=2, grace=0.3, give_up=0.0) for name in "ab"]
    for each in both:
        each._member._give_up = 30.0
    calls = [
        functools.partial(one.exchange, moved(PARAMS, x), tokens=1, wait=True)
        for x, one in enumerate(both)
    ]
    mine, _ = together(*calls)
    # The second site is gone.
    both[0]._member._run.quorum, both[0]._member._give_up = 1, 0.0
    failed = []
    while both[0].round == 1:
        try:
            mine = both[0].exchange(mine, tokens=1, wait=True)
        except TimeoutError as error:
            failed.append(str(error))
    assert failed[0].endswith("give_up=0 s: it has its quorum, and waits grace=0.3 s for b.")
    assert both[0].last.sites == ("a",)


def test_a_caller_that_goes_on_from_the_shared_parameters_gives_up_its_own():
    store = memory()
    one, other = (site(store, name, density=1.0, grace=0.0) for name in "ab")
    mine = one.exchange(moved(PARAMS, 0), tokens=1)
    one._member._pending.exception()
    other.exchange(other.params, tokens=1, wait=True)
    with pytest.raises(ValueError, match="go on from the parameters of all sites, site.params"):
        one.exchange({**mine, "a": mine["a"] * np.nan}, tokens=1)
    # Its first change was delivered, and is not taken back.
    mine = one.exchange(one.params, tokens=1, wait=True)
    mine = one.exchange(mine, tokens=1, wait=True)
    np.testing.assert_array_equal(flat(mine), flat(moved(PARAMS, 0)))
    np.testing.assert_array_equal(flat(one.params), flat(mine))
    one.close()
    for call in (lambda: one.exchange(mine, tokens=1), lambda: one.finish(mine)):
        with pytest.raises(ValueError, match="this site is closed"):
            call()

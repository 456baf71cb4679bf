"""Objects that were cut, changed, replayed or made up are refused, and do no harm."""

import json
import struct
import threading

import numpy as np
import obstore
import pytest

from optax_ext.sites import _payload
from optax_ext.sites._objects import Name
from optax_ext.sites._payload import PayloadError, pack, unpack
from sparse_collectives import wire
from tests.sites.helpers import PARAMS, SIZE, delivered, flat, memory, moved, site, together

KEY = b"secret"


def made(key=None, codec=None, **changes):
    """A payload of site a for round 0, and its reader."""
    one = site(memory(), key=key, codec=codec or wire.narrow8(), density=0.3)
    run = one._member._run
    body = run.messages.encode(flat(moved(PARAMS, 0)) - flat(PARAMS), 0)
    header = {"run": run._objects.run, "number": 0, "site": "a", "life": "0" * 16}
    header |= {"tokens": 5, "base": "0" * 16}
    return one, pack({**header, **changes}, body, key), header, body


def taken(one, data):
    """Whether a payload is taken; checks that a taken one can be added."""
    run, name = one._member._run, Name("payload", 0, "a")
    run._objects._refused.clear()
    run._shares.clear()
    obstore.put(run.store._store, name.path, data)
    if not (share := run._payloads({name: len(data)}).get(name)):
        return False
    assert len(np.unique(share.change.indices)) == len(share.change.indices)
    assert not len(share.change.indices) or share.change.indices.min() >= 0
    assert not len(share.change.indices) or share.change.indices.max() < SIZE
    assert np.isfinite(share.change.values).all()
    assert share.tokens > 0
    return True


@pytest.mark.parametrize("key", [None, KEY])
def test_of_ten_thousand_that_were_cut_or_changed_none_is_taken(key):
    one, data, *_ = made(key)
    assert taken(one, data)
    rng = np.random.default_rng(0)
    for number in range(5000):
        changed = bytearray(data)
        if number % 3 == 0:
            changed = changed[: rng.integers(len(data))]
        elif number % 3 == 1:
            for where in rng.integers(len(data), size=rng.integers(1, 4)):
                changed[where] ^= 1 << rng.integers(8)
        else:
            where = rng.integers(len(data))
            changed[where:where] = rng.bytes(rng.integers(1, 40))
        if bytes(changed) != data:
            assert not taken(one, bytes(changed)), number


def test_what_is_made_up_with_a_right_tag_is_refused_or_can_be_added():
    one, _, header, body = made(KEY, wire.raw())
    rng = np.random.default_rng(0)
    found = [taken(one, pack(header, rng.bytes(len(body)), KEY)) for _ in range(300)]
    # Values of random bits are seldom all finite, and their indices seldom all in range.
    assert not any(found)
    other, _, header8, body8 = made(KEY)
    for _ in range(300):
        # Any bits decode to entries of this codec, which can be added.
        taken(other, pack(header8, rng.bytes(len(body8)), KEY))
    for changes in (
        {"number": 1},
        {"number": 0.0},
        {"number": False},
        {"site": "b"},
        {"site": None},
        {"life": None},
        {"life": "\u1234" * 16},
        {"run": "another"},
        {"tokens": 0},
        {"tokens": -3},
        {"tokens": 2.5},
        {"tokens": True},
        {"tokens": 2**60},
        {"tokens": "5"},
        {"tokens": None},
    ):
        assert not taken(one, pack({**header, **changes}, body, KEY)), changes
    for other in (body[:-4], body + b"\0\0\0\0", b""):
        assert not taken(one, pack(header, other, KEY))
    # Another key, and no key.
    assert not taken(one, pack(header, body, b"other"))
    assert not taken(one, pack(header, body, None))


def test_headers_that_are_none():
    _, _, header, body = made()
    for text in (b"[1]", b"{", b"[" * 4000, b"\xff", json.dumps(header).encode() * 40):
        data = _payload._MAGIC + struct.pack("<I", len(text)) + text + body
        with pytest.raises(PayloadError):
            unpack(data + _payload._tag(data, None), None)
    with pytest.raises(ValueError, match="the header has .* bytes, and at most 4096"):
        pack({"x": "y" * 5000}, b"", None)


def test_a_replayed_payload_of_another_round_is_left_out():
    store = memory()
    both = [site(store, name, grace=0.0, density=0.3) for name in "ab"]
    params = both[0].exchange(moved(PARAMS, 0), tokens=1, wait=True)
    old = both[0]._member._run.store.get("round/00000000/payload/a", 10_000)
    obstore.put(store, "round/00000001/payload/b", old)
    both[0].exchange(moved(params, 1), tokens=1, wait=True)
    assert both[0].last.sites == ("a",)


def test_one_that_can_not_read_a_closed_round_goes_on_from_the_next_snapshot():
    store = memory()
    one, other = site(store, snapshot_every=2), site(store, "b", give_up=0.1)
    params = one.exchange(moved(PARAMS, 0), tokens=1, wait=True)
    name = "round/00000000/payload/a"
    obstore.put(store, name, one._member._run.store.get(name, 10_000)[:-1])
    mine = moved(PARAMS, 0, 1)
    with pytest.raises(TimeoutError, match="is not what the list of its round says"):
        other.exchange(mine, tokens=1, wait=True)
    one.exchange(moved(params, 1), tokens=1, wait=True)
    one.close()
    other._member._give_up = 30.0
    got = other.exchange(mine, tokens=1, wait=True)
    given = delivered(other, 3, first=2)
    assert np.abs(given).sum() > 0
    np.testing.assert_allclose(flat(other.params), flat(one.params) + given, atol=1e-5)
    waits = flat(mine) - flat(PARAMS) - given
    np.testing.assert_allclose(flat(got) - flat(other.params), waits, atol=1e-5)


def test_of_many_that_close_a_round_at_once_one_does():
    for _ in range(20):
        store = memory()
        names = "abcdefgh"
        each = [site(store, name, quorum=1, grace=0.0) for name in names]
        start = threading.Barrier(len(names))

        def go(one, start=start):
            start.wait()
            one.exchange(moved(PARAMS, 0, ord(one.name)), tokens=1, wait=True)
            return one._member._run.closed(0)

        lists = together(*(lambda one=one: go(one) for one in each))
        assert len({tuple(share.site for share in done) for done in lists}) == 1
        at = {one.round: flat(one.params).tobytes() for one in each}
        assert all(flat(one.params).tobytes() == at[one.round] for one in each)

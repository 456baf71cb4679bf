"""Thousands of objects that were cut, flipped, forged or planted: none wrong is used."""

import functools

import numpy as np
import obstore
import pytest

from optax_ext.sites._contents import digest_of
from optax_ext.sites._objects import Name, name_of
from optax_ext.sites._payload import pack
from sparse_collectives import wire
from tests.sites.helpers import PARAMS, SIZE, flat, memory, moved, site, stored, together

pytestmark = pytest.mark.slow
KEY = b"secret"
CODECS = {
    "raw": wire.raw(),
    "narrow8": wire.narrow8(),
    "narrow16": wire.narrow16(),
    "two_bits": wire.two_bits(),
    "bf16": wire.bf16(),
    "qsgd": wire.qsgd(),
}


def begun(key, codec=None, store=None):
    """A site with a closed round and a snapshot after it, and its objects."""
    one = site(store or memory(), key=key, snapshot_every=1, codec=codec or wire.narrow8())
    one.exchange(moved(PARAMS, 0), tokens=1, wait=True)
    stored(one)
    return one, one._member._run


def used(run, name, data):
    """What the run takes from an object that is in the store under a name."""
    run._objects._refused.clear()
    run._shares.clear()
    obstore.put(run.store._store, name.path, data)
    if name.kind == "payload":
        return run._payloads({name: len(data)})
    found = {name: len(data)}
    return run._listed(found) if name.kind == "list" else run._first_snapshot(found)


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize(
    "name", [Name("payload", 0, "a"), Name("list", 0), Name("snapshot", 1)], ids=lambda x: x.kind
)
def test_every_length_and_every_bit(key, name):
    _, run = begun(key)
    data = run.store.get(name.path, 10_000)
    assert used(run, name, data)
    count = 0
    for length in range(len(data)):
        assert not used(run, name, data[:length]), length
        count += 1
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not used(run, name, bytes(flipped)), bit
        count += 1
    print(count, "objects")
    assert count == 9 * len(data)


@pytest.mark.parametrize("codec", CODECS)
def test_random_bodies_with_a_right_tag_can_be_added(codec):
    one, run = begun(KEY, CODECS[codec])
    name, rng, taken = Name("payload", 1, "b"), np.random.default_rng(0), 0
    header = {"run": run._objects.run, "number": 1, "site": "b", "life": "0" * 16, "tokens": 3}
    header |= {"base": "0" * 16}
    for _ in range(600):
        body = rng.bytes(run.messages.bytes)
        for share in used(run, name, pack(header, body, KEY)).values():
            indices, values = share.change
            assert len({*indices.tolist()}) == len(indices)
            assert ((indices >= 0) & (indices < SIZE)).all()
            assert np.isfinite(values).all()
            taken += 1
    print(taken, "of 600 are taken")
    assert flat(one.params).size == SIZE


# Values of a header that JSON has, and that are none here.
VALUES = [None, True, False, 0, -1, 1.0, 2**53, 10**300, 1e308, "", "1", "é", [], [1], {}, "x" * 99]


@pytest.mark.parametrize("field", ["run", "number", "site", "life", "tokens", "digest"])
def test_forged_headers(field):
    _, run = begun(KEY)
    names = [Name("payload", 1, "b")] if field != "digest" else [Name("snapshot", 1)]
    names = [Name("payload", 1, "b"), Name("list", 1)] if field in ("run", "number") else names
    body = {
        "payload": run.messages.encode(flat(moved(PARAMS, 1)), 0),
        "list": b'[["a",0,"00"]]',
        "snapshot": flat(PARAMS).tobytes() + b"[]",
    }
    header = {"run": run._objects.run, "number": 1, "site": "b", "life": "0" * 16, "tokens": 3}
    for name in names:
        assert name.kind == "snapshot" or used(run, name, pack(header, body[name.kind], KEY))
        for value in VALUES:
            changed = {**header, field: value}
            assert not used(run, name, pack(changed, body[name.kind], KEY)), (name, value)
        rest = {x: header[x] for x in header if x != field}
        assert not used(run, name, pack(rest, body[name.kind], KEY)), name


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"[null]",
        b"[[]]",
        b'[["a",0]]',
        b'[["a",0,"00",1]]',
        b'[["a",true,"00"]]',
        b'[["a",-1,"00"]]',
        b'[["a",1e400,"00"]]',
        b'[["a",NaN,"00"]]',
        b'[["a/b",0,"00"]]',
        b'[["",0,"00"]]',
        b'[[1,0,"00"]]',
        b'[["a",0,0]]',
        b'[["a",0,"00"],["a",1,"01"]]',
        b"[" * 100_000,
        b"\xff",
        b'[["a",' + b"9" * 5000 + b',"00"]]',
    ],
    ids=range(20),
)
def test_forged_lists_and_snapshots(body):
    _, run = begun(KEY)
    header = {"run": run._objects.run, "number": 1}
    assert not used(run, Name("list", 1), pack(header, body, KEY))
    for params in (PARAMS, {"a": PARAMS["a"] + np.inf, "b": PARAMS["b"]}):
        vector = flat(params).astype(np.float32)
        header["digest"] = digest_of(vector)
        found = used(run, Name("snapshot", 1), pack(header, vector.tobytes() + body, KEY))
        assert not found or (body == b"[]" and np.isfinite(vector).all())


def test_a_run_goes_on_among_thousands_of_planted_objects(tmp_path):
    """Two sites, and a third one that joins, with 100 objects before each of 30 rounds."""
    rng = np.random.default_rng(0)
    both = [site(tmp_path, x, key=KEY, quorum=2, snapshot_every=2, give_up=60.0) for x in "ab"]
    params, planted = [one.params for one in both], 0
    for step in range(30):
        store = both[0]._member._run.store
        sizes = store.sizes("round") | store.sizes("snapshot")
        whole = [
            (tmp_path / path).read_bytes()
            for path, size in sizes.items()
            if size > 100 and name_of(path)
        ]
        for _ in range(100):
            number = max(0, both[0].round + int(rng.integers(-2, 4)))
            version, sender = int(rng.integers(20)), str(rng.choice(["a", "b", "c", "d.e"]))
            name = [
                Name("snapshot", number, "", version),
                Name("list", number, "", version),
                Name("payload", number, sender, version),
            ][rng.integers(3)]
            data = bytearray(whole[rng.integers(len(whole))])
            way = rng.integers(4)
            if way == 0:
                data = data[: rng.integers(len(data))]
            elif way == 1:
                data[rng.integers(len(data))] ^= 1 << rng.integers(8)
            elif way == 2:
                data = bytearray(rng.bytes(rng.integers(400)))
            else:
                data = data[:-32] + rng.bytes(32)
            # The sites never write an object twice; neither does this.
            planted += store.create(name.path, bytes(data))
        before = both[0].round
        calls = [
            functools.partial(one.exchange, moved(x, step, number), tokens=1, wait=True)
            for number, (one, x) in enumerate(zip(both, params, strict=True))
        ]
        params = together(*calls)
        assert [one.round for one in both] == [before + 1] * 2
        assert both[0].last.sites == ("a", "b")
        assert flat(both[0].params).tobytes() == flat(both[1].params).tobytes()
        for one in both:
            stored(one)
    third = site(tmp_path, "c", key=KEY)
    assert flat(third.params).tobytes() == flat(both[0].params).tobytes()
    print(planted, "objects")
    assert planted > 1500

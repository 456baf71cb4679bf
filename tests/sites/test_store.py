"""Stores that fail, are full, slow, not there, or S3."""

import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from optax_ext.sites._payload import PayloadError
from optax_ext.sites._store import Store, StoreError
from tests.sites.helpers import PARAMS, catch_up, flat, memory, moved, site, together


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    return Store(tmp_path / "run" if request.param == "folder" else memory())


def test_objects_by_their_name(store):
    assert store.get("a/b", 5) is None
    assert store.sizes("a") == {}
    assert store.create("a/b", b"three")
    assert store.get("a/b", 5) == b"three"
    with pytest.raises(PayloadError, match="it has 5 bytes"):
        store.get("a/b", 4)
    assert not store.create("a/b", b"other")
    assert store.create("a/c/d", b"")
    assert store.sizes("a") == {"a/b": 5, "a/c/d": 0}
    store.delete(["a/b", "a/none"])
    assert store.sizes("a") == {"a/c/d": 0}


def test_a_folder_is_listed_whatever_is_in_it(tmp_path):
    store = Store(tmp_path)
    assert store.create("a/b/c", b"three")
    (tmp_path / "a" / "b" / "loop").symlink_to(tmp_path / "a")
    (tmp_path / "a" / "gone").symlink_to(tmp_path / "nothing")
    os.mkfifo(tmp_path / "a" / "fifo")
    with open(os.fsencode(tmp_path) + b"/a/\xff\xfe", "wb"):
        pass
    sizes = store.sizes("a")
    assert sizes.pop("a/b/c") == 5
    assert [*sizes.values()] == [0]
    store.delete(["a/b/c"])
    assert (tmp_path / "a" / "b").exists()
    (tmp_path / "a" / "b" / "loop").unlink()
    assert store.create("a/b/d/e", b"")
    store.delete(["a/b/d/e"])
    assert not (tmp_path / "a" / "b").exists()


def test_a_store_that_is_not_there(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="can't open the store at .*file"):
        Store(tmp_path / "file")
    with pytest.raises(StoreError, match="can't open the store at nothing://x"):
        Store("nothing://x")


@pytest.mark.parametrize("begin", ["file://", "FILE://", "file://localhost"])
def test_a_url_of_a_folder_is_that_folder_and_makes_it(tmp_path, begin):
    folder = tmp_path / "new" / "a run 50%20#?é"
    assert Store(folder.as_uri().replace("file://", begin)).create("a/b", b"three")
    assert Store(folder).get("a/b", 5) == b"three"
    with pytest.raises(StoreError, match="can't open the store at file://elsewhere/run"):
        Store("file://elsewhere/run")


@pytest.mark.parametrize("url", ["memory://", "MEMORY:///run"])
def test_a_url_that_is_another_store_for_each_site(url):
    with pytest.raises(ValueError, match=rf"got {url}: .* one obstore.store.MemoryStore\(\)"):
        Store(url)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(TimeoutError, match="can't write"):
        site(tmp_path, give_up=0.0)


@pytest.mark.parametrize("store", [5, b"s3://a/b", None, "", ["x"], Path("s3://a/b")])
def test_what_is_no_store(store):
    with pytest.raises(TypeError, match="store must be a folder, a URL such as .*, got "):
        Store(store)


class Unreliable(Store):
    """A store that fails at random, before or after the operation."""

    def __init__(self, inner):
        super().__init__(inner)
        self.random = random.Random(0)
        self.failures = 0

    def _fail(self):
        if self.random.random() < 0.15:
            self.failures += 1
            raise StoreError("can't reach the store")

    def create(self, name, data):
        self._fail()
        made = super().create(name, data)
        self._fail()
        return made

    def get(self, name, most):
        self._fail()
        time.sleep(0.002)
        return super().get(name, most)

    def sizes(self, prefix):
        self._fail()
        return super().sizes(prefix)


def test_a_store_that_fails_and_is_slow_loses_nothing(monkeypatch):
    monkeypatch.setattr("optax_ext.sites._member._AGAIN", 0.001)
    monkeypatch.setattr("optax_ext.sites._site.Store", Unreliable)
    one = site(memory(), snapshot_every=3)
    params, total = one.params, np.zeros_like(flat(PARAMS))
    for step in range(8):
        before = flat(params)
        params = moved(params, step)
        total += flat(params) - before
        params = one.exchange(params, tokens=1, wait=step % 2 == 0)
    params = one.finish(params)
    one.close()
    assert one._member._run.store.failures > 5
    # It is alone, so its deliveries count in full, and once.
    np.testing.assert_array_equal(flat(params) - flat(PARAMS), total)
    assert not np.array_equal(flat(one.params), flat(PARAMS))


def test_a_store_that_is_full_is_waited_for_and_then_an_error(monkeypatch):
    monkeypatch.setattr("optax_ext.sites._member._AGAIN", 0.001)
    one = site(memory(), give_up=0.2)

    def full(*_):
        raise StoreError("can't write: no space left on device")

    monkeypatch.setattr(one._member._run.store, "create", full)
    params = moved(one.params, 0)
    with pytest.raises(TimeoutError, match="no space left"):
        one.exchange(params, tokens=1, wait=True)
    monkeypatch.undo()
    got = one.exchange(params, tokens=1, wait=True)
    np.testing.assert_array_equal(flat(got), flat(params))
    assert one.last.delivered


@pytest.mark.slow
def test_the_protocol_of_s3(monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
        }.items():
            monkeypatch.setenv(name, value)
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as test:
                if not test.connect_ex(("127.0.0.1", port)):
                    break
            assert time.monotonic() < deadline, "the server does not come up"
            time.sleep(0.1)
        import boto3

        boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="bucket")
        both = [site("s3://bucket/run", name, snapshot_every=2) for name in "ab"]
        params = [one.params for one in both]
        for step in range(3):
            for number, one in enumerate(both):
                params[number] = one.exchange(
                    moved(params[number], step, number), tokens=1, wait=True
                )
        assert all(one.last.delivered for one in both)
        late = site("s3://bucket/run", "c")
        for one in both:
            catch_up(one)
        assert both[0].round == both[1].round == late.round == 6
        assert len({flat(one.params).tobytes() for one in (*both, late)}) == 1
        store = both[0]._member._run.store
        assert store.create("one", b"1")
        assert not store.create("one", b"2")
    finally:
        server.kill()
        server.wait()


def test_a_site_reads_each_payload_once(monkeypatch):
    store = memory()
    both = [site(store, name, quorum=2) for name in "ab"]
    read = [[], []]
    for one, names in zip(both, read, strict=True):
        get = one._member._run.store.get

        def noted(name, most, get=get, names=names):
            names.append(name)
            return get(name, most)

        monkeypatch.setattr(one._member._run.store, "get", noted)
    for step in range(3):
        calls = [
            lambda one=one, step=step: one.exchange(moved(one.params, step), tokens=1, wait=True)
            for one in both
        ]
        together(*calls)
    for names in read:
        payloads = [name for name in names if "payload" in name]
        assert len(payloads) == len({*payloads}) == 2 * 3

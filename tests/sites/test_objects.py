"""Objects that are damaged or not of the run stop no site, and count for nothing."""

import os
import resource

import pytest

from optax_ext.sites._objects import Name, name_of
from optax_ext.sites._payload import pack
from tests.sites.helpers import PARAMS, flat, memory, moved, site, stored

KEY = b"secret"
NAMES = [
    Name("snapshot", 5),
    Name("snapshot", 10**9, version=3),
    Name("list", 0),
    Name("list", 12, version=999_999),
    Name("payload", 7, "a"),
    Name("payload", 7, "a.b_c-1", 2),
]


def test_names_and_their_paths():
    for name in NAMES:
        assert name_of(name.path) == name
    assert Name("payload", 7, "a", 2).path == "round/00000007/payload/a!2"
    for path in (
        "snapshot/²",
        "snapshot/5",
        "snapshot/000000005",
        "snapshot/00000005!0",
        "snapshot/00000005!01",
        "snapshot/00000005/list",
        "snapshot/-0000005",
        "snapshot/00000005#1",
        "snapshot/0000000٥",
        "round/00000005",
        "round/00000005/payload",
        "round/00000005/payload/",
        "round/00000005/payload/a/b",
        "round/00000005/payload/é",
        "round/00000005/list/x",
        "round/00000005/list\n",
        "round/abc/payload/x",
        "run",
        "",
    ):
        assert name_of(path) is None, path


def write(folder, name, data):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if data == "folder":
        path.unlink(missing_ok=True)
        (path / "below").mkdir(parents=True)
        (path / "below" / "x").write_bytes(b"junk")
    elif data == "fifo":
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    elif data == "loop":
        path.unlink(missing_ok=True)
        path.symlink_to(folder)
    elif data == "sparse":
        with open(path, "wb") as file:
            file.truncate(1 << 30)
    else:
        path.write_bytes(data)


def begun(folder, key):
    """A site after three rounds, a snapshot of round 2 and one of round 0."""
    one = site(folder, key=key, grace=0.05, snapshot_every=2, give_up=20.0, quorum=1)
    params = one.params
    for step in range(3):
        params = one.exchange(moved(params, step), tokens=1, wait=True)
        stored(one)
    return one, params


# A planted object: a function of a whole object of the same kind.
CONTENTS = {
    "junk": lambda whole, run: b"junk",
    "empty": lambda whole, run: b"",
    "cut": lambda whole, run: whole[: len(whole) // 2],
    "flipped": lambda whole, run: whole[:40] + bytes([whole[40] ^ 4]) + whole[41:],
    "unsigned": lambda whole, run: pack({"run": run, "number": 3, "site": "a"}, b"[]", None),
    "of another round": lambda whole, run: whole,
    "as long": lambda whole, run: bytes(len(whole)),
    "folder": lambda whole, run: "folder",
    "fifo": lambda whole, run: "fifo",
    "loop": lambda whole, run: "loop",
    "sparse": lambda whole, run: "sparse",
}
# Where it is planted, after three rounds; the objects of round 3 are next.
PLACES = [
    "snapshot/99999999",
    "snapshot/00000004",
    "snapshot/00000003",
    "snapshot/00000002",
    "snapshot/²",
    "snapshot/notes.txt",
    "round/00000003/list",
    "round/00000003/list!1",
    "round/00000003/payload/a",
    "round/00000003/payload/b",
    "round/00000003/payload/zz",
    "round/00000003/payload/a!1",
    "round/abc/payload/x",
    "round/00000001/notes",
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "content",
    [pytest.param(x, marks=() if x in ("junk", "loop") else pytest.mark.slow) for x in CONTENTS],
)
def test_what_can_not_be_used_stops_nobody(tmp_path, caplog, place, content):
    one, params = begun(tmp_path, KEY)
    kind = "snapshot/00000002" if place.startswith("snapshot") else "round/00000002/payload/a"
    kind = "round/00000002/list" if "list" in place else kind
    whole = (tmp_path / kind).read_bytes()
    if place == "snapshot/00000002" and content == "of another round":
        whole = (tmp_path / "snapshot/00000000").read_bytes()
    write(tmp_path, place, CONTENTS[content](whole, one._member._run._objects.run))
    # It goes on, and another one joins from an older snapshot, and takes part.
    params = one.exchange(moved(params, 3), tokens=1, wait=True)
    assert (one.round, one.last.sites) == (4, ("a",))
    other = site(tmp_path, "b", key=KEY, grace=0.05, snapshot_every=2, give_up=20.0)
    assert flat(other.params).tobytes() == flat(one.params).tobytes()
    other.exchange(moved(other.params, 4), tokens=1, wait=True)
    for step in range(4, 7):
        params = one.exchange(moved(params, step), tokens=1, wait=True)
    one.close()
    other.close()
    assert len(caplog.records) <= 6, [x.getMessage() for x in caplog.records]
    # Old objects are removed, and foreign ones stay.
    rest = one._member._run.store.sizes("round")
    mine = [name_of(path).number for path in rest if name_of(path)]
    assert min(mine) >= 4, sorted(rest)


def test_what_can_not_be_used_counts_for_no_quorum(tmp_path, caplog):
    one = site(tmp_path, key=KEY, quorum=2, give_up=0.3)
    payloads = tmp_path / "round/00000000/payload"
    payloads.mkdir(parents=True)
    size = one._member._run.messages.bytes
    for number in range(3000):
        (payloads / f"junk-{number}").write_bytes(b"x" * 5)
    for number in range(10):
        (payloads / f"long-{number}").write_bytes(bytes(size + 100))
    get, read = one._member._run.store.get, []
    one._member._run.store.get = lambda name, most: (read.append(name), get(name, most))[1]
    message = "round 0 at .* was not closed within give_up=0.3 s: it has 1 of the quorum=2"
    with pytest.raises(TimeoutError, match=message):
        one.exchange(moved(PARAMS, 0), tokens=1, wait=True)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "round/00000000/payload/junk-0 at " in said[0]
    assert said[0].endswith("is left out: it has 5 bytes, and 3009 more objects")
    # Only the objects of about the right size were read, each once.
    assert sorted(read) == sorted({*read})
    assert len(read) == 10 + 1
    one._member._give_up = 30.0
    site(tmp_path, "b", key=KEY, quorum=2).exchange(moved(PARAMS, 1), tokens=1, wait=True)
    one.exchange(moved(PARAMS, 0), tokens=1, wait=True)
    assert one._member._run.closed(0) is not None
    assert one.last.sites == ("a", "b")


def test_a_large_object_takes_no_memory(tmp_path):
    one, params = begun(tmp_path, None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    places = ("snapshot/00000003", "round/00000003/list", "round/00000003/payload/b", "run!1")
    for place in places:
        write(tmp_path, place, "sparse")
    one.exchange(moved(params, 3), tokens=1, wait=True)
    site(tmp_path, "b")
    write(tmp_path, "run", "sparse")
    with pytest.raises(ValueError, match="run at .* can't be used: it has 1073741824 bytes"):
        site(tmp_path, "c")
    # In kilobytes.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000


def test_junk_that_was_there_before_the_run(tmp_path, caplog):
    places = [f"round/00000000/list!{number}" for number in range(1, 1000)]
    places += [f"snapshot/{number:08d}" for number in range(1000)]
    for place in ("round/00000000/list", *places):
        write(tmp_path, place, b"junk")
    one = site(tmp_path, snapshot_every=2)
    params = one.exchange(moved(PARAMS, 0), tokens=1, wait=True)
    one.exchange(moved(params, 1), tokens=1, wait=True)
    one.close()
    other = site(tmp_path, "b")
    # Each site says it once of the snapshots, and once of the lists.
    assert len(caplog.records) <= 4
    assert (one.round, other.round) == (2, 2)
    assert flat(other.params).tobytes() == flat(one.params).tobytes()


def test_a_store_that_was_emptied_is_named():
    store = memory()
    one = site(store, give_up=0.1)
    run = one._member._run.store
    run.delete([*run.sizes("snapshot"), "run"])
    with pytest.raises(TimeoutError, match="there is no snapshot of the run at .*MemoryStore"):
        one.exchange(moved(PARAMS, 0), tokens=1, wait=True)

"""A site of two processes, with parameters that are sharded over them."""

import numpy as np
import pytest

from benchmarks._common import processes as launcher
from tests import groups
from tests.sites.helpers import PARAMS, SIZE, flat, moved, site

pytestmark = pytest.mark.slow


def test_a_site_of_two_processes_is_a_site(tmp_path):
    store = str(tmp_path / "run")
    given = {"store": store, "fails": False}
    with groups.group("tests.sites._worker", 2, **given) as both:
        # Not before the others have begun: the parameters are theirs.
        one = site(store, "one", quorum=2, grace=60.0, give_up=120.0)
        params = one.params
        total = np.zeros(SIZE)
        for step in range(3):
            before = flat(params)
            params = moved(params, step)
            total += flat(params) - before
            params = one.exchange(params, tokens=1, wait=True)
        launcher.wait_for_ends(both, groups.TIMEOUT)
        assert [process.status for process in both] == [0, 0], both[0].output
        ends = [process.find("done") for process in both]
    assert [end["round"] for end in ends] == [3, 3]
    for end in ends:
        assert end["shared"] == ends[0]["shared"] == flat(one.params).tolist()
        assert end["params"] == ends[0]["params"]
    theirs = sum(np.random.default_rng([x, 7]).integers(-8, 9, SIZE) for x in range(3))
    # Each counts half: what both have moved is there, or waits at its site.
    shared, mine = flat(one.params), flat(params)
    waits = (mine - shared) / 2 + (np.asarray(ends[0]["params"]) - shared) / 2
    np.testing.assert_array_equal(shared + waits, flat(PARAMS) + (total + theirs) / 2)


def test_all_processes_learn_of_an_error_of_the_first_and_call_again(tmp_path):
    (tmp_path / "run").mkdir()
    given = {"store": str(tmp_path / "run"), "fails": True}
    with groups.group("tests.sites._worker", 2, **given) as both:
        launcher.wait_for_ends(both, groups.TIMEOUT)
        assert [process.status for process in both] == [0, 0], both[0].output
        ends = [process.find("failed") for process in both]
        done = [process.find("done") for process in both]
    assert [end["kind"] for end in ends] == ["TimeoutError"] * 2
    assert [end["round"] for end in done] == [3, 3]
    assert done[0] == done[1]
    assert ends[1]["text"] == f"process 0 of this site failed: TimeoutError: {ends[0]['text']}"

"""The soak, for a short time; and what it would notice.

The long version, with the checks of `_soak.py` and its table:

    SOAK_STEPS=10000 SOAK_PROCESSES=4 SOAK_REPORT_EVERY=50 \\
        python -m pytest tests/system/test_soak.py -m slow -s
"""

import json

import numpy as np
import pytest

from tests.system import _patterns as patterns
from tests.system import _soak

pytestmark = pytest.mark.usefixtures("default_promotion")


def test_gradients_are_not_finite_exactly_where_it_is_said():
    steps = 0
    for step in range(400):
        bad = [
            np.flatnonzero(~np.isfinite(patterns.gradient(step, worker, 3))) for worker in range(3)
        ]
        said = [patterns.faulty(step, worker, 3)[0] for worker in range(3)]
        assert [x.tolist() for x in bad] == [x.tolist() for x in said]
        steps += any(x.size for x in bad)
    assert 5 < steps < 40
    assert {patterns.pattern_of(step) for step in range(100)} == set(patterns.PATTERNS)


def line(step, **changes):
    counts = {"count": step, "skipped": 0, "dropped": 0}
    return {
        "step": step,
        "params": step,
        "finite": True,
        "worst": 1.0,
        "found": counts,
        "expected": counts,
        "settled": True,
        "rss": 300.0,
        "maps": 2000,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"worst": 9.0}, "step 30: 9.0 roundings lost"),
        ({"worst": float("nan")}, "step 30: nan roundings lost"),
        ({"params": 7}, "step 30: replicas differ"),
        ({"finite": False}, "step 30: parameters that are not finite"),
        ({"found": {"count": 29, "skipped": 1, "dropped": 0}}, "step 30: counts"),
        ({"rss": 317.0}, "process 1: rss grew by 17.0"),
        ({"maps": 2065}, "process 1: maps grew by 65"),
    ],
)
def test_the_soak_sees_each_violation(changes, complaint):
    settings = _soak.Settings(steps=30, processes=2)
    good = [line(step) for step in range(1, 31)]
    assert _soak.summary([[good, good]], settings)["violations"] == []
    # Memory that grows stays so.
    late = {"rss", "maps"} & changes.keys()
    bad = [line(x["step"], **(changes if x["step"] > 25 or not late else {})) for x in good]
    if not late:
        bad[:-1] = good[:-1]
    (found,) = _soak.summary([[good, bad]], settings)["violations"]
    assert found.startswith(complaint)


@pytest.mark.slow
def test_a_soak_finds_no_violation(tmp_path):
    found = _soak.soak(_soak.Settings.of_environment(), tmp_path)
    print(f"\n{json.dumps(found, indent=1)}")
    assert found["violations"] == []

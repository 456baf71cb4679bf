"""Results of the evidence: what is kept and what is stale; and the verdicts that they give."""

import json
import math

import numpy as np
import pytest

from benchmarks.evidence import _curves
from benchmarks.evidence._claims import (
    ELSEWHERE,
    FAILS,
    HOLDS,
    UNMEASURED,
    UNTOLD,
    Bound,
    Claim,
    Elsewhere,
    interval,
    spread,
    verdict,
)
from benchmarks.evidence._curves import Curve, Curves
from benchmarks.evidence._page import page, unmarked
from benchmarks.evidence._store import FORMAT, Store

# The benchmarks are programs of users.
pytestmark = pytest.mark.usefixtures("default_promotion")


def claim_of(check, **more):
    given = {"rule": (Bound("x", most=1),), **more}
    return Claim("some/claim", "A claim.", "a paper", "1", "somewhere", check=check, **given)


# Verdicts.


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (UNMEASURED, "")),
        ([0.5, 1.0], (HOLDS, "")),
        ([0.5, 1.5], (ELSEWHERE, "in the dark; 1 of 2 seeds do")),
        ([1.5], (ELSEWHERE, "in the dark")),
        ([2.5], (FAILS, "")),
        ([math.nan], (FAILS, "")),
    ],
)
def test_the_verdict_is_that_of_the_worst_seed(values, expected):
    claim = claim_of(dict, elsewhere=Elsewhere("in the dark", (Bound("x", most=2),)))
    assert verdict(claim, [{"x": value} for value in values]) == expected


LEAST = {"rule": (Bound("x", least=1.5),), "chance": True}
WITHIN = {"rule": (Bound("x", -1, 1),), "chance": True}
NEAR = np.array([-0.1, 0, 0.1])


@pytest.mark.parametrize(
    ("options", "values", "expected"),
    [
        # The claim: at least 1.5. Means of three seeds, with 4.3 standard errors on either side.
        (LEAST, [1.9, 2.0, 2.1], HOLDS),
        (LEAST, [1.0, 1.1, 1.2], FAILS),
        # Each seed meets the rule, and chance is as large as what is claimed.
        (LEAST, [1.6, 2.0, 3.0], UNTOLD),
        (LEAST, [0.0, 1.0, 1.4], UNTOLD),
        # The mean of many seeds is known better: so does one that is off.
        (LEAST, [1.4, *[2.0, 1.9, 2.1] * 5], HOLDS),
        (LEAST, [9.0], UNTOLD),
        (LEAST, [math.nan, 2.0, 2.1], UNTOLD),
        # A tolerance has two sides.
        (WITHIN, NEAR, HOLDS),
        (WITHIN, NEAR + 0.9, UNTOLD),
        (WITHIN, NEAR - 0.9, UNTOLD),
        (WITHIN, NEAR + 2, FAILS),
        (WITHIN, NEAR - 2, FAILS),
    ],
)
def test_where_chance_is_as_large_as_the_claim_nothing_can_be_told(options, values, expected):
    claim = claim_of(dict, **options)
    assert verdict(claim, [{"x": value} for value in values])[0] == expected


@pytest.mark.parametrize(("y", "x", "expected"), [(1, 1, HOLDS), (0, 1, UNTOLD), (0, -1, FAILS)])
def test_the_worst_number_decides_what_can_be_told(x, y, expected):
    claim = claim_of(dict, rule=(Bound("x", least=0), Bound("y", least=0)), chance=True)
    assert verdict(claim, [{"x": x + z, "y": y + z} for z in NEAR])[0] == expected


def test_the_interval_has_the_mean_in_19_of_20_cases():
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(500):
        mean, room = interval("x", [{"x": x} for x in random.standard_normal(6)])
        inside += abs(mean) <= room
    # 0.95 with a standard error of 0.01.
    assert 0.92 < inside / 500 < 0.98


def test_the_worse_seed_comes_first():
    claim = claim_of(dict, rule=(Bound("x", most=1), Bound("y", least=1), Bound("z", 1, 3)))
    seeds = [{"x": 1.0, "y": 1.0, "z": 2.0}, {"x": 2.0, "y": 2.0, "z": 3.5}]
    assert spread(claim, seeds) == [("x", 2.0, 1.0), ("y", 1.0, 2.0), ("z", 3.5, 2.0)]


# What is kept.


def test_a_curve_is_kept_thinned_and_found_again(tmp_path):
    path = tmp_path / "figures" / "curves.json"
    curve = Curve("xi", "a line", lambda *_: (np.arange(1.0, 401.0), np.arange(400.0)))
    curves = Curves(path)
    curves.add(curve, 0, True, curve.measure(0, True))
    assert curves.has(curve, 0, quick=True)
    assert not curves.has(curve, 0, quick=False)
    curves.add(curve, 0, False, curve.measure(0, False))
    assert curves.has(curve, 0, quick=True)
    (series,) = Curves(path).best(curve)
    assert not series["quick"]
    assert len(series["x"]) == len(series["y"]) == 80
    # Means of five points each.
    assert series["x"][:2] == [3.0, 8.0]
    assert series["y"][-1] == 397.0
    path.write_text(path.read_text().replace(f'"format": {_curves.FORMAT}', '"format": 9'))
    with pytest.raises(ValueError, match="has format 9, and this program reads and writes"):
        Curves(path)


def test_a_file_of_another_format_is_refused(tmp_path):
    (tmp_path / "some.json").write_text(json.dumps({"format": FORMAT + 1, "results": []}))
    with pytest.raises(ValueError, match=f"has format {FORMAT + 1}, and this program reads") as one:
        Store(tmp_path)
    assert "\n" not in str(one.value)


def test_a_result_that_is_not_whole_is_refused(tmp_path):
    store = Store(tmp_path)
    store.add(claim_of(dict), 0, False, {"x": 1.0}, 1.0)
    file = tmp_path / "some.json"
    text = file.read_text()
    file.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match="is not a JSON file"):
        Store(tmp_path)
    file.write_text(text.replace('"numbers"', '"nothing"'))
    with pytest.raises(ValueError, match="no 'numbers' in results"):
        Store(tmp_path)


def test_a_full_result_does_for_a_quick_one_and_not_the_other_way(tmp_path):
    store, claim = Store(tmp_path), claim_of(dict)
    store.add(claim, 0, True, {"x": 1.0}, 1.0)
    assert store.has(claim, 0, quick=True)
    assert not store.has(claim, 0, quick=False)
    store.add(claim, 0, False, {"x": 2.0}, 1.0)
    store.add(claim, 1, False, {"x": 3.0}, 1.0)
    assert store.has(claim, 1, quick=True)
    again = Store(tmp_path)
    assert [r["numbers"]["x"] for r in again.best(claim)] == [2.0, 3.0]


def test_a_result_of_another_setting_or_other_numbers_is_stale(tmp_path):
    store, claim = Store(tmp_path), claim_of(dict)
    store.add(claim, 0, False, {"x": 1.0}, 1.0)
    assert not store.has(claim._replace(setting="elsewhere"), 0, quick=True)
    assert not store.has(claim._replace(rule=(Bound("y", most=1),)), 0, quick=True)
    assert store.has(claim._replace(rule=(Bound("x", most=2),)), 0, quick=True)


def test_a_result_of_other_code_is_stale_and_stays_on_the_page(tmp_path):
    claims = [claim_of(dict)._replace(id=f"some/{name}") for name in ("one", "two")]
    code = {claim.id: "a" for claim in claims}
    store = Store(tmp_path, code=lambda claim: code[claim.id])
    for claim in claims:
        store.add(claim, 0, False, {"x": 1.0}, 1.0)
    fresh = page(claims, store)
    assert "older than the code" not in fresh.partition("## What surprised")[2]
    code["some/one"] = "b"
    assert store.old(claims[0])
    assert not store.has(claims[0], 0, quick=True)
    assert store.has(claims[1], 0, quick=True)
    text = page(claims, store)
    assert "Of 1 claims the results are older than the code." in text
    (line,) = [line for line in text.splitlines() if line.endswith("(older than the code) |")]
    assert "`some/one`" in line
    assert HOLDS in line
    assert unmarked(text) == fresh
    store.add(claims[0], 0, False, {"x": 1.0}, 1.0)
    assert page(claims, store) == fresh


def test_a_line_of_other_code_is_stale_and_its_figure_says_so(tmp_path):
    curve = Curve("xi", "a line", dict)
    code = ["a"]
    curves = Curves(tmp_path / "curves.json", code=lambda curve: code[0])
    curves.add(curve, 0, False, (np.arange(3.0), np.arange(3.0)))
    assert curves.has(curve, 0, quick=True)
    assert not curves.old(curve)
    code[0] = "b"
    assert not curves.has(curve, 0, quick=True)
    assert curves.old(curve)
    marked, fresh = (page((), Store(tmp_path / "none"), ["xi"], old) for old in (["xi"], []))
    assert marked != fresh
    assert unmarked(marked) == fresh


def test_results_of_claims_that_are_no_more_are_dropped(tmp_path):
    claims = [claim_of(dict)._replace(id=f"some/{name}") for name in ("one", "two", "three")]
    store = Store(tmp_path)
    for claim in claims:
        store.add(claim, 0, False, {"x": 1.0}, 1.0)
    store.forget_all_but([claims[0], claims[1]._replace(setting="elsewhere")])
    assert json.loads((tmp_path / "some.json").read_text())["results"][0]["claim"] == "some/one"
    assert [bool(Store(tmp_path).best(claim)) for claim in claims] == [True, False, False]

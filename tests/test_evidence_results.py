"""Results of the evidence: stored ones, stale ones, and their verdicts."""

import math

import numpy as np
import pytest

from benchmarks.evidence import _claims, _store
from benchmarks.evidence._claims import FAILS, HOLDS, UNTOLD, Bound, Claim, verdict
from benchmarks.evidence._figures import CURVES, Curve
from benchmarks.evidence._page import page, pages, unmarked
from benchmarks.evidence._store import Store
from tests.test_evidence import claim_of, with_results

# The benchmarks are programs of users.
pytestmark = pytest.mark.usefixtures("default_promotion")


# Verdicts.


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], (_claims.UNMEASURED, "")),
        ([0.5, 1.0], (HOLDS, "")),
        ([0.5, 1.5], (_claims.ELSEWHERE, "in the dark; 1 of 2 seeds do")),
        ([1.5], (_claims.ELSEWHERE, "in the dark")),
        ([2.5], (FAILS, "")),
        ([math.nan], (FAILS, "")),
    ],
)
def test_verdict_is_that_of_the_worst_seed(values, expected):
    claim = claim_of(dict, where="in the dark", elsewhere=(Bound("x", most=2),))
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
        # Each seed meets the rule, but chance is as large as the claim.
        (LEAST, [1.6, 2.0, 3.0], UNTOLD),
        (LEAST, [0.0, 1.0, 1.4], UNTOLD),
        # The mean of many seeds is more certain, and one seed that is off does not matter.
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
def test_verdict_where_chance_is_as_large_as_the_claim(options, values, expected):
    claim = claim_of(dict, **options)
    assert verdict(claim, [{"x": value} for value in values])[0] == expected


@pytest.mark.parametrize(("y", "x", "expected"), [(1, 1, HOLDS), (0, 1, UNTOLD), (0, -1, FAILS)])
def test_verdict_by_chance_is_that_of_the_worst_number(x, y, expected):
    claim = claim_of(dict, rule=(Bound("x", least=0), Bound("y", least=0)), chance=True)
    assert verdict(claim, [{"x": x + z, "y": y + z} for z in NEAR])[0] == expected


def test_interval_has_the_mean_in_19_of_20_cases():
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(500):
        mean, room = _claims.interval("x", [{"x": x} for x in random.standard_normal(6)])
        inside += abs(mean) <= room
    # 0.95 with a standard error of 0.01.
    assert 0.92 < inside / 500 < 0.98


def test_spread_has_the_worse_seed_first():
    claim = claim_of(dict, rule=(Bound("x", most=1), Bound("y", least=1), Bound("z", 1, 3)))
    seeds = [{"x": 1.0, "y": 1.0, "z": 2.0}, {"x": 2.0, "y": 2.0, "z": 3.5}]
    assert _claims.spread(claim, seeds) == [("x", 2.0, 1.0), ("y", 1.0, 2.0), ("z", 3.5, 2.0)]


# Stored results.


@pytest.mark.parametrize("one", [claim_of(dict), Curve("xi", "a line", dict)])
def test_store_takes_a_full_result_for_a_quick_one_and_not_the_other_way(tmp_path, one):
    store = Store(tmp_path)
    found = {"x": 1.0} if isinstance(one, Claim) else (np.arange(3.0), np.arange(3.0))
    store.add(one, 0, True, found)
    assert (store.has(one, 0, quick=True), store.has(one, 0, quick=False)) == (True, False)
    for seed in (1, 0):
        store.add(one, seed, False, found)
    again = Store(tmp_path)
    assert again.has(one, 1, quick=True)
    assert [(x["seed"], x["quick"]) for x in again.best(one)] == [(0, False), (1, False)]


def test_store_keeps_a_thinned_curve(tmp_path):
    store, curve = Store(tmp_path), Curve("xi", "a line", dict)
    store.add(curve, 0, False, (np.arange(1.0, 401.0), np.arange(400.0)))
    (series,) = Store(tmp_path).best(curve)
    assert len(series["x"]) == len(series["y"]) == 80
    # Means of five points each.
    assert series["x"][:2] == [3.0, 8.0]
    assert series["y"][-1] == 397.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 9, "results": []}', "format must be a whole number from 2 to 2, got 9"),
        ('{"format": 2, "res', "is not a JSON file"),
        (
            '{"format": 2, "results": [{"claim": "some/claim"}]}',
            "must be an object with code, seed",
        ),
    ],
)
@pytest.mark.parametrize("name", ["some.json", "figures/curves.json"])
def test_store_refuses_a_file_of_another_format_or_that_is_not_whole(tmp_path, name, text, message):
    (tmp_path / "figures").mkdir()
    kind = "series" if "curves" in name else "results"
    (tmp_path / name).write_text(text.replace("results", kind))
    with pytest.raises(ValueError, match=message.replace("results", kind)) as one:
        Store(tmp_path)
    assert "\n" not in str(one.value)


def test_store_drops_a_result_of_another_setting_or_other_numbers(tmp_path):
    (one, two, three), store = with_results(tmp_path, one=1.0, two=1.0, no=1.0)
    moved = two._replace(setting="elsewhere")
    assert not store.has(moved, 0, quick=True)
    assert not store.has(one._replace(rule=(Bound("y", most=1),)), 0, quick=True)
    assert store.has(one._replace(rule=(Bound("x", most=2),)), 0, quick=True)
    store.forget_all_but([one, moved])
    left = [bool(Store(tmp_path).best(claim)) for claim in (one, two, three)]
    assert left == [True, False, False]


def test_page_keeps_a_result_of_other_code_that_is_stale(tmp_path, monkeypatch):
    code = {"some/one": "a", "some/two": "a"}
    monkeypatch.setattr(_store, "code_of", lambda one: code[one.name])
    claims, store = with_results(tmp_path, one=1.0, two=1.0)
    fresh = pages(store, claims)
    assert not any("older than the code" in x or "(older code)" in x for x in fresh.values())
    code["some/one"] = "b"
    assert [store.old(claim) for claim in claims] == [True, False]
    assert [store.has(claim, 0, quick=True) for claim in claims] == [False, True]
    text = pages(store, claims)
    assert "The results of 1 claims are older than the code." in text["index.md"]
    lines = text["claims.html"].splitlines()
    (line,) = [line for line in lines if "</b> (older code)</td>" in line]
    assert line.startswith(f'<tr id="some/one"><td><b>{HOLDS}')
    assert {name: unmarked(x) for name, x in text.items()} == fresh
    store.add(claims[0], 0, False, {"x": 1.0})
    assert pages(store, claims) == fresh


def test_page_says_that_a_line_of_a_figure_is_of_other_code(tmp_path, monkeypatch):
    code, store = ["a"], Store(tmp_path)
    monkeypatch.setattr(_store, "code_of", lambda one: code[0])
    curve = next(curve for curve in CURVES if curve.figure == "xi")
    store.add(curve, 0, False, (np.arange(3.0), np.arange(3.0)))
    fresh = page(store, ())
    code[0] = "b"
    assert unmarked(page(store, ())) == fresh != page(store, ())

"""The claims, the results that are kept of them, and the page that is made of both."""

import json
import math

import numpy as np
import pytest

from benchmarks._common.processes import ROOT
from benchmarks.evidence import __main__ as program
from benchmarks.evidence import _figures
from benchmarks.evidence._catalogue import CLAIMS
from benchmarks.evidence._claims import (
    ELSEWHERE,
    FAILS,
    HOLDS,
    UNCHECKED,
    UNMEASURED,
    Bound,
    Claim,
    Elsewhere,
    mark,
    spread,
    verdict,
)
from benchmarks.evidence._curves import Curve, Curves
from benchmarks.evidence._lines import CURVES
from benchmarks.evidence._page import page
from benchmarks.evidence._store import FORMAT, Store

# The benchmarks are programs of users.
pytestmark = pytest.mark.usefixtures("default_promotion")
KEPT = ROOT / "docs" / "evidence"
CHECKED = [claim for claim in CLAIMS if claim.check]
# They take about a second each.
QUICKEST = [
    "ok-topk/dense-words",
    "ok-topk/topk-a-above-dense",
    "sparcml/delta",
    "control-flow/latency",
    "mstopk/between-nodes",
]


def claim_of(check, **more):
    given = {"rule": (Bound("x", most=1),), **more}
    return Claim("some/claim", "A claim.", "a paper", "1", "somewhere", check=check, **given)


def test_the_page_is_what_the_kept_results_give():
    figures = [figure.name for figure in _figures.FIGURES]
    written = (KEPT / "index.md").read_text(encoding="utf-8")
    assert written == page(CLAIMS, Store(KEPT), figures)


def test_the_kept_curves_are_those_that_there_are():
    kept = Curves(KEPT / _figures.FOLDER / "curves.json")
    assert kept.path.stat().st_size < 150_000
    names = {
        (series["figure"], series["line"]) for series in json.loads(kept.path.read_text())["series"]
    }
    assert names == {(curve.figure, curve.line) for curve in CURVES}
    for curve in CURVES:
        seeds = [series["seed"] for series in kept.of(curve, quick=False)]
        assert seeds == ([0] if curve.exact else [0, 1, 2]), curve.line
    assert {curve.figure for curve in CURVES} == {figure.name for figure in _figures.FIGURES}
    for figure in _figures.FIGURES:
        assert (KEPT / _figures.FOLDER / f"{figure.name}.png").stat().st_size < 200_000


def test_figures_of_the_kept_curves(tmp_path):
    kept = Curves(KEPT / _figures.FOLDER / "curves.json")
    drawn = _figures.draw(tmp_path, kept)
    assert [path.stem for path in drawn] == [figure.name for figure in _figures.FIGURES]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    # Of what was not measured there is nothing to draw.
    assert _figures.draw(tmp_path, Curves(tmp_path / "none.json")) == []


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
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="has format 2, and this program reads and writes 1"):
        Curves(path)


def test_lines_of_figures_are_measured_like_claims(tmp_path, monkeypatch, capsys):
    curve = Curve("xi", "a line", lambda seed, quick: (np.arange(3.0), np.arange(3.0) + seed))
    monkeypatch.setattr(program, "CLAIMS", ())
    monkeypatch.setattr(program, "CURVES", (curve,))
    monkeypatch.setattr(_figures, "CURVES", (curve,))
    argv = ["--folder", str(tmp_path), "--seeds", "2", "--only", "figures/xi"]
    assert program.main(argv) == 0
    assert "2 measured now" in capsys.readouterr().out
    assert program.main(argv) == 0
    assert "0 measured now" in capsys.readouterr().out
    assert (tmp_path / "figures" / "xi.png").exists()
    assert "![xi](figures/xi.png)" in (tmp_path / "index.md").read_text()


def test_kept_results_are_small_and_of_claims_that_there_are():
    files = list(KEPT.glob("*.json"))
    assert sum(file.stat().st_size for file in files) < 200_000
    checked = {claim.id: claim for claim in CHECKED}
    for file in files:
        for result in json.loads(file.read_text(encoding="utf-8"))["results"]:
            claim = checked[result["claim"]]
            assert claim.id.startswith(f"{file.stem}/")
            assert result["mark"] == mark(claim), "measure it again"
            names = set(result["numbers"])
            assert {bound.name for bound in claim.rule} <= names
            assert claim.elsewhere is None or {b.name for b in claim.elsewhere.rule} <= names


def test_every_claim_has_a_source_and_a_rule_or_a_reason():
    assert len(CLAIMS) >= 40
    assert len({claim.id for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.text.endswith(".")
        assert claim.source
        assert claim.paper
        if claim.check:
            assert claim.rule
            assert claim.setting
            assert not claim.reason
        else:
            assert claim.reason
            assert not claim.rule


@pytest.mark.parametrize("name", QUICKEST)
def test_what_is_exact_is_measured_as_it_is_kept(name):
    claim = next(claim for claim in CHECKED if claim.id == name)
    assert claim.check
    numbers = claim.check(0, True)
    kept = Store(KEPT).best(claim)
    assert verdict(claim, [numbers]) == verdict(claim, [kept[0]["numbers"]])
    assert numbers == pytest.approx(kept[0]["numbers"], rel=1e-5)


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


def test_the_worse_seed_comes_first():
    claim = claim_of(dict, rule=(Bound("x", most=1), Bound("y", least=1), Bound("z", 1, 3)))
    seeds = [{"x": 1.0, "y": 1.0, "z": 2.0}, {"x": 2.0, "y": 2.0, "z": 3.5}]
    assert spread(claim, seeds) == [("x", 2.0, 1.0), ("y", 1.0, 2.0), ("z", 3.5, 2.0)]


def test_failures_come_first_on_the_page(tmp_path):
    store = Store(tmp_path)
    good = claim_of(dict)._replace(id="some/good")
    bad = claim_of(dict)._replace(id="some/bad")
    for claim, value in ((good, 1.0), (bad, 2.0)):
        store.add(claim, 0, False, {"x": value}, 1.0)
    never = Claim("some/never", "A claim.", "a paper", "1", reason="it takes a | cluster")
    text = page([good, bad, never], store)
    assert "**3 claims, 2 of them checked.**" in text
    assert text.index("`some/bad`") < text.index("`some/good`") < text.index("`some/never`")
    assert f"**{UNCHECKED}**: it takes a \\| cluster" in text


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


def test_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch, capsys):
    done = []

    def check(seed, quick):
        done.append(seed)
        if len(done) == 2:
            raise KeyboardInterrupt
        return {"x": float(seed)}

    monkeypatch.setattr(program, "CLAIMS", (claim_of(check),))
    monkeypatch.setattr(program, "CURVES", ())
    argv = ["--folder", str(tmp_path), "--seeds", "2"]
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        program.main(argv)
    program.main(argv)
    assert done == [0, 1, 1]
    assert "1 measured now" in capsys.readouterr().out
    program.main(argv)
    assert done == [0, 1, 1]
    assert "**1 claims, 1 of them checked.**" in (tmp_path / "index.md").read_text()


def test_a_check_that_breaks_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    def broken(seed, quick):
        raise RuntimeError("no such data")

    claims = (claim_of(broken)._replace(id="some/broken"), claim_of(lambda *_: {"x": 0.5}))
    monkeypatch.setattr(program, "CLAIMS", claims)
    monkeypatch.setattr(program, "CURVES", ())
    assert program.main(["--folder", str(tmp_path), "--quick"]) == 1
    assert "some/broken could not be measured: RuntimeError" in capsys.readouterr().err
    assert Store(tmp_path).has(claims[1], 0, quick=True)


def test_list_prints_every_claim_and_checks_nothing(capsys):
    program.main(["--list", "--only", "sparcml"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(claim.id.startswith("sparcml") for claim in CLAIMS)


def test_an_unknown_claim_is_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        program.main(["--only", "nothing"])
    assert end.value.code == 2
    assert "--only 'nothing' is the beginning of no claim" in capsys.readouterr().err

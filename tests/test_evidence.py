"""The claims, the results that are kept of them, and the page that is made of both."""

import json

import numpy as np
import pytest

from benchmarks._common.processes import ROOT
from benchmarks.evidence import __main__ as program
from benchmarks.evidence import _figures
from benchmarks.evidence._catalogue import CLAIMS
from benchmarks.evidence._claims import (
    FAILS,
    HOLDS,
    UNCHECKED,
    Bound,
    Claim,
    mark,
    verdict,
)
from benchmarks.evidence._curves import Curve, Curves
from benchmarks.evidence._figures import CURVES
from benchmarks.evidence._page import page, unmarked
from benchmarks.evidence._store import Store
from tools.evidence_changes import changes, verdicts

# The benchmarks are programs of users.
pytestmark = pytest.mark.usefixtures("default_promotion")
KEPT = ROOT / "docs" / "evidence"
CHECKED = [claim for claim in CLAIMS if claim.check]
# They take about a second each.
QUICKEST = [
    "ok-topk/dense-words",
    "ok-topk/topk-a-above-dense",
    "sparcml/delta",
    "mstopk/between-nodes",
    "mstopk/pto",
    "ok-topk/dense-overlap",
    "ok-topk/fastest",
    "sparcml/atis-size",
    "sparcml/coordinate-descent",
    "sparcml/url-ethernet",
    "sparcml/webspam-ethernet",
]


def claim_of(check, **more):
    given = {"rule": (Bound("x", most=1),), **more}
    return Claim("some/claim", "A claim.", "a paper", "1", "somewhere", check=check, **given)


def test_the_page_is_what_the_kept_results_give():
    # What it says of their age was so when it was written: code may change without measuring again.
    figures = [figure.name for figure in _figures.FIGURES]
    written = (KEPT / "index.md").read_text(encoding="utf-8")
    made = page(CLAIMS, Store(KEPT, code=lambda claim: ""), figures)
    assert unmarked(written) == unmarked(made)


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
            # The page leaves out what is of another setting: "not measured yet".
            if result["mark"] != mark(claim):
                continue
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
    assert set(numbers) >= {bound.name for bound in claim.rule}
    store = Store(KEPT)
    # A result of older code may be another one, which the page says; it is not an error.
    if store.has(claim, 0, quick=True):
        kept = store.best(claim)[0]["numbers"]
        assert verdict(claim, [numbers]) == verdict(claim, [kept])
        assert numbers == pytest.approx(kept, rel=1e-5)


def test_changes_of_verdicts_between_two_pages(tmp_path):
    store = Store(tmp_path)
    one, two = (claim_of(dict)._replace(id=f"some/{name}") for name in ("one", "two"))
    never = Claim("some/never", "A claim.", "a paper", "1", reason="it takes a | cluster")
    store.add(one, 0, False, {"x": 1.0}, 1.0)
    store.add(two, 0, False, {"x": 1.0}, 1.0)
    before = page([one, two, never], store)
    assert verdicts(before) == {"some/one": HOLDS, "some/two": HOLDS, "some/never": UNCHECKED}
    store.add(two, 0, False, {"x": 2.0}, 1.0)
    after = page([two, never], store)
    assert changes(before, after) == [("some/two", HOLDS, FAILS), ("some/one", HOLDS, "gone")]
    assert changes(after, before) == [("some/one", "new", HOLDS), ("some/two", FAILS, HOLDS)]
    assert changes(after, after) == []
    kept = (KEPT / "index.md").read_text(encoding="utf-8")
    assert set(verdicts(kept)) == {claim.id for claim in CLAIMS}


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


def test_what_is_stale_is_measured_again_and_the_rest_is_not(tmp_path, monkeypatch, capsys):
    done = []

    def by(name):
        return claim_of(lambda *_: done.append(name) or {"x": 0.5})._replace(id=f"some/{name}")

    claims, code = (by("one"), by("two")), {"some/one": "a", "some/two": "a"}
    monkeypatch.setattr(program, "CLAIMS", claims)
    monkeypatch.setattr(program, "CURVES", ())
    monkeypatch.setattr(program, "Store", lambda f: Store(f, code=lambda c: code[c.id]))
    argv = ["--folder", str(tmp_path), "--seeds", "1"]
    program.main(argv)
    code["some/two"] = "b"
    # A page of what there is says what is older, and measures nothing.
    program.main([*argv, "--page"])
    assert done == ["one", "two"]
    assert "Of 1 claims" in (tmp_path / "index.md").read_text()
    program.main(argv)
    assert done == ["one", "two", "two"]
    assert "Of 1 claims" not in (tmp_path / "index.md").read_text()
    capsys.readouterr()


def test_what_chance_decides_takes_more_seeds_unless_they_are_asked_for(tmp_path, monkeypatch):
    claim = claim_of(lambda seed, quick: {"x": float(seed)}, seeds=5, chance=True)
    exact = claim_of(lambda *_: {"x": 0.0}, exact=True)._replace(id="some/exact")
    monkeypatch.setattr(program, "CLAIMS", (claim, exact))
    monkeypatch.setattr(program, "CURVES", ())
    for argv, expected in (([], 5), (["--seeds", "2"], 2), (["--quick"], 1)):
        folder = tmp_path / str(expected)
        program.main(["--folder", str(folder), *argv])
        assert len(Store(folder).best(claim)) == expected
        assert len(Store(folder).best(exact)) == 1


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

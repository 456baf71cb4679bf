"""The claims, their stored results, and the page that is made of both."""

import json
import math

import numpy as np
import pytest

from benchmarks._common.processes import ROOT
from benchmarks.evidence import __main__ as program
from benchmarks.evidence import _code, _store
from benchmarks.evidence._claims import (
    CLAIMS,
    FAILS,
    HOLDS,
    UNCHECKED,
    UNTOLD,
    Bound,
    Claim,
    read,
    verdict,
)
from benchmarks.evidence._figures import CURVES, FIGURES, Curve
from benchmarks.evidence._page import page, pages, table, unmarked
from benchmarks.evidence._store import Store
from tools.evidence_changes import changes, verdicts

# The benchmarks are programs of users.
pytestmark = pytest.mark.usefixtures("default_promotion")
KEPT, EVIDENCE = ROOT / "docs" / "evidence", ROOT / "benchmarks" / "evidence"
CHECKED = {claim.name: claim for claim in CLAIMS if claim.check}
# They take about a second each.
QUICKEST = [
    *("ok-topk/dense-words", "ok-topk/topk-a-above-dense", "sparcml/delta", "mstopk/between-nodes"),
    *("mstopk/pto", "ok-topk/dense-overlap", "ok-topk/fastest", "sparcml/atis-size"),
    *("sparcml/coordinate-descent", "sparcml/url-ethernet", "sparcml/webspam-ethernet"),
]
NEVER = Claim("some/never", "A claim.", "a paper", "1", reason="it takes a | cluster")


def claim_of(check, name="claim", **more):
    given = {"rule": (Bound("x", most=1),), **more}
    return Claim(f"some/{name}", "A claim.", "a paper", "1", "somewhere", check=check, **given)


def with_results(folder, **values):
    """Claims by name, and a store with a result of each."""
    claims, store = [claim_of(dict, name) for name in values], Store(folder)
    for claim, value in zip(claims, values.values(), strict=True):
        store.add(claim, 0, False, {"x": value})
    return claims, store


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The program with other claims, or lines of figures."""
    monkeypatch.setattr(program, "CLAIMS", ())
    monkeypatch.setattr(program, "CURVES", ())

    def started(*ones, argv=()):
        monkeypatch.setattr(program, "CURVES" if isinstance(ones[0], Curve) else "CLAIMS", ones)
        return program.main(["--folder", str(tmp_path), *argv])

    return started


# Stored results.


def test_claims_have_a_source_and_a_rule_or_a_reason():
    assert len(CLAIMS) >= 40
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)
    for claim in CLAIMS:
        assert claim.text.endswith(".")
        assert claim.source
        assert claim.paper
        assert bool(claim.check) == bool(claim.rule) == bool(claim.setting) != bool(claim.reason)


def test_kept_results_are_small_and_of_claims_that_there_are():
    files = list(KEPT.glob("*.json"))
    assert sum(file.stat().st_size for file in files) < 200_000
    for file in files:
        for result in json.loads(file.read_text(encoding="utf-8"))["results"]:
            claim = CHECKED[result["claim"]]
            assert claim.file == file.name
            # The page leaves out results of another setting: "not measured yet".
            if result["mark"] == claim.key["mark"]:
                assert {bound.name for bound in (*claim.rule, *claim.elsewhere)} <= set(
                    result["numbers"]
                )


def test_kept_lines_of_figures_are_those_that_there_are():
    file = KEPT / "figures" / "curves.json"
    assert file.stat().st_size < 150_000
    kept = json.loads(file.read_text())["series"]
    assert {(x["figure"], x["line"]) for x in kept} == {(x.figure, x.line) for x in CURVES}
    for curve in CURVES:
        seeds = [series["seed"] for series in Store(KEPT).of(curve, quick=False)]
        assert seeds == ([0] if curve.check.exact else [0, 1, 2]), curve.line
    assert {path.stem for path in KEPT.glob("figures/*.png")} == set(FIGURES)


GOOD = """
["some/claim"]
text = "A claim."
source = "a paper"
paper = "1"
setting = "here"
check = ["shifts.entries", 4.0]
rule."text: entries / k" = [2, inf]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[2, inf]", "[-inf, inf]", "no number fails the rule of 'text: entries / k'"),
        ("[2, inf]", "[3, 2]", r"must be \[least, most\], got \[3, 2\]"),
        ("[2, inf]", "2", r"must be \[least, most\], got 2"),
        ('rule."text', 'rules."text', "rules is no field. The fields are "),
        ('rule."text: entries / k" = [2, inf]', "", "it has no rule"),
        ("shifts.entries", "shifts.none", "_none"),
        ("shifts.entries", "nothing.entries", "_nothing"),
        ("check = ", 'data = ["no.json"]\ncheck = ', "docs/data has no no.json"),
        ("check = ", 'reason = "none"\ncheck = ', "either a check with a rule, or the reason"),
        ('source = "a paper"', "", "source"),
    ],
)
def test_mistakes_in_a_claim_file_name_the_claim(old, new, message):
    (claim,) = read(GOOD)
    assert claim.rule == (Bound("text: entries / k", 2, math.inf),)
    assert old in GOOD
    with pytest.raises(ValueError, match=f"the claim some/claim in claims.toml: .*{message}"):
        list(read(GOOD.replace(old, new)))


def test_a_measurement_of_something_else_decides_nothing():
    claim = claim_of(dict, unlike="times of CPUs, and the claim is about GPUs")
    assert verdict(claim, [{"x": 0.0}]) == (UNTOLD, claim.unlike)
    assert verdict(claim, []) == ("not measured yet", "")


def test_page_is_what_the_kept_results_give():
    # The ages on the page are from its writing: code may change without new measurements.
    made = pages(Store(KEPT))
    written = {name: (KEPT / name).read_text(encoding="utf-8") for name in made}
    assert {k: unmarked(x) for k, x in written.items()} == {k: unmarked(x) for k, x in made.items()}
    assert len(written["index.md"].split()) <= 1_500
    assert set(verdicts(written["claims.html"])) == {claim.name for claim in CLAIMS}


@pytest.mark.parametrize("name", QUICKEST)
def test_exact_claims_are_measured_as_they_are_kept(name):
    claim = CHECKED[name]
    numbers = claim.check(0, True)
    assert set(numbers) >= {bound.name for bound in claim.rule}
    store = Store(KEPT)
    # A result of older code may differ, as the page says; that is not an error.
    if store.has(claim, 0, quick=True):
        kept = store.best(claim)[0]["numbers"]
        assert verdict(claim, [numbers]) == verdict(claim, [kept])
        assert numbers == pytest.approx(kept, rel=1e-5)


# The code that a result comes from.


def test_check_is_of_all_files_that_it_can_import_and_of_no_others():
    found = {x.relative_to(ROOT).as_posix() for x in _code.reached(EVIDENCE / "_words.py")}
    assert {"sparse_collectives/traffic/_collectives.py", "benchmarks/network/_volumes.py"} <= found
    assert "sparse_collectives/allreduce/_ok_topk/_ok_topk.py" in found
    assert not [name for name in found if name.startswith("docs") or "evidence/_page" in name]
    # Imports in functions, programs that are packages, and files next to a program.
    linear = {ROOT / "examples/linear_models/__main__.py", ROOT / "examples/_data.py"}
    assert linear <= {*_code.reached(EVIDENCE / "_trainings.py")}
    by_name = ROOT / "benchmarks/network/linear_models.py"
    assert ROOT / "examples/linear_models/training.py" in _code.reached(by_name)


def test_digest_changes_with_files_arguments_and_data(tmp_path, monkeypatch):
    def code(*given, files=("a", "b"), data="1"):
        paths = tuple(tmp_path / str(i) for i in range(len(files)))
        for path, text in zip(paths, files, strict=True):
            path.write_text(text)
        (tmp_path / "some.json").write_text(data)
        monkeypatch.setattr(_code, "DATA", tmp_path)
        monkeypatch.setattr(_code, "reached", lambda file: paths)
        return _code.Check("words.of_formula", *given, data=("some.json",)).code

    assert code("dense") == code("dense")
    others = [code("topk_a"), code("dense", files=("a", "c")), code("dense", data="2")]
    assert len({code("dense"), *others}) == 4


def test_digest_does_not_change_with_docstrings_and_comments():
    code = b'def f():\n    """Old."""\n    return 1\n'
    same = b'"""A module."""\n\ndef f():\n    """New."""\n    # Why.\n    return 1\n'
    assert _code._code_of(code) != _code._code_of(code.replace(b"1", b"2"))
    assert _code._code_of(b'"""Of one."""\n' + code) == _code._code_of(same)


def test_files_are_followed_by_imports_and_by_names_in_strings(tmp_path, monkeypatch):
    monkeypatch.setattr(_code, "ROOT", tmp_path)
    files = {
        "benchmarks/__init__.py": "",
        "benchmarks/one.py": "def late():\n    from . import two\n    from ..examples import x\n",
        "benchmarks/two.py": "import sparse_collectives.deep.part\nimport numpy\n",
        "sparse_collectives/__init__.py": "",
        "sparse_collectives/deep/__init__.py": "from .other import thing\n",
        "sparse_collectives/deep/part.py": "ARGV = ['-m', 'examples.program']\n",
        "sparse_collectives/deep/other.py": "thing = 'sparse_collectives is no module: nothing'\n",
        "examples/program/__init__.py": "",
        "examples/program/__main__.py": "import _beside\n",
        "examples/_beside.py": "",
        "examples/never.py": "",
        "tests/never.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    reached = _code.reached(tmp_path / "benchmarks/one.py")
    found = {path.relative_to(tmp_path).as_posix() for path in reached}
    assert set(files) - found == {"examples/never.py", "tests/never.py"}


# Pages.


def test_changes_of_verdicts_between_two_pages(tmp_path):
    (one, two), store = with_results(tmp_path, one=1.0, two=1.0)
    before = table(store, [one, two, NEVER])
    assert verdicts(before) == {"some/one": HOLDS, "some/two": HOLDS, "some/never": UNCHECKED}
    store.add(two, 0, False, {"x": 2.0})
    after = table(store, [two, NEVER])
    assert changes(before, after) == [("some/two", HOLDS, FAILS), ("some/one", HOLDS, "gone")]
    assert changes(after, before) == [("some/one", "new", HOLDS), ("some/two", FAILS, HOLDS)]
    assert changes(after, after) == []


def test_failures_come_first_in_the_table(tmp_path):
    claims, store = with_results(tmp_path, good=1.0, bad=2.0)
    given = [*claims, NEVER]
    text = page(store, given)
    assert "**3 claims, 2 of them checked.**" in text
    assert "These do not hold: [`some/bad`](claims.html#some/bad).\n" in text
    text = table(store, given)
    places = [text.index(f'<tr id="some/{name}">') for name in ("bad", "good", "never")]
    assert places == sorted(places)
    assert f"<b>{UNCHECKED}</b>: it takes a | cluster</td>" in text


def test_texts_of_claims_are_escaped_in_the_table(tmp_path):
    claim = NEVER._replace(text="`a < b` & c.")
    assert "<code>a &lt; b</code> &amp; c.</td>" in table(Store(tmp_path), [claim])


# Runs.


def test_lines_of_figures_are_measured_like_claims(tmp_path, run, capsys):
    curve = Curve("xi", "a line", lambda seed, quick: (np.arange(3.0), np.arange(3.0) + seed))
    for measured in (3, 0):
        assert run(curve, argv=["--only", "figures/xi"]) == 0
        assert f"{measured} measured now" in capsys.readouterr().out
    assert (tmp_path / "figures" / "xi.png").read_bytes().startswith(b"\x89PNG")


def test_stale_results_are_measured_again_and_the_rest_is_not(tmp_path, run, monkeypatch):
    done, code = [], {"some/one": "a", "some/two": "a"}
    monkeypatch.setattr(_store, "code_of", lambda one: code[one.name])
    claims = [
        claim_of(lambda *_, name=name: done.append(name) or {"x": 0.5}, name, seeds=1)
        for name in ("one", "two")
    ]
    run(*claims)
    code["some/two"] = "b"
    # `--page` marks older results on the page, and measures nothing.
    run(*claims, argv=["--page"])
    assert done == ["one", "two"]
    assert "The results of 1 claims" in (tmp_path / "index.md").read_text()
    run(*claims)
    assert done == ["one", "two", "two"]
    assert "The results of 1 claims" not in (tmp_path / "index.md").read_text()


@pytest.mark.parametrize(("argv", "expected"), [((), 5), (["--quick"], 1)])
def test_chance_takes_more_seeds(tmp_path, run, argv, expected):
    claim = claim_of(lambda seed, quick: {"x": float(seed)}, seeds=5, chance=True)
    exact = claim_of(lambda *_: {"x": 0.0}, "exact")
    exact.check.exact = True
    run(claim, exact, argv=argv)
    assert len(Store(tmp_path).best(claim)) == expected
    assert len(Store(tmp_path).best(exact)) == 1


def test_evidence_that_was_stopped_goes_on(tmp_path, run):
    done = []

    def check(seed, quick):
        done.append(seed)
        if len(done) == 2:
            raise KeyboardInterrupt
        return {"x": float(seed)}

    claim = claim_of(check, seeds=2)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(claim)
    for _ in range(2):
        run(claim)
        assert done == [0, 1, 1]
    assert "**1 claims, 1 of them checked.**" in (tmp_path / "index.md").read_text()


def test_check_that_breaks_does_not_stop_the_others(tmp_path, run, capsys):
    def broken(seed, quick):
        raise RuntimeError("no such data")

    good = claim_of(lambda *_: {"x": 0.5})
    assert run(claim_of(broken, "broken"), good, argv=["--quick"]) == 1
    assert "some/broken could not be measured: RuntimeError" in capsys.readouterr().err
    assert Store(tmp_path).has(good, 0, quick=True)

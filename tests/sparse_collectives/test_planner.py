"""The planner, the command line, the choice at trace time, and the fit of a network."""

import json
import math
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import sparse_collectives as sc
from sparse_collectives import _units, allreduce, cost_model, planner
from sparse_collectives.__main__ import main
from sparse_collectives.cost_model import Network, Workload, network
from sparse_collectives.planner import _auto, _measure, _plan_report, _planner, _steps
from tests.sparse_collectives import helpers

ROOT = Path(__file__).parents[2]
SLOW = ["--params", "10M", "--density", "0.01", "--workers", "16"]
SLOW += ["--latency", "5us", "--bandwidth", "100Mbit"]


def run(capsys, *arguments):
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


# Units.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5us", 5e-6),
        ("1.5ms", 1.5e-3),
        ("2s", 2.0),
        (" 3 ns ", 3e-9),
        ("5µs", 5e-6),
        ("1e-3s", 1e-3),
    ],
)
def test_times(text, value):
    assert _units.seconds("x", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("25Gbit", 25e9 / 8),
        ("25Gbit/s", 25e9 / 8),
        ("25Gbps", 25e9 / 8),
        ("100Mbit", 100e6 / 8),
        ("3GB/s", 3e9),
        ("3GB", 3e9),
        ("1GiB/s", 2.0**30),
    ],
)
def test_bandwidths(text, value):
    assert _units.bandwidth("x", text) == pytest.approx(value)


def test_counts():
    values = [_units.count("x", text) for text in ("133M", "133e6", "133_000_000", "1.3B", "12")]
    assert values == [133_000_000] * 3 + [1_300_000_000, 12]


@pytest.mark.parametrize(
    "text",
    [
        *("", "us", "5", "5 parsecs", "5US", "nan", "infs", "-1us", "nans"),
        *("1e10s", "1e99999999999999999999s", 10**400, True, None, [1.0]),
    ],
)
def test_a_time_without_a_known_unit_is_an_error(text):
    with pytest.raises(ValueError, match="x must be .*got"):
        _units.seconds("x", text)


@pytest.mark.parametrize("text", ["25", "25Gb", "0Gbit", "-1GB/s", "Gbit", "25 GHz", "1e30GB/s"])
def test_a_bandwidth_that_is_none_is_an_error(text):
    with pytest.raises(ValueError, match="x must be .*got"):
        _units.bandwidth("x", text)


def test_a_long_value_is_shortened_in_the_error():
    with pytest.raises(ValueError, match="got '9") as raised:
        _units.count("x", "9" * 100_000)
    assert len(str(raised.value)) < 200


# Plans.


def plan_of(n, density, workers, net, **options):
    k = max(1, round(n * density))
    return _planner.plan(Workload(n, k, workers, options.pop("inner", 1)), net, **options)


def test_a_slow_network_gets_ok_topk_and_a_fast_one_dense():
    slow = plan_of(10**7, 0.01, 16, network("5us", "100Mbit"), codecs=["raw"])
    fast = plan_of(10**7, 0.01, 16, network("5us", "400Gbit"), codecs=["raw"])
    assert not slow.recommended.dense
    assert fast.recommended.dense
    assert "only" in fast.reason


def test_predictions_are_sorted_and_relative_to_dense():
    plan = plan_of(10**6, 0.01, 8, network("5us", "1Gbit"), compute=0.01)
    steps = [row.step for row in plan.predictions]
    assert steps == sorted(steps)
    dense = next(row for row in plan.predictions if row.name == "dense")
    assert dense.speedup == 1
    assert all(row.speedup == pytest.approx(dense.step / row.step) for row in plan.predictions)
    for row in plan.predictions:
        assert row.step == pytest.approx(0.01 + row.exchange + row.local - row.hidden)


def test_every_algorithm_is_an_option_but_the_one_for_disjoint_selections():
    names = {option.name for option in _planner.OPTIONS}
    assert names == set(cost_model.IMPLEMENTATION) - {"sparse_allgather"}
    assert len(_plan_report._COLOURS) >= len(names)


def test_what_matters_to_the_loss_is_steps_times_their_time():
    net = network("5us", "1Gbit")
    given = {"names": ["ok_topk", "agreed(few)", "gtopk"], "codecs": ["raw"]}
    by_step = plan_of(10**7, 0.01, 16, net, **given)
    assert not by_step.to_loss
    assert by_step.recommended.name == "agreed(few)"
    steps = {"agreed(few)": 100.0, "ok_topk": 1.5}
    plan = plan_of(10**7, 0.01, 16, net, steps=steps, **given)
    assert plan.recommended.name == "ok_topk"
    assert plan.unknown == ("gtopk",)
    rows = {row.name: row for row in plan.predictions}
    before = {row.name: row for row in by_step.predictions}
    assert set(rows) == {"dense", "ok_topk", "agreed(few)"}
    for name, factor in {"dense": 1.0, **steps}.items():
        assert rows[name].step == before[name].step
        assert rows[name].speedup == pytest.approx(before[name].speedup / factor)
    assert [row.to_loss for row in plan.predictions] == sorted(r.to_loss for r in rows.values())
    text = _plan_report.text(plan)
    assert "steps" in text.splitlines()[4]
    assert "1.50x" in text
    assert "left out, without a number of steps: gtopk" in text
    assert "steps" not in _plan_report.text(by_step).splitlines()[4]


@pytest.mark.parametrize("factor", [0, -1.0, math.inf, math.nan, True, "2"])
def test_steps_are_positive_numbers_of_known_algorithms(factor):
    net = network("5us", "1Gbit")
    with pytest.raises(ValueError, match=r"steps\['ok_topk'\] must be a positive number"):
        plan_of(1000, 0.1, 4, net, steps={"ok_topk": factor})
    with pytest.raises(ValueError, match="steps must be among .*got 'topk'"):
        plan_of(1000, 0.1, 4, net, steps={"topk": 1.0})


def test_steps_from_a_file_and_as_measured(tmp_path, capsys):
    file = tmp_path / "steps.json"
    file.write_text('{"gtopk": 3}')
    call = ["plan", "--params", "10M", "--density", "0.01", "--workers", "8"]
    call += ["--latency", "5us", "--bandwidth", "100Mbit"]
    assert main([*call, "--same-loss", str(file)]) == 0
    text = capsys.readouterr().out
    assert "3.00x" in text
    assert "Use gtopk" in text
    call[call.index("0.01")] = "0.05"
    assert main([*call, "--same-loss"]) == 0
    text = capsys.readouterr().out
    assert "Use agreed(few)" in text
    assert f"{_steps.MEASURED['agreed(few)'][8, 0.05]:.2f}x" in text
    assert "left out, without a number of steps: topk_a" in text
    for content, error in (("[1]", "must hold an object"), ("{", "is no JSON")):
        file.write_text(content)
        with pytest.raises(SystemExit):
            main([*call, "--same-loss", str(file)])
        assert error in capsys.readouterr().err
    # The nearest case, by ratios; and none where it says nothing.
    cases = {(4, 0.01): 1.0, (16, 0.01): 2.0, (16, 0.015): 3.0}
    near = [(7, 0.01), (9, 0.011), (9, 0.02), (9, 0.03), (65, 0.01), (64, 0.015)]
    nearest = [_steps._nearest(cases, *case) for case in near]
    assert nearest == [1.0, 2.0, 3.0, None, None, 3.0]


def test_an_encoding_without_room_for_the_gaps_is_left_out():
    plan = plan_of(10**8, 0.001, 16, network("5us", "100Mbit"))
    assert plan.crowded == ("narrow8",)
    assert not any(row.codec == "narrow8" for row in plan.predictions)
    assert "narrow8" in _plan_report.text(plan)
    assert not plan_of(10**8, 0.01, 16, network("5us", "100Mbit")).crowded


def test_a_margin_stands_between_dense_and_sparse():
    net = network("1us", "1Gbit")
    base = plan_of(10**7, 0.01, 4, net, names=["ok_topk"], codecs=["raw"])
    exchange = {row.name: row.exchange for row in base.predictions}
    merged = next(row for row in base.predictions if row.name == "ok_topk").estimate.expected.pairs
    for ratio, dense in ((1.05, True), (1.2, False)):
        busy = exchange["dense"] / ratio - exchange["ok_topk"]
        local = _planner.LocalCost(0.0, busy / merged)
        plan = plan_of(10**7, 0.01, 4, net, names=["ok_topk"], codecs=["raw"], local=local)
        assert plan.recommended.dense == dense


def test_what_the_model_cannot_tell_apart_is_a_tie():
    plan = plan_of(10**7, 0.01, 16, network("5us", "1Gbit"), names=["ok_topk", "agreed", "spardl"])
    steps = {row.name: row.step for row in reversed(plan.predictions)}
    best = min(steps.values())
    tied = {name for name, step in steps.items() if best < step <= 1.2 * best}
    said = next(x for x in _plan_report.text(plan).splitlines() if x.startswith("a tie with"))
    assert said.startswith(f"a tie with {plan.recommended.name}, within 20%: ")
    assert tied == set(said.rpartition(": ")[2].split(", "))


def test_only_a_bucketed_exchange_hides_and_not_all_of_it():
    rows = plan_of(10**8, 0.01, 8, network("5us", "25Gbit"), compute=100.0).predictions
    hidden = {row.name: row.hidden / row.exchange for row in rows}
    assert {name for name, share in hidden.items() if share > 0} == {"dense_bucketed"}
    assert 0.9 < hidden["dense_bucketed"] < 1
    rows = plan_of(10**8, 0.01, 8, network("5us", "25Gbit"), compute=0.03).predictions
    assert max(row.hidden for row in rows) == pytest.approx(0.02)


def test_two_level_schemes_need_two_levels():
    net = Network(5e-6, 1e-9, 1e-6, 1e-10)
    flat = {row.name for row in plan_of(10**6, 0.01, 16, net).predictions}
    two = {row.name for row in plan_of(10**6, 0.01, 16, net, inner=4).predictions}
    options = {option.name for option in _planner.OPTIONS if option.two_level}
    assert two - flat == options
    assert {"torus_2d", "hierarchical(topk_a)", "hierarchical(ok_topk)"} <= options


def test_one_worker_uses_dense():
    plan = plan_of(10**6, 0.01, 1, network("5us", "1Gbit"))
    assert plan.recommended.name == "dense"
    assert "one worker" in plan.reason


@pytest.mark.parametrize("option", _planner.OPTIONS, ids=lambda option: option.name)
def test_the_code_to_write_is_an_expression(option):
    for overlap in (None, cost_model.Overlap(250, 4)):
        load = Workload(10_000, 100, 8, 4, overlap)
        for codec in option.codecs:
            code = _planner._code(option, codec, load)
            assert ("sc.wire" in code) == (codec != "raw")
            made = eval(code, {"sc": sc})
            assert isinstance(made, sc.SparseAllreduce)


@pytest.mark.parametrize(
    ("name", "codec", "code"),
    [
        ("dense_bucketed", "raw", "dense_bucketed(buckets=2)"),
        ("topk_a", "bf16", "topk_a(codec=sc.wire.bf16())"),
        ("ring_sparse", "raw", "ring_sparse(fill=2.5)"),
        ("ok_topk", "narrow8", "ok_topk(density=0.01, codec=sc.wire.narrow8())"),
        (
            "hierarchical(gtopk)",
            "bf16",
            'hierarchical(inner_axis="device", outer=sc.allreduce.gtopk(density=0.01, '
            "codec=sc.wire.bf16()))",
        ),
    ],
)
def test_the_code_has_what_the_workload_says(name, codec, code):
    option = next(option for option in _planner.OPTIONS if option.name == name)
    load = Workload(10_000_000, 100_000, 4, 2, cost_model.Overlap(250_000, 4))
    assert _planner._code(option, codec, load) == f"sc.allreduce.{code}"


def test_the_code_writes_a_density_of_everything_as_a_float():
    option = next(option for option in _planner.OPTIONS if option.name == "gtopk")
    assert _planner._code(option, "raw", Workload(100, 100, 2)).endswith("gtopk(density=1.0)")


# The command line.


def test_table_and_recommendation(capsys):
    out = run(capsys, *SLOW, "--compute", "100ms", "--inner", "4", "--all")
    lines = out.splitlines()
    last = next(i for i, line in enumerate(lines) if line.startswith("Use "))
    assert max(map(len, lines[:last])) <= 100
    assert "n = 10,000,000, k = 100,000" in lines[0]
    assert "selection 3 ns a parameter" in lines[2]
    assert "computation 100.0 ms" in lines[2]
    assert any(line.startswith("hierarchical(ok_topk)") for line in lines)
    assert "hidden" in out


def advice(out):
    """The line that recommends an exchange."""
    return next(line for line in out.splitlines() if line.startswith("Use "))


def test_the_recommendation_says_what_to_write(capsys):
    last = advice(run(capsys, *SLOW, "--exact"))
    assert "times as fast" in last
    made = eval(last.rsplit(": ", 1)[1], {"sc": sc})
    assert isinstance(made, sc.SparseAllreduce)


def test_dense_is_the_answer_where_selection_costs_more_than_it_saves(capsys):
    fast = [*SLOW[:-1], "25Gbit"]
    out = run(capsys, *fast)
    last = advice(out)
    assert last.startswith("Use dense here")
    assert "only" in last
    # Which assumption decides, and what the other one would say.
    assert "two CPU cores, which decides it. With --select-cost gpu it is" in out
    assert "counted and not timed" in run(capsys, *fast, "--select-cost", "gpu")
    assert not advice(run(capsys, *fast, "--select-cost", "gpu")).startswith("Use dense")


def test_the_devices_of_a_worker_have_parts_and_share_its_links(capsys, tmp_path):
    def planned(*arguments):
        file = tmp_path / "plan.json"
        out = run(capsys, *SLOW, *arguments, "--json", str(file))
        return out, json.loads(file.read_text())

    _, whole = planned()
    out, shared = planned("--shard", "4")
    _, alone = planned("--shard", "4", "--links", "4")
    assert "one of the 4 devices of a worker" in out
    assert shared["size"] == -(-whole["size"] // 4)
    assert shared["selected"] == -(-whole["selected"] // 4)

    def dense(plan):
        return next(row for row in plan["predictions"] if row["name"] == "dense")["exchange"]

    # As much over the same links, and a quarter of it over each of four.
    assert dense(shared) == pytest.approx(dense(whole), rel=1e-2)
    assert dense(alone) == pytest.approx(dense(whole) / 4, rel=1e-2)


def test_expansion_shortens_what_fills_in(capsys, tmp_path):
    def words(name, *arguments):
        file = tmp_path / "plan.json"
        run(capsys, *SLOW, *arguments, "--json", str(file))
        rows = json.loads(file.read_text())["predictions"]
        found = next(row for row in rows if (row["name"], row["codec"]) == (name, "raw"))
        return found["estimate"]["expected"]["words"]

    assert words("ssar_split_allgather", "--expansion", "1.2@8") < words("ssar_split_allgather")
    assert words("ok_topk", "--expansion", "1.2@8") == words("ok_topk")


def test_json_and_measured(capsys, tmp_path):
    measured, plan = tmp_path / "net.json", tmp_path / "plan.json"
    measured.write_text(json.dumps({"latency": 1e-5, "bandwidth": 4e9}))
    arguments = ["--params", "1M", "--density", "0.01", "--workers", "4", "--json", str(plan)]
    run(capsys, *arguments, "--measured", str(measured))
    found = json.loads(plan.read_text())["network"]
    assert (found["latency"], found["seconds_per_word"]) == pytest.approx((1e-5, 1e-9))
    run(capsys, *arguments, "--measured", str(measured), "--latency", "1ms")
    assert json.loads(plan.read_text())["network"]["latency"] == 1e-3


MEASURED = ["--params", "1M", "--density", "0.01", "--workers", "4", "--measured"]


def measured_file(tmp_path, content):
    file = tmp_path / "net.json"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        file.write_text(content)
    return str(file)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("", "must hold JSON"),
        ("not JSON", "must hold JSON"),
        ('{"latency": 1e-6, ', "must hold JSON"),
        (bytes(range(256)), "must hold JSON"),
        ("[" * 200_000, "must hold JSON"),
        ('{"latency":' * 50_000, "must hold JSON"),
        ('{"latency": 1' + 9000 * "0" + ', "bandwidth": 1e9}', "must hold JSON"),
        ("1" + (1 << 20) * " ", "1 MiB"),
        ("null", "got None"),
        ("[]", "got []"),
        ("[1, 2]", "got [1, 2]"),
        ('"latency"', "got 'latency'"),
        ("3", "got 3"),
        ("{}", "no 'latency'"),
        ('{"latency": 1e-6}', "no 'bandwidth'"),
        ('{"bandwidth": 1e9}', "no 'latency'"),
        ('{"latency": 1' + 400 * "0" + ', "bandwidth": 1e9}', "latency in"),
        ('{"latency": null, "bandwidth": 1e9}', "latency in"),
        ('{"latency": [1], "bandwidth": 1e9}', "latency in"),
        ('{"latency": {"s": 1}, "bandwidth": 1e9}', "latency in"),
        ('{"latency": true, "bandwidth": 1e9}', "latency in"),
        ('{"latency": "5us", "bandwidth": 1e9}', "latency in"),
        ('{"latency": "5", "bandwidth": 1e9}', "latency in"),
        ('{"latency": -1, "bandwidth": 1e9}', "latency in"),
        ('{"latency": NaN, "bandwidth": 1e9}', "latency in"),
        ('{"latency": Infinity, "bandwidth": 1e9}', "latency in"),
        ('{"latency": 1e-6, "bandwidth": "25Gbit"}', "bandwidth in"),
        ('{"latency": 1e-6, "bandwidth": null}', "bandwidth in"),
        ('{"latency": 1e-6, "bandwidth": 0}', "bandwidth in"),
        ('{"latency": 1e-6, "bandwidth": NaN}', "bandwidth in"),
        ('{"latency": 1e-6, "bandwidth": Infinity}', "Pass --bandwidth"),
        ('{"latency": 1e-6, "bandwidth": 1e9, "error": "small"}', "error in"),
        ('{"latency": 1e-6, "bandwidth": 1e9, "error": [0.1]}', "error in"),
        ('{"latency": 1e-6, "bandwidth": 1e9, "error": false}', "error in"),
        ('{"latency": 1e-6, "bandwidth": 1e9, "error": -1}', "error in"),
        ('{"latency": 1e-6, "bandwidth": 1e9, "error": NaN}', "error in"),
        ('{"latency": 1e-6, "bandwidth": 1e9, "error": 1' + 400 * "0" + "}", "error in"),
    ],
)
def test_a_bad_measured_file_is_one_line(capsys, tmp_path, content, match):
    file = measured_file(tmp_path, content)
    error = fails(capsys, "plan", *MEASURED, file)
    assert match in error
    assert file in error
    assert len(error) < 400


def test_a_number_that_is_given_replaces_one_that_the_file_has_wrong(capsys, tmp_path):
    file = measured_file(tmp_path, '{"latency": 1e-6, "bandwidth": Infinity}')
    assert "1 Gbit/s" in run(capsys, *MEASURED, file, "--bandwidth", "1Gbit")


@pytest.mark.parametrize(("error", "warned"), [(None, 0), (0.3, 0), (0.37, 1), (4, 1)])
def test_a_poor_fit_is_said_beside_the_plan(capsys, tmp_path, error, warned):
    found = {"latency": 1e-6, "bandwidth": 1e9, "error": error}
    file = measured_file(tmp_path, json.dumps(found))
    out = run(capsys, *MEASURED, file)
    assert ("Warning: " in out) == warned
    if warned:
        assert f"by {error:.0%}" in out
        assert "30%" in out
    assert advice(out)
    # Of the file nothing is used then.
    out = run(capsys, *MEASURED, file, "--latency", "5us", "--bandwidth", "1Gbit")
    assert "Warning: " not in out


def test_a_plot_without_matplotlib_names_what_to_install(capsys, tmp_path, monkeypatch):
    # None in sys.modules is how Python marks a module as one that cannot be imported.
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = fails(capsys, "plan", *SLOW, "--plot", str(tmp_path / "plan.png"))
    assert "pip install 'sparse-collectives[examples]'" in error


def test_the_extra_that_a_plot_names_has_matplotlib():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = extras["optional-dependencies"]["examples"]
    assert any(package.startswith("matplotlib") for package in packages)


def test_plot(capsys, tmp_path):
    file = tmp_path / "plan.png"
    run(capsys, *SLOW, "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["plan.xyz", "no/such/folder/plan.png"])
def test_a_plot_that_cannot_be_written(capsys, tmp_path, name):
    pytest.importorskip("matplotlib")
    error = fails(capsys, "plan", *SLOW, "--plot", str(tmp_path / name))
    assert "--plot must be a file that can be written, such as plan.png, got" in error


def test_a_plot_shows_what_was_assumed(tmp_path, monkeypatch):
    titles = []
    axes = pytest.importorskip("matplotlib.axes").Axes
    monkeypatch.setattr(axes, "set_title", lambda self, title, **options: titles.append(title))
    plan = plan_of(10**6, 0.01, 4, network("5us", "1Gbit"))
    _plan_report.plot(str(tmp_path / "plan.png"), lambda count: plan, 4, 1)
    (title,) = titles
    for said in ("P = 4", "1 Gbit/s", "selection 3 ns a parameter", "computation 0 ms"):
        assert said in title


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--density", "0"], "--density"),
        (["--density", "1.5"], "--density"),
        (["--density", "one"], "--density"),
        (["--density", "1"], "--density must be 1.0 to send all entries or 0.01 to send 1 %"),
        (["--workers", "0"], "--workers must be a whole number from 1 to 65,536, such as 16"),
        (["--workers", "2.5"], "--workers"),
        (["--workers", "1e12"], "--workers"),
        (["--params", "0"], "--params"),
        (["--params", "1e16"], "--params"),
        (["--inner", "0"], "--inner must be a whole number from 1 to 65,536, such as 16"),
        (["--latency", "1e300s"], "--latency"),
        (["--bandwidth", "1e-300B/s"], "--bandwidth"),
        (["--compute", "1e300s"], "--compute"),
        (["--expansion", ""], "--expansion"),
        (["--expansion", "inf@8"], "--expansion"),
        (["--expansion", "nan@8"], "--expansion"),
        (["--expansion", "2@" + 400 * "9"], "--expansion"),
        (["--expansion", "2@" + 5000 * "9"], "--expansion"),
        (["--latency", "5 parsecs"], "--latency"),
        (["--bandwidth", "0Gbit"], "--bandwidth"),
        (["--bandwidth", "25"], "--bandwidth"),
        (["--inner", "3"], "--inner"),
        (["--shard", "0"], "--shard must be a whole number"),
        (["--shard", "2", "--links", "3"], "--links must be at most --shard=2, got 3"),
        (["--shard", "2", "--inner", "2"], "--shard=2 and --inner=2 are of two plans"),
        (["--inner", "4", "--inner-bandwidth", "0GB/s"], "--inner-bandwidth"),
        (["--compute", "-1s"], "--compute"),
        (["--expansion", "9@8"], "--expansion"),
        (["--expansion", "3.2"], "--expansion"),
        (["--select-cost", "gpuu"], "--select-cost must be cpu, gpu or a time such as 0.1ns"),
        (["--select-cost", ""], "--select-cost must be cpu, gpu or a time"),
        (["--merge-cost", "gpu"], "--merge-cost must be a time such as 0.1ns"),
        (["--measured", "/does/not/exist"], "/does/not/exist"),
        (["--measured", ""], "No such file"),
        (["--bogus"], "--bogus"),
    ],
)
def test_a_bad_argument_is_one_line(capsys, arguments, match):
    assert match in fails(capsys, "plan", *SLOW, *arguments)


def test_missing_arguments_are_one_line(capsys):
    assert "--params" in fails(capsys, "plan")
    assert "--measured" in fails(capsys, "plan", *SLOW[:6])
    assert "unrecognized" in fails(capsys, "measure", "--bogus")
    assert "invalid choice" in fails(capsys, "bogus")


def test_no_command_prints_the_help(capsys):
    assert main([]) == 0
    assert "plan" in capsys.readouterr().out


def test_the_module_runs_and_needs_no_backend_matplotlib_or_rich():
    code = """
import runpy, sys
sys.argv = ["sparse_collectives", "plan", "--help"]
try:
    runpy.run_module("sparse_collectives", run_name="__main__")
except SystemExit as done:
    assert not done.code
import jax
jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend has started
assert not {"matplotlib", "rich", "optax"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "example:" in done.stdout


def test_an_error_of_the_module_has_no_traceback():
    command = [sys.executable, "-m", "sparse_collectives", "plan", *SLOW, "--density", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1


# The choice at trace time.

NET = {"latency": "5us", "bandwidth": "100Mbit"}


@pytest.mark.parametrize("chosen", ["dense", *helpers.slow("ok_topk")])
def test_auto_is_the_program_of_the_chosen_one(chosen):
    n, k, workers = 4000, 40, 4
    # A latency that dwarfs the rest leaves the psum, which has the fewest messages.
    options = NET if chosen == "ok_topk" else {"latency": "1s", "bandwidth": "1Gbit"}
    options = {"density": k / n, "candidates": ["ok_topk"], **options}
    assert planner.explain_auto(n, workers, **options).name == chosen

    def program(reducer):
        def body(values, indices):
            coo = sc.PaddedCOO(values, indices, n)
            return reducer.reduce(coo, reducer.init(n, workers), axis="workers")

        shape = (workers, k)
        arguments = (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32))
        return str(jax.make_jaxpr(jax.vmap(body, axis_name="workers"))(*arguments))

    plain = allreduce.dense() if chosen == "dense" else allreduce.ok_topk(density=k / n)
    assert program(planner.auto(**options)) == program(plain)


def test_auto_runs():
    reducer = planner.auto(density=0.5, latency="1s", bandwidth="1Gbit", candidates=[])

    def body(values, indices):
        coo = sc.PaddedCOO(values, indices, 4)
        return reducer.reduce(coo, reducer.init(4, 2), axis="workers")[0]

    values, indices = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[0, 1], [1, 3]])
    total = sc.simulate(body, axis_size=2)(values, indices)
    np.testing.assert_array_equal(total, [[1.0, 5.0, 0.0, 4.0]] * 2)


@pytest.mark.parametrize(
    "name",
    helpers.slow_but(
        ("dense", "dense_bucketed", "topk_a", "ssar_split_allgather", "dsar_split_allgather"),
        [
            option.name
            for option in _planner.OPTIONS
            if not option.two_level and not option.complete
        ],
    ),
)
def test_auto_can_make_every_candidate(name):
    choice = planner.explain_auto(64, 3, density=0.125, candidates=[], **NET)
    reducer = _auto._make(choice._replace(name=name, codec="raw"), 64, 0.125)

    def body(values, indices):
        coo = sc.PaddedCOO(values, indices, 64)
        total, *_ = reducer.reduce(coo, reducer.init(64, 3), axis="workers")
        return total.to_dense() if isinstance(total, sc.PaddedCOO) else total

    # As many for every owner, whether regions are hashed or not.
    places = [0, 1, 2, 24, 25, 26, 45, 46]
    indices = jnp.tile(jnp.asarray(places, jnp.int32), (3, 1))
    totals = sc.simulate(body, axis_size=3)(jnp.ones((3, 8)), indices)
    np.testing.assert_array_equal(totals, [[3.0 if i in places else 0.0 for i in range(64)]] * 3)


def test_auto_has_a_row_for_every_candidate_and_codec():
    flat = {o.name for o in _planner.OPTIONS if not o.two_level and not o.complete}
    assert set(_auto._FACTORIES) == flat
    assert set(_auto._CODECS) == set(helpers.CODECS)
    for name in flat:
        assert hasattr(allreduce, name)


@pytest.mark.parametrize(
    "codec", helpers.slow_but(("bf16", "narrow16", "qsgd", "raw"), helpers.CODECS)
)
def test_auto_gives_the_codec_to_the_chosen_one(codec):
    choice = planner.explain_auto(64, 3, density=0.125, candidates=[], **NET)
    reducer = _auto._make(choice._replace(name="topk_a", codec=codec), 64, 0.125)
    plain = allreduce.topk_a(codec=getattr(sc.wire, codec)())

    def program(reducer):
        def body(values, indices):
            coo = sc.PaddedCOO(values, indices, 64)
            return reducer.reduce(coo, reducer.init(64, 3), axis="workers")

        arguments = (jnp.zeros((3, 8), jnp.float32), jnp.zeros((3, 8), jnp.int32))
        return str(jax.make_jaxpr(jax.vmap(body, axis_name="workers"))(*arguments))

    assert program(reducer) == program(plain)


def test_auto_explains_itself():
    choice = planner.explain_auto(10**6, 64, density=0.01, candidates=["ok_topk"], **NET)
    assert {name for name, _, _ in choice.predictions} == {"dense", "ok_topk"}
    everything = planner.explain_auto(10**6, 64, density=0.01, codecs=helpers.CODECS, **NET)
    flat = {o.name for o in _planner.OPTIONS if not o.two_level and not o.complete}
    assert {name for name, _, _ in everything.predictions} == flat
    assert str(choice).startswith("ok_topk with raw: ")
    assert choice.seconds == choice.predictions[0][2]
    alone = planner.explain_auto(10**6, 1, density=0.01, **NET)
    assert alone.name == "dense"
    assert "optax_ext.dense" in alone.reason


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"density": 0.0}, "density"),
        ({"density": 1}, "density=1.0"),
        ({"candidates": ["bogus"]}, "candidates"),
        ({"codecs": ["bogus"]}, "codecs"),
        ({"codecs": []}, "codecs"),
        ({"latency": "5"}, "latency"),
        ({"bandwidth": 0}, "bandwidth"),
    ],
)
def test_auto_names_a_bad_argument(options, match):
    with pytest.raises(ValueError, match=match):
        planner.auto(**{"density": 0.01, **NET, **options})


# The fit.


def synthetic(alpha, beta, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return [
        _measure.Sample("psum", m, w, (m * alpha + w * beta) * (1 + noise * rng.normal()), 0.0)
        for m in (1, 3, 6)
        for w in (100.0, 10_000.0, 1e6)
    ]


@pytest.mark.parametrize(("alpha", "beta"), [(5e-6, 1e-9), (1e-3, 1e-11), (1e-7, 1e-6)])
def test_the_fit_finds_the_network(alpha, beta):
    assert _measure.fit(synthetic(alpha, beta)) == pytest.approx((alpha, beta), rel=1e-6)


def test_the_fit_withstands_noise():
    found = _measure.fit(synthetic(5e-6, 1e-9, noise=0.03))
    assert found == pytest.approx((5e-6, 1e-9), rel=0.1)


def test_the_fit_ignores_a_disturbed_sample():
    samples = synthetic(5e-6, 1e-9)
    samples[4] = samples[4]._replace(seconds=20 * samples[4].seconds)
    assert _measure.fit(samples) == pytest.approx((5e-6, 1e-9), rel=0.02)


@pytest.mark.parametrize(("alpha", "beta"), [(1e-5, 0.0), (0.0, 1e-9)])
def test_the_fit_is_never_negative(alpha, beta):
    noisy = synthetic(alpha, beta, noise=0.2)
    found = _measure.fit(noisy)
    assert min(found) >= 0
    assert found[alpha == 0] == pytest.approx(alpha or beta, rel=0.3)


def test_the_fit_needs_samples():
    with pytest.raises(ValueError, match="at least 2"):
        _measure.fit(synthetic(1e-6, 1e-9)[:1])
    with pytest.raises(ValueError, match="above 0"):
        _measure.fit([s._replace(seconds=0.0) for s in synthetic(1e-6, 1e-9)])


def test_measure_runs_on_a_mesh_of_two_axes():
    mesh = jax.make_mesh(
        (2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )
    for axis, workers in ((None, 4), ("b", 2)):
        measured = sc.measure(mesh, axis, sizes=(64, 4096), rounds=2)
        assert measured.workers == workers
        assert len(measured.samples) == 6
        assert min(measured.latency, measured.bandwidth) >= 0
        assert measured.network().latency == measured.latency
        json.dumps(measured.as_dict())


def test_measure_names_a_bad_argument():
    one = jax.make_mesh((1,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    for options, match in (
        ({"mesh": one}, "at least 2"),
        ({"axis": "bogus"}, "bogus"),
        ({"sizes": (64, 64)}, "sizes"),
        ({"sizes": (0, 64)}, "sizes"),
        ({"rounds": 0}, "rounds"),
    ):
        with pytest.raises(ValueError, match=match):
            sc.measure(**options)


@pytest.mark.slow
def test_the_measure_command_writes_what_the_planner_reads(capsys, tmp_path):
    file = tmp_path / "net.json"
    assert main(["measure", "--devices", "2", "--rounds", "2", "--json", str(file)]) == 0
    assert "bandwidth" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["workers"] == 2
    assert len(found["samples"]) == 12
    assert "--devices" in fails(capsys, "measure", "--devices", "99")
    for option in ("--devices", "--rounds"):
        assert option in fails(capsys, "measure", option, "0")


def test_the_measure_command_says_where_its_fit_is_poor(capsys, monkeypatch):
    fitted = _measure.Measured(1e-6, 1e9, 0.37, 0.01, 2, ())
    monkeypatch.setattr(_measure, "measure", lambda mesh, rounds: fitted)
    assert main(["measure", "--devices", "2"]) == 0
    assert "Warning: latency and bandwidth miss the measured times by 37" in capsys.readouterr().out
    monkeypatch.setattr(_measure, "measure", lambda mesh, rounds: fitted._replace(error=0.1))
    assert main(["measure", "--devices", "2"]) == 0
    assert "Warning" not in capsys.readouterr().out

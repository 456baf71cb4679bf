"""The planner, the command line, the choice at trace time, and the fit of a network."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import sparse_collectives as sc
from sparse_collectives import allreduce, cost_model
from sparse_collectives.__main__ import main
from sparse_collectives.allreduce import _auto
from sparse_collectives.cost_model import Network, Workload, network
from sparse_collectives.planner import _measure, _plan_report, _planner, _units

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
    ["", "us", "5", "5 parsecs", "5US", "nan", "infs", "-1us", "nans", "1e99999999999999999999s"],
)
def test_a_time_without_a_known_unit_is_an_error(text):
    with pytest.raises(ValueError, match="x is"):
        _units.seconds("x", text)


@pytest.mark.parametrize("text", ["25", "25Gb", "0Gbit", "-1GB/s", "Gbit", "25 GHz"])
def test_a_bandwidth_that_is_none_is_an_error(text):
    with pytest.raises(ValueError, match="x is"):
        _units.bandwidth("x", text)


# Plans.


def plan_of(n, density, workers, net, **options):
    k = max(1, round(n * density))
    return _planner.make_plan(Workload(n, k, workers, options.pop("inner", 1)), net, **options)


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
            assert isinstance(made, (sc.SparseAllreduce, sc.allreduce.Hierarchical))


# The command line.


def test_table_and_recommendation(capsys):
    out = run(capsys, *SLOW, "--compute", "100ms", "--inner", "4", "--all")
    lines = out.splitlines()
    assert max(map(len, lines[:-1])) <= 100
    assert "n = 10,000,000, k = 100,000" in lines[0]
    assert any(line.startswith("hierarchical(ok_topk)") for line in lines)
    assert "hidden" in out


def test_the_last_line_says_what_to_write(capsys):
    last = run(capsys, *SLOW, "--exact").splitlines()[-1]
    assert last.startswith("Use ")
    assert "times as fast" in last
    made = eval(last.rsplit(": ", 1)[1], {"sc": sc})
    assert isinstance(made, sc.SparseAllreduce)


def test_dense_is_the_answer_where_selection_costs_more_than_it_saves(capsys):
    fast = [*SLOW[:-1], "25Gbit"]
    out = run(capsys, *fast)
    last = out.splitlines()[-1]
    assert last.startswith("Use dense here")
    assert "only" in last
    assert "--select-cost gpu" in out
    assert not run(capsys, *fast, "--select-cost", "gpu").splitlines()[-1].startswith("Use dense")


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


def test_plot(capsys, tmp_path):
    file = tmp_path / "plan.png"
    run(capsys, *SLOW, "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--density", "0"], "--density"),
        (["--density", "1.5"], "--density"),
        (["--density", "one"], "--density"),
        (["--workers", "0"], "--workers"),
        (["--workers", "2.5"], "--workers"),
        (["--workers", "1e12"], "--workers"),
        (["--params", "0"], "--params"),
        (["--latency", "5 parsecs"], "--latency"),
        (["--bandwidth", "0Gbit"], "--bandwidth"),
        (["--bandwidth", "25"], "--bandwidth"),
        (["--inner", "3"], "--inner"),
        (["--inner", "4", "--inner-bandwidth", "0GB/s"], "--inner-bandwidth"),
        (["--compute", "-1s"], "--compute"),
        (["--expansion", "9@8"], "--expansion"),
        (["--expansion", "3.2"], "--expansion"),
        (["--select-cost", "tpu"], "--select-cost"),
        (["--measured", "/does/not/exist"], "/does/not/exist"),
        (["--bogus"], "--bogus"),
    ],
)
def test_a_bad_argument_is_one_line(capsys, arguments, match):
    assert match in fails(capsys, "plan", *SLOW, *arguments)


def test_missing_arguments_are_one_line(capsys, tmp_path):
    assert "--params" in fails(capsys, "plan")
    assert "--measured" in fails(capsys, "plan", *SLOW[:6])
    file = tmp_path / "net.json"
    file.write_text("[]")
    assert "measure --json" in fails(capsys, "plan", *SLOW, "--measured", str(file))
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


@pytest.mark.parametrize("chosen", ["ok_topk", "dense"])
def test_auto_is_the_program_of_the_chosen_one(chosen):
    n, k, workers = 4000, 40, 4
    # A latency that dwarfs the rest leaves the psum, which has the fewest messages.
    options = NET if chosen == "ok_topk" else {"latency": "1s", "bandwidth": "1Gbit"}
    options = {"density": k / n, "candidates": ["ok_topk"], **options}
    assert allreduce.explain_auto(n, workers, **options).name == chosen

    def program(reducer):
        def body(values, indices):
            coo = sc.PaddedCOO(values, indices, n)
            return reducer.reduce(coo, reducer.init(n, workers), axis="workers")

        shape = (workers, k)
        arguments = (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.int32))
        return str(jax.make_jaxpr(jax.vmap(body, axis_name="workers"))(*arguments))

    plain = allreduce.dense() if chosen == "dense" else allreduce.ok_topk(density=k / n)
    assert program(allreduce.auto(**options)) == program(plain)


def test_auto_runs():
    reducer = allreduce.auto(density=0.5, latency="1s", bandwidth="1Gbit", candidates=[])

    def body(values, indices):
        coo = sc.PaddedCOO(values, indices, 4)
        return reducer.reduce(coo, reducer.init(4, 2), axis="workers")[0]

    values, indices = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[0, 1], [1, 3]])
    total = sc.simulate(body, axis_size=2)(values, indices)
    np.testing.assert_array_equal(total, [[1.0, 5.0, 0.0, 4.0]] * 2)


@pytest.mark.parametrize(
    "name", [option.name for option in _planner.OPTIONS if not option.two_level]
)
def test_auto_can_make_every_candidate(name):
    choice = allreduce.explain_auto(64, 3, density=0.125, candidates=[], **NET)
    reducer = _auto._make(choice._replace(name=name, codec="raw"), 64, 0.125)

    def body(values, indices):
        coo = sc.PaddedCOO(values, indices, 64)
        total, *_ = reducer.reduce(coo, reducer.init(64, 3), axis="workers")
        return total.to_dense() if isinstance(total, sc.PaddedCOO) else total

    indices = jnp.tile(jnp.arange(8, dtype=jnp.int32) * 8, (3, 1))
    totals = sc.simulate(body, axis_size=3)(jnp.ones((3, 8)), indices)
    np.testing.assert_array_equal(totals, [[3.0 if i % 8 == 0 else 0.0 for i in range(64)]] * 3)


def test_auto_explains_itself():
    choice = allreduce.explain_auto(10**6, 64, density=0.01, candidates=["ok_topk"], **NET)
    assert {name for name, _, _ in choice.predictions} == {"dense", "ok_topk"}
    everything = allreduce.explain_auto(10**6, 64, density=0.01, codecs=sc.wire.__all__, **NET)
    flat = {option.name for option in _planner.OPTIONS if not option.two_level}
    assert {name for name, _, _ in everything.predictions} == flat
    assert str(choice).startswith("ok_topk with raw: ")
    assert choice.seconds == choice.predictions[0][2]
    alone = allreduce.explain_auto(10**6, 1, density=0.01, **NET)
    assert alone.name == "dense"
    assert "optax_ext.dense" in alone.reason


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"density": 0.0}, "density"),
        ({"candidates": ["bogus"]}, "candidates"),
        ({"codecs": ["bogus"]}, "codecs"),
        ({"codecs": []}, "codecs"),
        ({"latency": "5"}, "latency"),
        ({"bandwidth": 0}, "bandwidth"),
    ],
)
def test_auto_names_a_bad_argument(options, match):
    with pytest.raises(ValueError, match=match):
        allreduce.auto(**{"density": 0.01, **NET, **options})


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


def test_the_measure_command_writes_what_the_planner_reads(capsys, tmp_path):
    file = tmp_path / "net.json"
    assert main(["measure", "--devices", "2", "--rounds", "2", "--json", str(file)]) == 0
    assert "bandwidth" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["workers"] == 2
    assert len(found["samples"]) == 12
    assert "--devices" in fails(capsys, "measure", "--devices", "99")

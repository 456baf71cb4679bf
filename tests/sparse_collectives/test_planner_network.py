"""The network of a plan: the units of its arguments, the fit to measurements, and their file."""

import json

import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives import _units
from sparse_collectives.__main__ import main
from sparse_collectives.planner import _measure
from tests.sparse_collectives import helpers
from tests.sparse_collectives.test_planner_command import SLOW, advice, fails, planned, run


@pytest.mark.parametrize(
    ("unit", "texts", "value"),
    [
        (_units.seconds, ("5us", "5µs", "5e-6s", " 5 us ", "0.005ms"), 5e-6),
        (_units.bandwidth, ("25Gbit", "25Gbit/s", "25Gbps", "3.125GB/s", "3.125GB"), 25e9 / 8),
        (_units.bandwidth, ("1GiB/s",), 2.0**30),
        (_units.count, ("133M", "133e6", "133_000_000", "0.133B"), 133_000_000),
    ],
)
def test_units(unit, texts, value):
    for text in texts:
        assert unit("x", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("unit", "values"),
    [
        (_units.seconds, ("", "us", "5", "5 parsecs", "5US", "nan", "nans", "infs", "-1us")),
        (_units.seconds, ("1e10s", "1e99999999999999999999s", 10**400, True, None, [1.0])),
        (_units.bandwidth, ("25", "25Gb", "0Gbit", "-1GB/s", "Gbit", "25 GHz", "1e30GB/s")),
        (_units.count, ("9" * 100_000,)),
    ],
)
def test_unknown_unit_is_an_error_of_one_line(unit, values):
    for value in values:
        with pytest.raises(ValueError, match="x must be .*got") as raised:
            unit("x", value)
        assert len(str(raised.value)) < 200


# The fit.


def synthetic(alpha, beta, noise=0.0, seed=0):
    rng = np.random.default_rng(seed)
    return [
        _measure.Sample("psum", m, w, (m * alpha + w * beta) * (1 + noise * rng.normal()), 0.0)
        for m in (1, 3, 6)
        for w in (100.0, 10_000.0, 1e6)
    ]


@pytest.mark.parametrize(("alpha", "beta"), [(5e-6, 1e-9), (1e-3, 1e-11), (1e-7, 1e-6)])
def test_fit_finds_the_network_and_withstands_noise(alpha, beta):
    assert _measure.fit(synthetic(alpha, beta)) == pytest.approx((alpha, beta), rel=1e-6)
    noisy = synthetic(5e-6, 1e-9, noise=0.03)
    assert _measure.fit(noisy) == pytest.approx((5e-6, 1e-9), rel=0.1)
    disturbed = synthetic(5e-6, 1e-9)
    disturbed[4] = disturbed[4]._replace(seconds=20 * disturbed[4].seconds)
    assert _measure.fit(disturbed) == pytest.approx((5e-6, 1e-9), rel=0.02)


def test_fit_is_never_negative_and_needs_samples():
    for alpha, beta in ((1e-5, 0.0), (0.0, 1e-9)):
        found = _measure.fit(synthetic(alpha, beta, noise=0.2))
        assert min(found) >= 0
        assert found[alpha == 0] == pytest.approx(alpha or beta, rel=0.3)
    without_time = [sample._replace(seconds=0.0) for sample in synthetic(1e-6, 1e-9)]
    for few, match in ((synthetic(1e-6, 1e-9)[:1], "at least 2"), (without_time, "above 0")):
        with pytest.raises(ValueError, match=match):
            _measure.fit(few)


def test_measure_runs_on_a_mesh_of_two_axes():
    mesh = helpers.mesh((2, 2), ("a", "b"))
    for axis, workers in ((None, 4), ("b", 2)):
        measured = sc.measure(mesh, axis, sizes=(64, 4096), rounds=2)
        assert measured.workers == workers
        assert len(measured.samples) == 6
        assert min(measured.latency, measured.bandwidth) >= 0
        assert measured.network().latency == measured.latency


@pytest.mark.slow
def test_measure_command_writes_what_the_planner_reads(capsys, tmp_path):
    file = tmp_path / "net.json"
    assert main(["measure", "--devices", "2", "--rounds", "2", "--json", str(file)]) == 0
    assert "bandwidth" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["workers"] == 2
    assert len(found["samples"]) == 12
    assert "--devices" in fails(capsys, "measure", "--devices", "99")
    for option in ("--devices", "--rounds"):
        assert option in fails(capsys, "measure", option, "0")


def test_measure_command_warns_of_a_poor_fit(capsys, monkeypatch):
    for error, warned in ((0.37, True), (0.1, False)):
        fitted = _measure.Measured(1e-6, 1e9, error, 0.01, 2, ())
        monkeypatch.setattr(_measure, "measure", lambda mesh, rounds, fitted=fitted: fitted)
        assert main(["measure", "--devices", "2"]) == 0
        warning = "Warning: latency and bandwidth miss the measured times by 37"
        assert (warning in capsys.readouterr().out) == warned


# The file of a measurement.

MEASURED = [*SLOW[:6], "--measured"]
# A file with these two fields is correct.
GOOD = {"latency": "1e-6", "bandwidth": "1e9"}


def measured_file(tmp_path, content):
    file = tmp_path / "net.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(file)


def having(**fields):
    """The JSON of a correct file with other fields."""
    return "{" + ", ".join(f'"{key}": {value}' for key, value in (GOOD | fields).items()) + "}"


NUMBERS = ("null", "[1]", "true", '"5us"', "-1", "NaN", "Infinity", "1" + 400 * "0")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        *((text, "must hold JSON") for text in ("", '{"latency": 1e-6, ', bytes(range(256)))),
        *((text, "must hold JSON") for text in ("[" * 200_000, '{"latency":' * 50_000)),
        (having(latency="1" + 9000 * "0"), "must hold JSON"),
        ("1" + (1 << 20) * " ", "1 MiB"),
        *((text, f"got {text}") for text in ("[]", "3")),
        ("null", "got None"),
        *((text, "no 'latency'") for text in ("{}", '{"bandwidth": 1e9}')),
        ('{"latency": 1e-6}', "no 'bandwidth'"),
        *((having(latency=number), "latency in") for number in NUMBERS),
        *((having(bandwidth=number), "bandwidth in") for number in ('"25Gbit"', "0", "NaN")),
        (having(bandwidth="Infinity"), "Pass --bandwidth"),
        *((having(error=number), "error in") for number in ('"small"', "false", "-1", "NaN")),
    ],
)
def test_bad_measured_file_is_one_line(capsys, tmp_path, content, match):
    file = measured_file(tmp_path, content)
    error = fails(capsys, "plan", *MEASURED, file)
    assert match in error
    assert file in error
    assert len(error) < 400


def test_plan_is_of_the_measured_network_or_of_what_is_given(capsys, tmp_path):
    def network(content, *arguments):
        file = measured_file(tmp_path, content)
        found = planned(capsys, tmp_path, *MEASURED, file, *arguments)["network"]
        return found["latency"], found["seconds_per_word"]

    right = having(latency="1e-5", bandwidth="4e9")
    assert network(right) == pytest.approx((1e-5, 1e-9))
    assert network(right, "--latency", "1ms") == pytest.approx((1e-3, 1e-9))
    # This includes a value that is wrong in the file.
    given = network(having(bandwidth="Infinity"), "--bandwidth", "4GB/s")
    assert given == pytest.approx((1e-6, 1e-9))


@pytest.mark.parametrize(("error", "warned"), [(None, 0), (0.3, 0), (0.37, 1), (4, 1)])
def test_poor_fit_is_said_beside_the_plan(capsys, tmp_path, error, warned):
    file = measured_file(tmp_path, having(error=json.dumps(error)))
    out = run(capsys, *MEASURED, file)
    assert ("Warning: " in out) == warned
    if warned:
        assert f"by {error:.0%}" in out
    assert advice(out)
    # The file is not used then.
    out = run(capsys, *MEASURED, file, "--latency", "5us", "--bandwidth", "1Gbit")
    assert "Warning: " not in out

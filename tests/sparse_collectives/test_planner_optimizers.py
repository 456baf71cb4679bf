"""Complete optimizers in the planner: their costs, and the code to write."""

import json
import statistics
from pathlib import Path

import jax.numpy as jnp
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from optax_ext._optimizers import _rates
from sparse_collectives.cost_model import Workload, network
from sparse_collectives.cost_model._numbers import NUMBERS
from sparse_collectives.planner import _optimizers, plan
from sparse_collectives.planner._ways import CPU
from tests.sparse_collectives.test_planner_command import fails, planned, run
from tools.tables import _predicted
from tools.tables._links import speedups

DATA = Path(__file__).parents[2] / "docs" / "data"
N, WORKERS = 14_700_000, 4
NET = network("100us", "1Gbit")
SUMS = ("sparse_adamw", "few bits")


@pytest.mark.parametrize(
    ("method", "name"),
    [("alone/adamw", "adamw"), ("sparse_adamw",) * 2, ("powersgd1/adamw", "powersgd")],
)
def test_local_work_is_what_was_measured(method, name):
    of_runs = []
    for path in sorted(DATA.glob("network_4*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))["points"]
        for row in rows:
            if (row["link"], row["method"]) == ("1gbit", method):
                of_runs.append(statistics.median(row["cpu_seconds"]) / N)
    measured = pytest.approx(statistics.median(of_runs), abs=6e-12)
    assert NUMBERS["optimizers"][name] == measured


def test_work_with_codes_is_what_was_measured_beside_sums():
    rows = json.loads((DATA / "few_bits_over_links.json").read_text(encoding="utf-8"))["points"]
    seconds = {
        row["method"]: statistics.median(row["cpu_seconds"])
        for row in rows
        if row["link"] == "1gbit"
    }
    ratio = seconds["sparse_adamw, bits (1, 3)"] / seconds["sparse_adamw"]
    assert NUMBERS["few_bits"]["of_sums"] == pytest.approx(ratio, abs=0.005)


def test_work_of_all_entries_is_what_was_measured():
    rows = json.loads((DATA / "quantized_over_links.json").read_text(encoding="utf-8"))["points"]
    (row,) = [x for x in rows if (x["link"], x["method"]) == ("1gbit", "quantized/adamw")]
    measured = statistics.median(row["cpu_seconds"]) / N
    assert NUMBERS["optimizers"]["quantized"] == pytest.approx(measured, abs=6e-11)


def test_words_of_all_entries_are_those_of_the_exchange():
    for size, workers in ((10**6, 4), (10**7, 64), (1000, 8)):
        cost = _optimizers.all_in_codes(Workload(size, size // 20, workers)).expected
        words = sc.extend.words_of_sum_of_all(size, workers, (2, 4))
        assert cost.words == pytest.approx(words)


def test_codes_are_recommended_where_they_are_clearly_faster():
    load = Workload(N, N // 20, WORKERS)
    fast, slow = (
        _optimizers.plan_optimizers(load, network("100us", x)) for x in ("2Gbit", "20Mbit")
    )
    assert [x.recommended.codec for x in (fast, slow)] == ["few bits", "1, 3 bits"]
    assert "bits=(1, 3)" in slow.recommended.code
    # The other one is named, where its step is no longer.
    assert "1, 3 bits" in {row.codec for row in fast.others if row.name == "sparse_adamw"}


# Runs of one method differ (sparse_adamw: 3.50 to 4.00 times dense), and the model's median error
# is 21 %. The costs are from runs at 1 Gbit/s; the other link is a prediction.
FACTOR = 1.3
# Processes that share cores wait for one another in each collective, which the model leaves out:
# with local work measured in the same runs, it has ok_topk 28 % too fast (docs/network.md).
WITH_PAIRS = 1.6


@pytest.mark.parametrize("link", ["1gbit", "100mbit"])
def test_speed_of_workers_that_share_cores_is_predicted(link):
    for method, (predicted, measured) in _predicted.shared_cores(link).items():
        factor = WITH_PAIRS if method in ("ok_topk", "topk_a") else FACTOR
        for found in measured:
            assert 1 / factor < predicted / found < factor, (method, predicted, found)


def test_speed_with_a_core_for_each_worker_is_predicted_higher():
    alone = plan(Workload(N, N // 100, WORKERS), NET)
    step = {row.name: row for row in alone.predictions if row.codec == "raw"}["partitioned_topk"]
    assert step.speedup > FACTOR * max(speedups(WORKERS, N, "1gbit")["partitioned_topk"])


def test_words_of_powersgd_are_near_those_of_measured_models():
    for name, n, workers in (("network_4_third.json", N, 4), ("network_8.json", 10**6, 8)):
        rows = json.loads((DATA / name).read_text(encoding="utf-8"))["points"]
        words = next(
            row["program_words"]["best"] for row in rows if row["method"] == "powersgd1/adamw"
        )
        estimate = _optimizers.two_factors(Workload(n, n // 20, workers)).expected
        assert estimate.words == pytest.approx(words, rel=0.02)


WAYS = _optimizers.optimizers(Workload(10**7, 10**7 // 4, WORKERS), CPU)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.name}, {way.codec}")
@pytest.mark.one_in(3)
def test_code_of_each_optimizer_steps(way):
    tx = eval(way.code, {"optax": optax, "optax_ext": optax_ext, "sc": sc, "rate": 0.1})
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}

    def step(gradients):
        return tx.update(gradients, tx.init(params), params)[0]

    given = {"w": jnp.ones((2, 4, 4)), "b": jnp.ones((2, 4))}
    updates = sc.simulate(step, axis="data", axis_size=2)(given)
    assert {name: u.dtype for name, u in updates.items()} == {"w": jnp.float32, "b": jnp.float32}
    assert all(bool(jnp.all(jnp.isfinite(u))) for u in updates.values())
    # At a density of 1/4 one leaf may have to wait.
    assert any(bool(jnp.any(u < 0)) for u in updates.values())


def test_words_and_steps_to_the_same_loss_are_those_of_the_exchange():
    load = Workload(10**7, 5 * 10**5, 8)
    plain = _optimizers.plan_optimizers(load, NET)
    words = {row.codec: row.estimate.expected.words for row in plain.predictions}
    assert words["float16"] == words["float32"] / 2
    found = _optimizers.plan_optimizers(load, NET, steps={"partitioned_topk(few)": 2.0})
    assert {row.name for row in found.predictions} == {
        *("sparse_adamw", "dense, adamw", "dense_bucketed, adamw")
    }
    dense = next(row for row in plain.predictions if row.dense)
    few = next(row for row in plain.predictions if (row.name, row.codec) == SUMS)
    assert found.ratio == pytest.approx(dense.to_loss / few.to_loss / 2)
    alone = _optimizers.plan_optimizers(Workload(1000, 50, 1), NET)
    assert alone.recommended.dense
    assert alone.others == ()


SMALL = ["--params", "50M", "--workers", "4", "--bandwidth", "1Gbit", "--compute", "200ms"]


def test_recommended_optimizer_is_code_or_dense(capsys):
    lines = run(capsys, *SMALL).splitlines()
    last = next(line for line in lines if line.startswith("Optimizer: "))
    assert "times as fast as a dense AdamW" in last
    codes = [way.code for way in _optimizers.optimizers(Workload(20, 1, 4), CPU)]
    assert last.rsplit(": ", 1)[1] == codes[0]
    # Optimizers with a shorter step are named, and not recommended for that alone.
    assert any(
        line.startswith("no longer than sparse_adamw") and "powersgd(1)" in line for line in lines
    )
    fast = run(capsys, *SMALL[:5], "400Gbit", "--latency", "5us")
    assert "Optimizer: dense, adamw, sparse_adamw is only" in fast


def test_numbers_that_are_not_given_are_assumed_and_said(capsys):
    assumed = run(capsys, *SMALL[:6])
    assert assumed.splitlines()[0] == (
        "not given, and assumed: --density 0.05, the default of sparse_adamw; --latency 100us; "
        "--compute 0s; --select-cost cpu"
    )
    options = "--density 0.05 --latency 100us --compute 0s --select-cost cpu"
    given = run(capsys, *SMALL[:6], *options.split())
    assert set(given.splitlines()) < set(assumed.splitlines())
    assert "not given" not in given
    assert _rates.DENSITY == 0.05


def test_workers_on_a_core_take_turns_but_on_no_gpu(capsys, tmp_path):
    def ordered(*arguments):
        plan = planned(capsys, tmp_path, *SMALL, *arguments)
        return sorted(row["local"] for row in plan["predictions"] + plan["optimizers"])

    assert ordered("--workers-per-core", "1") == ordered()
    assert ordered("--workers-per-core", "2.5") == pytest.approx([2.5 * x for x in ordered()])
    error = fails(capsys, "plan", *SMALL, "--workers-per-core", "2", "--select-cost", "gpu")
    assert "leave it out with --select-cost gpu" in error


def test_exact_messages_leave_the_dense_optimizers_and_powersgd(capsys, tmp_path):
    plan = planned(capsys, tmp_path, *SMALL, "--exact")
    names = {row["name"] for row in plan["optimizers"]}
    assert {"powersgd(1), adamw", "dense, adamw"} <= names
    assert "sparse_adamw" not in names
    assert "float16" not in {row["codec"] for row in plan["optimizers"]}

"""The planner and `auto`: their predictions, their choices, and the code to write."""

import math

import jax
import jax.numpy as jnp
import pytest

import sparse_collectives as sc
from sparse_collectives import allreduce, cost_model, planner
from sparse_collectives.cost_model import Overlap, Workload, network
from sparse_collectives.cost_model._costs import Network
from sparse_collectives.planner._auto import CANDIDATES
from sparse_collectives.planner._optimizers import plan_optimizers
from sparse_collectives.planner._report import text
from tests.sparse_collectives import helpers

ROWS = cost_model.ALGORITHMS
NET, SLOW_LINK = network("5us", "1Gbit"), network("5us", "100Mbit")


def plan_of(n, density, workers, net, **options):
    k = max(1, round(n * density))
    return planner.plan(Workload(n, k, workers, options.pop("inner", 1)), net, **options)


def test_slow_network_gets_a_sparse_exchange_and_a_fast_one_or_one_worker_dense():
    for workers, net, dense, reason in (
        (16, SLOW_LINK, False, ""),
        (16, network("5us", "400Gbit"), True, "only"),
        (1, SLOW_LINK, True, "one worker"),
    ):
        plan = plan_of(10**7, 0.01, workers, net, codecs=["raw"])
        assert plan.recommended.dense == dense
        assert reason in plan.reason


def test_predictions_are_sorted_relative_to_dense_and_of_every_algorithm_for_its_levels():
    plan = plan_of(10**6, 0.01, 8, NET, compute=0.01)
    steps = {row.step: row for row in plan.predictions}
    assert list(steps) == sorted(steps)
    dense = next(row for row in plan.predictions if row.name == "dense")
    for step, row in steps.items():
        assert row.speedup == pytest.approx(dense.step / step)
        assert step == pytest.approx(0.01 + row.exchange + row.local - row.hidden)
    # One is for selections by row, which a workload lacks, and one has the words of topk_a.
    unplanned = {row.name for row in ROWS.values() if not row.planned}
    assert unplanned == {"row_topk", "sparse_allgather"}
    of_nodes = plan_of(10**6, 0.01, 16, Network(5e-6, 1e-9, 1e-6, 1e-10), inner=4).predictions
    two = {row.name for row in of_nodes} - {row.name for row in plan.predictions}
    assert two == {row.name for row in ROWS.values() if row.two_level}


def test_plan_to_the_same_loss_multiplies_steps_by_their_time():
    given = {"names": ["ok_topk", "partitioned_topk(few)", "gtopk"], "codecs": ["raw"]}
    by_step = plan_of(10**7, 0.01, 16, NET, **given)
    assert by_step.recommended.name == "partitioned_topk(few)"
    steps = {"partitioned_topk(few)": 100.0, "ok_topk": 1.5}
    plan = plan_of(10**7, 0.01, 16, NET, steps=steps, **given)
    assert plan.recommended.name == "ok_topk"
    assert plan.unknown == ("gtopk",)
    before = {row.name: row for row in by_step.predictions}
    factors = {"dense": 1.0, **steps}
    assert {row.name for row in plan.predictions} == set(factors)
    for row in plan.predictions:
        assert row.step == before[row.name].step
        assert row.speedup == pytest.approx(before[row.name].speedup / factors[row.name])
    order = [row.to_loss for row in plan.predictions]
    assert order == sorted(order)


def test_steps_are_positive_numbers_of_known_algorithms():
    wrong = [{"ok_topk": factor} for factor in (0, math.inf, math.nan, True, "2")]
    for steps in (*wrong, {"topk": 1.0}):
        with pytest.raises(ValueError, match=r"steps.* must be .*got ('topk'|0|inf|nan|True|'2')"):
            plan_of(1000, 0.1, 4, NET, steps=steps)


def test_a_step_takes_no_negative_time():
    with pytest.raises(ValueError, match=r"compute must be a number in .*got -1\.0"):
        plan_of(1000, 0.1, 4, NET, compute=-1.0)


def test_encoding_without_room_for_the_gaps_is_left_out():
    plan = plan_of(10**8, 0.001, 16, SLOW_LINK)
    assert plan.crowded == ("narrow8",)
    assert not any(row.codec == "narrow8" for row in plan.predictions)
    assert not plan_of(10**8, 0.01, 16, SLOW_LINK).crowded


def test_margin_between_dense_and_sparse():
    net = network("1us", "1Gbit")
    base = plan_of(10**7, 0.01, 4, net, names=["ok_topk"], codecs=["raw"])
    exchange = {row.name: row.exchange for row in base.predictions}
    merged = next(row for row in base.predictions if row.name == "ok_topk").estimate.expected.pairs
    for ratio, dense in ((1.05, True), (1.2, False)):
        busy = exchange["dense"] / ratio - exchange["ok_topk"]
        local = planner.LocalCost(0.0, busy / merged)
        plan = plan_of(10**7, 0.01, 4, net, names=["ok_topk"], codecs=["raw"], local=local)
        assert plan.recommended.dense == dense


def test_ties_are_named():
    plan = plan_of(10**7, 0.01, 16, NET, names=["ok_topk", "partitioned_topk", "spardl"])
    steps = {row.name: row.step for row in reversed(plan.predictions)}
    best = min(steps.values())
    tied = {name for name, step in steps.items() if best < step <= 1.2 * best}
    lines = text(plan, plan_optimizers(plan.workload, NET)).splitlines()
    said = next(line for line in lines if line.startswith("a tie with"))
    assert tied == set(said.rpartition(": ")[2].split(", "))


def test_only_a_bucketed_exchange_hides_and_not_all_of_it():
    rows = plan_of(10**8, 0.01, 8, network("5us", "25Gbit"), compute=100.0).predictions
    hidden = {row.name: row.hidden / row.exchange for row in rows}
    assert {name for name, share in hidden.items() if share > 0} == {"dense_bucketed"}
    assert 0.9 < hidden["dense_bucketed"] < 1
    rows = plan_of(10**8, 0.01, 8, network("5us", "25Gbit"), compute=0.03).predictions
    assert max(row.hidden for row in rows) == pytest.approx(0.02)


@pytest.mark.parametrize("name", ROWS)
def test_code_of_a_row_has_what_the_workload_says(name):
    for overlap in (None, Overlap(250_000, 4)):
        load = Workload(10_000_000, 100_000, 4, 2, overlap)
        for codec in ROWS[name].codecs:
            code = ROWS[name].code(load, codec)
            assert ("sc.wire" in code) == (codec != "raw")
            assert isinstance(eval(code, {"sc": sc}), sc.SparseAllreduce)
            assert ("density" not in code) or "density=0.01" in code
            assert "density=0.01" not in ROWS[name].code(Workload(100, 100, 4, 2), codec)
            said = {"dense_bucketed": "buckets=2", "ring_sparse": "fill=2.5"}
            assert overlap is None or said.get(name, "") in code


# The choice when a program is traced.

SLOWLY = {"latency": "5us", "bandwidth": "100Mbit"}


def program(reducer, n, workers, k):
    """The text of a step of k entries of each worker."""

    def body(values, indices):
        coo = sc.PaddedCOO(values, indices, n)
        return reducer.reduce(coo, reducer.init(n, workers), axis="workers")

    arguments = (jnp.zeros((workers, k), jnp.float32), jnp.zeros((workers, k), jnp.int32))
    return str(jax.make_jaxpr(jax.vmap(body, axis_name="workers"))(*arguments))


FEW_MESSAGES = {"latency": "1s", "bandwidth": "1Gbit"}
FEW_BYTES = {"latency": 0.0, "bandwidth": "1kbit", "codecs": ["raw", "bf16"]}


@pytest.mark.parametrize(
    ("chosen", "name", "options"),
    [
        # With a dominant latency, psum is chosen, which has the fewest messages.
        (lambda density: allreduce.dense(), "ok_topk", FEW_MESSAGES),
        (lambda density: allreduce.topk_a(codec=sc.wire.bf16()), "topk_a", FEW_BYTES),
        *helpers.slow_rows((lambda density: allreduce.ok_topk(density=density), "ok_topk", SLOWLY)),
    ],
)
def test_auto_is_the_program_of_the_chosen_one(chosen, name, options):
    given, density = (4000, 4, 40), 40 / 4000
    made = planner.auto(density=density, candidates=[name], **options)
    assert program(made, *given) == program(chosen(density), *given)


QUICK = ("dense", "dense_bucketed", "topk_a", "ssar_split_allgather", "dsar_split_allgather")


@pytest.mark.parametrize("name", helpers.slow_but(QUICK, sorted(CANDIDATES)))
def test_candidate_of_auto_is_the_program_of_its_code_in_each_encoding(name):
    load = Workload(64, 8, 3)
    for codec in ROWS[name].codecs if name == "topk_a" else ("raw",):
        made = ROWS[name].make(load, getattr(sc.wire, codec)())
        written = eval(ROWS[name].code(load, codec), {"sc": sc})
        assert program(made, 64, 3, 8) == program(written, 64, 3, 8)

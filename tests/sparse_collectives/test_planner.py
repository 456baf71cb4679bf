"""The planner: what it predicts, what it recommends, and the code to write."""

import math

import pytest

import sparse_collectives as sc
from sparse_collectives import cost_model
from sparse_collectives.cost_model import Workload, network
from sparse_collectives.cost_model._types import Network
from sparse_collectives.planner import _plan_report, _planner


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
    rows = cost_model.ALGORITHMS.values()
    assert {row.name for row in rows if not row.planned} == {"sparse_allgather"}
    # No two lines of the picture are alike.
    assert len({row.colour for row in rows}) == len(rows)


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
    options = {option.name for option in cost_model.ALGORITHMS.values() if option.two_level}
    assert two - flat == options
    assert {"torus_2d", "hierarchical(topk_a)", "hierarchical(ok_topk)"} <= options


def test_one_worker_uses_dense():
    plan = plan_of(10**6, 0.01, 1, network("5us", "1Gbit"))
    assert plan.recommended.name == "dense"
    assert "one worker" in plan.reason


@pytest.mark.parametrize("option", cost_model.ALGORITHMS.values(), ids=lambda option: option.name)
def test_the_code_to_write_is_an_expression(option):
    for overlap in (None, cost_model.Overlap(250, 4)):
        load = Workload(10_000, 100, 8, 4, overlap)
        for codec in option.codecs:
            code = option.code(load, codec)
            assert ("sc.wire" in code) == (codec != "raw")
            made = eval(code, {"sc": sc})
            assert isinstance(made, sc.SparseAllreduce)


@pytest.mark.parametrize(
    ("name", "codec", "code"),
    [
        ("dense_bucketed", "raw", "published.dense_bucketed(buckets=2)"),
        ("topk_a", "bf16", "topk_a(codec=sc.wire.bf16())"),
        ("ring_sparse", "raw", "published.ring_sparse(fill=2.5)"),
        ("ok_topk", "narrow8", "ok_topk(density=0.01, codec=sc.wire.narrow8())"),
        (
            "hierarchical(gtopk)",
            "bf16",
            'hierarchical(inner_axis="device", outer=sc.allreduce.published.gtopk(density=0.01, '
            "codec=sc.wire.bf16()))",
        ),
    ],
)
def test_the_code_has_what_the_workload_says(name, codec, code):
    option = cost_model.ALGORITHMS[name]
    load = Workload(10_000_000, 100_000, 4, 2, cost_model.Overlap(250_000, 4))
    assert option.code(load, codec) == f"sc.allreduce.{code}"
    if "density" in code:
        everything = Workload(100, 100, 2)
        assert "density=1.0" in option.code(everything, codec)

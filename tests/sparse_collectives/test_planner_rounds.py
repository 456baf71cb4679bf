"""Rounds over a link: their arithmetic, the choice, and the source of the loss."""

import statistics

import pytest

import sparse_collectives as sc
from sparse_collectives.__main__ import main
from sparse_collectives.cost_model._numbers import NUMBERS, PROGRAMS
from sparse_collectives.planner._report import of_rounds
from sparse_collectives.planner._slow_links import SHARE, plan_rounds
from sparse_collectives.planner._ways import GPU
from tests.sparse_collectives.test_planner_command import fails
from tools.tables._learning import losses_by_bytes

SIZE, WORKERS = 10_000_000, 4
# Their exchanges, and a step as a share of one with the first.
OF_MESSAGES = {
    "few bits": ("partitioned_topk(few)", 1.0),
    "1, 3 bits": ("partitioned_topk(1, 3)", NUMBERS["few_bits"]["of_sums"]),
}


def planned(latency, bandwidth, compute=0.5, size=SIZE, **given):
    network = sc.cost_model.network(latency, bandwidth)
    return plan_rounds(size, WORKERS, network, compute=compute, **given)


def test_rounds_wait_for_their_share_of_an_exchange():
    network = sc.cost_model.network(0.05, 12.5e6)
    for row in planned(0.05, 12.5e6).rows:
        name, share = OF_MESSAGES[row.messages]
        busy = 0.5 + share * NUMBERS["optimizers"]["sparse_adamw"] * SIZE
        workload = sc.cost_model.Workload(SIZE, round(row.density * SIZE), WORKERS)
        cost, found = (
            sc.cost_model.predict(name, workload).expected,
            row.prediction,
        )
        assert found.estimate.expected == cost
        assert found.exchange == pytest.approx(cost.seconds(network))
        assert found.step == pytest.approx(busy + found.exchange / row.every)
        expected = found.step if row.every == 1 else max(busy, found.exchange / row.every)
        assert row.overlapped == pytest.approx(expected)
        # With a link of that bandwidth and no latency, an exchange takes as long as a round.
        free = sc.cost_model.network(0.0, row.needed / 8)
        assert cost.seconds(free) == pytest.approx(row.every * busy)


def test_rounds_on_a_gpu_are_counted():
    row = planned(0.05, 12.5e6, local=GPU).rows[0].prediction
    counted = PROGRAMS["sparse_adamw"].seconds(SIZE)
    assert row.step == pytest.approx(0.5 + counted + row.exchange)


@pytest.mark.parametrize(
    ("latency", "bandwidth", "every", "overlaps", "decides"),
    [
        (1e-4, 125e6, 1, False, "bytes"),
        (0.05, 125e6, 10, False, "latency"),
        (0.2, 125e6, 10, False, "latency"),
        (0.1, 1e5, 30, False, "bytes"),
        (0.1, 3e4, 30, True, "bytes"),
    ],
)
def test_rounds_are_longer_the_slower_the_link(latency, bandwidth, every, overlaps, decides):
    found = planned(latency, bandwidth)
    assert (found.recommended.every, found.overlaps) == (every, overlaps)
    assert found.decides.startswith(decides)
    rows = [(row, row.prediction) for row in found.rows]
    waits = [row.above for row, x in rows if x.exchange / row.every <= SHARE * x.step]
    assert bool(waits) is not overlaps
    if waits:
        assert found.recommended.above == min(waits)


def test_losses_of_rounds_are_those_that_were_measured():
    dense, *others = losses_by_bytes(128)
    shown = {one.shown: statistics.mean(one.above(dense)) for one in others}
    for messages, rows in NUMBERS["rounds"].items():
        for every, density, percent in rows:
            parts = [f"`every={every}`"] if every > 1 else []
            parts += ["`bits=(1, 3)`"] if messages == "one_and_three" else []
            name = ", ".join([*(parts or ["`sparse_adamw`"]), f"{100 * density:g} %"])
            assert percent == pytest.approx(shown[name], abs=0.05)


USUAL = "--params 124M --workers 4 --latency 50ms --bandwidth 100Mbit --compute 500ms"


def test_rounds_command_says_what_to_write(capsys):
    assert main(["rounds", *USUAL.split()]) == 0
    printed = capsys.readouterr().out
    found = planned(0.05, 12.5e6, size=124_000_000)
    assert printed == f"not given, and assumed: --select-cost cpu\n{of_rounds(found)}\n"
    assert main(["rounds", *USUAL.split(), "--select-cost", "cpu"]) == 0
    assert capsys.readouterr().out == of_rounds(found) + "\n"
    assert found.recommended.prediction.code in printed
    assert max(map(len, printed.splitlines())) <= 140


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--compute 0s", "compute must be the seconds"),
        ("--workers 0", "--workers"),
        ("--bandwidth fast", "--bandwidth"),
    ],
)
def test_wrong_option_of_rounds_is_named(capsys, changed, message):
    assert message in fails(capsys, "rounds", *USUAL.split(), *changed.split())


def test_one_site_exchanges_nothing():
    network = sc.cost_model.network(0.05, 12.5e6)
    with pytest.raises(ValueError, match="workers must be an integer of at least 2, got 1"):
        plan_rounds(SIZE, 1, network, compute=0.5)

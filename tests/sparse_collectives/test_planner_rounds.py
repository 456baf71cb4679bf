"""Rounds over a link: their arithmetic, the choice, and the source of the loss."""

import statistics

import pytest

import sparse_collectives as sc
from sparse_collectives.__main__ import main
from sparse_collectives.cost_model._gpu import Program
from sparse_collectives.planner import _planner
from sparse_collectives.planner._optimizers import OPTIMIZERS, SPARSE_ADAMW
from sparse_collectives.planner._rounds import ABOVE_DENSE, SHARE, plan_rounds, text
from tools.tables._learning import losses_by_bytes

SIZE, WORKERS = 10_000_000, 4


def planned(latency, bandwidth, compute=0.5, **given):
    return plan_rounds(
        SIZE, WORKERS, sc.cost_model.network(latency, bandwidth), compute=compute, **given
    )


def test_a_step_waits_for_its_share_of_an_exchange():
    network = sc.cost_model.network(0.05, 12.5e6)
    busy = 0.5 + SPARSE_ADAMW * SIZE
    for row in planned(0.05, 12.5e6).rows:
        workload = sc.cost_model.Workload(SIZE, round(row.density * SIZE), WORKERS)
        cost = sc.cost_model.predict("agreed(few)", workload).expected
        assert row.exchange == pytest.approx(cost.seconds(network))
        assert row.step == pytest.approx(busy + row.exchange / row.every)
        expected = row.step if row.every == 1 else max(busy, row.exchange / row.every)
        assert row.beside == pytest.approx(expected)
        assert row.words == pytest.approx(cost.words / row.every)
        # With a link of that bandwidth and no latency, an exchange takes as long as a round.
        free = sc.cost_model.network(0.0, row.needed / 8)
        assert cost.seconds(free) == pytest.approx(row.every * busy)


def test_on_a_gpu_a_step_is_counted():
    local = _planner.GPU
    row = planned(0.05, 12.5e6, local=local).rows[0]
    assert isinstance(OPTIMIZERS[0].gpu, Program)
    assert row.step == pytest.approx(0.5 + OPTIMIZERS[0].gpu.seconds(SIZE) + row.exchange)


@pytest.mark.parametrize(
    ("latency", "bandwidth", "every", "hidden", "decides"),
    [
        (1e-4, 125e6, 1, False, "bytes"),
        (0.05, 125e6, 10, False, "latency"),
        (0.2, 125e6, 10, False, "latency"),
        (0.1, 1e5, 30, True, "bytes"),
    ],
)
def test_the_slower_the_link_the_fewer_exchanges(latency, bandwidth, every, hidden, decides):
    found = planned(latency, bandwidth)
    assert (found.recommended.every, found.hidden) == (every, hidden)
    assert found.decides.startswith(decides)
    waits = [row for row in found.rows if row.exchange / row.every <= SHARE * row.step]
    assert bool(waits) is not hidden
    if waits:
        assert found.recommended.above == min(row.above for row in waits)


def test_the_losses_are_those_that_were_measured():
    shown = {one.shown: statistics.mean(one.above) for one in losses_by_bytes(128)}
    for every, density in ABOVE_DENSE:
        rounds = "`sparse_adamw`" if every == 1 else f"`every={every}`"
        above = shown[f"{rounds}, {100 * density:g} %"]
        assert ABOVE_DENSE[every, density] == pytest.approx(above, abs=0.05)


def test_the_command_says_what_to_write(capsys):
    given = "--params 124M --workers 4 --latency 50ms --bandwidth 100Mbit --compute 500ms"
    assert main(["rounds", *given.split()]) == 0
    printed = capsys.readouterr().out
    found = plan_rounds(
        124_000_000, 4, sc.cost_model.network(0.05, 12.5e6), compute=0.5, local=_planner.CPU
    )
    assert printed == f"not given, and assumed: --select-cost cpu\n{text(found)}\n"
    assert main(["rounds", *given.split(), "--select-cost", "cpu"]) == 0
    assert capsys.readouterr().out == text(found) + "\n"
    assert found.recommended.code in printed
    for line in printed.splitlines():
        assert len(line) <= 140


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("--compute 0s", "compute must be the seconds"),
        ("--workers 0", "--workers"),
        ("--bandwidth fast", "--bandwidth"),
    ],
)
def test_what_is_wrong_is_named(capsys, changed, message):
    usual = "--params 1M --workers 4 --latency 50ms --bandwidth 100Mbit --compute 1s"
    with pytest.raises(SystemExit) as ended:
        main(["rounds", *usual.split(), *changed.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err

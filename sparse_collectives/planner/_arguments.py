"""Converts the options of the planner's command to the arguments of the planner.

Each function raises a ValueError that names the option, the value and what to write instead.
"""

import argparse
import math
from typing import Literal

from sparse_collectives import _units, cost_model
from sparse_collectives.cost_model import _fill_in
from sparse_collectives.cost_model._types import Network
from sparse_collectives.planner import _measured_file, _planner

# The link of a node if none is given; NVLink is several times as fast, PCIe is slower.
INNER_LATENCY, INNER_BANDWIDTH = "2us", "100GB/s"

# A ring has a message for each worker: with more workers, its cost alone takes seconds.
_MOST_WORKERS = 1 << 16


def workers(option: str, text: str, examples: str = "16, 256 or 1k") -> int:
    """A number of workers, or of devices."""
    return _units.count(option, text, most=_MOST_WORKERS, examples=examples)


def density(text: str) -> float:
    """A share in (0, 1], except a plain 1, which may mean one percent."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= 1:
        shown = _units.shown(text)
        raise ValueError(f"--density must be a share in (0, 1], such as 0.01 for 1 %, got {shown}.")
    if text.strip() == "1":
        raise ValueError(
            "--density must be 1.0 to send all entries or 0.01 to send 1 %, got 1, which may mean "
            "either."
        )
    return found


def network(
    args: argparse.Namespace, inner: int, measured: _measured_file.MeasuredFile | None
) -> Network:
    """The links of the network, and of a node if it has several workers (``inner``)."""
    latency = _units.seconds(*_given("latency", args.latency, measured))
    bandwidth = _units.bandwidth(*_given("bandwidth", args.bandwidth, measured))
    if inner == 1:
        return cost_model.network(latency, bandwidth)
    near, fast = args.inner_latency or INNER_LATENCY, args.inner_bandwidth or INNER_BANDWIDTH
    return cost_model.network(
        latency,
        bandwidth,
        inner_latency=_units.seconds("--inner-latency", near),
        inner_bandwidth=_units.bandwidth("--inner-bandwidth", fast),
    )


def _given(
    name: Literal["latency", "bandwidth"],
    text: str | None,
    measured: _measured_file.MeasuredFile | None,
) -> tuple[str, float | str]:
    """The name of a number of the network in an error message, and the number."""
    if text is not None:
        return f"--{name}", text
    if measured is None:
        raise ValueError("the network must be given by --bandwidth or --measured.")
    value = measured.latency if name == "latency" else measured.bandwidth
    if value == math.inf:
        raise ValueError(
            f"{name} in --measured {measured.file} must be finite, got {value}: no time grew with "
            f"the size when it was measured. Pass --{name}."
        )
    return f"{name} in --measured {measured.file}", value


def overlap(text: str, selected: int) -> cost_model.Overlap:
    """The fill-in ``X@P`` of selections of so many entries."""
    try:
        factor, number = text.split("@")
        found = cost_model.Overlap(float(factor) * selected, workers("--expansion", number))
        _fill_in.effective_size(selected, found)
    except ValueError:
        raise ValueError(
            "--expansion must be X@P with P >= 2 workers and 1 <= X <= P, such as 3.2@16, got "
            f"{_units.shown(text)}."
        ) from None
    return found


def local_cost(
    select_cost: str | None, workers_per_core: str = "1", merge_cost: str | None = None
) -> _planner.LocalCost:
    """The local costs of a worker; the costs on a CPU if nothing is given."""
    sharing = _units.number("--workers-per-core", workers_per_core, 1, _MOST_WORKERS)
    named = {"cpu": _planner.CPU, "gpu": _planner.GPU}
    if select_cost is None or select_cost in named:
        local = named[select_cost or "cpu"]
    else:
        form = "cpu, gpu or a time such as 0.1ns"
        select = _units.seconds("--select-cost", select_cost, form=form)
        local = _planner.LocalCost(select, select)
    if local.gpu and sharing > 1:
        raise ValueError(
            f"--workers-per-core={sharing:g} is for workers that select on cores: leave it out "
            "with --select-cost gpu."
        )
    local = local._replace(sharing=sharing)
    if merge_cost is not None:
        local = local._replace(
            merge=_units.seconds("--merge-cost", merge_cost, form="a time such as 0.1ns")
        )
    return local

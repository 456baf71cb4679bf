"""What the cost model predicts: steps of workers that share cores, and rounds over a link."""

from benchmarks.gpu import _predicted
from sparse_collectives import cost_model
from sparse_collectives.planner import plan as plan_exchanges
from sparse_collectives.planner._optimizers import CODES, plan_optimizers
from sparse_collectives.planner._slow_links import plan_rounds
from sparse_collectives.planner._ways import CPU, GPU

from ._data import LABELS, Rows, blank_repeats, interval, number
from ._links import speedups

# The case of docs/data/network_4*.json.
_WORKERS, _PARAMS, _SHARING, _LATENCY = 4, 14_700_000, 2.0, "100us"
# Methods that have another name in the planner.
_PLANNED = {"sparse_adamw": "sparse_adamw, few bits", "dense/adamw": "dense, adamw, float32"}
_PLANNED |= {"powersgd1/adamw": "powersgd(1), adamw, factors"}


def shared_cores(link: str) -> dict[str, tuple[float, list[float]]]:
    """By method, how many times as fast as dense: predicted, and the medians of the runs.

    Args:
      link: ``"1gbit"`` or ``"100mbit"``.
    """
    net = cost_model.network(_LATENCY, link.replace("gbit", "Gbit").replace("mbit", "Mbit"))
    local = CPU._replace(sharing=_SHARING)
    # Exchanges at 1 %, optimizers at their default, as they were measured.
    few, more = (cost_model.Workload(_PARAMS, _PARAMS * x // 100, _WORKERS) for x in (1, 5))
    plan = plan_exchanges(few, net, local=local, codecs=["raw"])
    optimizers = plan_optimizers(more, net, local=local)
    steps = {row.name: row.step for row in plan.predictions}
    steps |= {f"{row.name}, {row.codec}": row.step for row in optimizers.predictions}
    measured = speedups(_WORKERS, _PARAMS, link)
    names = {name: _PLANNED.get(name, name) for name in LABELS["shared_cores"]}
    return {x: (steps["dense"] / steps[name], measured[x]) for x, name in names.items()}


def table_shared_cores() -> Rows:
    """The speeds over both links."""
    links = [shared_cores(link) for link in ("1gbit", "100mbit")]
    rows = []
    for method, shown in LABELS["shared_cores"].items():
        if method == "topk_a":
            continue
        digits, cells = 2 if method == "dense/adamw" else 1, [shown]
        for predicted, measured in (found[method] for found in links):
            cells += [f"{predicted:.{digits}f}", interval(measured, digits)]
        rows.append(cells)
    return rows


def table_rounds_by_link() -> Rows:
    """What `plan_rounds` recommends to four sites with a GPT of 124M parameters on GPUs."""
    rows = []
    for latency in ("20ms", "50ms", "150ms"):
        cells = []
        for bandwidth in ("1Gbit", "100Mbit", "20Mbit"):
            net = cost_model.network(latency, bandwidth)
            plan = plan_rounds(124_000_000, 4, net, compute=0.5, local=GPU)
            chosen = plan.recommended
            rounds = f", every={chosen.every}" if chosen.every > 1 else ""
            bits = ", `bits=(1, 3)`" if chosen.messages == CODES else ""
            overlapped = ", overlapped" if plan.overlaps else ""
            cells.append(f"`density={chosen.density:g}{rounds}`{bits}{overlapped}")
        rows.append([latency.replace("ms", " ms"), *cells])
    return rows


def table_gpu_links() -> Rows:
    """A dense step over a step of `sparse_adamw`, in float32 and in float16, by the host's card."""
    found: dict[tuple[str, int, int], list[str]] = {}
    for (model, hosts, gpus, _), steps in _predicted.cases():
        dense = min(steps[name].step for name in ("dense", "dense, overlapped"))
        half = steps["dense, float16, overlapped"].step
        pair = (number(x / steps["sparse_adamw"].step) for x in (dense, half))
        found.setdefault((model, gpus, hosts), []).append(" / ".join(pair))
    rows = [[model, f"{gpus}", f"{hosts}", *cells] for (model, gpus, hosts), cells in found.items()]
    return blank_repeats(rows)

"""Tables and a plot: ratios to the dense allreduce, bytes, and parts of a step."""

import statistics
from pathlib import Path
from typing import Any

from .._common import display
from .._common.timing import over, quartiles, times_as_fast
from ._session import REST

Row = dict[str, Any]
PARTS = ("rest", "sparsification", "communication")
_HEAD = (
    *("", "step ms", "quartiles", "speed-up", "quartiles", "CPU ms", "MB", "predicted", "off"),
    *("rest", "sparsif.", "communic.", "(unlim.)"),
)


def ratios(point: Row) -> list[float]:
    """How many times as fast as the baseline, in each round."""
    return over(point["baseline_seconds"], point["seconds"])


def predicted_bytes(point: Row) -> float | None:
    """Bytes a step receives by the library's meter; None where it can't know.

    Of an algorithm whose words depend on the data it is the mean of what its steps say,
    and that of the traced program otherwise.
    """
    if point["words"]:
        return 4 * statistics.mean(point["words"])
    return 4 * point["program_words"]["worst"] if point["program_words"] else None


def breakdown(point: Row, found: dict[str, list[Row]]) -> dict[str, float] | None:
    """Seconds of the parts of a step, as in Figure 8 of the Ok-Topk paper.

    ``rest``: the step of `dense/leaves` with one worker alone, that is applying the update.
    ``sparsification``: what the method's step of one worker takes beyond that.
    ``communication``: all else of the step. ``of_it_unlimited``: the part of it that is there
    without a limit of the link, too: the work of exchanging and merging, and waiting
    for each other.
    """
    where = point["workers"], point["params"]
    local, unlimited = (
        {
            row["method"]: statistics.median(row["seconds"])
            for row in rows
            if (row["workers"], row["params"]) == where
        }
        for rows in (found["local"], [row for row in found["points"] if row["link"] == "none"])
    )
    method = point["method"]
    if REST not in local or method not in local:
        return None
    own, rest = local[method], local[REST]
    return {
        "rest": rest,
        "sparsification": own - rest,
        "communication": statistics.median(point["seconds"]) - own,
        "of_it_unlimited": unlimited.get(method, float("nan")) - own,
    }


def tables(found: dict[str, list[Row]]) -> list[str]:
    """One table for each number of workers, number of parameters and link."""
    made = []
    for where, points in _groups(found).items():
        lines = [_cells(point, found) for point in points]
        made.append(display.table(_title(*where), _HEAD, lines))
        for row in found["links"]:
            if (row["workers"], row["params"], row["link"]) == where:
                # Without a limit no time grows with the size, if the machine is busy.
                bandwidth = row["bandwidth"]
                rate = f"{8e-9 * bandwidth:.3g} Gbit/s" if bandwidth else "no bandwidth"
                fit = f"{1e6 * row['latency']:.0f} us, {rate}, error {row['error']:.0%}"
                made[-1] += f"\nfitted: latency {fit}"
    return made


def _groups(found: dict[str, list[Row]]) -> dict[tuple[int, int, str], list[Row]]:
    groups: dict[tuple[int, int, str], list[Row]] = {}
    for point in found["points"]:
        where = point["workers"], point["params"], point["link"]
        groups.setdefault(where, []).append(point)
    return groups


def _title(workers: int, params: int, link: str) -> str:
    return f"P = {workers}, n = {params:,}, {'no limit' if link == 'none' else link}"


def _cells(point: Row, found: dict[str, list[Row]]) -> list[str]:
    low, middle, high = (1e3 * x for x in quartiles(point["seconds"]))
    received, predicted = statistics.mean(point["received"]), predicted_bytes(point)
    parts = breakdown(point, found) or {}
    return [
        point["method"],
        f"{middle:.1f}",
        f"{low:.1f} - {high:.1f}",
        *times_as_fast(point["baseline_seconds"], point["seconds"]),
        f"{1e3 * statistics.median(point['cpu_seconds']):.0f}",
        f"{received / 1e6:.3f}",
        "-" if predicted is None else f"{predicted / 1e6:.3f}",
        f"{received / predicted - 1:+.1%}" if predicted else "-",
        *(f"{1e3 * parts[x]:.0f}" if parts else "-" for x in (*PARTS, "of_it_unlimited")),
    ]


def draw(file: Path, found: dict[str, list[Row]], title: str) -> None:
    """Bars of step times for each number of workers, parameters and link, on one scale each.

    Methods whose step without an exchange was measured have their bar in three parts; the
    number at its end is the speed-up over the dense allreduce.
    """
    groups = _groups(found)
    links = list(dict.fromkeys(link for _, _, link in groups))
    rows = list(dict.fromkeys(where[:2] for where in groups))
    height = 0.8 + 0.26 * max(map(len, groups.values()))
    size = (1.5 + 4.2 * len(links), 0.7 + height * len(rows))
    figure, panels = display.panels(len(rows), len(links), size)
    for where, points in groups.items():
        axes = panels[rows.index(where[:2])][links.index(where[2])]
        for point in points[::-1]:
            middle, name = 1e3 * statistics.median(point["seconds"]), point["method"]
            parts, left = breakdown(point, found) or {"communication": middle / 1e3}, 0.0
            for part, color in zip(PARTS, ("0.45", "tab:orange", "tab:blue"), strict=True):
                # Differences of medians: noise may make one of them negative.
                width = max(0.0, 1e3 * parts.get(part, 0.0))
                axes.barh(name, width, left=left, color=color, label=part)
                left += width
            text = f" {statistics.median(ratios(point)):.2f}x"
            axes.annotate(text, (left, name), fontsize=7, va="center")
        axes.set_title(_title(*where), fontsize=9)
        axes.set_xlabel("ms a step", fontsize=8)
        axes.margins(x=0.15)
        axes.tick_params(labelsize=7)
    handles, labels = panels[0][0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=4, fontsize=8)
    display.save(figure, file, title)

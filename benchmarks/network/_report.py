"""Tables and a plot: ratios to the dense allreduce, bytes, and parts of a step."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._common import display
from .._common.timing import quartiles
from ._methods import REST

Row = dict[str, Any]
PARTS = ("rest", "sparsification", "communication")


def ratios(point: Row) -> list[float]:
    """How many times as fast as the baseline, in each round."""
    pairs = zip(point["baseline_seconds"], point["seconds"], strict=True)
    return [base / own for base, own in pairs]


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
    same = [row for row in found["local"] if _at(row) == _at(point)]
    local = {row["method"]: statistics.median(row["seconds"]) for row in same}
    if REST not in local or point["method"] not in local:
        return None
    own, rest = local[point["method"]], local[REST]
    step = statistics.median(point["seconds"])
    unlimited = [
        statistics.median(row["seconds"])
        for row in found["points"]
        if (_at(row), row["link"], row["method"]) == (_at(point), "none", point["method"])
    ]
    return {
        "rest": rest,
        "sparsification": own - rest,
        "communication": step - own,
        "of_it_unlimited": unlimited[0] - own if unlimited else float("nan"),
    }


def tables(found: dict[str, list[Row]]) -> list[str]:
    """One table for each number of workers, number of parameters and link."""
    groups: dict[tuple, list[Row]] = {}
    for point in found["points"]:
        groups.setdefault((*_at(point), point["link"]), []).append(point)
    return [_table(points, found) for points in groups.values()]


def _table(points: Sequence[Row], found: dict[str, list[Row]]) -> str:
    first = points[0]
    link = "no limit" if first["link"] == "none" else first["link"]
    lines = [
        f"P = {first['workers']}, n = {first['params']:,}, {link}",
        f"{'':24} {'step ms':>9} {'quartiles':>17} {'speed-up':>9} {'quartiles':>13} {'CPU ms':>7}"
        f" {'MB':>8} {'predicted':>9} {'off':>6} {'rest':>6} {'sparsif.':>8} {'communic.':>9}"
        f" {'(unlim.)':>8}",
    ]
    for point in points:
        low, middle, high = (1e3 * x for x in quartiles(point["seconds"]))
        slow, ratio, fast = quartiles(ratios(point))
        received, predicted = statistics.mean(point["received"]), predicted_bytes(point)
        off = f"{received / predicted - 1:+.1%}" if predicted else "-"
        meter = f"{predicted / 1e6:.3f}" if predicted is not None else "-"
        parts = breakdown(point, found)
        keys = ("rest", "sparsification", "communication", "of_it_unlimited")
        cells = ["-" if parts is None else f"{1e3 * parts[key]:.0f}" for key in keys]
        lines.append(
            f"{point['method']:24} {middle:9.1f} {f'{low:.1f} - {high:.1f}':>17} {ratio:9.2f} "
            f"{f'{slow:.2f} - {fast:.2f}':>13} "
            f"{1e3 * statistics.median(point['cpu_seconds']):7.0f} "
            f"{received / 1e6:8.3f} {meter:>9} {off:>6} "
            f"{cells[0]:>6} {cells[1]:>8} {cells[2]:>9} {cells[3]:>8}"
        )
    fitted = [
        row for row in found["links"] if (_at(row), row["link"]) == (_at(first), first["link"])
    ]
    for row in fitted:
        # Without a limit no time grows with the size, if the machine is busy.
        rate = f"{8e-9 * row['bandwidth']:.3g} Gbit/s" if row["bandwidth"] else "no bandwidth"
        lines.append(
            f"fitted: latency {1e6 * row['latency']:.0f} us, {rate}, error {row['error']:.0%}"
        )
    return "\n".join(lines)


def draw(file: Path, found: dict[str, list[dict[str, Any]]], title: str) -> None:
    """Bars of step times for each number of workers, parameters and link, on one scale each.

    Methods whose step without an exchange was measured have their bar in three parts; the
    number at its end is the speed-up over the dense allreduce.
    """
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for point in found["points"]:
        groups.setdefault((point["workers"], point["params"], point["link"]), []).append(point)
    links = list(dict.fromkeys(link for _, _, link in groups))
    rows = list(dict.fromkeys((workers, params) for workers, params, _ in groups))
    height = 0.8 + 0.26 * max(map(len, groups.values()))
    size = (1.5 + 4.2 * len(links), 0.7 + height * len(rows))
    figure, panels = display.panels(len(rows), len(links), size)
    for row, (workers, params) in enumerate(rows):
        for column, link in enumerate(links):
            axes = panels[row][column]
            points = groups.get((workers, params, link), [])
            _bars(axes, points[::-1], found)
            name = "no limit" if link == "none" else link
            axes.set_title(f"P = {workers}, n = {params / 1e6:g}M, {name}", fontsize=9)
    handles, labels = panels[0][0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(title, fontsize=10)
    display.save(figure, file)


def _bars(axes, points: list[dict[str, Any]], found) -> None:
    longest = 0.0
    for y, point in enumerate(points):
        low, middle, high = (1e3 * x for x in quartiles(point["seconds"]))
        parts = breakdown(point, found)
        if parts is None:
            axes.barh(y, middle, color="0.75", label="step, parts not measured")
        else:
            left = 0.0
            for part, color in zip(PARTS, ("0.45", "tab:orange", "tab:blue"), strict=True):
                # Differences of medians: noise may make one of them negative.
                width = max(0.0, 1e3 * parts[part])
                axes.barh(y, width, left=left, color=color, label=part)
                left += width
        axes.plot([low, high], [y, y], color="black", linewidth=1)
        ratio = statistics.median(ratios(point))
        axes.annotate(f" {ratio:.2f}x", (max(high, middle), y), fontsize=7, va="center")
        longest = max(longest, high, middle)
    axes.set_yticks(range(len(points)), [point["method"] for point in points], fontsize=7)
    axes.set_xlim(0, 1.15 * longest)
    axes.set_xlabel("ms a step", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)


def _at(row: Row) -> tuple[int, int]:
    return row["workers"], row["params"]

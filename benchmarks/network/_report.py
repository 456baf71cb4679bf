"""Tables and a plot: ratios to the dense allreduce, bytes, and parts of a step."""

import statistics
from pathlib import Path
from typing import Any

from .._common import display
from .._common.display import grouped
from .._common.timing import quartiles, times_as_fast

Row = dict[str, Any]
_PARTS = ("rest", "sparsification", "communication", "of_it_unlimited")
_WHERE = ("workers", "params", "link")
# With one worker alone, this only applies the update.
REST = "dense/leaves"


def predicted_bytes(point: Row) -> float | None:
    """Bytes that a step receives according to the library; None if that is not known.

    If the words of an algorithm depend on the data, it is the mean of what its steps report, and
    otherwise the words of the traced program.
    """
    if point["words"]:
        return 4 * statistics.mean(point["words"])
    return 4 * point["program_words"]["worst"] if point["program_words"] else None


def breakdown(point: Row, found: dict[str, list[Row]]) -> dict[str, float] | None:
    """Seconds of the parts of a step, as in Figure 8 of the Ok-Topk paper.

    ``rest``: the step of `dense/leaves` with one worker alone, that is, applying the update.
    ``sparsification``: the further time of the method's step with one worker.
    ``communication``: the rest of the step. ``of_it_unlimited``: the part of it that remains
    without a limit of the link: exchanging, merging, and waiting for other workers.
    """
    where = tuple(point[key] for key in _WHERE[:2])
    local, unlimited = (
        {row["method"]: statistics.median(row["seconds"]) for row in of.get(where, ())}
        for of in (
            grouped(found["local"], *_WHERE[:2]),
            grouped((row for row in found["points"] if row["link"] == "none"), *_WHERE[:2]),
        )
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


def show(found: dict[str, list[Row]]) -> None:
    """Prints a table for each number of workers, number of parameters and link."""
    for where, points in grouped(found["points"], *_WHERE).items():
        display.show_rows(_title(*where), [_shown(point, found) for point in points])
        for row in grouped(found["links"], *_WHERE).get(where, ()):
            # Without a limit no time grows with the size, if the machine is busy.
            rate = f"{8e-9 * row['bandwidth']:.3g} Gbit/s" if row["bandwidth"] else "no bandwidth"
            fit = f"{1e6 * row['latency']:.0f} us, {rate}, error {row['error']:.0%}"
            print(f"fitted: latency {fit}", flush=True)


def _title(workers: int, params: int, link: str) -> str:
    return f"P = {workers}, n = {params:,}, {'no limit' if link == 'none' else link}"


def _shown(point: Row, found: dict[str, list[Row]]) -> Row:
    """A row of the table; docs/network.md explains the columns."""
    received, predicted = statistics.mean(point["received"]), predicted_bytes(point)
    parts = breakdown(point, found) or {}
    row = {"": point["method"], "step ms": quartiles([1e3 * x for x in point["seconds"]])}
    row["speed-up"] = times_as_fast(point["baseline_seconds"], point["seconds"])
    row["CPU ms"] = 1e3 * statistics.median(point["cpu_seconds"])
    row |= {"MB": received / 1e6, "predicted": predicted and predicted / 1e6}
    row["off"] = f"{received / predicted - 1:+.1%}" if predicted else "-"
    for name, part in zip(("rest", "sparsif.", "communic.", "(unlim.)"), _PARTS, strict=True):
        row[name] = 1e3 * parts[part] if parts else None
    return row


def draw(file: Path, found: dict[str, list[Row]], title: str) -> None:
    """Bars of step times for each number of workers, parameters and link, on one scale each.

    Methods whose step without an exchange was measured have a bar of three parts; the number at
    its end is the speed-up over the dense allreduce.
    """
    groups = grouped(found["points"], *_WHERE)
    links = list(grouped(found["points"], "link"))
    rows = list(grouped(found["points"], "workers", "params"))
    height = 0.8 + 0.26 * max(map(len, groups.values()))
    size = (1.5 + 4.2 * len(links), 0.7 + height * len(rows))
    figure, panels = display.panels(len(rows), len(links), size)
    for where, points in groups.items():
        axes = panels[rows.index(where[:2])][links.index(where[2])]
        for point in points[::-1]:
            whole = statistics.median(point["seconds"])
            parts, left = breakdown(point, found) or {"communication": whole}, 0.0
            for part, color in zip(_PARTS[:3], ("0.45", "tab:orange", "tab:blue"), strict=True):
                # Differences of medians: noise may make one of them negative.
                width = max(0.0, 1e3 * parts.get(part, 0.0))
                axes.barh(point["method"], width, left=left, color=color, label=part)
                left += width
            gain = times_as_fast(point["baseline_seconds"], point["seconds"])[1]
            axes.annotate(f" {gain:.2f}x", (left, point["method"]), fontsize=7, va="center")
        axes.set(title=_title(*where), xlabel="ms a step")
        axes.margins(x=0.15)
    handles, labels = panels[0][0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(unique.values(), unique.keys(), loc="outside lower center", ncols=4, fontsize=8)
    display.save(figure, file, title)

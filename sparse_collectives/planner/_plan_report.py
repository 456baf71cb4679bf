"""A plan as text, as JSON and as a picture."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from sparse_collectives.cost_model import ALGORITHMS, _gpu
from sparse_collectives.cost_model._types import BYTES_PER_WORD, Cost
from sparse_collectives.planner._optimizers import TIE, Optimizers
from sparse_collectives.planner._planner import MARGIN, LocalCost, Plan, Prediction

# The most names in a list of ties.
_NAMED = 5
# Ticks of each decade of a short logarithmic axis.
_TICKS = (1, 1.5, 2, 3, 4, 5, 7)


def text(plan: Plan, optimizers: Optimizers | None = None, *, all_codecs: bool = False) -> str:
    """Two tables of at most 100 columns, fastest first, and the recommendation."""
    rows = plan.predictions if all_codecs else best_codecs(plan)
    lines = [*_assumptions(plan), "", *_table(plan, ("algorithm", "codec"), rows)]
    if optimizers is not None:
        names = ("whole optimizer", "messages")
        lines += ["", *_table(plan, names, optimizers.predictions)]
    lines.append("")
    if plan.workload.inner_size > 1:
        lines.append("words and MB are those between the nodes")
    if plan.crowded:
        lines.append(f"left out, as gaps are too long for them here: {', '.join(plan.crowded)}")
    if plan.unknown:
        lines.append(f"left out, without a number of steps: {', '.join(plan.unknown)}")
    lines.append(recommendation(plan))
    level = _level(plan)
    if level:
        lines.append(f"a tie with {plan.recommended.name}, within {TIE - 1:.0%}: {level}")
    return "\n".join(lines if optimizers is None else [*lines, *_of_optimizers(optimizers)])


def _table(plan: Plan, names: tuple[str, str], rows: Sequence[Prediction]) -> list[str]:
    """The lines of a table."""
    head = [*names, "step ms", "steps", "vs dense", "exchange", "local", "hidden", "words", "MB"]
    body = [
        [
            row.name,
            row.codec,
            _ms(row.step),
            f"{row.steps:.2f}x",
            f"{row.speedup:.2f}x",
            _ms(row.exchange),
            _ms(row.local),
            _ms(row.hidden),
            _short(row.estimate.expected.words),
            f"{row.estimate.expected.words * BYTES_PER_WORD / 1e6:,.1f}",
        ]
        for row in rows
    ]
    table = [head, *body]
    unused = [
        name for name, used in (("hidden", plan.compute), ("steps", plan.to_loss)) if not used
    ]
    for name in unused:
        column = head.index(name)
        for line in table:
            del line[column]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for line in table:
        cells = [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def recommendation(plan: Plan) -> str:
    """One line: the choice, why, and what to write."""
    chosen = plan.recommended
    if chosen.dense:
        return f"Use dense here, as {plan.reason}: {chosen.code}"
    return f"Use {chosen.name} ({chosen.codec}), {plan.reason}: {chosen.code}"


def _level(plan: Plan) -> str:
    """The algorithms that the model cannot separate from the recommended one, each once."""
    chosen = plan.recommended
    most = TIE * chosen.to_loss
    near = [row.name for row in plan.predictions if chosen.to_loss / TIE <= row.to_loss <= most]
    names = [name for name in dict.fromkeys(near) if name != chosen.name]
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _of_optimizers(found: Optimizers) -> list[str]:
    """The recommended optimizer, and others with as short a step."""
    chosen, lines = found.recommended, []
    if found.others:
        named = [
            f"{row.name} ({row.codec}), {row.to_loss / chosen.to_loss:.2f} of its step"
            for row in found.others
        ]
        lines.append(f"no longer than {chosen.name}, to losses of their own: {'; '.join(named)}")
    if not chosen.dense:
        reason = f"{found.ratio:.2f} times as fast as a dense AdamW"
    elif found.ratio is None:
        reason = "there is nothing to compare it with"
    else:
        reason = f"sparse_adamw is only {found.ratio:.2f} times as fast"
    return [*lines, f"As a whole optimizer {chosen.name}, {reason}: {chosen.code}"]


def best_codecs(plan: Plan) -> list[Prediction]:
    """The exact encoding and the fastest encoding of each algorithm."""
    chosen: list[Prediction] = []
    for row in plan.predictions:
        if row.codec == "raw" or all(other.name != row.name for other in chosen):
            chosen.append(row)
    return chosen


def _assumptions(plan: Plan) -> list[str]:
    load, net = plan.workload, plan.network
    lines = [
        f"n = {load.size:,}, k = {load.selected:,} (density {load.density:.4g}),"
        f" P = {load.workers:,}"
        + (f", {load.inner_size} in a node" if load.inner_size > 1 else ""),
        f"network: latency {net.latency * 1e6:.4g} us,"
        f" {_gigabits(net.seconds_per_word):.4g} Gbit/s a worker",
    ]
    if load.inner_size > 1:
        lines[-1] += (
            f"; in a node {net.inner_latency * 1e6:.4g} us,"
            f" {_gigabits(net.inner_seconds_per_word):.4g} Gbit/s"
        )
    lines.append(
        f"worker: {_local(plan.local)}; computation {_ms(plan.compute) if plan.compute else 0} ms"
    )
    return lines


def _local(local: LocalCost) -> str:
    given = (
        f"selection {local.select * 1e9:.3g} ns a parameter, merging {local.merge * 1e9:.3g} ns "
        "a pair"
    )
    if local.sharing > 1:
        given += f", {local.sharing:g} workers on a core"
    if not local.gpu:
        return given
    counted = (
        f"a GPU, {_gpu.LAUNCH * 1e6:.3g} us a launch and {_gpu.BANDWIDTH / 1e12:.3g} TB/s "
        "(an H200 took 0.8 to 1.3 times as long)"
    )
    return f"{counted}; {given}" if local.select or local.merge else counted


def as_dict(plan: Plan, optimizers: Optimizers) -> dict[str, Any]:
    """For a JSON file: the inputs, every prediction in seconds and words, and the choices."""

    def cost(value: Cost) -> dict[str, float]:
        return {
            "messages": value.messages,
            "words": value.words,
            "path_words": value.path_words,
            "inner_messages": value.inner_messages,
            "inner_words": value.inner_words,
            "pairs": value.pairs,
        }

    def prediction(row: Prediction) -> dict[str, Any]:
        bounds = {name: cost(value) for name, value in row.estimate._asdict().items()}
        return {**row._asdict(), "estimate": bounds}

    load = plan.workload
    return {
        "size": load.size,
        "selected": load.selected,
        "workers": load.workers,
        "inner_size": load.inner_size,
        "overlap": load.overlap._asdict() if load.overlap else None,
        "network": plan.network._asdict(),
        "local": plan.local._asdict(),
        "compute": plan.compute,
        "margin": MARGIN,
        "predictions": [prediction(row) for row in plan.predictions],
        "recommended": prediction(plan.recommended),
        "optimizers": [prediction(row) for row in optimizers.predictions],
        "recommended_optimizer": prediction(optimizers.recommended),
        "left_out": list(plan.crowded),
        "to_loss": plan.to_loss,
        "unknown": list(plan.unknown),
        "reason": plan.reason,
    }


def plot(file: str, plan_for: Callable[[int], Plan], workers: int, inner: int) -> None:
    """Draws the step of each algorithm, in its fastest encoding, over P.

    Args:
      file: the name of the PNG file.
      plan_for: returns the plan for a number of workers.
      workers: P of the plan, which the picture marks.
      inner: workers in a node; every P is a multiple of it.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: the file cannot be written, or its name is not the name of a picture.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter, NullLocator
    except ImportError as error:
        raise ImportError(
            f"--plot {file} is drawn by matplotlib, which cannot be imported ({error}). Install it "
            "with: pip install 'sparse-collectives[examples]'"
        ) from error

    nodes = max(16, 4 * workers // inner)
    counts = sorted(
        {inner << i for i in range(0 if inner > 1 else 1, nodes.bit_length())} | {workers}
    )
    # An algorithm keeps its color and marker whatever else is drawn.
    order = list(ALGORITHMS)
    lines: dict[str, list[tuple[int, float]]] = {}
    for count in counts:
        for row in plan_for(count).predictions:
            points = lines.setdefault(row.name, [])
            # Fastest first: the other encodings of an algorithm come later.
            if row.step > 0 and (not points or points[-1][0] != count):
                points.append((count, 1e3 * row.step))
    figure = Figure(figsize=(9.5, 5.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    # Ordered by their right ends, so that the legend is easy to follow.
    ranked = sorted(lines.items(), key=lambda item: -item[1][-1][1] if item[1] else math.inf)
    for name, points in ranked:
        i = order.index(name)
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=ALGORITHMS[name].colour,
            # Equal costs coincide: a thick line shows under a thin one.
            linewidth=3 if name == "dense" else 1.5,
            marker="os^D"[i % 4],
            markersize=4,
            zorder=2 if name == "dense" else 3,
        )
    axes.axvline(workers, color="0.7", linewidth=1, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.xaxis.set_minor_locator(NullLocator())
    bottom, top = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=_TICKS if top < 100 * bottom else (1,)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("workers P")
    axes.set_ylabel("predicted step, ms")
    plan = plan_for(workers)
    # The assumptions decide the order of the lines, so the picture shows all of them.
    axes.set_title("\n".join([*_assumptions(plan), "fastest encoding of each"]), fontsize=9)
    axes.grid(True, which="both", alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=8)
    try:
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--plot must be a file that can be written, such as plan.png, got {file}: {error}"
        ) from error


def _ms(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _short(value: float) -> str:
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.2f}{suffix}"
    return f"{value:.0f}"


def _gigabits(seconds_per_word: float) -> float:
    return 8 * BYTES_PER_WORD / seconds_per_word / 1e9 if seconds_per_word else math.inf

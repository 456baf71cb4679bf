"""The programs of the gallery."""

from __future__ import annotations

import statistics

from matplotlib.figure import Figure

from ..tables._data import by, read
from ._style import DENSE, LOSS, OURS, SMALL, Line, color_of, end_at, name_ends, name_points

# The program of a picture, and the name of its y axis.
PICTURES = {
    "classifier": ("An image classifier", LOSS),
    "language": ("A language model", LOSS),
    "lora": ("LoRA", LOSS),
    "ppo": ("PPO", "steps of an episode"),
}
NAMES = {
    "dense": "dense()",
    "powersgd(2)": "powersgd(2)",
    "quantized()": "quantized()",
    "after": "after the change",
}


def results_against_words(figure: Figure, picture: str) -> None:
    """A dot for each seed of an exchange, a mark for the mean; before the change a line."""
    program, said = PICTURES[picture]
    found, axes = by(read("gallery.json")["rows"], "program", "exchange"), figure.subplots()
    before, points = statistics.mean(found[program, "before"]["value"]), []
    axes.axhline(before, color=DENSE, linestyle="--", linewidth=1)
    for exchange, name in NAMES.items():
        row = found[program, exchange]
        color = {"after": OURS, "quantized()": "#be185d"}.get(exchange) or color_of(name)
        words, mean = (statistics.mean(row[key]) for key in ("words", "value"))
        axes.plot([words] * len(row["value"]), row["value"], ".", color=color, alpha=0.5)
        axes.plot([words], [mean], "D", color=color, markersize=5)
        points.append((name, color, words, mean))
    axes.set_xscale("log")
    axes.margins(x=0.25, y=0.15)
    axes.set_xlabel("words that a worker receives in a step")
    axes.set_ylabel(said)
    name_points(axes, points)
    place = axes.get_yaxis_transform()
    axes.text(0.01, before, "before", color=DENSE, fontsize=SMALL, va="bottom", transform=place)


def accuracy_of_two_sites(figure: Figure) -> None:
    """The accuracy by round, of each site together with the other one and alone."""
    axes, lines, rows = figure.subplots(), [], read("two_sites.json")["rows"]
    for alone, color in ((False, OURS), (True, DENSE)):
        for site, style in (("berlin", "-"), ("paris", ":")):
            runs = [x["accuracy"] for x in rows if x["site"] == site and x["alone"] == alone]
            mean = [100 * statistics.mean(now) for now in zip(*runs, strict=True)]
            rounds = range(1, len(mean) + 1)
            axes.plot(rounds, mean, style, color=color)
            line: Line = (f"{site}, {'alone' if alone else 'together'}", color, rounds, mean)
            lines.append(line)
    axes.set(xlim=(1, 25), xticks=range(5, 21, 5))
    axes.set_ylabel("test accuracy, %")
    end_at(axes, 20, "round of ten steps")
    name_ends(axes, lines)

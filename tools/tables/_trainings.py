"""Fill-in, balance, selectors and counts in trainings: `benchmarks.training`."""

import functools
import operator
from typing import Any

from ._data import LABELS, Rows, blank_repeats, by, cells, code, interval, percent, read

Row = dict[str, Any]
# Columns and rows of the trainings.
FILLED = [("images", 16), ("images", 32), ("text", 16), ("text", 32)]
PARTS = {
    "mean": "mean",
    "first 10 % of the steps": "first_tenth",
    "last 25 % of the steps": "last_quarter",
}
LOSSES = ("{validation_before[loss]:.2f}", "{validation_after[loss]:.2f}")


# Fill-in.


def table_fill_in_uniform() -> Rows:
    """Uniform indices, next to the formula."""
    texts = ("{expected:,.1f}", "{mean:,.1f}", "{standard_error:.1f}", "{errors_off:.1f}")
    one, other = (table["rows"] for table in read("fill_in.json")["uniform"])
    pairs = zip(one, other, strict=True)
    return [[*cells(x, "{workers}", *texts), *cells(y, *texts)] for x, y in pairs]


def table_fill_in_trainings() -> Rows:
    """The union in trainings, a column for each."""
    runs = [run for task in read("fill_in.json")["runs"] for run in task]
    assert [(run["run"], run["workers"]) for run in runs] == FILLED
    texts = {f"union / n, {said}": f"{{union[{part}]:.1%}}" for said, part in PARTS.items()}
    texts["union / k, mean"] = "{union_of_k:.1f}"
    texts["union / n by the uniform formula"] = "{uniform:.1%}"
    rows = [[said, *(cells(run, text)[0] for run in runs)] for said, text in texts.items()]
    shares = (f"{run['union']['mean'] / run['uniform']:.2f}" for run in runs)
    rows.append(["measured / uniform, mean", *shares])
    papers = (percent(run["paper"], 1) if run["paper"] else "" for run in runs)
    rows.append(["union / n in the paper, mean", *papers])
    for said, text in zip(("first", "last"), LOSSES, strict=True):
        rows.append([f"{said} validation loss", *(cells(run, text)[0] for run in runs)])
    return rows


def table_fill_in_predicted() -> Rows:
    """Predictions of the cost model from unions of fewer workers."""
    both, rows = read("fill_in.json")["predictions"], []
    first, *others = both[0]["same_run"]
    other = next(iter(both[0]["other_runs"]))
    lines = {"measured": ["measured"], "uniform formula": ["uniform"]}
    lines |= {f"from {first} of the {both[0]['workers']} workers": ["same_run", first]}
    lines |= {f"from {p}": ["same_run", p] for p in others}
    lines |= {f"from the run with {other} workers": ["other_runs", other]}
    lines |= {"the same at each step, then the mean": ["other_runs_by_step", other]}
    for name, keys in lines.items():
        values = [functools.reduce(operator.getitem, keys, table) for table in both]
        offs = [x / table["measured"] - 1 for x, table in zip(values, both, strict=True)]
        shown = [f"{100 * x:+.0f} %" if name != "measured" else "" for x in offs]
        rows.append([name, percent(values[0], 1), shown[0], percent(values[1], 1), shown[1]])
    return rows


# Regions and balance.


def _share(value: float, digits: int = 1) -> str:
    """Fewer digits where there is more."""
    return percent(value, 0 if value >= 0.1 else digits if value < 0.05 else 1)


def _regions(file: str) -> dict[tuple[str, int], Rows]:
    """Rows of `benchmarks.training.regions`: two for each input and P, hashed and balanced."""
    found = by(read(file)["rows"], "regions", "case", "workers")
    texts = ("{mass:.3f}", "{wait}", "{words:.2f}")
    rows: dict[tuple[str, int], Rows] = {}
    for setting in dict.fromkeys(key[1:] for key in found):
        for way in ("hashed", "balanced"):
            row = found[way, *setting]
            mass, wait, words = cells(row, *texts)
            missing = [_share(row["missing"]), percent(row["missing_worst"])]
            shown = [way, *missing, mass, _share(row["overflow"], 2), wait, words]
            rows.setdefault(setting, []).append(shown)
    return rows


def table_regions() -> Rows:
    """Hashed regions next to balanced ones."""
    found = _regions("regions.json")
    labels, counts = LABELS["regions"].items(), sorted({p for _, p in found})
    rows = [[x, str(p), *row] for case, x in labels for p in counts for row in found[case, p]]
    return blank_repeats(rows, 2)


def table_regions_recorded() -> Rows:
    """Regions for recorded trainings."""
    found = _regions("regions_recorded.json")
    return blank_repeats([[case, *row] for (case, _), rows in found.items() for row in rows])


def table_regions_large() -> Rows:
    """Regions for many workers."""
    found = {case: rows for (case, _), rows in _regions("regions_large.json").items()}
    labels = LABELS["regions_large"].items()
    return blank_repeats([[shown, *row] for case, shown in labels for row in found[case]])


def _recorded() -> list[tuple[str, Row]]:
    """Recorded runs by their names; a scaled layer is named by the benchmark."""
    found = []
    for run in read("load_balance.json")["runs"]:
        layer, times, factor = run["case"].partition(" x ")
        found.append((f"{run['run']}, `{layer}` x {factor}" if times else run["run"], run))
    return found


def table_concentrations() -> Rows:
    """Where selected entries are from."""
    rows = []
    for name, run in _recorded():
        layers = sorted(run["layers"].items(), key=lambda item: -item[1]["selected"])
        parts = []
        for layer, share in layers[: 1 if layers[0][1]["selected"] > 0.6 else 2]:
            of_all = percent(share["parameters"], 0 if share["parameters"] >= 0.1 else 1)
            parts.append(f"{percent(share['selected'])} `{layer}` ({of_all} of n)")
        rows.append([name, ", ".join(parts), *cells(run, *LOSSES)])
    return rows


def table_split() -> Rows:
    """Entries that an owner receives, for equal and for balanced regions."""
    rows = []
    for name, run in _recorded():
        at = by(run["rows"], "workers", "regions")
        for p in dict.fromkeys(p for p, _ in at):
            line = [name, str(p)]
            for row in (at[p, "equal"], at[p, "balanced"]):
                received = (row["received"], row["received_of_k"])
                line += [f"{x:.2f}" if x < 10 else f"{x:.1f}" for x in received]
                line.append(_share(row["overflow"]))
            rows.append(line)
    return blank_repeats(rows)


def table_balancing() -> tuple[Rows, Rows]:
    """Entries of each worker before and after the balancing; and delivered entries, and words."""
    modes: tuple[Rows, Rows] = ([], [])
    for name, run in _recorded():
        for row in sorted(run["rows"], key=lambda row: row["regions"] != "equal"):
            setting, of = [name, *cells(row, "{regions}", "{workers}")], row["balance"]
            each = [of[mode] for mode in ("never", "auto", "always")]
            before = cells(row, "{over_trigger:.0%}", "{before:.2f}")
            modes[0].append([*setting, *before, *(f"{x['after']:.2f}" for x in each)])
            delivered = [percent(x["delivered"], 0 if x["delivered"] > 0.9995 else 1) for x in each]
            modes[1].append([*setting, *delivered, *(f"{x['words_of_bound']:.2f}" for x in each)])
    return blank_repeats(modes[0], 2), blank_repeats(modes[1], 2)


# Selectors and counts.


def table_selector_quality() -> Rows:
    """Each selector next to the exact top-k."""
    runs = [run["selectors"] for run in read("select_quality.json")["runs"]]

    def line(row: Row) -> list[str]:
        overlap, worst = (row["overlap"][of] for of in ("mean", "worst"))
        shown = percent(overlap, 1 if 0.985 < overlap < 0.9995 else 0)
        if overlap > 0.9995 and worst < 1:
            shown = f"{percent(overlap, 2)} (worst {percent(worst, 2)})"
        passed = [row["passed"][part] for part in ("first_tenth", "last_quarter")]
        return [*(f"{x:.2f}" if x < 10 else f"{x:.1f}" for x in passed), shown]

    labels = {name: LABELS["selector_quality"].get(name, code(name)) for name in runs[0]}
    return [
        [shown, *(x for run in runs for x in line(run[name]))] for name, shown in labels.items()
    ]


def table_missing_rows() -> Rows:
    """Rows of the LSTM without a selected entry."""
    rates = read("select_quality.json")["runs"][1]["missing_rows"]["accumulator"]
    rows = [["the paper: LSTM, words of WikiText-2", "96 %", "", "", "", "26 %"]]
    for shown, (selector, of) in LABELS["missing_rows"].items():
        rows.append([shown, *(percent(x, 0 if x > 0.005 else 2) for x in rates[selector][of])])
    return rows


def table_paper_counts() -> Rows:
    """Both rules of the paper's thresholds in trainings of their own, over the seeds."""
    rows = []
    for run in read("paper_counts.json"):
        task = LABELS["paper_counts"][run["task"]]
        line = [f"{task}, k = {run['k']:,}", str(run["period"]), run["rule"]]
        for of in (run["local"], run["global"]):
            for values in (of["deviation"], of["after"]):
                line.append(f"{interval([100 * value for value in values], 0)} %")
            line.append(interval(of["mean"], 2))
        rows.append(line)
    return blank_repeats(rows, 2)

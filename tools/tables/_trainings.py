"""Fill-in, balance, selectors and counts in trainings: `benchmarks.training`."""

import functools
import operator
from typing import Any

from ._data import LABELS, Rows, blank_repeats, by, cells, code, interval, percent, read

Row = dict[str, Any]
# What a table has of each way to cut the regions.
ALL = ("missing", "mass", "overflow", "wait", "words")
LOSSES = "{validation_before[loss]:.2f} to {validation_after[loss]:.2f}"


# Fill-in.


def table_fill_in_uniform() -> Rows:
    """Uniform indices, beside the formula."""
    texts = ("{expected:,.1f}", "{mean:,.1f}", "{standard_error:.1f}", "{errors_off:.1f}")
    one, other = (table["rows"] for table in read("fill_in.json")["uniform"])
    pairs = zip(one, other, strict=True)
    return [[*cells(x, "{workers}", *texts), *cells(y, *texts)] for x, y in pairs]


def table_fill_in_trainings() -> Rows:
    """The union in trainings."""
    shares = (f"{{union[{part}]:.1%}}" for part in ("mean", "first_tenth", "last_quarter"))
    texts = ("{run}, {density:.0%}", "{workers}", *shares, "{union_of_k:.1f}", "{uniform:.1%}")
    rows = []
    for run in (run for task in read("fill_in.json")["runs"] for run in task):
        of_uniform = f"{run['union']['mean'] / run['uniform']:.2f}"
        paper = percent(run["paper"], 1) if run["paper"] else ""
        rows.append([*cells(run, *texts), of_uniform, paper, *cells(run, LOSSES)])
    return blank_repeats(rows)


def table_fill_in_predicted() -> Rows:
    """What the cost model makes of unions of fewer workers."""
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


def _cell(row: Row, column: str) -> str:
    value = row[column]
    if column == "missing":
        return f"{_share(value)} ({100 * row['missing_worst']:.0f})"
    if column == "overflow":
        return _share(value, 2)
    return f"{value:.{ {'mass': 3, 'wait': 0}.get(column, 2) }f}"


def _regions(
    file: str, hashed: tuple[str, ...] = ALL, balanced: tuple[str, ...] = ALL
) -> dict[tuple[str, int], list[str]]:
    """Cells of `benchmarks.training.regions`: of each input and P those of both ways."""
    found = by(read(file)["rows"], "regions", "case", "workers")
    columns = [("hashed", x) for x in hashed] + [("balanced", x) for x in balanced]
    settings = dict.fromkeys(key[1:] for key in found)
    return {each: [_cell(found[way, *each], x) for way, x in columns] for each in settings}


def table_regions() -> Rows:
    """Hashed regions beside balanced ones."""
    found = _regions("regions.json")
    labels, counts = LABELS["regions"].items(), sorted({p for _, p in found})
    return blank_repeats([[x, str(p), *found[case, p]] for case, x in labels for p in counts])


def table_regions_recorded() -> Rows:
    """Those of recorded trainings."""
    columns = ("missing", "overflow", "words"), ("missing", "mass", "overflow", "words")
    return [[case, *row] for (case, _), row in _regions("regions_recorded.json", *columns).items()]


def table_regions_large() -> Rows:
    """Those of many workers."""
    found = _regions("regions_large.json", ("missing", "overflow", "wait", "words"))
    rows = {case: row for (case, _), row in found.items()}
    return [[shown, *rows[case]] for case, shown in LABELS["regions_large"].items()]


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
        rows.append([name, ", ".join(parts), *cells(run, LOSSES)])
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


def table_balancing() -> Rows:
    """Entries of each worker before and after the balancing."""
    texts, rows = ("{regions}", "{workers}", "{before:.2f}", "{over_trigger:.0%}"), []
    for name, run in _recorded():
        for row in sorted(run["rows"], key=lambda row: row["regions"] != "equal"):
            line = [name, *cells(row, *texts)]
            for of in (row["balance"][mode] for mode in ("never", "auto", "always")):
                delivered = percent(of["delivered"], 0 if of["delivered"] > 0.9995 else 1)
                line += [f"{of['after']:.2f}", delivered, f"{of['words_of_bound']:.2f}"]
            rows.append(line)
    return blank_repeats(rows, 2)


# Selectors and counts.


def table_selector_quality() -> Rows:
    """Each selector beside the exact top-k."""
    runs = [run["selectors"] for run in read("select_quality.json")["runs"]]

    def line(row: Row) -> list[str]:
        overlap, worst = (row["overlap"][of] for of in ("mean", "worst"))
        shown = percent(overlap, 1 if 0.985 < overlap < 0.9995 else 0)
        if overlap > 0.9995 and worst < 1:
            shown = f"{percent(overlap, 2)} (worst {percent(worst, 2)})"
        passed = [row["passed"][part] for part in ("first_tenth", "last_quarter")]
        return [*(f"{x:.2f}" if x < 10 else f"{x:.1f}" for x in passed), shown]

    return [[code(name), *(cell for run in runs for cell in line(run[name]))] for name in runs[0]]


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

"""Which worker owns which index, and how even that is: `benchmarks.training`."""

from typing import Any

from ._data import blank_repeats, percent, read
from ._files import Rows

INPUTS = {
    "iid": "iid",
    "same region": "all workers in the same region",
    "drifting": "a region that drifts",
    "heavy tails": "heavy tails, scales by layer",
    "one worker": "one worker in a region, heavier than the others",
    "own region": "each worker in a region of its own",
}
FOUR = {
    "iid": "iid",
    "drifting": "a region that drifts",
    "one worker": "one worker in a region",
    "own region": "each worker in a region of its own",
}
# What a table has of each way to cut the regions.
ALL = ("missing", "mass", "overflow", "wait", "words")
FEW = ("missing", "overflow", "words")


def _pairs(file: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Rows of `benchmarks.training.regions`: of each input and P those of both ways."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in read(file)["rows"]:
        found.setdefault((row["case"], row["workers"]), {})[row["regions"]] = row
    return found


def _cells(of: dict[str, Any], hashed: tuple[str, ...], balanced: tuple[str, ...]) -> list[str]:
    cells = [_cell(of["hashed"], column) for column in hashed]
    return cells + [_cell(of["balanced"], column) for column in balanced]


def regions() -> Rows:
    """Hashed regions beside balanced ones."""
    found, rows = _pairs("regions.json"), []
    for case, shown in INPUTS.items():
        for p in sorted(p for name, p in found if name == case):
            rows.append([shown, str(p), *_cells(found[case, p], ALL, ALL)])
    return blank_repeats(rows)


def regions_recorded() -> Rows:
    """Those of recorded trainings."""
    found = _pairs("regions_recorded.json")
    return [
        [case, *_cells(of, FEW, ("missing", "mass", "overflow", "words"))]
        for (case, _), of in found.items()
    ]


def regions_large() -> Rows:
    """Those of many workers."""
    found = {case: of for (case, _), of in _pairs("regions_large.json").items()}
    hashed = ("missing", "overflow", "wait", "words")
    return [[shown, *_cells(found[case], hashed, ALL)] for case, shown in FOUR.items()]


def _cell(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if column == "missing":
        worst = f"{100 * row['missing_worst']:.0f}"
        return f"{_share(value)} ({worst})"
    if column == "overflow":
        return _share(value, 2)
    return {"mass": f"{value:.3f}", "wait": f"{value:.0f}"}.get(column, f"{value:.2f}")


def _share(value: float, digits: int = 1) -> str:
    """Fewer digits where there is more."""
    if value >= 0.1:
        return percent(value)
    return percent(value, digits if value < 0.05 else 1)


def _recorded() -> list[tuple[str, dict[str, Any]]]:
    """Recorded runs by their names; a scaled layer is named by the benchmark."""
    found = []
    for run in read("load_balance.json")["runs"]:
        layer, *factor = run["case"].split(" x ")
        found.append((f"{run['run']}, `{layer}` x {factor[0]}" if factor else run["run"], run))
    return found


def concentrations() -> Rows:
    """Where selected entries are from."""
    rows = []
    for name, run in _recorded():
        layers = sorted(run["layers"].items(), key=lambda item: -item[1]["selected"])
        parts = []
        for layer, share in layers[: 1 if layers[0][1]["selected"] > 0.6 else 2]:
            of_all = percent(share["parameters"], 0 if share["parameters"] >= 0.1 else 1)
            parts.append(f"{percent(share['selected'])} `{layer}` ({of_all} of n)")
        before, after = (run[f"validation_{when}"]["loss"] for when in ("before", "after"))
        rows.append([name, ", ".join(parts), f"{before:.2f} to {after:.2f}"])
    return rows


def split() -> Rows:
    """Entries that an owner receives, for equal and for balanced regions."""
    rows = []
    for name, run in _recorded():
        at = {(row["workers"], row["regions"]): row for row in run["rows"]}
        for p in dict.fromkeys(row["workers"] for row in run["rows"]):
            cells = [name, str(p)]
            for row in (at[p, "equal"], at[p, "balanced"]):
                received = (row["received"], row["received_of_k"])
                cells += [f"{x:.2f}" if x < 10 else f"{x:.1f}" for x in received]
                cells.append(_share(row["overflow"]))
            rows.append(cells)
    return blank_repeats(rows)


def allgather() -> Rows:
    """Entries of each worker before and after the balancing."""
    rows = []
    for name, run in _recorded():
        for row in sorted(run["rows"], key=lambda row: row["regions"] != "equal"):
            cells = [name, row["regions"], str(row["workers"]), f"{row['before']:.2f}"]
            cells.append(percent(row["over_trigger"]))
            for mode in ("never", "auto", "always"):
                of = row["balance"][mode]
                delivered = percent(of["delivered"], 0 if of["delivered"] > 0.9995 else 1)
                cells += [f"{of['after']:.2f}", delivered, f"{of['words_of_bound']:.2f}"]
            rows.append(cells)
    return blank_repeats(rows, 2)

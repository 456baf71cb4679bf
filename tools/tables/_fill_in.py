"""How the union of the selections grows with the workers: `benchmarks.training.fill_in`."""

from ._data import blank_repeats, percent, read
from ._files import Rows


def uniform() -> Rows:
    """Uniform indices, beside the formula."""
    tables = [
        {row["workers"]: row for row in table["rows"]} for table in read("fill_in.json")["uniform"]
    ]
    rows = []
    for p in tables[0]:
        cells = [str(p)]
        for table in tables:
            row = table[p]
            cells += [f"{row['expected']:,.1f}", f"{row['mean']:,.1f}"]
            cells += [f"{row['standard_error']:.1f}", f"{row['errors_off']:.1f}"]
        rows.append(cells)
    return rows


def trainings() -> Rows:
    """The union in trainings."""
    rows = []
    for task in read("fill_in.json")["runs"]:
        for run in task:
            union = run["union"]
            before, after = (run[f"validation_{when}"]["loss"] for when in ("before", "after"))
            rows.append(
                [
                    f"{run['run']}, {run['density']:.0%}".replace("%", " %"),
                    str(run["workers"]),
                    *(percent(union[part], 1) for part in ("mean", "first_tenth", "last_quarter")),
                    f"{run['union_of_k']:.1f}",
                    percent(run["uniform"], 1),
                    f"{union['mean'] / run['uniform']:.2f}",
                    percent(run["paper"], 1) if run["paper"] else "",
                    f"{before:.2f} to {after:.2f}",
                ]
            )
    return blank_repeats(rows)


def predicted() -> Rows:
    """What the cost model makes of unions of fewer workers."""
    both = read("fill_in.json")["predictions"]

    def line(name: str, *values: float) -> list[str]:
        cells = [name]
        for value, of in zip(values, both, strict=True):
            cells += [percent(value, 1), f"{100 * (value / of['measured'] - 1):+.0f} %"]
        return cells

    def of(key: str, workers: str) -> list[float]:
        return [table[key][workers] for table in both]

    measured = ["measured"]
    for table in both:
        measured += [percent(table["measured"], 1), ""]
    counts = list(both[0]["same_run"])
    other = next(iter(both[0]["other_runs"]))
    most = both[0]["workers"]
    name = f"from {counts[0]} of the {most} workers"
    return [
        measured,
        line("uniform formula", *(table["uniform"] for table in both)),
        *(line(name if p == counts[0] else f"from {p}", *of("same_run", p)) for p in counts),
        line(f"from the run with {other} workers", *of("other_runs", other)),
        line("the same at each step, then the mean", *of("other_runs_by_step", other)),
    ]

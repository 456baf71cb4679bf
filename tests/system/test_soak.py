"""Thousands of steps over several processes, with everything that is hard on a sparse allreduce.

The processes train over jax.distributed and Gloo on one machine. Their gradients are the hard
accumulators of the other tests, one for a few steps, and move on; four of a hundred steps have
entries that are not finite, which skip the step, or, in a fifth of the steps, are left out. The
state is saved now and then, and the processes start again from a checkpoint. It is checked:

- conservation, at every step: what was accumulated is what was delivered or kept. The largest
  difference at any entry is in units of a float32 rounding of that entry, at most 2P + 4 of them.
- replicas: the parameters have the same bits in every process, and are finite.
- counts: steps taken and skipped and entries dropped are those that the gradients ask for.
- memory: once a start has compiled both steps and written a checkpoint, the resident memory grows
  by no more than 16 MiB until the next start, and the pieces of memory that are mapped by no more
  than 64: the medians of the first and the last tenth of at least twenty reports.

A short one by default; the long version:

    SOAK_STEPS=10000 SOAK_PROCESSES=4 SOAK_REPORT_EVERY=50 \\
        python -m pytest tests/system/test_soak.py -m slow -s
"""

import os
import statistics

import pytest

from tests import groups

# By their names with SOAK_ in front; restarts are from a checkpoint, evenly spread.
SETTINGS = {"steps": 120, "processes": 2, "restarts": 1, "save_every": 500, "report_every": 5}
# MiB, and pieces of memory.
MOST_GROWTH = {"rss": 16.0, "maps": 64}


def segment(folder, first, last, expected, settings):
    """The reports of each process, from its start at step ``first`` to its end at ``last``."""
    given = {name: settings[name] for name in ("save_every", "report_every", "processes")}
    given |= {"folder": str(folder / "checkpoints"), "first": first, "last": last}
    # The deadline is of a single step; the first one compiles and has more.
    given |= {"deadline": 120, "expected": expected}
    with groups.group("tests.system._soak_worker", **given) as group:
        # Each process watches its own steps, so there is no deadline for all of them.
        for process in group:
            process.wait_for("finished", seconds=1e6)
        return [[x for x in process.events if x["event"] == "report"] for process in group]


def growth(samples):
    """From the median of the first tenth to that of the last; 0 where there are few."""
    if len(samples) < 20:
        return 0
    tenth = len(samples) // 10
    return statistics.median(samples[-tenth:]) - statistics.median(samples[:tenth])


def check(processes):
    """The reports of each process from one start on."""
    for number, reports in enumerate(processes):
        for report in reports:
            assert report["worst"] <= 2 * len(processes) + 4, "entries lost"
            assert report["finite"], "parameters that are not finite"
            assert report["found"] == report["expected"], "other counts"
        for name, most in MOST_GROWTH.items():
            more = growth([report[name] for report in reports if report["settled"]])
            print(f"process {number}: {name} grew by {more:.1f}")
            assert more <= most, f"{name} grew"
    for same_step in zip(*processes, strict=True):
        assert len({report["params"] for report in same_step}) == 1, "replicas differ"


def made_up(step, **changes):
    counts = {"count": step, "skipped": 0, "dropped": 0}
    report = {"params": step, "finite": True, "worst": 1.0, "found": counts, "expected": counts}
    return report | {"settled": True, "rss": 300.0, "maps": 2000} | changes


def test_the_soak_sees_each_violation():
    good = [made_up(step) for step in range(30)]
    check([good, good])
    for complaint, changes in (
        ("entries lost", {"worst": 9.0}),
        ("entries lost", {"worst": float("nan")}),
        ("replicas differ", {"params": 7}),
        ("not finite", {"finite": False}),
        ("other counts", {"found": {"count": 29, "skipped": 1, "dropped": 0}}),
        ("rss grew", {"rss": 317.0}),
        ("maps grew", {"maps": 2065}),
    ):
        bad = good[:25] + [made_up(step, **changes) for step in range(25, 30)]
        with pytest.raises(AssertionError, match=complaint):
            check([good, bad])


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
def test_a_soak_finds_no_violation(tmp_path):
    read = os.environ.get
    settings = {name: int(read(f"SOAK_{name.upper()}", x)) for name, x in SETTINGS.items()}
    starts = settings["restarts"] + 1
    bounds = [round(settings["steps"] * i / starts) for i in range(starts + 1)]
    expected = {"count": 0, "skipped": 0, "dropped": 0}
    for first, last in zip(bounds, bounds[1:], strict=False):
        found = segment(tmp_path, first, last, expected, settings)
        check(found)
        expected = found[0][-1]["expected"]
        worst = max(report["worst"] for reports in found for report in reports)
        print(f"to step {last}: {expected}, at most {worst:.2f} roundings lost")
    # Entries that are not finite have come.
    assert expected["skipped"] > 0

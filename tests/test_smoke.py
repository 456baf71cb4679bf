"""Every program of the benchmarks and examples runs in small: a row has its options and its output.

test_wrong_options.py has their errors, test_over_links.py the programs that need real links.
"""

import importlib
import json
import math
import re
import runpy
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from PIL import Image

from benchmarks._common.processes import ROOT
from benchmarks.gpu import same_results, timings, train_step
from benchmarks.learning import steps
from tests.programs import refused

pytestmark = pytest.mark.usefixtures("default_promotion")


class Run(NamedTuple):
    """A program in small.

    `{folder}` in the options is a temporary folder, with the files `fox` and `rat` of text.
    `said(out, numbers)` checks the output and what the program wrote to numbers.json. `again` is
    the error of a second run.
    """

    program: str
    options: str = ""
    said: Callable[[str, Any], bool] = lambda out, numbers: bool(out)
    quick: bool = False
    again: str = ""


def found(pattern: str, text: str) -> list[float]:
    """The numbers that the pattern's one group matches."""
    return [float(x.replace(",", "")) for x in re.findall(pattern, text)]


def learned(start: float, end: float, accuracy: float = 0) -> Callable[[str, Any], bool]:
    """The first loss is above `start`, the last one below `end` times the first one."""

    def said(out: str, numbers: Any) -> bool:
        losses, reached = found(r"loss ([\d.]+)", out), found(r"test accuracy ([\d.]+)%", out)
        assert "differ" not in out
        assert all(x > accuracy for x in reached)
        return losses[0] > start and losses[-1] < end * losses[0] and bool(reached or not accuracy)

    return said


def compared(out: str, _: Any) -> bool:
    """A sparse and a dense run of an nnx classifier."""
    assert re.findall(r"^(\w+): test", out, re.MULTILINE) == ["sparse_adamw", "dense"]
    sparse, dense = found(r"([\d,]+) words a step", out)
    assert min(found(r"test accuracy ([\d.]+)%", out)) > 50
    return 0 < sparse < 0.03 * dense and max(found(r"train loss ([\d.]+)", out)) < math.log(10)


def resharded(out: str, _: Any) -> bool:
    """It continues from the checkpoint with fewer workers, and nothing that waits is lost."""
    lines = re.findall(r"(\d) workers: loss from (\S+) to (\S+)", out)
    (old, first, last), (new, again, end) = (map(float, line) for line in lines)
    assert (old, new) == (8, 4)
    assert end < again < min(first, 1.5 * last)
    before, after = found(r"([\d.]+)(?:,|;) ", out.split("have magnitude")[1])
    assert before == pytest.approx(after, rel=1e-6)
    assert found(r"at an entry is (\S+)", out)[0] < 1e-8
    return before > 1 and found(r"test accuracy ([\d.]+)%", out)[0] > 60


def of_digits(_: str, numbers: Any) -> bool:
    """On held-out images ok_topk costs more than sparse_adamw; neither cost is chance."""
    runs, dense = numbers["runs"], numbers["runs"]["dense"]
    assert list(runs) == ["dense", "sparse_adamw", "ok_topk"]
    assert runs["ok_topk"]["delivered"] == numbers["k"]
    assert dense["words"] == 2 * numbers["n"] * 7 / 8
    assert runs["sparse_adamw"]["words"] < runs["ok_topk"]["words"] < 0.03 * dense["words"]
    assert runs["sparse_adamw"]["accuracy_above"] > -0.02
    for run in (runs["sparse_adamw"], runs["ok_topk"]):
        assert 0 < run["words"] < numbers["bound"]
        assert run["test_accuracy"] > 0.5
        assert run["loss_above"] > 3 * run["loss_error"]
    above = [runs[name]["loss_above"] for name in ("sparse_adamw", "ok_topk")]
    return 0.01 < above[0] < 0.06 < above[1] < 0.15


def hashed(_: str, numbers: Any) -> bool:
    rows = {row["regions"]: row["missing"] for row in numbers["rows"]}
    return rows["hashed"] < 0.1 < rows["balanced"]


def timed(out: str, numbers: Any) -> bool:
    """A program for CPUs has no launches."""
    places = [
        (timings.SELECTION, "lax.top_k"),
        (timings.STEP, "dense"),
        (timings.SIMULATED, "dense"),
    ]
    places += [(timings.SELECTION, "threshold")]
    assert [(row["part"], row["contestant"]) for row in numbers["rows"]] == places
    for row in numbers["rows"]:
        low, high = row["quartiles_ms"]
        assert 0 < row["min_ms"] <= low <= row["median_ms"] <= high
        assert row["launches"] is None
    return numbers["finished"] and "COMPUTED, not measured" in out


def skipped(out: str, numbers: Any) -> bool:
    assert not numbers["rows"]
    assert len(numbers["skipped"]) == 3
    return "skipped, no time left: selection: threshold" in out


def in_turns(_: str, numbers: Any) -> bool:
    """Adam's moments; the residual of an exchange before AdamW, of 4 bytes."""
    rows = {row["contestant"]: row for row in numbers["rows"]}
    assert list(rows) == [train_step.BASE, *train_step.NAMES]
    held = [round(row["state_bytes_per_parameter"]) for row in rows.values()]
    return rows[train_step.BASE]["ratio"] == 1 and held == [8, 8, 8, 12, 12]


def of_source_code(_: str, numbers: Any) -> bool:
    """Each contestant learns, and the bits of an entry are fewer from row to row."""
    rows = numbers["rows"]
    dense, sparse, few = (row["words_per_parameter"] for row in rows)
    assert all(row["loss"] == row["losses"][-1] < 0.9 * row["losses"][0] for row in rows)
    return few < 0.7 * sparse < 0.05 * dense


def same_on_both(_: str, numbers: Any) -> bool:
    """Here both devices are the CPU."""
    sparse, whole = numbers["rows"]
    assert sparse["entries"] == sparse["difference"] == whole["difference"] == 0
    return 0 <= sparse["lost"] < same_results.ROUNDING and "lost" not in whole


def predicted(_: str, numbers: Any) -> bool:
    """The model has the words of the programs."""
    for row in numbers["program_words"]:
        assert 0.999 * row["best"] <= row["model"] <= 1.001 * row["worst"]
    return len(numbers["rows"]) == 3 * 5


def of_pages(out: str, numbers: Any) -> bool:
    """A program with each exchange: fewer words than dense, and a loss that is near."""
    rows = {row["exchange"]: row for row in numbers["rows"]}
    assert list(rows) == ["before", "dense", "powersgd(2)", "quantized()", "after", "density=0.2"]
    (dense,), words = rows["dense"]["words"], [rows[x]["words"][0] for x in list(rows)[2:]]
    assert rows["before"]["words"] == [None]
    powersgd, quantized, after, denser = words
    assert after < denser < dense
    assert max(powersgd, quantized) < dense / 4
    losses = [row["value"][0] for row in rows.values()]
    return max(losses) < 23 and max(losses) - min(losses) < 1


def last_row(out: str) -> list[str]:
    return out.splitlines()[-1].split()


def flushed(out: str, _) -> bool:
    """The flush has moved the parameters, and has its bytes."""
    before, after, share, with_flush = map(float, last_row(out)[-4:])
    # A dense exchange is one step's in four; the logarithm of the alphabet is 3.3.
    added = 1 / with_flush - 1 / share
    return before != after and max(before, after) < 8 and added == pytest.approx(1 / 4, rel=1e-3)


STEPS = "--workers 2 --points 2 --seeds 1 --text {folder}/fox "
FOUR = f"{STEPS} --steps 4 --width 8 --batch 4 --rates 0.01"
# Dense rounds receive 2 n (P-1)/P words in four steps, in units of k (P-1)/P for k = n / 100.
IN_ROUNDS = "--options optimizer=diloco every=4 --only none"
SIXTY = f"{STEPS} --steps 60 --batch 8 --rates 0.02 --width 8 --task"
# A loss starts at the logarithm of the alphabet or of the vocabulary, an accuracy at 10 %.
TASKS = {"text --only sparse_adamw": 2.9, "lstm --only dense": 3.8, "words --only dense": 7}
ROUNDS = "density=0.5", "optimizer=diloco momentum=0.5", "optimizer=sparse_loco density=0.5"
ROUNDS += ("optimizer=local_steps density=0.5",)
JSON, PLOT = "--json {folder}/numbers.json", "{folder}/plot.png"
GPU = f"--allow-cpu --size 4096 --rounds 2 {JSON} --only"
RUNS = [
    Run("train_nnx", f"--steps 20 --batch 64 --workers 4 --compare --out {PLOT}", compared),
    Run(
        "train_text",
        "--text {folder}/rat --width 16 --layers 1 --length 16 --batch 16 --workers 4 --steps 150"
        " --report 1",
        # It starts near log(128); the frequencies of the characters alone give 2.7.
        lambda out, _: learned(4, 0.4)(out, _) and found(r"held-out loss ([\d.]+)", out)[0] < 1.5,
    ),
    Run("loop_pmap", "--steps 30 --workers 4", learned(0, 0.3, 85)),
    Run("loop_shard_map", "--steps 30 --workers 4", learned(0, 0.3, 85), quick=True),
    Run(
        "checkpoint_reshard",
        "--steps 10 --folder {folder}/checkpoint",
        resharded,
        again="has a checkpoint already",
    ),
    Run(
        "train_multihost",
        "--steps 10 --report 1",
        lambda out, _: "1 processes, 8 workers, sparse_adamw" in out and learned(0, 0.7)(out, _),
    ),
    Run("train_digits", f"--out {PLOT} {JSON}", of_digits),
    Run(".training.paper_counts", f"--tasks images --workers 2 --steps 40 --seeds 1 {JSON}"),
    Run(".local.partitioned_norms", f"--layers 2 --width 8 --workers 2 --rounds 2 {JSON}"),
    Run(".local.select_speed", f"--sizes 4096 --densities 0.05 --rounds 2 {JSON}"),
    Run(".local.state_memory", f"--layers 2 --width 32 {JSON}"),
    Run(".local.step_cost", f"--size 4096 --density 0.05 --rounds 3 {JSON}"),
    Run(
        ".network.traffic",
        f"--sections algorithms --workers 2 3 --params 4096 --density 0.05 {JSON}",
    ),
    Run(
        ".training.regions",
        f"--workers 4 --steps 4 --size 800 --selected 80 --inputs 'own region' {JSON}",
        hashed,
    ),
    Run(".network.scaling", f"--params 1M --workers 4 {JSON} --plot {PLOT}", predicted),
    Run(".gpu.timings", f"{GPU} lax.top_k threshold dense", timed, quick=True),
    Run(".gpu.timings", f"{GPU} threshold dense --minutes 1e-9", skipped, quick=True),
    # Steps keep their state on vectors and on matrices.
    Run(
        ".gpu.timings",
        f"{GPU} ok_topk_reuse sparse_adamw powersgd",
        lambda out, numbers: len(numbers["rows"]) == 6,
    ),
    Run(
        ".gpu.train_step",
        f"--batch 2 --width 64 --blocks 1 --context 8 --rounds 2 --calls 2 {JSON}",
        in_turns,
    ),
    Run(
        ".gpu.same_results",
        f"--size 16384 --workers 2 --rounds 2 {JSON} --only topk_a sparse_sgd",
        same_on_both,
    ),
    *(
        Run(
            ".learning.steps",
            f"{FOUR} --only dense --options every=2 {given} --plot-bytes {PLOT}",
            lambda out, _: "every=2" in last_row(out) and float(last_row(out)[-1]) > 0,
        )
        for given in ROUNDS
    ),
    Run(
        ".learning.programs",
        f"--only 'Variational inference' --seeds 1 --densities 0.2 {JSON}",
        of_pages,
    ),
    Run(
        ".learning.steps",
        f"{FOUR} {IN_ROUNDS}",
        lambda out, _: (
            "dense" not in out and float(last_row(out)[-1]) == pytest.approx(200 / 4, rel=1e-3)
        ),
    ),
    Run(
        ".learning.flushed",
        f"{FOUR.replace('--points 2 ', '')} --options every=4 density=0.5",
        flushed,
    ),
    Run(
        ".learning.large",
        "--width 64 --blocks 1 --context 16 --megabytes 2 --batch 8 --steps 30 --rates 0.01 "
        f"{JSON}",
        of_source_code,
    ),
    *(
        Run(
            ".learning.steps",
            f"{SIXTY} {task}",
            lambda out, _, most=most: float(last_row(out)[4]) < most,
        )
        for task, most in TASKS.items()
    ),
    Run(
        ".learning.steps",
        f"{SIXTY.replace('--width 8', '')} images-adamw --only dense",
        lambda out, _: float(last_row(out)[4]) > 50,
    ),
]


@pytest.fixture
def folder(tmp_path):
    fox, rat = "the quick brown fox jumps over the lazy dog. ", "Was it a rat? Ünä, no: a cat. "
    (tmp_path / "fox").write_text(60 * fox, encoding="utf-8")
    (tmp_path / "rat").write_text(100 * rat, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    "run",
    [pytest.param(x, id=x.program, marks=[] if x.quick else [pytest.mark.slow]) for x in RUNS],
)
def test_program_runs_in_small_and_says_what_it_should(run, folder, capsys):
    options = shlex.split(run.options.format(folder=folder))
    main, file = importlib.import_module(run.program, "benchmarks").main, folder / "numbers.json"
    # Programs return the status 0 or nothing.
    assert not main(options)
    numbers = json.loads(file.read_text()) if file.exists() else None
    assert file.exists() == ("numbers.json" in run.options)
    assert run.said(capsys.readouterr().out, numbers)
    if "plot.png" in run.options:
        with Image.open(folder / "plot.png") as image:
            assert image.width > 600
    if run.again:
        assert run.again in refused(main, options, capsys)


def test_quick_start_learns(capsys):
    runpy.run_path(str(ROOT / "examples" / "quick_start.py"))
    out = capsys.readouterr().out
    losses = found(r"loss ([\d.]+)", out)
    assert len(losses) == 3
    assert losses[-1] < 0.3
    assert found(r"test accuracy ([\d.]+)%", out)[0] > 95


@pytest.mark.slow
def test_tricks_of_dgc_are_trained(tmp_path):
    runs = tmp_path / "runs"
    names = ["dense", "topk_a, correction, masking, clipping, density warm-up"]
    argv = ["--task", "images-hidden", "--steps", "20", "--workers", "2", "--share", "0.1"]
    argv += ["--rates", "0.05", "--seeds", "1", "--only", *names, "--runs", str(runs)]
    assert steps.main(argv) == 0
    dense, sparse = map(json.loads, runs.read_text().splitlines())
    assert [dense["contestant"], sparse["contestant"]] == names
    assert min(dense["value"], sparse["value"]) > 0.3
    assert sparse["words"] < dense["words"] / 3

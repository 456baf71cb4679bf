"""The command lines of the benchmarks: what is wrong is one line, and status 2."""

import pytest

from benchmarks.local import (
    compile_time,
    data_cache,
    partitioned_norms,
    select_speed,
    state_memory,
    step_cost,
)
from benchmarks.network import run, scaling, traffic
from benchmarks.training import (
    convergence,
    fill_in,
    flush_cost,
    load_balance,
    paper_counts,
    regions,
    select_quality,
    training_tricks,
)

PROGRAMS = (
    compile_time,
    data_cache,
    partitioned_norms,
    select_speed,
    state_memory,
    step_cost,
    run,
    scaling,
    traffic,
    convergence,
    fill_in,
    flush_cost,
    load_balance,
    paper_counts,
    regions,
    select_quality,
    training_tricks,
)
RECORDING = (fill_in, load_balance, select_quality)
DRAWING = (*RECORDING, convergence, paper_counts, run, scaling, traffic, select_speed)

WRONG = [
    *((program, ["--json", "no-such-folder/numbers.json"]) for program in PROGRAMS),
    *((program, ["--plot", "no-such-folder/plot.png"]) for program in DRAWING),
    *((program, ["--json", "."]) for program in PROGRAMS),
    *((program, ["--text", "no-such-file"]) for program in RECORDING),
    *((program, ["--images", "no-such-folder"]) for program in RECORDING),
    *((program, ["--density-text", "2"]) for program in RECORDING),
    *((program, ["--steps", "0"]) for program in RECORDING),
    (data_cache, ["--images", "8", "--batch", "9"]),
    (data_cache, ["--bandwidth", "0"]),
    (data_cache, ["--folder", "no-such-folder"]),
    (fill_in, ["--workers", "1"]),
    (load_balance, ["--workers", "1"]),
    (regions, ["--workers", "0"]),
    (regions, ["--plot", "plot.png"]),
    (regions, ["--inputs", "x"]),
    (load_balance, ["--every", "9", "--steps", "8"]),
    (convergence, ["--text", "no-such-file", "--tasks", "text"]),
    (convergence, ["--images", "no-such-folder", "--tasks", "images"]),
    (convergence, ["--read", "no-such-file"]),
    (convergence, ["--only", "no-such-variant"]),
    (convergence, ["--workers", "5"]),
    (convergence, ["--steps", "1"]),
    (convergence, ["--width", "62"]),
    (convergence, ["--tasks", "images", "--workers", "2", "--batch-images", "5000"]),
    (flush_cost, ["--images", "no-such-folder"]),
    (paper_counts, ["--images", "no-such-folder", "--tasks", "images"]),
    (paper_counts, ["--text", "no-such-file", "--tasks", "lstm"]),
    (paper_counts, ["--workers", "5", "--tasks", "images"]),
    (training_tricks, ["--images", "no-such-folder"]),
    (training_tricks, ["--only", "no-such-variant"]),
    (training_tricks, ["--rate", "nan"]),
    (compile_time, ["--leaves", "0.5"]),
    (compile_time, ["--leaves", "7"]),
    (step_cost, ["--size", "0"]),
    (step_cost, ["--density", "0"]),
    (select_speed, ["--sizes", "2**40"]),
    (partitioned_norms, ["--rounds", "0"]),
    (state_memory, ["--density", "1.5"]),
    (traffic, ["--workers", "1"]),
    (traffic, ["--sections", "levels", "--plot", "plot.png"]),
    (run, ["--workers", "1"]),
    (run, ["--workers", "2.5"]),
    (run, ["--link", "fast"]),
    (run, ["--density", "2"]),
    (run, ["--methods", "magic"]),
    (scaling, ["--workers", "0"]),
    (scaling, ["--density", "0"]),
    (scaling, ["--params", "many"]),
    (scaling, ["--local", "no-such-file"]),
    (scaling, ["--validate", "no-such-file"]),
    (scaling, ["--validate", "some-file", "--plot", "plot.png"]),
    (scaling, ["--network", "mine", "1us", "fast", "--no-programs"]),
]


@pytest.mark.parametrize(("program", "argv"), WRONG)
def test_wrong_options_are_one_line(program, argv, capsys):
    try:
        status = program.main(argv)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    message = capsys.readouterr().err.strip()
    assert message
    assert "\n" not in message

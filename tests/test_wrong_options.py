"""The command lines of all programs: what is wrong is one line, and status 2."""

import pytest

import checkpoint_reshard
import loop_pmap
import loop_shard_map
import train_cached
import train_digits
import train_nnx
import train_sharded
import train_text
from benchmarks.evidence import __main__ as evidence
from benchmarks.gpu import programs, timings
from benchmarks.learning import step_times, steps, time
from benchmarks.local import (
    compile_time,
    data_cache,
    partitioned_norms,
    select_speed,
    state_memory,
    step_cost,
)
from benchmarks.network import linear_models as linear_over_links
from benchmarks.network import run, scaling, traffic
from benchmarks.training import (
    fill_in,
    flush_cost,
    load_balance,
    paper_counts,
    regions,
    select_quality,
)
from examples.linear_models import __main__ as linear
from tests.programs import refused

pytestmark = pytest.mark.usefixtures("default_promotion")

LOCAL = (compile_time, data_cache, partitioned_norms, select_speed, state_memory, step_cost)
RECORDING = (fill_in, load_balance, select_quality)
TRAINING = (*RECORDING, flush_cost, paper_counts, regions)
DRAWING = (*RECORDING, paper_counts, run, scaling, traffic, select_speed)
REPORTING = (*LOCAL, *TRAINING, run, scaling, traffic)

# Programs, and options of which one line says what is wrong; in the second table also how.
REFUSED = [
    (REPORTING, ("--json no-such-folder/numbers.json", "--json .")),
    (DRAWING, ("--plot no-such-folder/plot.png",)),
    (RECORDING, ("--text no-such-file", "--images no-such-folder", "--density-text 2")),
    (RECORDING, ("--steps 0",)),
    ((data_cache,), ("--images 8 --batch 9", "--bandwidth 0", "--folder no-such-folder")),
    ((fill_in, load_balance), ("--workers 1",)),
    ((load_balance,), ("--every 9 --steps 8",)),
    ((regions,), ("--workers 0", "--plot plot.png", "--inputs x")),
    ((steps,), ("--text no-such-file", "--images no-such-folder --task images", "--steps 1")),
    ((steps,), ("--task images --workers 2 --batch 5000",)),
    ((flush_cost,), ("--images no-such-folder",)),
    ((paper_counts,), ("--images no-such-folder --tasks images", "--workers 5 --tasks images")),
    ((paper_counts,), ("--text no-such-file --tasks lstm",)),
    ((compile_time,), ("--leaves 0.5", "--leaves 7")),
    ((step_cost,), ("--size 0", "--density 0")),
    ((select_speed,), ("--sizes 2**40",)),
    ((partitioned_norms,), ("--rounds 0",)),
    ((state_memory,), ("--density 1.5",)),
    ((traffic,), ("--workers 1", "--sections levels --plot plot.png")),
    ((run,), ("--workers 1", "--workers 2.5", "--link fast", "--density 2", "--methods magic")),
    ((scaling,), ("--workers 0", "--density 0", "--params many", "--local no-such-file")),
    ((scaling,), ("--validate no-such-file", "--validate some-file --plot plot.png")),
    ((scaling,), ("--network mine 1us fast --no-programs",)),
    ((programs,), ("--size 0", "--density 2", "--devices 0.5", "--check no-such-file")),
    ((programs,), ("--write no-such-folder/programs.json",)),
    ((programs,), ("--check benchmarks/gpu/programs.json --size 1000",)),
    ((timings,), ("--size 10 --allow-cpu", "--minutes 0 --allow-cpu", "--workers 1 --allow-cpu")),
    ((timings,), ("--json no-such-folder/timings.json --allow-cpu",)),
    ((timings,), ("--only no-such-contestant --size 4096 --allow-cpu",)),
    ((train_digits,), ("--density 0", "--density much", "--workers 3", "--steps -1")),
    ((train_digits,), ("--out figure.txt", "--data no-such-folder")),
    ((train_cached,), ("--bandwidth 0", "--latency -1", "--memory-limit nan", "--workers 3")),
    ((train_cached,), ("--batch 4096", "--data no-such-folder", "--holds images")),
    ((train_cached,), (f"--cache {__file__}",)),
]
SAID = [
    (evidence, "--only nothing", "--only 'nothing' is the beginning of no claim"),
    (linear_over_links, "--method scd --exchange topk_a", "--method scd: dense_allgather, dense"),
    *((program, "--only x", "--only 'x' is none of: dense") for program in (steps, time)),
    *((program, "--workers 3", "--batch 32 can't be dealt out to 3") for program in (steps, time)),
    *((program, "--show", "--show needs --runs FILE") for program in (steps, time)),
    *((program, "--options density=2", "--options: density") for program in (steps, time)),
    *((program, "--options rate=1", "sparse_adamw has no 'rate'") for program in (steps, time)),
    (steps, "--width 30", "--width 30 can't be divided into 4 heads"),
    (steps, "--rates 0", "0 is not a positive number"),
    (steps, "--options gain", "gain is not NAME=VALUE"),
    (steps, "--task images --options b2=0.9", "sparse_sgd has no 'b2' here"),
    (steps, "--options step_ahead=x", "--options: step_ahead"),
    (steps, "--task images --width 8", "--width: the model of images has one width"),
    (time, "--link fast", "'fast' is not a link"),
    (time, "--task images", "invalid choice: 'images'"),
    (time, ["--task", "lstm", "--only", "PyTorch, dense"], "needs PyTorch (pip install torch)"),
    (step_times, "--batch 6", "can't be dealt out"),
    *(
        (step_times, options, options.split()[0])
        for options in ("--workers 1", "--group x", "--link 0mbit")
    ),
    (linear, "--workers 0", "0 is not between 1 and"),
    (linear, "--exchange ring", "--exchange ring is none of --method sgd"),
    (linear, "--method scd --exchange topk_a", "is none of --method scd"),
    (linear, "--rate 1e5 --regularisation 1 --rows 9", "must be below 1"),
    (linear, "--test file", "--test and --size are for --data"),
    (linear, "--data none --rows 5", "--rows is for generated data"),
    (linear, "--data no-such-file", "cannot read no-such-file: No such file"),
    *(
        (linear, f"--mpi {options}", "with --mpi they are those of mpirun")
        for options in ("--workers 2", "--join host:1 0")
    ),
    (linear, "--join host 0", "expected HOST:PORT"),
    (linear, "--join host:1 4", "--join 4: there are 4 workers"),
    (linear, "--workers 9", "--workers is 9, but jax runs with 8 devices"),
    (linear, "--json .", "cannot write"),
    (train_nnx, "--workers 3", "--batch 128 is not divisible by --workers 3"),
    (train_nnx, "--out loss.txt", "--out loss.txt must end in one of"),
    (train_nnx, "--data no-such-folder", "no-such-folder is not a folder"),
    (train_nnx, "--workers 16", "--workers is 16, but jax runs with 8 devices"),
    (train_nnx, "--batch 2048", "a batch of 2048 images is asked for"),
    (train_text, "--text no-such-file", "cannot read no-such-file: No such file"),
    (train_text, "--text .", "cannot read"),
    (train_text, "--width 10", "--width is 10; it must be a multiple of 4"),
    (train_text, "--length 99999", "has no windows of 100000"),
    (loop_pmap, "--steps 0", "0 is not between 1 and"),
    (loop_shard_map, "--lr fast", "invalid float value: 'fast'"),
    (checkpoint_reshard, "--then 3", "--batch 128 is not divisible by --then 3"),
    (train_sharded, "--sites 3", "--sites 3 does not divide the 8 devices"),
    (train_sharded, "--sites 8 --layout both", "--layout both needs an even number of devices"),
    (train_sharded, "--batch 12", "--batch 12 is not divisible by the devices of ('site', 'fsdp')"),
    (train_sharded, "--width 20", "--width is 20; it must be a multiple of 16"),
    (train_sharded, "--density 0", "--density is 0.0; it must be above 0 and at most 1"),
    (train_sharded, "--text no-such-file", "--text no-such-file is no file"),
    (train_sharded, "--layout pipeline", "invalid choice: 'pipeline'"),
]
ALL = [(program, options, "") for these, lines in REFUSED for program in these for options in lines]


def name_of(value):
    return getattr(value, "__name__", None) or str(value)


@pytest.mark.parametrize(("program", "argv", "message"), [*ALL, *SAID], ids=name_of)
def test_wrong_options_are_one_line(program, argv, message, capsys):
    argv = argv.split() if isinstance(argv, str) else argv
    assert message in refused(program.main, argv, capsys)

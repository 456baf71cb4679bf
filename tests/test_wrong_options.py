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
    convergence,
    fill_in,
    flush_cost,
    load_balance,
    paper_counts,
    regions,
    select_quality,
    training_tricks,
)
from examples.linear_models import __main__ as linear
from tests.programs import refused

pytestmark = pytest.mark.usefixtures("default_promotion")

LOCAL = (compile_time, data_cache, partitioned_norms, select_speed, state_memory, step_cost)
RECORDING = (fill_in, load_balance, select_quality)
TRAINING = (*RECORDING, convergence, flush_cost, paper_counts, regions, training_tricks)
DRAWING = (*RECORDING, convergence, paper_counts, run, scaling, traffic, select_speed)
REPORTING = (*LOCAL, *TRAINING, run, scaling, traffic)

# Options of several programs; the line says what is wrong with them.
SHARED = [
    *((program, "--json no-such-folder/numbers.json", "") for program in REPORTING),
    *((program, "--json .", "") for program in REPORTING),
    *((program, "--plot no-such-folder/plot.png", "") for program in DRAWING),
    *((program, "--text no-such-file", "") for program in RECORDING),
    *((program, "--images no-such-folder", "") for program in RECORDING),
    *((program, "--density-text 2", "") for program in RECORDING),
    *((program, "--steps 0", "") for program in RECORDING),
]
BENCHMARKS = [
    (data_cache, "--images 8 --batch 9", ""),
    (data_cache, "--bandwidth 0", ""),
    (data_cache, "--folder no-such-folder", ""),
    (fill_in, "--workers 1", ""),
    (load_balance, "--workers 1", ""),
    (load_balance, "--every 9 --steps 8", ""),
    (regions, "--workers 0", ""),
    (regions, "--plot plot.png", ""),
    (regions, "--inputs x", ""),
    (convergence, "--text no-such-file --tasks text", ""),
    (convergence, "--images no-such-folder --tasks images", ""),
    (convergence, "--read no-such-file", ""),
    (convergence, "--only no-such-variant", ""),
    (convergence, "--workers 5", ""),
    (convergence, "--steps 1", ""),
    (convergence, "--width 62", ""),
    (convergence, "--tasks images --workers 2 --batch-images 5000", ""),
    (flush_cost, "--images no-such-folder", ""),
    (paper_counts, "--images no-such-folder --tasks images", ""),
    (paper_counts, "--text no-such-file --tasks lstm", ""),
    (paper_counts, "--workers 5 --tasks images", ""),
    (training_tricks, "--images no-such-folder", ""),
    (training_tricks, "--only no-such-variant", ""),
    (training_tricks, "--rate nan", ""),
    (compile_time, "--leaves 0.5", ""),
    (compile_time, "--leaves 7", ""),
    (step_cost, "--size 0", ""),
    (step_cost, "--density 0", ""),
    (select_speed, "--sizes 2**40", ""),
    (partitioned_norms, "--rounds 0", ""),
    (state_memory, "--density 1.5", ""),
    (traffic, "--workers 1", ""),
    (traffic, "--sections levels --plot plot.png", ""),
    (run, "--workers 1", ""),
    (run, "--workers 2.5", ""),
    (run, "--link fast", ""),
    (run, "--density 2", ""),
    (run, "--methods magic", ""),
    (scaling, "--workers 0", ""),
    (scaling, "--density 0", ""),
    (scaling, "--params many", ""),
    (scaling, "--local no-such-file", ""),
    (scaling, "--validate no-such-file", ""),
    (scaling, "--validate some-file --plot plot.png", ""),
    (scaling, "--network mine 1us fast --no-programs", ""),
    (programs, "--size 0", ""),
    (programs, "--density 2", ""),
    (programs, "--devices 0.5", ""),
    (programs, "--write no-such-folder/programs.json", ""),
    (programs, "--check no-such-file", ""),
    (programs, "--check benchmarks/gpu/programs.json --size 1000", ""),
    (timings, "--size 10 --allow-cpu", ""),
    (timings, "--minutes 0 --allow-cpu", ""),
    (timings, "--workers 1 --allow-cpu", ""),
    (timings, "--json no-such-folder/timings.json --allow-cpu", ""),
    (timings, "--only no-such-contestant --size 4096 --allow-cpu", ""),
    (evidence, "--only nothing", "--only 'nothing' is the beginning of no claim"),
    (linear_over_links, "--method scd --exchange topk_a", "--method scd: dense_allgather, dense"),
]
LEARNING = [
    *((program, "--only x", "--only 'x' is none of: dense") for program in (steps, time)),
    *((program, "--workers 3", "--batch 32 can't be dealt out to 3") for program in (steps, time)),
    *((program, "--show", "--show needs --runs FILE") for program in (steps, time)),
    *((program, "--options density=2", "--options: density") for program in (steps, time)),
    *(
        (program, "--options rate=1", "sparse_adamw has no 'rate' here")
        for program in (steps, time)
    ),
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
    (step_times, "--workers 1", "--workers"),
    (step_times, "--group x", "--group"),
    (step_times, "--link 0mbit", "--link"),
]
LINEAR = [
    (linear, "--workers 0", "0 is not between 1 and"),
    (linear, "--exchange ring", "--exchange ring is none of --method sgd"),
    (linear, "--method scd --exchange topk_a", "is none of --method scd"),
    (linear, "--rate 1e5 --regularisation 1 --rows 9", "must be below 1"),
    (linear, "--test file", "--test and --size are for --data"),
    (linear, "--data none --rows 5", "--rows is for generated data"),
    (linear, "--data no-such-file", "cannot read no-such-file: No such file"),
    (linear, "--mpi --workers 2", "with --mpi they are those of mpirun"),
    (linear, "--mpi --join host:1 0", "with --mpi they are those of mpirun"),
    (linear, "--join host 0", "expected HOST:PORT"),
    (linear, "--join host:1 4", "--join 4: there are 4 workers"),
    (linear, "--workers 9", "--workers is 9, but jax runs with 8 devices"),
    (linear, "--json .", "cannot write"),
]
EXAMPLES = [
    (train_digits, "--density 0", ""),
    (train_digits, "--density much", ""),
    (train_digits, "--workers 3", ""),
    (train_digits, "--steps -1", ""),
    (train_digits, "--out figure.txt", ""),
    (train_digits, "--data no-such-folder", ""),
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
    (train_cached, "--bandwidth 0", ""),
    (train_cached, "--latency -1", ""),
    (train_cached, "--memory-limit nan", ""),
    (train_cached, "--workers 3", ""),
    (train_cached, "--batch 4096", ""),
    (train_cached, "--data no-such-folder", ""),
    (train_cached, "--holds images", ""),
    (train_cached, f"--cache {__file__}", ""),
    (train_sharded, "--sites 3", "--sites 3 does not divide the 8 devices"),
    (train_sharded, "--sites 8 --layout both", "--layout both needs an even number of devices"),
    (train_sharded, "--batch 12", "--batch 12 is not divisible by the devices of ('site', 'fsdp')"),
    (train_sharded, "--width 20", "--width is 20; it must be a multiple of 16"),
    (train_sharded, "--density 0", "--density is 0.0; it must be above 0 and at most 1"),
    (train_sharded, "--text no-such-file", "--text no-such-file is no file"),
    (train_sharded, "--layout pipeline", "invalid choice: 'pipeline'"),
]
ALL = [*SHARED, *BENCHMARKS, *LEARNING, *LINEAR, *EXAMPLES]


def name_of(value):
    return getattr(value, "__name__", None) or str(value)


@pytest.mark.parametrize(("program", "argv", "message"), ALL, ids=name_of)
def test_wrong_options_are_one_line(program, argv, message, capsys):
    argv = argv.split() if isinstance(argv, str) else argv
    assert message in refused(program.main, argv, capsys)

"""The command lines of all programs: an error is one line and status 2."""

import importlib
import re
import shlex

import pytest

import _processes
from tests.programs import refused

pytestmark = pytest.mark.usefixtures("default_promotion")

# Several names in one string; the names of benchmarks are relative to their package.
LINEAR, MULTIHOST = "examples.linear_models.__main__", "train_multihost"
BOTH = ".learning.steps .learning.time"
LOCAL = ".local.compile_time .local.data_cache .local.partitioned_norms .local.state_memory"
RECORDING = ".training.fill_in .training.load_balance .training.select_quality"
DRAWING = f"{RECORDING} .training.paper_counts .local.select_speed"
DRAWING += " .network.planned .network.run .network.scaling .network.traffic"
REPORTING = f"{DRAWING} {LOCAL} .local.step_cost .training.regions"

# Programs and their wrong options; the second table also has the messages.
REFUSED = [
    (REPORTING, "--json no-such-folder/numbers.json; --json ."),
    (DRAWING, "--plot no-such-folder/plot.png"),
    (RECORDING, "--text no-such-file; --images no-such-folder; --density-text 2; --steps 0"),
    (".local.data_cache", "--images 8 --batch 9; --bandwidth 0; --folder no-such-folder"),
    (".training.fill_in .training.load_balance", "--workers 1"),
    (".training.load_balance", "--every 9 --steps 8"),
    (".training.regions", "--workers 0; --plot plot.png; --inputs x"),
    (".learning.steps", "--text no-such-file; --images no-such-folder --task images; --steps 1"),
    (".learning.steps", "--task images --workers 2 --batch 5000"),
    (".learning.large", "--only magic; --batch 9; --megabytes 1000000; --rates 0"),
    (".learning.flushed", "--seeds 1; --options density=2; --options every=2 --show"),
    (".training.paper_counts", "--images no-such-folder --tasks images"),
    (".training.paper_counts", "--workers 5 --tasks images; --text no-such-file --tasks lstm"),
    (".local.compile_time", "--leaves 0.5; --leaves 7"),
    (".local.passes", "--only magic; --breakdown magic; --check no-such-file"),
    (".local.step_cost", "--size 0; --density 0"),
    (".local.select_speed", "--sizes 2**40"),
    (".local.partitioned_norms", "--rounds 0"),
    (".local.state_memory", "--density 1.5"),
    (".network.traffic", "--workers 1; --sections levels --plot plot.png"),
    (".network.run", "--workers 1; --workers 2.5; --link fast; --density 2; --methods magic"),
    (".network.planned", "--workers 0; --params many; --bandwidth 25; --compute 1"),
    (".network.scaling", "--workers 0; --density 0; --params many; --local no-such-file"),
    (".network.scaling", "--validate no-such-file; --validate some-file --plot plot.png"),
    (".network.scaling", "--network mine 1us fast --no-programs"),
    (".gpu.programs", "--size 0; --density 2; --devices 0.5; --check no-such-file"),
    (".gpu.programs", "--write no-such-folder/programs.json"),
    (".gpu.programs", "--check benchmarks/gpu/programs.json --size 1000"),
    (".gpu.timings", "--size 10 --allow-cpu; --minutes 0 --allow-cpu; --workers 1 --allow-cpu"),
    (".gpu.timings", "--json no-such-folder/timings.json --allow-cpu"),
    (".gpu.timings", "--only no-such-contestant --size 4096 --allow-cpu"),
    (".gpu.train_step .gpu.same_results", "--json no-such-folder/numbers.json; --rounds 0"),
    (".gpu.same_results", "--size 10; --only magic; --density 2"),
    (".gpu.train_step", "--width 0.5; --blocks 0; --calls x"),
    (".gpu.hosts", "--params x; --only magic; --process 0; --processes 0; --rounds 0"),
    ("train_digits", "--density 0; --density much; --workers 3; --steps -1; --out figure.txt"),
    ("train_digits", "--data no-such-folder"),
    ("train_cached", "--bandwidth 0; --latency -1; --memory-limit nan; --workers 3; --batch 4096"),
    ("train_cached", f"--data no-such-folder; --holds images; --cache {__file__}"),
]
SAID = [
    (".evidence.__main__", "--only nothing", "--only 'nothing' is the beginning of no claim"),
    (".network.linear_models", "--method scd --exchange topk_a", "--method scd: dense_allgather,"),
    (BOTH, "--only x", "--only 'x' is none of: dense"),
    (BOTH, "--workers 3", "--batch 32 can't be dealt out to 3"),
    (BOTH, "--show", "--show needs --runs FILE"),
    (BOTH, "--options density=2", "--options: density"),
    (BOTH, "--options moments=x", "moments must be one of"),
    (BOTH, "--options rate=1", "sparse_adamw has no 'rate'"),
    (".learning.steps", "--width 30", "--width 30 can't be divided into 4 heads"),
    (".learning.steps", "--rates 0", "0 is not a positive number"),
    (".learning.steps", "--options gain", "gain is not NAME=VALUE"),
    (".learning.steps", "--options optimizer=fedavg", "optimizer=fedavg is none of diloco"),
    (".learning.steps", "--options every=0", "every must be an integer of at least 1"),
    (".learning.steps", "--task images --options b2=0.9", "sparse_sgd has no 'b2' here"),
    (".learning.steps", "--options step_ahead=x", "--options: step_ahead"),
    (".learning.steps", "--task images --width 8", "--width: the model of images has one width"),
    (".learning.programs", "--only x", "--only 'x' is none of: An image classifier; "),
    (".learning.programs", "--exchanges x", "invalid choice: 'x'"),
    (".learning.programs", "--seeds 0", "0 is not a whole number of at least 1"),
    (".learning.programs", "--densities 2", "2 is not in (0, 1]"),
    (".learning.programs", "--factors 0", "0 is not a positive number"),
    (".learning.programs", "--json no-such-folder/numbers.json", "cannot write"),
    (".learning.time", "--link fast", "'fast' is not a link"),
    (".learning.time", "--link 1gbit+50", "'1gbit+50' is not a link"),
    (".learning.time", "--task images", "invalid choice: 'images'"),
    (".learning.time", "--task lstm --only 'PyTorch, dense'", "needs PyTorch (pip install torch)"),
    (".learning.step_times", "--batch 6", "can't be dealt out"),
    (".learning.step_times", "--workers 1", "--workers"),
    (".learning.step_times", "--group x", "--group"),
    (".learning.step_times", "--link 0mbit", "--link"),
    (LINEAR, "--workers 0", "0 is not between 1 and"),
    (LINEAR, "--exchange ring", "--exchange ring is none of --method sgd"),
    (LINEAR, "--method scd --exchange topk_a", "is none of --method scd"),
    (LINEAR, "--rate 1e5 --regularisation 1 --rows 9", "must be below 1"),
    (LINEAR, "--test file", "--test and --size are for --data"),
    (LINEAR, "--data none --rows 5", "--rows is for generated data"),
    (LINEAR, "--data no-such-file", "cannot read no-such-file: No such file"),
    (LINEAR, "--mpi --workers 2", "with --mpi they are those of mpirun"),
    (LINEAR, "--mpi --join host:1 0", "with --mpi they are those of mpirun"),
    (LINEAR, "--join host 0", "expected HOST:PORT"),
    (LINEAR, "--join host:1 4", "--join 4: there are 4 workers"),
    (LINEAR, "--workers 9", "--workers is 9, but jax runs with 8 devices"),
    (LINEAR, "--json .", "cannot write"),
    ("train_nnx", "--workers 3", "--batch 128 is not divisible by --workers 3"),
    ("train_nnx", "--out loss.txt", "--out loss.txt must end in one of"),
    (f"train_nnx {MULTIHOST}", "--data no-such-folder", "no-such-folder is not a folder"),
    ("train_nnx", "--workers 16", "--workers is 16, but jax runs with 8 devices"),
    ("train_nnx", "--batch 2048", "a batch of 2048 images is asked for"),
    ("train_text", "--text no-such-file", "cannot read no-such-file: No such file"),
    ("train_text", "--text .", "cannot read"),
    ("train_text", "--width 10", "--width is 10; it must be a multiple of 4"),
    ("train_text", "--length 99999", "has no windows of 100000"),
    ("loop_pmap", "--steps 0", "0 is not between 1 and"),
    ("loop_shard_map", "--lr fast", "invalid float value: 'fast'"),
    ("checkpoint_reshard", "--then 3", "--batch 128 is not divisible by --then 3"),
    ("train_sharded", "--sites 3", "--sites 3 does not divide the 8 devices"),
    ("train_sharded", "--sites 8 --layout both", "--layout both needs an even number of devices"),
    ("train_sharded", "--batch 12", "12 is not divisible by the devices of ('site', 'fsdp')"),
    ("train_sharded", "--width 20", "--width is 20; it must be a multiple of 16"),
    ("train_sharded", "--density 0", "--density is 0.0; it must be above 0 and at most 1"),
    ("train_sharded", "--text no-such-file", "--text no-such-file is no file"),
    ("train_sharded", "--layout pipeline", "invalid choice: 'pipeline'"),
    ("train_sharded", "--every 5 --method ok_topk", "--every is for --method sparse_adamw and"),
    ("train_sharded", "--every 3", "--report is 20; it must be a multiple of --every"),
    (MULTIHOST, "--num-processes 2 --process-id 0", "--coordinator must be given"),
    (MULTIHOST, "--coordinator h:1 --num-processes 2", "--process-id must be given"),
    (MULTIHOST, "JAX_PROCESS_ID=1", "--coordinator and --num-processes must be given"),
    (MULTIHOST, "PMI_SIZE=4 PMI_RANK=4 --coordinator h:1", "give 0 to 3"),
    (MULTIHOST, "JAX_NUM_PROCESSES=two --coordinator h:1", "JAX_NUM_PROCESSES is 'two'"),
    (MULTIHOST, "--coordinator h --num-processes 1 --process-id 0", "HOST:PORT"),
    (MULTIHOST, "--coordinator h:99999 --num-processes 1 --process-id 0", "HOST:PORT"),
    (MULTIHOST, "--coordinator h:1 --num-processes 0 --process-id 0", "1 or more"),
    (MULTIHOST, "--batch 20", "--batch 20 is not divisible by 8 workers"),
    (MULTIHOST, "--batch 8000", "a worker has 168 images only"),
    (MULTIHOST, "--batch 0", "0 is not a positive number"),
    (MULTIHOST, "--density 2", "--density is 2.0"),
    (MULTIHOST, "--resume", "--resume needs --checkpoints"),
]
CASES = [(programs, each, "") for programs, lines in REFUSED for each in lines.split("; ")] + SAID
SPREAD = [(name, *rest) for programs, *rest in CASES for name in programs.split()]


@pytest.mark.parametrize(("program", "options", "message"), SPREAD)
def test_wrong_options_are_one_line(program, options, message, monkeypatch, capsys):
    """Environment variables are written before the options, as in a shell."""
    for name in (*_processes.COUNTS, *_processes.IDS, *_processes.DETECTED):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("JAX_COORDINATOR_ADDRESS", raising=False)
    variables = re.match(r"(?:[A-Z_]+=\S+ ?)*", options)[0]
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    main = importlib.import_module(program, "benchmarks").main
    assert message in refused(main, shlex.split(options.removeprefix(variables)), capsys)


def test_a_port_that_is_in_use_is_one_line(monkeypatch, capsys):
    def initialize(*given, **options):
        raise RuntimeError("UNKNOWN: Failed to start RPC server")

    monkeypatch.setattr("jax.distributed.initialize", initialize)
    main = importlib.import_module(MULTIHOST).main
    options = "--coordinator 127.0.0.1:5 --num-processes 2 --process-id 0"
    said = refused(main, shlex.split(options), capsys)
    assert "cannot meet at 127.0.0.1:5, whose port may be in use: UNKNOWN: Failed" in said

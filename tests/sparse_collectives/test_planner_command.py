"""The planner on the command line: its advice, and one line for each error."""

import json
import re
import subprocess
import sys

import pytest

import sparse_collectives as sc
from sparse_collectives.__main__ import main
from sparse_collectives.planner import _option_files

SLOW = ["--params", "10M", "--density", "0.01", "--workers", "16"]
SLOW += ["--latency", "5us", "--bandwidth", "100Mbit"]


def run(capsys, *arguments):
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def planned(capsys, tmp_path, *arguments):
    """The plan as it is written to a file."""
    file = tmp_path / "plan.json"
    run(capsys, *arguments, "--json", str(file))
    return json.loads(file.read_text())


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def advice(out):
    """The line that recommends an exchange."""
    return next(line for line in out.splitlines() if line.startswith("Use "))


def test_recommendation_is_code_or_dense(capsys):
    last = advice(run(capsys, *SLOW, "--exact"))
    assert "times as fast" in last
    assert isinstance(eval(last.rsplit(": ", 1)[1], {"sc": sc}), sc.SparseAllreduce)
    # Selection may cost more than it saves; the plan says which assumption decides that.
    fast = [*SLOW[:-1], "25Gbit"]
    out = run(capsys, *fast)
    assert advice(out).startswith("Use dense here")
    assert "two CPU cores. With --select-cost gpu the answer is" in out
    assert not advice(run(capsys, *fast, "--select-cost", "gpu")).startswith("Use dense")


def found(plan, name):
    """The prediction of an exchange of exact pairs."""
    rows = (row for row in plan["predictions"] if (row["name"], row["codec"]) == (name, "raw"))
    return next(rows)


def test_shards_of_a_worker_share_its_links(capsys, tmp_path):
    whole, shared, alone = (
        planned(capsys, tmp_path, *SLOW, *arguments)
        for arguments in ((), ("--shard", "4"), ("--shard", "4", "--links", "4"))
    )
    for field in ("size", "selected"):
        assert shared[field] == -(-whole[field] // 4)
    # The same time over shared links, and 1/4 of it with a link for each of four devices.
    dense = found(whole, "dense")["exchange"]
    assert found(shared, "dense")["exchange"] == pytest.approx(dense, rel=1e-2)
    assert found(alone, "dense")["exchange"] == pytest.approx(dense / 4, rel=1e-2)


def test_expansion_shortens_what_fills_in(capsys, tmp_path):
    before, after = (
        planned(capsys, tmp_path, *SLOW, *arguments) for arguments in ((), ("--expansion", "1.2@8"))
    )
    for name, shorter in (("ssar_split_allgather", True), ("ok_topk", False)):
        words = [found(x, name)["estimate"]["expected"]["words"] for x in (before, after)]
        assert (words[1] < words[0]) == shorter


# Each option, with values whose last word is wrong.
WRONG = {
    "--density": ("0", "1.5", "one", "1"),
    "--workers": ("0", "2.5", "1e12"),
    "--params": ("0", "1e16", "7B"),
    "--inner": ("0", "3", "4 --inner-bandwidth 0GB/s"),
    "--latency": ("1e300s", "5parsecs"),
    "--bandwidth": ("1e-300B/s", "0Gbit", "25"),
    "--compute": ("-1s",),
    "--expansion": ("inf@8", "nan@8", "9@8", "3.2", f"2@{5000 * '9'}", "", "2@2 --density 0.9"),
    "--shard": ("0", "2 --links 3", "2 --inner 2"),
    "--select-cost": ("gpuu", ""),
    "--merge-cost": ("gpu",),
    "--workers-per-core": ("0.5", "nan", "two", "1e9"),
    "--measured": ("/does/not/exist", ""),
    "--json": ("/does/not/exist",),
    "--bogus": ("",),
}
# The messages of argparse or of the system.
OTHERS_SAY = (
    *("expected one argument", "No such file", "unrecognized", "are of two plans"),
    "must be at most all entries",
)


@pytest.mark.parametrize("option", WRONG)
def test_bad_argument_is_one_line(capsys, option):
    for value in WRONG[option]:
        given = value.split(" ")
        error = fails(capsys, "plan", *SLOW, option, *given)
        assert option in error or "No such file" in error
        said = re.search(r"must .*got '?(.*?)['.,]", error)
        assert any(each in error for each in OTHERS_SAY) or given[-1].startswith(said[1])


def test_missing_arguments_are_one_line_and_no_command_prints_the_help(capsys):
    for arguments, match in (
        (["plan"], "--params"),
        (["plan", *SLOW[:6]], "--measured"),
        (["measure", "--bogus"], "unrecognized"),
        (["measure", "--json", "/no/file"], "--json must be in a folder that exists, got /no/file"),
        (["bogus"], "invalid choice"),
    ):
        assert match in fails(capsys, *arguments)
    assert main([]) == 0
    assert "plan" in capsys.readouterr().out


def test_module_runs_without_backend_matplotlib_or_rich():
    code = """
import runpy, sys
sys.argv = ["sparse_collectives", "plan", "--density", "0"]
try:
    runpy.run_module("sparse_collectives", run_name="__main__")
except SystemExit as done:
    assert done.code == 2
import jax
jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend has started
assert not {"matplotlib", "rich", "optax"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_steps_from_a_file_and_as_measured(tmp_path, capsys):
    file = tmp_path / "steps.json"
    file.write_text('{"gtopk": 3}')
    call = [*SLOW[:-5], "8", *SLOW[-4:]]
    text = run(capsys, *call, "--same-loss", str(file))
    assert "3.00x" in text
    assert "Use gtopk" in text
    call[call.index("0.01")] = "0.05"
    text = run(capsys, *call, "--same-loss")
    assert "Use partitioned_topk(1, 3)" in text
    for name in ("partitioned_topk(few)", "partitioned_topk(1, 3)"):
        assert f"{_option_files.MEASURED[name][8, 0.05]:.2f}x" in text
    assert "left out, without a number of steps: topk_a" in text
    for content, error in (("[1]", "must hold an object"), ("{", "is no JSON")):
        file.write_text(content)
        assert error in fails(capsys, "plan", *call, "--same-loss", str(file))
    # The nearest case by ratios, and None if no case is near.
    cases = {(4, 0.01): 1.0, (16, 0.01): 2.0, (16, 0.015): 3.0}
    near = [(7, 0.01), (9, 0.011), (9, 0.02), (9, 0.03), (65, 0.01), (64, 0.015)]
    nearest = [_option_files._nearest(cases, *case) for case in near]
    assert nearest == [1.0, 2.0, 3.0, None, None, 3.0]


def test_measured_steps_reach_as_far_as_the_page_says():
    for workers in range(2, 33):
        for density in (0.0067, 0.01, 0.012, 0.015):
            found = _option_files.read_steps(_option_files.ADAMW, workers, density)
            assert {"ok_topk", "partitioned_topk(few)"} <= found.keys(), (workers, density)
    for workers in (1, 2, 5, 11, 23, 47, 64, 128):
        for density in (0.034, 0.05, 0.074):
            found = _option_files.read_steps(_option_files.ADAMW, workers, density)
            assert "partitioned_topk(few)" in found, (workers, density)

"""The planner on the command line: its advice, and one line for what is wrong."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import sparse_collectives as sc
from sparse_collectives.__main__ import main
from sparse_collectives.planner import _steps

ROOT = Path(__file__).parents[2]
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


def test_the_recommendation_says_what_to_write(capsys):
    last = advice(run(capsys, *SLOW, "--exact"))
    assert "times as fast" in last
    made = eval(last.rsplit(": ", 1)[1], {"sc": sc})
    assert isinstance(made, sc.SparseAllreduce)


def test_dense_is_the_answer_where_selection_costs_more_than_it_saves(capsys):
    fast = [*SLOW[:-1], "25Gbit"]
    out = run(capsys, *fast)
    assert advice(out).startswith("Use dense here")
    # Which assumption decides, and what the other one would say.
    assert "two CPU cores, which decides it. With --select-cost gpu it is" in out
    assert not advice(run(capsys, *fast, "--select-cost", "gpu")).startswith("Use dense")


def test_the_devices_of_a_worker_have_parts_and_share_its_links(capsys, tmp_path):
    whole, shared, alone = (
        planned(capsys, tmp_path, *SLOW, *arguments)
        for arguments in ((), ("--shard", "4"), ("--shard", "4", "--links", "4"))
    )
    for field in ("size", "selected"):
        assert shared[field] == -(-whole[field] // 4)

    def dense(plan):
        return next(row for row in plan["predictions"] if row["name"] == "dense")["exchange"]

    # As much over the same links, and a quarter of it over each of four.
    assert dense(shared) == pytest.approx(dense(whole), rel=1e-2)
    assert dense(alone) == pytest.approx(dense(whole) / 4, rel=1e-2)


def test_expansion_shortens_what_fills_in(capsys, tmp_path):
    def words(name, *arguments):
        rows = planned(capsys, tmp_path, *SLOW, *arguments)["predictions"]
        found = next(row for row in rows if (row["name"], row["codec"]) == (name, "raw"))
        return found["estimate"]["expected"]["words"]

    assert words("ssar_split_allgather", "--expansion", "1.2@8") < words("ssar_split_allgather")
    assert words("ok_topk", "--expansion", "1.2@8") == words("ok_topk")


def test_a_plot_or_what_to_install_for_it(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    run(capsys, *SLOW, "--plot", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")
    for name in ("plan.xyz", "no/such/folder/plan.png"):
        error = fails(capsys, "plan", *SLOW, "--plot", str(tmp_path / name))
        assert "--plot must be a file that can be written, such as plan.png, got" in error
    # None in sys.modules is how Python marks a module as one that cannot be imported.
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = fails(capsys, "plan", *SLOW, "--plot", str(file))
    assert "pip install 'sparse-collectives[examples]'" in error
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = project["optional-dependencies"]["examples"]
    assert any(package.startswith("matplotlib") for package in packages)


A_COUNT = "must be a whole number from 1 to 65,536, such as 16"


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        *((f"--density {x}", "--density") for x in ("0", "1.5", "one")),
        ("--density 1", "--density must be 1.0 to send all entries or 0.01 to send 1 %"),
        *((f"--workers {x}", f"--workers {A_COUNT}") for x in ("0", "2.5", "1e12")),
        *((f"--params {x}", "--params") for x in ("0", "1e16")),
        ("--inner 0", f"--inner {A_COUNT}"),
        ("--inner 3", "--inner"),
        *((f"--latency {x}", "--latency") for x in ("1e300s", "5parsecs")),
        *((f"--bandwidth {x}", "--bandwidth") for x in ("1e-300B/s", "0Gbit", "25")),
        ("--compute -1s", "--compute"),
        *((f"--expansion {x}", "--expansion") for x in ("inf@8", "nan@8", "9@8", "3.2")),
        (f"--expansion 2@{5000 * '9'}", "--expansion"),
        ("--shard 0", "--shard must be a whole number"),
        ("--shard 2 --links 3", "--links must be at most --shard=2, got 3"),
        ("--shard 2 --inner 2", "--shard=2 and --inner=2 are of two plans"),
        ("--inner 4 --inner-bandwidth 0GB/s", "--inner-bandwidth"),
        ("--select-cost gpuu", "--select-cost must be cpu, gpu or a time such as 0.1ns"),
        ("--merge-cost gpu", "--merge-cost must be a time such as 0.1ns"),
        *(
            (f"--workers-per-core {x}", f"must be a number from 1 to 65,536, got '{x}'")
            for x in ("0.5", "nan", "two", "1e9")
        ),
        ("--measured /does/not/exist", "/does/not/exist"),
        ("--bogus", "--bogus"),
        # Empty ones.
        *(([option, ""], option) for option in ("--expansion", "--select-cost")),
        (["--measured", ""], "No such file"),
    ],
)
def test_a_bad_argument_is_one_line(capsys, arguments, match):
    given = arguments.split() if isinstance(arguments, str) else arguments
    assert match in fails(capsys, "plan", *SLOW, *given)


def test_missing_arguments_are_one_line_and_no_command_prints_the_help(capsys):
    assert "--params" in fails(capsys, "plan")
    assert "--measured" in fails(capsys, "plan", *SLOW[:6])
    assert "unrecognized" in fails(capsys, "measure", "--bogus")
    assert "invalid choice" in fails(capsys, "bogus")
    assert main([]) == 0
    assert "plan" in capsys.readouterr().out


def test_the_module_runs_and_needs_no_backend_matplotlib_or_rich():
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
    assert "Use agreed(few)" in text
    assert f"{_steps.MEASURED['agreed(few)'][8, 0.05]:.2f}x" in text
    assert "left out, without a number of steps: topk_a" in text
    for content, error in (("[1]", "must hold an object"), ("{", "is no JSON")):
        file.write_text(content)
        assert error in fails(capsys, "plan", *call, "--same-loss", str(file))
    # The nearest case, by ratios; and none where it says nothing.
    cases = {(4, 0.01): 1.0, (16, 0.01): 2.0, (16, 0.015): 3.0}
    near = [(7, 0.01), (9, 0.011), (9, 0.02), (9, 0.03), (65, 0.01), (64, 0.015)]
    nearest = [_steps._nearest(cases, *case) for case in near]
    assert nearest == [1.0, 2.0, 3.0, None, None, 3.0]

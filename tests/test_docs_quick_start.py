"""The programs of docs/quick-start.md run as they stand, in a Python of their own."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "quick-start.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
# What the page says that the programs print.
PRINTED = re.findall(r"^(?:loss \d|dense:|sparse_adamw:).*$", PAGE, re.MULTILINE)
NUMBER = r"\d[\d,]*(?:\.\d+)?"


def numbers(line):
    return [float(x.replace(",", "")) for x in re.findall(NUMBER, line)]


def run(program, folder):
    """The lines that a program prints in a Python of its own; a warning is an error."""
    file = folder / "quick_start.py"
    file.write_text(program)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(file)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_programs_run(tmp_path):
    """With fewer steps, which only the numbers depend on."""
    assert len(PROGRAMS) == 7
    assert len(PRINTED) == 4
    program = "\n".join(PROGRAMS)
    for steps, fewer in (("steps=200", "steps=2"), ("STEPS = 150", "STEPS = 16")):
        assert program.count(steps) == 1
        program = program.replace(steps, fewer)
    assert [line.split()[0] for line in run(program, tmp_path)] == [
        *("loss", "loss", "dense:", "sparse_adamw:"),
        *("selected", "delivered", "overflow", "words"),
    ]


@pytest.mark.slow
def test_the_programs_print_what_the_page_says(tmp_path):
    for line, expected in zip(run("\n".join(PROGRAMS), tmp_path), PRINTED):
        assert re.sub(NUMBER, "N", line) == re.sub(NUMBER, "N", expected)
        # Another version of jax or of its compiler rounds otherwise.
        assert numbers(line) == pytest.approx(numbers(expected), rel=0.15), line


def test_the_index_begins_with_the_program_of_the_readme():
    readme, index = ((ROOT / name).read_text() for name in ("README.md", "docs/index.md"))
    program = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert program is not None
    assert re.findall(r"```python\n(.*?)```", index, re.DOTALL) == [program[1]]
    commands = re.search(r"```\n(make .*?)```", readme, re.DOTALL)
    assert commands is not None
    assert f"```\n{commands[1]}```" in index


@pytest.mark.parametrize("name", ["index", "quick-start", "idea", "choosing", "sharp-bits"])
def test_pages_fit_the_screen(name):
    """Lines of programs, which don't wrap, have at most 100 characters."""
    page = (ROOT / "docs" / f"{name}.md").read_text()
    for program in re.findall(r"```\w*\n(.*?)```", page, re.DOTALL):
        assert max(map(len, program.splitlines()), default=0) <= 100

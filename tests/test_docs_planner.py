"""What docs/planner.md and the README print of the planner is what it prints."""

import re
import shlex
from pathlib import Path

from sparse_collectives.__main__ import main

ROOT = Path(__file__).parents[1]
COMMAND = r"python -m sparse_collectives (plan [^`\n\\]*(?:\\\n[^`\n\\]*)*)"


def printed(command, capsys):
    assert main(shlex.split(command.replace("\\\n", " "))) == 0
    return capsys.readouterr().out


def test_the_output_in_the_guide(capsys):
    page = (ROOT / "docs" / "planner.md").read_text(encoding="utf-8")
    block = re.search(r"```\n\$ " + COMMAND + r"\n(.*?)```", page, re.DOTALL)
    assert block is not None
    assert printed(block[1], capsys).rstrip() == block[2].rstrip()


def test_what_the_readme_says_of_its_command(capsys):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    command = re.search(f"`{COMMAND}`", page)
    assert command is not None
    text = printed(command[1], capsys)
    rows = {
        tuple(words[:2]): float(words[2].replace(",", ""))
        for line in text.splitlines()
        if len(words := line.split()) == 9 and words[3].endswith("x")
    }
    said = re.search(
        r"it recommends `agreed` in few\s+bits \(`spardl` and `ok_topk` with 8-bit pairs are "
        r"([\d.]+) and ([\d.]+) % behind\), ([\d.]+)\s+times as fast as the best dense allreduce",
        page,
    )
    assert said is not None
    best = rows["agreed(few)", "raw"]
    assert best == min(rows.values())
    assert f"{rows['spardl', 'narrow8'] / best - 1:.1%}" == f"{said[1]}%"
    assert f"{rows['ok_topk', 'narrow8'] / best - 1:.1%}" == f"{said[2]}%"
    assert f"{rows['dense_bucketed', 'raw'] / best:.1f}" == said[3]
    assert "Use agreed(few)" in text
    # With the other cost it says that the cost decides it.
    other = printed(command[1].replace("--select-cost gpu", ""), capsys)
    assert "Use dense here" in other

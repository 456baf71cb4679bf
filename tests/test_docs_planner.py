"""What docs/planner.md and the README print of the planner is what it prints."""

import re
import shlex
from pathlib import Path

from sparse_collectives.__main__ import main
from sparse_collectives.planner import _optimizers

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
        tuple(re.split(r"  +", line)[:2]): float(re.split(r"  +", line)[2].replace(",", ""))
        for line in text.splitlines()
        if re.match(r"\S.*?  +\S+(?: bits)?  +[\d.,]+  +[\d.]+x", line)
    }
    said = re.search(
        r"it recommends `sparse_adamw`, ([\d.]+) times as fast as the best dense AdamW in "
        r"float32, and\s+says that `powersgd\(1\)` and a float16 allreduce tie with it\. Among the "
        r"exchanges `agreed` in few bits ties with `spardl` and `ok_topk`: two\s+steps within "
        r"20 % are a tie",
        page,
    )
    assert said is not None
    best = rows["sparse_adamw", "few bits"]
    assert f"{rows['dense_bucketed, adamw', 'float32'] / best:.1f}" == said[1]
    assert "As a whole optimizer sparse_adamw" in text
    tied = [rows["powersgd(1), adamw", "factors"], rows["dense, adamw", "float16"]]
    assert all(best / _optimizers.TIE < step < best * _optimizers.TIE for step in tied)
    assert "Use agreed(few)" in text
    assert re.search(r"a tie with agreed\(few\), within 20%: spardl, ok_topk", text)
    # With the other cost it says that the cost decides it.
    other = printed(command[1].replace("--select-cost gpu", ""), capsys)
    assert "Use dense here" in other

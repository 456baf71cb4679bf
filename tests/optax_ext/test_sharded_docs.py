"""The programs of docs/sharded.md run as they stand there, one after the other."""

import re
from pathlib import Path

import pytest
from jax.sharding import PartitionSpec

TEXT = (Path(__file__).parents[2] / "docs" / "sharded.md").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("default_promotion")
def test_the_programs_run():
    programs = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    assert len(programs) == 2
    names = {}
    for program in programs:
        exec(program, names)
    assert int(names["opt_state"][0].count) == 3
    assert names["params"]["up"].sharding.spec == PartitionSpec(None, "fsdp")

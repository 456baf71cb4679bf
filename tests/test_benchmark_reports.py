"""Files that the benchmarks did not write end them with one line and status 2."""

import copy
import json

import numpy as np
import pytest

from benchmarks._common import reports
from benchmarks.network import scaling
from tests.programs import refused

WHERE = {"workers": 4, "params": 1000}
STEP = {**WHERE, "method": "dense"}
NETWORK = {
    "settings": {"density": 0.01, "cores": 2},
    "local": [{**STEP, "seconds": [0.5]}],
    "links": [{**WHERE, "link": "1gbit", "latency": 1e-3}],
    "points": [{**STEP, "link": "1gbit", "seconds": [2.0]}],
}
TIMES = [{"contestant": x, "median_ms": y} for x, y in (("dense (psum)", 20.0), ("ok_topk", 90.0))]
MODEL = ["--params", "1M", "--workers", "4", "--no-programs", "--local"]
PROGRAMS = {"--validate": (["--validate"], NETWORK)}
PROGRAMS |= {"--local": (MODEL, {"size": 1000, "times": TIMES})}
# For every program. Too many brackets raise a RecursionError, which is not a ValueError.
MALFORMED = {
    "nothing": "",
    "no JSON": "{",
    "no text": b"\xff\xfe\x00",
    "a list of a number": "[1]",
    "a list of an empty object": "[{}]",
    "one key": '{"task": 1}',
    "null": "null",
    "a long number": f"[{5000 * '1'}]",
    "deep lists": 200_000 * "[",
}
# Values that replace others in a good file.
CHANGES = [
    ("--validate", ("settings",), None),
    ("--validate", ("settings", "density"), 2),
    ("--validate", ("settings", "density"), "0.01"),
    ("--validate", ("settings", "cores"), True),
    ("--validate", ("points", 0, "params"), 10**400),
    ("--validate", ("points", 0, "method"), 1),
    ("--validate", ("points", 0), {}),
    ("--validate", ("points",), []),
    ("--validate", ("points", 0, "seconds"), []),
    ("--validate", ("points", 0, "seconds"), [0]),
    ("--validate", ("points", 0, "seconds"), [float("nan")]),
    ("--validate", ("points", 0, "link"), "2gbit"),
    ("--validate", ("local",), []),
    ("--local", ("size",), 0),
    ("--local", ("times",), TIMES[:1]),
]


def assert_one_line(program, path, capsys):
    message = refused(scaling.main, [*PROGRAMS[program][0], str(path)], capsys)
    assert str(path) in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize("program", PROGRAMS)
def test_report_that_is_good_is_read(program, tmp_path, capsys):
    path = tmp_path / "good.json"
    argv, content = PROGRAMS[program]
    reports.write(path, content)
    assert scaling.main([*argv, str(path)]) == 0
    printed, message = capsys.readouterr()
    assert printed
    assert not message


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("program", PROGRAMS)
def test_report_of_something_else_is_one_line(program, content, tmp_path, capsys):
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = assert_one_line(program, path, capsys)
    # The message names the program whose file was expected.
    assert "benchmarks." in message
    assert_one_line(program, tmp_path / "missing.json", capsys)


@pytest.mark.parametrize(("program", "place", "value"), CHANGES)
def test_report_with_one_wrong_value_is_one_line(program, place, value, tmp_path, capsys):
    path = tmp_path / "bad.json"
    content = copy.deepcopy(PROGRAMS[program][1])
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(content))
    assert_one_line(program, path, capsys)


def test_report_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.json"
    reports.write(path, {"a": np.arange(3), "b": np.float32(0.5)})
    assert json.loads(path.read_text()) == {"a": [0, 1, 2], "b": 0.5}
    with pytest.raises(TypeError):
        reports.write(path, {"a": {1j: 0}})
    assert json.loads(path.read_text()) == {"a": [0, 1, 2], "b": 0.5}
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]

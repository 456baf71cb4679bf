"""What the benchmarks make of files that they did not write: one line, and status 2."""

import copy
import json

import numpy as np
import pytest

from benchmarks._common import reports
from benchmarks.network import scaling
from tests.programs import refused

WHERE = {"workers": 4, "params": 1000}
POINT = {**WHERE, "link": "1gbit", "method": "dense", "seconds": [2.0]}
NETWORK = {
    "settings": {"density": 0.01, "cores": 2},
    "local": [{**WHERE, "method": "dense", "seconds": [0.5]}],
    "links": [{**WHERE, "link": "1gbit", "latency": 1e-3}],
    "points": [POINT],
}
TIMES = [
    {"contestant": "dense (psum)", "median_ms": 20.0},
    {"contestant": "ok_topk", "median_ms": 90.0},
]
PROGRAMS = {
    "scaling --validate": (scaling.main, ["--validate"], NETWORK),
    "scaling --local": (
        scaling.main,
        ["--params", "1M", "--workers", "4", "--no-programs", "--local"],
        {"size": 1000, "times": TIMES},
    ),
}
# For every program. Too many brackets end in a RecursionError, which is no ValueError.
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
# What is put in at a place of a good file.
CHANGES = [
    ("scaling --validate", ("settings",), None),
    ("scaling --validate", ("settings", "density"), 2),
    ("scaling --validate", ("settings", "density"), "0.01"),
    ("scaling --validate", ("settings", "cores"), True),
    ("scaling --validate", ("points", 0, "params"), 10**400),
    ("scaling --validate", ("points", 0, "method"), 1),
    ("scaling --validate", ("points", 0), {}),
    ("scaling --validate", ("points",), []),
    ("scaling --validate", ("points", 0, "seconds"), []),
    ("scaling --validate", ("points", 0, "seconds"), [0]),
    ("scaling --validate", ("points", 0, "seconds"), [float("nan")]),
    ("scaling --validate", ("points", 0, "link"), "2gbit"),
    ("scaling --validate", ("local",), []),
    ("scaling --local", ("size",), 0),
    ("scaling --local", ("times",), TIMES[:1]),
]


def assert_one_line(program, path, capsys):
    main, argv, _ = PROGRAMS[program]
    message = refused(main, [*argv, str(path)], capsys)
    assert str(path) in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_good_file_is_read(program, tmp_path, capsys):
    path = tmp_path / "good.json"
    main, argv, content = PROGRAMS[program]
    reports.write(path, content)
    assert main([*argv, str(path)]) == 0
    printed, message = capsys.readouterr()
    assert printed
    assert not message


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_file_of_something_else_is_one_line(program, content, tmp_path, capsys):
    path = tmp_path / "bad.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    message = assert_one_line(program, path, capsys)
    # What was expected is the file of a program that is named.
    assert "benchmarks." in message
    assert_one_line(program, tmp_path / "missing.json", capsys)


@pytest.mark.parametrize(("program", "place", "value"), CHANGES)
def test_one_wrong_value_is_one_line(program, place, value, tmp_path, capsys):
    path = tmp_path / "bad.json"
    content = copy.deepcopy(PROGRAMS[program][2])
    inner = content
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    path.write_text(json.dumps(content))
    assert_one_line(program, path, capsys)


def test_a_report_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "report.json"
    reports.write(path, {"a": np.arange(3), "b": np.float32(0.5)})
    assert json.loads(path.read_text()) == {"a": [0, 1, 2], "b": 0.5}
    with pytest.raises(TypeError):
        reports.write(path, {"a": {1j: 0}})
    assert json.loads(path.read_text()) == {"a": [0, 1, 2], "b": 0.5}
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]

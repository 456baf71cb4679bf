"""Results know the code that they are of: what is reached is part of it, and nothing else."""

import ast
import functools
import re

import pytest

from benchmarks.evidence import _code
from benchmarks.evidence._catalogue import CLAIMS
from benchmarks.evidence._code import Code
from benchmarks.evidence._figures import CURVES

# The benchmarks are programs of users.
pytestmark = pytest.mark.usefixtures("default_promotion")
MAIN = '''
"""Checks."""
import functools
from pack import select
from . import helper
from .helper import LIMIT as MOST

SIZE = 4

@functools.cache
def check(seed):
    """Measures."""
    return select.top(seed, SIZE) + MOST

def other(seed):
    return helper.unused(seed)

def named(seed):
    return getattr(select, "top")(seed)

def started(seed):
    return run(["python", "-m", "pack.program"])

def by(name, function):
    def inner(seed):
        return function(name)
    return inner

MADE = (by("one", other), by("two", check))
LAMBDAS = (lambda seed: check(seed),
           lambda seed: other(seed))
'''
FILES = {
    "pack/__init__.py": "from pack import select\n",
    "pack/select/__init__.py": "from ._top import top\nfrom ._rest import rest\n",
    "pack/select/_top.py": "def top(x, k=1):\n    return x\n",
    "pack/select/_rest.py": "def rest(x):\n    return x\n",
    "pack/helper.py": "LIMIT = 3\n\ndef unused(x):\n    return x\n",
    "pack/program.py": "def main():\n    return 0\n",
    "pack/main.py": MAIN,
}


@pytest.fixture
def pack(tmp_path):
    """A package, and a function that says what its checks are of after a change of a file."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    def source(module):
        place = tmp_path.joinpath(*module.split("."))
        paths = (place / "__init__.py", place.with_suffix(".py"))
        return next((path for path in paths if path.is_file()), None)

    def after(name=None, old="", new=""):
        if name is not None:
            content = (tmp_path / name).read_text()
            assert old in content
            (tmp_path / name).write_text(content.replace(old, new))
        space = {"__name__": "pack.main", "run": print, "helper": None, "select": None, "MOST": 3}
        text = (tmp_path / "pack" / "main.py").read_text()
        # By hand, as what a test imports stays imported.
        exec(re.sub("(?m)^from .*$", "", text), space)
        code = Code(source)
        checks = {
            "check": space["check"],
            "other": space["other"],
            "named": space["named"],
            "started": space["started"],
            "made one": space["MADE"][0],
            "made two": space["MADE"][1],
            "lambda of check": space["LAMBDAS"][0],
            "lambda of other": space["LAMBDAS"][1],
            "partial": functools.partial(space["by"], "one", space["check"]),
        }
        return {name: code.fingerprint(check) for name, check in checks.items()}

    return after


OF_CHECK = {"check", "made two", "lambda of check", "partial"}
OF_OTHER = {"other", "made one", "lambda of other"}
EACH = OF_CHECK | OF_OTHER | {"named", "started"}


@pytest.mark.parametrize(
    ("name", "old", "new", "changed"),
    [
        ("pack/select/_top.py", "return x", "return x + k", OF_CHECK | {"named"}),
        # By a name in a string anything of a module may be meant, and nothing beside it.
        ("pack/select/_rest.py", "return x", "return -x", {"named"}),
        ("pack/helper.py", "LIMIT = 3", "LIMIT = 4", OF_CHECK),
        ("pack/helper.py", "return x", "return -x", OF_OTHER),
        ("pack/program.py", "return 0", "return 1", {"started"}),
        ("pack/main.py", "SIZE = 4", "SIZE = 5", OF_CHECK),
        ("pack/main.py", "def inner(seed):\n", "def inner(seed):\n        seed += 1\n",
         {"made one", "made two", "partial"}),
        ("pack/main.py", "check(seed),", "check(-seed),", {"lambda of check"}),
        # Statements that bind nothing may do anything.
        ("pack/select/_top.py", "def top", "print()\ndef top", OF_CHECK | {"named"}),
        # Nothing is another program for its comments, docstrings, annotations, lines or imports.
        ("pack/select/_top.py", "return x", "return  (x)  # as it came", set()),
        ("pack/select/_top.py", "):\n", ') -> int:\n    """What it was."""\n', set()),
        ("pack/main.py", '"""Measures."""', '"""Counts."""', set()),
        ("pack/main.py", "import functools\n", "import functools\nimport os\n", set()),
        ("pack/main.py", "MADE = (", "SHOWN = 1\nMADE = (", set()),
    ],
)  # fmt: skip
def test_what_is_reached_is_part_of_the_code(pack, name, old, new, changed):
    before = pack()
    assert set(before) == EACH
    after = pack(name, old, new)
    assert {key for key in EACH if before[key] != after[key]} == changed


def test_a_fingerprint_is_that_of_every_version_of_python():
    # What 3.12 reads in place of f"{x:>{n}}", and its text as of 3.11 and 3.13.
    node = ast.parse('f"{x:>{n}}"').body[0]
    text = _code._canonical(node)
    spec = node.value.values[0].format_spec
    spec.values = [x for x in spec.values if getattr(x, "value", None) != ""]
    spec.values.append(ast.Constant(""))
    assert _code._canonical(node) == text
    assert "type_params" not in _code._canonical(ast.parse("def f(): pass"))


def test_a_file_that_moves_is_the_same_code(pack, tmp_path):
    before = pack()
    (tmp_path / "pack/select/_top.py").rename(tmp_path / "pack/select/_exact.py")
    assert pack("pack/select/__init__.py", "._top", "._exact") == before


def test_checks_of_one_function_differ_by_what_they_are_given(pack):
    found = pack()
    assert len({found[name] for name in EACH}) == len(EACH)


def test_data_is_part_of_the_code(tmp_path, monkeypatch):
    monkeypatch.setattr(_code, "DATA", tmp_path)
    found = []
    for text in ("1", "2", "1"):
        (tmp_path / "some.json").write_text(text)
        found.append(_code.fingerprint.__wrapped__(dict, ("some.json",)))
    assert found[0] == found[2] != found[1]


def test_a_claim_of_words_is_of_the_allreduces_and_not_of_the_optimizers():
    reached = {
        module for module, _ in _code.code().reached("benchmarks.evidence._words", "words_of")
    }
    assert "sparse_collectives.allreduce.ok_topk._composition" in reached
    assert "sparse_collectives.traffic._collectives" in reached
    assert not [module for module in reached if module.startswith("optax_ext")]


def test_every_check_and_line_is_of_some_code():
    for measure in (*(c.check for c in CLAIMS if c.check), *(c.measure for c in CURVES)):
        functions = [f for f in _code._functions(measure) if f.__module__.startswith("benchmarks.")]
        assert functions, measure

"""The packages as a user imports them, and their parts as docs/architecture.md has them."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib

import pytest
import yaml
from packaging.version import Version

import optax_ext
import sparse_collectives
from benchmarks._common.processes import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def modules():
    for package in (sparse_collectives, optax_ext):
        yield package.__name__
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            yield info.name


# Their examples compile for a second or more.
SLOW = (
    "_train_step _adamw _sgd _transforms._sparse_allreduce _partitioned_topk _hierarchical _adtopk "
    "_bucketed _dgc _gaussian_k _mstopk _random_k _scheduled _sidco _without_feedback"
)
SLOW = tuple(f".{name}" for name in SLOW.split())


# They are written as users write, with JAX's promotion.
@pytest.mark.usefixtures("default_promotion")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow if x.endswith(SLOW) else ()) for x in modules()]
)
def test_docstring_examples_run(name):
    failures, _ = doctest.testmod(importlib.import_module(name), verbose=False)
    assert failures == 0


def test_oldest_versions_that_are_tested_are_the_stated_minimums():
    minimums = dict(line.split(">=") for line in PROJECT["dependencies"])
    text = (ROOT / "constraints" / "oldest.txt").read_text()
    pinned = re.findall(r"^(\w+)==([\d.]+?)(?:\.\*)?(?:;.*)?$", text, re.MULTILINE)
    assert {name: Version(x) for name, x in pinned} == {x: Version(y) for x, y in minimums.items()}


# Packages that the examples and the logging need, and that users may not have.
OPTIONAL = "diskcache flax grain matplotlib mpi4jax mpi4py orbax pandas PIL rich scipy sklearn"


@pytest.mark.parametrize(
    ("package", "needed"),
    [("sparse_collectives", ("jax", "numpy")), ("optax_ext", ("jax", "numpy", "optax"))],
)
def test_import_loads_what_the_package_depends_on_and_starts_no_backend(package, needed):
    code = f"""
import importlib, sys
def load(names):
    for name in names:
        importlib.import_module(name)
    return {{module.split(".")[0] for module in sys.modules}}
before = load({needed})
after = load([{package!r}])
others = after - before - set(sys.stdlib_module_names)
print(*sorted(name for name in others if not name.startswith("_")))
print(*sorted(after & set({OPTIONAL!r}.split()) - before))
import jax
jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend has started
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded, optional = done.stdout.split("\n")[:2]
    assert set(loaded.split()) <= {"sparse_collectives", package}
    assert not optional


def test_citation_is_complete_and_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    # The fields that the format's schema requires.
    assert citation["cff-version"] == "1.2.0"
    assert citation["message"]
    assert citation["title"].startswith(PROJECT["name"])
    assert all("name" in author or "family-names" in author for author in citation["authors"])
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= reference.keys()
        assert re.fullmatch(r"10\.\d{4,}/\S+", reference.get("doi", "10.1000/none"))
    assert citation["version"] == PROJECT["version"] == sparse_collectives.__version__
    assert citation["license"] == PROJECT["license"]
    # A release has a heading with its date in the changelog; the citation gives the same.
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version = re.escape(PROJECT["version"])
    released = re.search(rf"^## \[{version}\] - ([\d-]+)$", changelog, re.MULTILINE)
    date = citation.get("date-released")
    assert (str(date) if date else None) == (released[1] if released else None)


# Parts import from parts above them in the tree of the page, and never from parts below.


def levels(package):
    """The line of each part in the tree of the page."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    (tree,) = re.findall(rf"^{package}/\n((?:  .*\n)+)", page, re.M)
    lines = [re.split(r" {2,}", line.strip())[0].split() for line in tree.splitlines()]
    return {name.rstrip("/"): level for level, names in enumerate(lines) for name in names}


def imported(source, package):
    """The parts of its own package that a source imports, in functions too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            for name in [f"{module}.{x.name}" if module else x.name for x in node.names]:
                if name.startswith(f"{package}."):
                    yield name.split(".")[1]


@pytest.mark.parametrize("package", ["sparse_collectives", "optax_ext"])
def test_parts_stand_in_the_tree_and_imports_go_one_way(package):
    level, folder, parts = levels(package), ROOT / package, set()
    for file in sorted(folder.rglob("*.py")):
        here = file.relative_to(folder).with_suffix("").parts[0]
        if here == "__init__":
            continue
        parts.add(here)
        for part in imported(file.read_text(), package):
            # The exports of the package itself have no line.
            assert level.get(part, -1) <= level[here], f"{file} imports {part}"
    assert parts == set(level)


def test_import_in_a_function_would_be_seen():
    source = "def f():\n    from optax_ext._train import _places\n"
    assert list(imported(source, "optax_ext")) == ["_train"]
    level = levels("optax_ext")
    assert level["_train"] > level["_error_feedback"]


# What a trace reads is in its arguments: jax's caches have no key for anything else.

# A setting of the process, as in jax.config: a change of it empties these caches. And what the
# fields of a state are to the workers, which is registered when the class is made.
SETTINGS = {"_direct.py": {"_in_use"}, "_roles.py": {"FIELDS"}}
METHODS = {"add", "append", "clear", "extend", "insert", "pop", "remove", "setdefault", "update"}


def hidden(source):
    """Names through which a call reaches a later one: context variables, and rebound names."""
    tree = ast.parse(source)
    found, held = set(), set()
    for node in tree.body:
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign) and value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            held |= {x.id for x in targets if isinstance(x, ast.Name)}
    for node in ast.walk(tree):
        match node:
            case ast.Global(names=names):
                found.update(names)
            case ast.Attribute(attr="ContextVar" | "local" as name, value=ast.Name(id=module)):
                found |= {name} if module in ("contextvars", "threading") else set()
            case ast.ImportFrom(module="contextvars" | "threading", names=names):
                found |= {x.name for x in names} & {"ContextVar", "local"}
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)):
                found |= {name} if name in held and method in METHODS else set()
            case ast.Assign(targets=[ast.Subscript(value=ast.Name(id=name))]):
                found |= {name} & held
    return found


def test_nothing_is_read_while_a_function_is_traced_but_its_arguments():
    files = [
        x for package in ("sparse_collectives", "optax_ext") for x in (ROOT / package).rglob("*.py")
    ]
    found = {file.name: names for file in files if (names := hidden(file.read_text()))}
    assert found == SETTINGS


@pytest.mark.parametrize(
    "source",
    [
        "import contextvars\nphase = contextvars.ContextVar('phase')",
        "from contextvars import ContextVar",
        "import threading\nhere = threading.local()",
        "seen = []\ndef f(x):\n    seen.append(x)",
        "made = {}\ndef f(x):\n    made[x] = 1",
        "on = False\ndef f():\n    global on\n    on = True",
    ],
)
def test_what_is_hidden_would_be_seen(source):
    assert hidden(source)

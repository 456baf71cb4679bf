"""Parts import from those above them in the tree of docs/architecture.md, and never from below."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def levels(package):
    """The line of each part in the tree of the page."""
    tree = re.search(rf"^{package}/\n((?:  .*\n)+)", PAGE, re.M)
    assert tree is not None
    lines = [re.split(r" {2,}", line.strip())[0].split() for line in tree[1].splitlines()]
    return {name.rstrip("/"): level for level, names in enumerate(lines) for name in names}


def imported(source, package):
    """The parts of its own package that a source imports, in functions too."""
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == package:
            names = [f"{package}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            if name.startswith(f"{package}."):
                yield name.split(".")[1]


@pytest.mark.parametrize("package", ["sparse_collectives", "optax_ext"])
def test_every_part_stands_in_the_tree_and_imports_go_one_way(package):
    level, folder, parts = levels(package), ROOT / package, set()
    for file in sorted(folder.rglob("*.py")):
        here = file.relative_to(folder).with_suffix("").parts[0]
        if here == "__init__":
            continue
        parts.add(here)
        for part in imported(file.read_text(), package):
            # What the package itself exports is of no line.
            assert level.get(part, -1) <= level[here], f"{file} imports {part}"
    assert parts == set(level)


def test_an_import_in_a_function_would_be_seen():
    source = "def f():\n    from optax_ext._loop import _places\n"
    assert list(imported(source, "optax_ext")) == ["_loop"]
    level = levels("optax_ext")
    assert level["_loop"] > level["_step"]

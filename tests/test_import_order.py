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


def part_of(module):
    """Of a module by its dotted name: what stands in the tree; None for the package itself."""
    names = module.split(".")
    return names[1] if len(names) > 1 else None


def imported(file, package):
    """The modules of its own package that a file imports, in functions too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith(package))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            if node.module == package:
                yield from (f"{package}.{alias.name}" for alias in node.names)
            else:
                yield node.module


def upward(package, folder):
    """Imports that go down the page, as (file, module)."""
    level = levels(package)
    for file in sorted(folder.rglob("*.py")):
        here = file.relative_to(folder).with_suffix("").parts[0]
        if here == "__init__":
            continue
        for module in imported(file, package):
            part = part_of(module)
            # What the package itself exports is of no line.
            if part is not None and level.get(part, -1) > level[here]:
                yield file.relative_to(folder).as_posix(), module


@pytest.mark.parametrize("package", ["sparse_collectives", "optax_ext"])
def test_imports_go_one_way(package):
    assert list(upward(package, ROOT / package)) == []


@pytest.mark.parametrize("package", ["sparse_collectives", "optax_ext"])
def test_every_part_stands_in_the_tree(package):
    files = (ROOT / package).iterdir()
    parts = {file.stem for file in files if file.suffix == ".py" or (file / "__init__.py").exists()}
    assert parts - {"__init__"} == set(levels(package))


def test_an_import_that_goes_up_would_be_seen(tmp_path):
    (tmp_path / "_step").mkdir()
    (tmp_path / "_step" / "_one.py").write_text(
        "def f():\n    from optax_ext._loop import _places\n"
    )
    (tmp_path / "_loop").mkdir()
    (tmp_path / "_loop" / "_two.py").write_text("from optax_ext._step._one import f\n")
    assert list(upward("optax_ext", tmp_path)) == [("_step/_one.py", "optax_ext._loop")]

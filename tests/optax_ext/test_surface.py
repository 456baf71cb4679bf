"""optax_ext uses of sparse_collectives what is public, and what both packages share."""

import ast
import pathlib

import pytest

import optax_ext
from sparse_collectives import extend

# Branches on versions of jax, checks of arguments, hashes and platforms are those of both packages.
SHARED = {"_compat", "_validation", "_hash", "_platform", "_coo"}
FILES = sorted(pathlib.Path(optax_ext.__file__).parent.rglob("*.py"))


def private(name):
    first, *rest = name.removeprefix("sparse_collectives.").split(".")
    if first in SHARED:
        name = ".".join(rest)
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def underscored(source):
    """Private modules and names of sparse_collectives that a program reaches."""
    nodes, reached, bound = list(ast.walk(ast.parse(source))), [], set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names = {alias.name: alias.asname or "sparse_collectives" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = {f"{node.module}.{x.name}": x.asname or x.name for x in node.names}
        else:
            continue
        names = {name: at for name, at in names.items() if name.startswith("sparse_collectives")}
        reached += names
        bound |= set(names.values())
    for node in nodes:
        first, _, rest = (
            ast.unparse(node).partition(".") if isinstance(node, ast.Attribute) else [""] * 3
        )
        reached += [rest] if first in bound else []
    return [name for name in reached if private(name)]


def test_nothing_underscored_is_imported():
    assert len(FILES) > 20
    assert {file.name: found for file in FILES if (found := underscored(file.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import sparse_collectives._spec",
        "from sparse_collectives import _volumes",
        "from sparse_collectives.allreduce._shared import regions",
        "import sparse_collectives as sc\nsc._volumes.all_gather",
        "from sparse_collectives import select\nselect._shared.threshold",
    ],
)
def test_an_import_of_something_private_would_be_noticed(source):
    assert underscored(source)


def test_what_is_declared_is_there_and_nothing_else():
    public = {name for name in vars(extend) if not name.startswith("_")}
    assert list(extend.__all__) == sorted(public)

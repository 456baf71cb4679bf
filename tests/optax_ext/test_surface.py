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
    tree = ast.parse(source)
    found, bound = [], {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "sparse_collectives":
                    bound[alias.asname or "sparse_collectives"] = alias.name
                    found += [alias.name] if private(alias.name) else []
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name, alias in zip(names, node.names, strict=True):
                if name.startswith("sparse_collectives."):
                    bound[alias.asname or alias.name] = name
                    found += [name] if private(name) else []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if text.split(".")[0] in bound and private(text.partition(".")[2]):
                found.append(text)
    return found


def test_there_are_files():
    assert len(FILES) > 20


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_nothing_underscored_is_imported(file):
    assert underscored(file.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import sparse_collectives._spec",
        "from sparse_collectives import _volumes",
        "from sparse_collectives.allreduce._shared import regions",
        "from sparse_collectives.allreduce import _topk_a as t",
        "import sparse_collectives as sc\nsc._volumes.all_gather",
        "from sparse_collectives import select\nselect._shared.threshold",
    ],
)
def test_an_import_of_something_private_would_be_noticed(source):
    assert underscored(source)


def test_what_is_declared_is_there_and_nothing_else():
    public = {name for name in vars(extend) if not name.startswith("_")}
    assert set(extend.__all__) == public
    assert list(extend.__all__) == sorted(extend.__all__)

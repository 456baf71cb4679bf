"""Every public name is in the reference of the manual, and once."""

import importlib
import inspect
import re
import types
from pathlib import Path

import pytest

import optax_ext
import sparse_collectives
from sparse_collectives import (
    allreduce,
    cost_model,
    extend,
    planner,
    select,
    traffic,
    transport,
    wire,
)

PAGES = Path(__file__).parents[1] / "docs" / "reference"
# `extend` last: what it has of the others is theirs.
PACKAGES = (
    optax_ext,
    optax_ext.published,
    optax_ext.contrib,
    sparse_collectives,
    allreduce,
    allreduce.published,
    cost_model,
    planner,
    select,
    select.published,
    traffic,
    transport,
    wire,
    extend,
)
# Where a folder has the name of what it exports, the reader of the sources finds the folder.
FOLDERS = ("sparse_collectives.allreduce.ok_topk.",)


def entries():
    """``(page, identifier)`` of each entry."""
    return [
        (page.name, identifier)
        for page in sorted(PAGES.glob("*.md"))
        for identifier in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
    ]


def public_names():
    """``package.name`` of each public name that is no module, where it is exported first."""
    found, seen = [], []
    for package in PACKAGES:
        for name in package.__all__:
            value = getattr(package, name)
            if isinstance(value, types.ModuleType):
                continue
            # Equal tuples of names and numbers are not the same export.
            if any(value is other for other in seen) and package is extend:
                continue
            seen.append(value)
            found.append(f"{package.__name__}.{name}")
    return found


def name_of(identifier):
    for folder in FOLDERS:
        if identifier.startswith(folder):
            return f"{folder.rsplit('.', 2)[0]}.{identifier.removeprefix(folder)}"
    return identifier


def test_every_public_name_is_in_the_reference_once():
    """And beside them what some of them return, which nobody makes."""
    listed = sorted(name_of(identifier) for _, identifier in entries())
    public = [name for name in listed if not re.search(r"\._[a-z]", name)]
    assert public == sorted(public_names())
    assert len(set(listed)) == len(listed)


def test_public_modules_export_nothing_else():
    """`layout` and `padded_coo` are public for what the packages above export."""
    for name in ("layout", "padded_coo"):
        module = importlib.import_module(f"sparse_collectives.{name}")
        assert not hasattr(module, "__all__")


@pytest.mark.parametrize("identifier", [identifier for _, identifier in entries()])
def test_what_is_in_the_reference_says_something(identifier):
    package, _, name = name_of(identifier).rpartition(".")
    value = getattr(importlib.import_module(package), name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert inspect.getdoc(value), identifier


def test_the_index_leads_to_every_page():
    index = (PAGES / "index.md").read_text()
    for page, _ in entries():
        assert f"]({page})" in index

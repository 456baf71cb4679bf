"""Every public name is exported, and in the reference of the manual, once."""

import importlib
import inspect
import re
import types

import pytest

from tests.optax_ext.helpers import DOCS

PAGES = DOCS / "reference"
# `extend` last: what it has of the others is theirs.
PACKAGES = ["optax_ext"] + [f"optax_ext.{x}" for x in ["published", "elastic", "sites", "contrib"]]
PACKAGES += ["sparse_collectives"]
INNER = "allreduce allreduce.published cost_model planner select select.published traffic transport"
PACKAGES += [f"sparse_collectives.{inner}" for inner in (*INNER.split(), "wire", "extend")]
# Where a folder has the name of what it exports, the reader of the sources finds the folder.
FOLDER = "sparse_collectives.allreduce.ok_topk."


@pytest.mark.parametrize("name", PACKAGES)
def test_all_is_complete_and_sorted(name):
    package = importlib.import_module(name)
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_")
        and (not isinstance(value, types.ModuleType) or name in package.__all__)
    }
    assert set(package.__all__) - {"__version__"} == public
    assert package.__all__ == sorted(package.__all__)


def entries():
    """``(page, identifier)`` of each entry."""
    return [
        (page.name, identifier.replace(FOLDER, "sparse_collectives.allreduce."))
        for page in sorted(PAGES.glob("*.md"))
        for identifier in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
    ]


def public_names():
    """``package.name`` of each public name that is no module, where it is exported first."""
    found, seen = [], []
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            # Equal tuples of names and numbers are not the same export.
            again = package.endswith(".extend") and any(value is other for other in seen)
            if not again and not isinstance(value, types.ModuleType):
                found.append(f"{package}.{name}")
            seen.append(value)
    return found


def test_every_public_name_is_in_the_reference_once():
    """And beside them what some of them return, which nobody makes."""
    listed = sorted(name for _, name in entries())
    assert [name for name in listed if not re.search(r"\._[a-z]", name)] == sorted(public_names())
    assert len(set(listed)) == len(listed)


def test_what_is_in_the_reference_says_something_and_the_index_leads_to_it():
    index = (PAGES / "index.md").read_text()
    for page, identifier in entries():
        package, _, name = identifier.rpartition(".")
        value = getattr(importlib.import_module(package), name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), identifier
        assert f"]({page})" in index

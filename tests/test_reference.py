"""Every public name is exported, and in the reference of the manual, once."""

import importlib
import inspect
import re
import types

import pytest

from tests.optax_ext.helpers import DOCS

PAGES = sorted((DOCS / "reference").glob("*.md"))
# `extend` is last: a name that it shares with another package belongs to that package first.
PACKAGES = ["optax_ext"] + [f"optax_ext.{x}" for x in ["published", "elastic", "sites", "contrib"]]
PACKAGES += ["sparse_collectives"]
INNER = "allreduce allreduce.published cost_model planner select select.published traffic transport"
PACKAGES += [f"sparse_collectives.{inner}" for inner in (*INNER.split(), "wire", "extend")]
# The folder has the name of its function, and the reader of the sources finds the folder.
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
        for page in PAGES
        for identifier in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
    ]


def public_names():
    """``package.name`` of each public name that is no module, with its first package."""
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


def test_public_names_are_in_the_reference_once():
    """Types without a public name that public functions return are also there."""
    listed = [name for _, name in entries()]
    public, shown = set(public_names()), {x for x in listed if not re.search(r"\._[a-z]", x)}
    assert not public - shown, "in no page of docs/reference"
    assert not shown - public, "in docs/reference, and in no __all__"
    assert len(set(listed)) == len(listed)


def test_entry_says_something_and_is_on_the_page_of_its_package():
    for page, identifier in entries():
        package, _, name = identifier.rpartition(".")
        value = getattr(importlib.import_module(package), name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), identifier
        assert page == f"{identifier.partition('.')[0]}.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_begins_with_links_to_all_of_its_sections(page):
    beginning, *sections = re.split(r"^## ", page.read_text(), flags=re.MULTILINE)
    titles = [section.partition("\n")[0] for section in sections]
    assert all("\n::: " in section for section in sections)
    assert "\n::: " not in beginning
    # An anchor is the title in lower case, with hyphens.
    anchors = [title.lower().replace(" ", "-") for title in titles]
    assert re.findall(r"\[([^\]]+)\]\(#([\w-]+)\)", beginning) == list(zip(titles, anchors))


def docstrings():
    """``(identifier, docstring)`` of the entries of the reference."""
    for _, identifier in entries():
        package, _, name = identifier.rpartition(".")
        text = inspect.getdoc(getattr(importlib.import_module(package), name))
        if text:
            yield identifier, text


def test_sentences_of_docstrings_are_short():
    """At most 40 words; formulas, tables and examples are no sentences."""
    long = []
    assert len(list(docstrings())) > 150
    for identifier, text in docstrings():
        text = re.sub(
            r"(?m)^\.\. math::.*\n(?:\n|    .*\n)*|^ *(?:>>>|\.\.\. ).*$|^.*={3,}.*$", "", text
        )
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*[\w*]+: )", text):
            if re.search(r"\S {3,}\S", paragraph):  # A table.
                continue
            sentences = re.split(r"(?<=[.:;])\s+", paragraph)
            long += [(identifier, x) for x in sentences if len(x.split()) > 40]
    assert not long


def test_each_error_of_a_docstring_has_a_line_of_its_own():
    joined = []
    for identifier, text in docstrings():
        raised = re.search(r"(?m)^Raises:\n((?:  .*\n?)+)", text)
        if raised and ";" in re.sub(r"``.*?``|\(.*?\)", "", raised[1], flags=re.DOTALL):
            joined.append(identifier)
    assert not joined

"""Converts the docstrings of this repository from reStructuredText to the manual's Markdown.

Griffe reads the packages without importing them, and this extension rewrites the docstrings:
formulas become MathML, which browsers draw without a script, and roles become links to the
reference if it has the name.
"""

import re
import textwrap
from pathlib import Path
from typing import Any

import griffe
import latex2mathml.converter

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"

_DIRECTIVE = re.compile(r"^::: ([\w.]+)", re.M)
_MATH = re.compile(r"^( *)\.\. math::(?: (.*))?\n((?:\n|\1[ ]+.*\n?)*)", re.M)
_ROLE = re.compile(r":(func|class|mod|data|attr|meth|math):`~?([^`]+)`")
_LINK = re.compile(r"`([^`<]+?)\s+<(https?://[^>\s]+)>`_")
_SECTION = re.compile(r"^( *)Example:$", re.M)
# Names of more than one letter, except commands and the contents of \text.
_WORD = re.compile(r"\\text\{[^}]*\}|\\[A-Za-z]+|\\.|[A-Za-z]{2,}(?:\\_[A-Za-z]+)*")


def documented() -> dict[str, str]:
    """The identifier in the reference of each name that only one of its entries has."""
    found: dict[str, list[str]] = {}
    for page in sorted(REFERENCE.glob("*.md")):
        for identifier in _DIRECTIVE.findall(page.read_text()):
            found.setdefault(identifier.rsplit(".", 1)[1], []).append(identifier)
    return {name: each[0] for name, each in found.items() if len(each) == 1}


def formula(text: str, display: str = "block") -> str:
    """A formula as MathML.

    Args:
      text: LaTeX; lines that end in a double backslash are aligned at their ampersands.
      display: "block", or "inline".
    """

    def word(match: re.Match[str]) -> str:
        found = match[0]
        return found if found[0] == "\\" else rf"\text{{{found}}}".replace(r"\_", "_")

    text = _WORD.sub(word, text)
    if r"\\" in text:
        columns = max(line.count("&") for line in text.split(r"\\")) + 1
        text = rf"\begin{{array}}{{{('rl' * columns)[:columns]}}} {text} \end{{array}}"
    return latex2mathml.converter.convert(text, display=display)


def as_markdown(text: str, names: dict[str, str]) -> str:
    """A docstring as Markdown.

    Args:
      text: the docstring.
      names: the result of :func:`documented`.
    """

    def math(match: re.Match[str]) -> str:
        indent, first, rest = match[1], match[2] or "", textwrap.dedent(match[3])
        lines = " ".join(f"{first} {rest}".split())
        return f"{indent}{formula(lines)}\n\n"

    def role(match: re.Match[str]) -> str:
        kind, target = match[1], " ".join(match[2].split())
        if kind == "math":
            return formula(target, "inline")
        name = target.rsplit(".", 1)[-1]
        if kind != "mod" and name in names:
            return f"[`{name}`][{names[name]}]"
        return f"`{target.lstrip('.')}`"

    text = _MATH.sub(math, text)
    text = _ROLE.sub(role, text)
    text = _LINK.sub(lambda match: f"[{' '.join(match[1].split())}]({match[2]})", text)
    return _SECTION.sub(r"\1Examples:", text)


class AsMarkdown(griffe.Extension):
    """Rewrites the docstring of each object when its package has been read."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Called by Griffe once for each package."""
        del kwargs
        names = documented()
        waiting: list[griffe.Object | griffe.Alias] = [pkg]
        while waiting:
            here = waiting.pop()
            if here.is_alias:
                continue
            if here.docstring is not None:
                here.docstring.value = as_markdown(here.docstring.value, names)
            waiting += here.members.values()

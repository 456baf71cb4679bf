"""The programs of docs/clients.md and docs/gallery.md, before and after their changes."""

import re
from typing import Any, NamedTuple

from .._common.processes import ROOT

PAGES = ("clients", "gallery")
_CALL = r"\((?:[^()]|\([^()]*\))*\)"
_PLAIN, _SPARSE = (
    re.compile(rf"(?<!\w){names}{_CALL}")
    for names in (r"optax\.(?:sgd|adamw?)", r"(?:optax_ext\.)?(?:sparse_adamw|ok_topk_sgd)")
)
_CLIP = "optax.clip_by_global_norm("


class Program(NamedTuple):
    """A program of a page: its lines before and after the change."""

    before: list[str]
    after: list[str]

    def exchanged_by(self, exchange: str) -> list[str]:
        """The changed program with the optimizer of the original after an exchange.

        ``exchange`` is an expression in which AXIS is the name of the axis. Clipping by a norm
        comes after it, for the mean gradient.
        """
        text = "\n".join(self.after)
        old, (new,) = _PLAIN.findall("\n".join(self.before))[-1], _SPARSE.findall(text)
        (axis,) = re.findall(r'axis=("\w+")', new)
        exchange = exchange.replace("AXIS", axis)
        if _CLIP in text:
            text = text.replace(_CLIP, f"{exchange}, {_CLIP}").replace(new, old)
        else:
            text = text.replace(new, f"optax.chain({exchange}, {old})")
        return ["import optax_ext", *text.splitlines()]


def scaled(lines: list[str], factor: float) -> list[str]:
    """A program with another learning rate in its last optimizer."""
    text = "\n".join(lines)
    *_, last = [*_PLAIN.finditer(text), *_SPARSE.finditer(text)]
    at = text.index("(", last.start()) + 1
    return f"{text[:at]}{factor:g} * {text[at:]}".splitlines()


def text_of(page: str) -> str:
    """The text of a page of the manual."""
    return (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")


def programs_of(page: str) -> dict[str, Program]:
    """The program of each section of a page that shows what changes in it."""
    return {
        section.partition("\n")[0]: _versions(section.partition("```diff\n")[2].partition("```")[0])
        for section in text_of(page).split("\n## ")
        if "```diff" in section
    }


def _versions(diff: str) -> Program:
    lines = diff.splitlines()
    assert {line[:1] for line in lines} <= {" ", "+", "-", ""}
    return Program(*([line[1:] for line in lines if not line.startswith(other)] for other in "+-"))


def names_after(lines: list[str], seed: int = 0) -> dict[str, Any]:
    """The names that a program defines, which runs with the data of the pages.

    The seed determines the parameters and the examples of a batch.
    """
    (data, *_) = re.findall(r"```python\n(.*?)```", text_of(PAGES[0]), re.DOTALL)
    names: dict[str, Any] = {"__name__": "program"}
    for text in (data, "\n".join(lines)):
        exec(re.sub(r"\b(key|default_rng|Rngs)\(0\)", rf"\1({seed})", text), names)
    return names


def held(names: dict[str, Any]) -> Any:
    """What holds the state of the optimizer of a program that ran."""
    optimizer = names.get("optimizer")
    return (
        optimizer if hasattr(optimizer, "opt_state") else names.get("state", names.get("opt_state"))
    )

"""The page: a count of the verdicts, then every claim, those that do not hold first."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ._claims import UNCHECKED, VERDICTS, Claim, shown, spread, verdict
from ._figures import FIGURES, FOLDER
from ._store import Result, Store

# The prose of the page. A number in brackets is that of a claim: `[id|number]`.
_TEMPLATE = Path(__file__).with_name("page.md")
# Beside a verdict, and behind the caption of a figure.
_OLD = " (older than the code)"
_OLDER = "Of {} claims the results are older than the code."
_QUICK = "Results marked with (q) are of the short trainings of `--quick`."


def page(
    claims: Sequence[Claim], store: Store, figures: Sequence[str] = (), old: Sequence[str] = ()
) -> str:
    """The whole page, in Markdown, with those of the figures that there are.

    In ``old`` are the names of those that have lines which are older than the code.
    """
    rows: dict[str, list[str]] = {name: [] for name in VERDICTS}
    for claim in claims:
        decided, row = _row(claim, store)
        rows[decided].append(row)
    older = sum(map(store.old, claims))
    quick = any(result["quick"] for claim in claims for result in store.best(claim))
    shown_figures = [
        f"## {figure.title}\n\n![{figure.title}]({FOLDER}/{figure.name}.png)\n\n"
        + figure.caption
        + (_OLD if figure.name in old else "")
        for figure in FIGURES
        if figure.name in figures
    ]
    text = _filled(_TEMPLATE.read_text(encoding="utf-8"), claims, store).format(
        claims=len(claims),
        checked=len(claims) - len(rows[UNCHECKED]),
        verdicts="\n".join(f"| {name} | {len(rows[name])} |" for name in VERDICTS if rows[name]),
        older=_OLDER.format(older) if older else "",
        quick=_QUICK if quick else "",
        figures="\n\n".join(shown_figures),
        rows="\n".join(line for name in VERDICTS for line in rows[name]),
        machines=_machines([result for claim in claims for result in store.best(claim)]),
    )
    # What is empty leaves its lines behind.
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def _filled(text: str, claims: Sequence[Claim], store: Store) -> str:
    """``text`` with the least and the most of each number that it names."""
    known = {claim.id: claim for claim in claims}

    def numbers(found: re.Match[str]) -> str:
        claim = known.get(found[1])
        measured = [result["numbers"] for result in store.best(claim)] if claim else []
        for name, worse, better in spread(claim, measured) if claim else ():
            if name == found[2]:
                few = [f"{value:.2g}" for value in sorted((worse, better))]
                return " to ".join(dict.fromkeys(few))
        return "(not measured)"

    return re.sub(r"\[([\w/-]+)\|([^\]]+)\]", numbers, text)


def unmarked(text: str) -> str:
    """A page without what it says of the age of results, which depends on the code of that day."""
    older = re.escape(_OLDER).replace(r"\{\}", r"\d+")
    return re.sub(rf"{older}\n\n|{re.escape(_OLD)}", "", text)


def _row(claim: Claim, store: Store) -> tuple[str, str]:
    """The verdict of a claim, and its line."""
    found = store.best(claim)
    numbers = [result["numbers"] for result in found]
    decided, note = verdict(claim, numbers)
    ours = "; ".join(
        f"{name}: " + " to ".join(dict.fromkeys((shown(worse), shown(better))))
        for name, worse, better in spread(claim, numbers)
    )
    if any(result["quick"] for result in found):
        ours += " (q)"
    rule = "; ".join(map(str, claim.rule))
    if claim.elsewhere:
        rule += f". Or {claim.elsewhere.where}: {'; '.join(map(str, claim.elsewhere.rule))}"
    result = f"**{decided}**" + (f": {note}" if note else "") + (_OLD if store.old(claim) else "")
    name = f"`{claim.id}` {claim.text}"
    cells = (name, claim.source, claim.paper, claim.setting, rule, ours, result)
    return decided, "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _machines(results: Sequence[Result]) -> str:
    """The versions and machines of the results on the page."""
    found: Counter[str] = Counter()
    for result in results:
        versions = ", ".join(f"{name} {text}" for name, text in result["versions"].items())
        machine = result["machine"]
        found[f"{versions}; {machine['system']}, cores: {machine['cores']}"] += 1
    return "\n".join(f"- {count} results: {text}." for text, count in sorted(found.items()))

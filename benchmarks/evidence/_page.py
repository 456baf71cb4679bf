"""Two pages: counts, surprises and figures; and the claims of each paper, failures first."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from ._claims import CLAIMS, FAILS, UNCHECKED, VERDICTS, Claim, shown, spread, verdict
from ._figures import CURVES, FIGURES, FOLDER
from ._store import Result, Store

# The prose of the page. Brackets stand for a number of a claim: `[id|number]`.
_TEMPLATE = Path(__file__).with_name("page.md")
# Where the second page begins.
_TABLES = "\n# All claims\n"
_HEAD = "| verdict | claim | the paper's number | ours | rule |\n|---|---|---|---|---|"
# After a verdict, and after the caption of a figure.
_OLD = " (older than the code)"
_OLDER = "The results of {} claims are older than the code."
_QUICK = "Results marked with (q) are of the short trainings of `--quick`."


def pages(text: str) -> dict[str, str]:
    """The files that :func:`page` is divided into, by name: to be read, and to be looked up."""
    summary, _, tables = text.partition(_TABLES)
    return {"index.md": summary.rstrip("\n") + "\n", "claims.md": _TABLES.lstrip("\n") + tables}


def page(store: Store, claims: Sequence[Claim] = CLAIMS) -> str:
    """Both pages in Markdown, with the figures that have results."""
    rows: dict[str, dict[str, list[str]]] = {}
    names: dict[str, list[str]] = {name: [] for name in VERDICTS}
    for claim in claims:
        decided, row = _row(claim, store)
        names[decided].append(claim.name)
        rows.setdefault(claim.paper_name, {}).setdefault(decided, []).append(row)
    results = [result for claim in claims for result in store.best(claim)]
    older = sum(map(store.old, claims))
    text = _filled(_TEMPLATE.read_text(encoding="utf-8"), claims, store).format(
        claims=len(claims),
        checked=len(claims) - len(names[UNCHECKED]),
        verdicts="\n".join(f"| {name} | {len(names[name])} |" for name in VERDICTS if names[name]),
        failures=", ".join(f"`{name}`" for name in names[FAILS]) or "none",
        older=_OLDER.format(older) if older else "",
        quick=_QUICK if any(result["quick"] for result in results) else "",
        figures="\n\n".join(_figures(store)),
        claims_by_paper="\n\n".join(
            _section(name, [row for one in VERDICTS for row in of.get(one, ())], claims)
            for name, of in rows.items()
        ),
        machines=_machines(results),
    )
    # Empty parts leave blank lines.
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def unmarked(text: str) -> str:
    """A page without its marks on the age of results, which depend on the code of that day."""
    older = re.escape(_OLDER).replace(r"\{\}", r"\d+")
    return re.sub(rf"{older}\n\n|{re.escape(_OLD)}", "", text)


def _filled(text: str, claims: Sequence[Claim], store: Store) -> str:
    """``text`` with the least and the most of each number that it names."""
    known = {claim.name: claim for claim in claims}

    def numbers(found: re.Match[str]) -> str:
        measured = store.best(known[found[1]]) if found[1] in known else []
        values = [f"{x:.2g}" for x in sorted(one["numbers"][found[2]] for one in measured)]
        return " to ".join(dict.fromkeys([*values[:1], *values[-1:]])) or "(not measured)"

    return re.sub(r"\[([\w/-]+)\|([^\]]+)\]", numbers, text)


def _figures(store: Store) -> Iterable[str]:
    for name, figure in FIGURES.items():
        curves = [one for one in CURVES if one.figure == name]
        if any(map(store.best, curves)):
            mark, title = _OLD if any(map(store.old, curves)) else "", figure["title"]
            yield f"## {title}\n\n![{title}]({FOLDER}/{name}.png)\n\n{figure['caption']}{mark}"


def _row(claim: Claim, store: Store) -> tuple[str, str]:
    """The verdict of a claim, and its line."""
    found = store.best(claim)
    numbers = [result["numbers"] for result in found]
    decided, note = verdict(claim, numbers)
    ranges = {name: dict.fromkeys(map(shown, both)) for name, *both in spread(claim, numbers)}
    ours = "; ".join(f"{name}: {' to '.join(both)}" for name, both in ranges.items())
    if any(result["quick"] for result in found):
        ours += " (q)"
    rule = "; ".join(map(str, claim.rule))
    if claim.elsewhere:
        rule += f". Or {claim.where}: {'; '.join(map(str, claim.elsewhere))}"
    result = f"**{decided}**" + (f": {note}" if note else "") + (_OLD if store.old(claim) else "")
    cells = (result, f"`{claim.name}` {claim.text}", claim.paper, ours, rule)
    return decided, "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _section(paper: str, rows: Sequence[str], claims: Sequence[Claim]) -> str:
    """The table of the claims of a paper, and their places and settings."""
    lines = [f"## {paper}", "", _HEAD, *rows, ""]
    for claim in claims:
        if claim.paper_name == paper:
            setting = f": {' '.join(claim.setting.split())}" if claim.setting else ""
            lines.append(f"- `{claim.name}`, {claim.source}{setting}.")
    return "\n".join(lines)


def _machines(results: Sequence[Result]) -> str:
    """The versions and machines of the results on the page."""
    found: Counter[str] = Counter()
    for result in results:
        versions = ", ".join(f"{name} {text}" for name, text in result["versions"].items())
        machine = result["machine"]
        found[f"{versions}; {machine['system']}, cores: {machine['cores']}"] += 1
    return "\n".join(f"- {count} results: {text}." for text, count in sorted(found.items()))

"""A page with counts, surprises and figures, and a file with a table of all claims."""

import html
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from ._claims import CLAIMS, FAILS, UNCHECKED, VERDICTS, Claim, shown, spread, verdict
from ._figures import CURVES, FIGURES, FOLDER
from ._store import Result, Store

# The prose of the page. Brackets stand for a number of a claim: `[id|number]`.
_TEMPLATE = Path(__file__).with_name("page.md")
# The file around the table of all claims.
_TABLE = Path(__file__).with_name("claims.html")
TABLE = "claims.html"
# After a verdict, and after the caption of a figure.
_OLD = " (older code)"
_OLDER = "The results of {} claims are older than the code."
_QUICK = "Results marked with (q) are of the short trainings of `--quick`."


def pages(store: Store, claims: Sequence[Claim] = CLAIMS) -> dict[str, str]:
    """The files by name: the page, to be read, and the table of all claims, to be looked up."""
    return {"index.md": page(store, claims), TABLE: table(store, claims)}


def page(store: Store, claims: Sequence[Claim] = CLAIMS) -> str:
    """The page in Markdown, with the figures that have results."""
    names: dict[str, list[str]] = {name: [] for name in VERDICTS}
    for claim in claims:
        names[_decided(claim, store)[0]].append(claim.name)
    older = sum(map(store.old, claims))
    text = _filled(_TEMPLATE.read_text(encoding="utf-8"), claims, store).format(
        claims=len(claims),
        checked=len(claims) - len(names[UNCHECKED]),
        verdicts="\n".join(f"| {name} | {len(names[name])} |" for name in VERDICTS if names[name]),
        failures=", ".join(f"[`{x}`]({TABLE}#{x})" for x in names[FAILS]) or "none",
        older=_OLDER.format(older) if older else "",
        figures="\n\n".join(_figures(store)),
    )
    # Empty parts leave blank lines.
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def table(store: Store, claims: Sequence[Claim] = CLAIMS) -> str:
    """The table of all claims in HTML: by paper, and in each the claims that do not hold first."""
    rows: dict[str, dict[str, list[str]]] = {}
    for claim in claims:
        of_paper = rows.setdefault(claim.paper_name, {})
        of_paper.setdefault(_decided(claim, store)[0], []).append(_row(claim, store))
    results = [result for claim in claims for result in store.best(claim)]
    lines = []
    for paper, of in rows.items():
        lines.append(f'<tr><th colspan="6">{html.escape(paper)}</th></tr>')
        lines += [row for name in VERDICTS for row in of.get(name, ())]
    return (
        _TABLE.read_text(encoding="utf-8")
        .replace("{quick}", _html(_QUICK) if any(one["quick"] for one in results) else "")
        .replace("{rows}", "\n".join(lines))
        .replace("{machines}", "\n".join(_machines(results)))
    )


def unmarked(text: str) -> str:
    """A file without its marks on the age of results, which depend on the code of that day."""
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


def _decided(claim: Claim, store: Store) -> tuple[str, str]:
    """The verdict of a claim, and a note."""
    return verdict(claim, [result["numbers"] for result in store.best(claim)])


def _row(claim: Claim, store: Store) -> str:
    """The line of a claim."""
    found = store.best(claim)
    decided, note = _decided(claim, store)
    numbers = [result["numbers"] for result in found]
    ranges = {name: dict.fromkeys(map(shown, both)) for name, *both in spread(claim, numbers)}
    ours = "; ".join(f"{name}: {' to '.join(both)}" for name, both in ranges.items())
    if any(result["quick"] for result in found):
        ours += " (q)"
    rule = "; ".join(map(str, claim.rule))
    if claim.elsewhere:
        rule += f". Or {claim.where}: {'; '.join(map(str, claim.elsewhere))}"
    setting = f": {' '.join(claim.setting.split())}" if claim.setting else ""
    result = f"<b>{decided}</b>{_html(f': {note}' if note else '')}"
    result += _OLD if store.old(claim) else ""
    said = f"<code>{claim.name}</code> {_html(claim.text)}"
    others = map(_html, (claim.paper, ours, rule, f"{claim.source}{setting}."))
    cells = "".join(f"<td>{cell}</td>" for cell in (result, said, *others))
    return f'<tr id="{claim.name}">{cells}</tr>'


def _html(text: str) -> str:
    """Escaped, with the text between backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))


def _machines(results: Sequence[Result]) -> Iterable[str]:
    """The versions and machines of the results, a line for each."""
    found: Counter[str] = Counter()
    for result in results:
        versions = ", ".join(f"{name} {text}" for name, text in result["versions"].items())
        machine = result["machine"]
        found[f"{versions}; {machine['system']}, cores: {machine['cores']}"] += 1
    for text, count in sorted(found.items()):
        yield f"<li>{count} results: {html.escape(text)}.</li>"

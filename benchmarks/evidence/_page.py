"""The page: a count of the verdicts, then every claim, those that do not hold first."""

from collections import Counter
from collections.abc import Sequence

from ._claims import UNCHECKED, UNMEASURED, VERDICTS, Claim, shown, spread, verdict
from ._store import Store

_TITLE = "# Claims, checked one by one"
_INTRODUCTION = """What five papers claim, and what this library says of itself, each beside a
measurement and a rule that decides. `make evidence` measures all of it again on your machine, into
`.cache/evidence`; with `ARGS=--quick` trainings are shorter and have one seed. The page
is made of the results in `docs/evidence/`, and a test makes it again.

"Ours" gives the worse of the seeds first, then the better one. Words and formulas are exact and
have no seeds. Trainings are those of small networks over simulated workers on one CPU, where the
papers train for hours or days on GPUs: a claim that does not hold does not hold *in that setting*,
which the table gives. [Papers and their experiments](../papers.md) says more.
"""


def page(claims: Sequence[Claim], store: Store) -> str:
    """The whole page, in Markdown."""
    rows: dict[str, list[str]] = {name: [] for name in VERDICTS}
    quick = False
    for claim in claims:
        found = store.best(claim)
        numbers = [result["numbers"] for result in found]
        decided, note = verdict(claim, numbers)
        short = any(result["quick"] for result in found)
        quick = quick or short
        rows[decided].append(_row(claim, numbers, decided, note, short))
    counts = Counter({name: len(lines) for name, lines in rows.items()})
    checked = sum(counts[name] for name in VERDICTS if name not in (UNMEASURED, UNCHECKED))
    lines = [
        _TITLE,
        "",
        f"**{len(claims)} claims, {checked} of them checked.**",
        "",
        "| verdict | claims |",
        "|---|---|",
        *(f"| {name} | {counts[name]} |" for name in VERDICTS if counts[name]),
        "",
        _INTRODUCTION,
    ]
    if quick:
        lines += ["Results marked with (q) are of the short trainings of `--quick`.", ""]
    lines += [
        "| claim | source | the paper's number | setting here | rule | ours | verdict |",
        "|---|---|---|---|---|---|---|",
        *(line for name in VERDICTS for line in rows[name]),
        "",
        "## With what",
        "",
        *_machines(claims, store),
    ]
    return "\n".join(lines) + "\n"


def _row(
    claim: Claim, numbers: Sequence[dict[str, float]], decided: str, note: str, short: bool
) -> str:
    ours = "; ".join(
        f"{name}: {shown(worse)}"
        + ("" if shown(worse) == shown(better) else f" to {shown(better)}")
        for name, worse, better in spread(claim, numbers)
    )
    rule = "; ".join(map(str, claim.rule))
    if claim.elsewhere:
        rule += f". Or {claim.elsewhere.where}: {'; '.join(map(str, claim.elsewhere.rule))}"
    result = f"**{decided}**" + (f": {note}" if note else "")
    cells = (
        f"`{claim.id}` {claim.text}",
        claim.source,
        claim.paper,
        claim.setting,
        rule,
        ours + (" (q)" if short and ours else ""),
        result,
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _machines(claims: Sequence[Claim], store: Store) -> list[str]:
    """The versions and machines of the results on the page."""
    found: Counter[str] = Counter()
    for claim in claims:
        for result in store.best(claim):
            versions = ", ".join(f"{name} {text}" for name, text in result["versions"].items())
            machine = result["machine"]
            found[f"{versions}; {machine['system']}, cores: {machine['cores']}"] += 1
    return [f"- {count} results: {text}." for text, count in sorted(found.items())]

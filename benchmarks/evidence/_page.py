"""The page: a count of the verdicts, then every claim, those that do not hold first."""

import re
from collections import Counter
from collections.abc import Sequence

from ._claims import UNCHECKED, VERDICTS, Claim, shown, spread, verdict
from ._figures import FIGURES, FOLDER
from ._store import Store

_TITLE = "# Claims, checked one by one"
_INTRODUCTION = """What five papers claim, and what this library says of itself, each beside a
measurement and a rule that decides. `make evidence` measures all of it again on your machine, into
`.cache/evidence`; with `ARGS=--quick` trainings are shorter and have one seed. The page
is made of the results in `docs/evidence/`, and a test makes it again.

"Ours" gives the worse of the seeds first, then the better one. Words and formulas are exact and
have no seeds. Where chance is as large as what is claimed, as for accuracies, the mean of the seeds
decides: the claim holds or fails if the whole interval (95 %) of that mean does, and otherwise it
"cannot be told here". Trainings are those of small networks over simulated workers on one CPU,
where the papers train for hours or days on GPUs: a claim that does not hold does not hold *in that
setting*, which the table gives. What is claimed of GPUs is not judged by times of a CPU, and what
was measured with root, or for hours, is read from the files in `docs/data/`. Each result knows the
code it was measured with; one of other code than there was when this page was written is marked,
and `make evidence` measures it again. [Papers and their experiments](../papers.md) says more.
"""
# Beside a verdict, and behind the caption of a figure.
_OLD = " (older than the code)"
# A number in brackets is that of a claim: `[id|number]`.
_SURPRISES = """## What surprised most

1. **Thresholds that are reused for 32 steps do not hold the count.** After the first tenth of a
   training [ok-topk/global-count|mean count, k] of k entries were delivered in the mean, and
   [ok-topk/global-count-corrected|mean count, k] of k with thresholds that their counts correct at
   every step, as in the program that the paper links to. The paper has 0.89 to 1.11 of k for three
   networks ([longer runs](../selectors.md) of three of ours). So by default both thresholds are
   exact at every step here: one small exchange finds the global one.
2. **In front of Adam a sparse allreduce teaches far less than dense.** The loss was
   [ok-topk/language-model|% above dense] % above that of dense, 4.3 % in the paper; Adam divides
   what arrives late and at once by a size that it has forgotten. With `sparse_adamw`, which puts
   Adam before the exchange and which the README therefore begins with, it was
   [library/sparse-adamw-text|% above dense] %.
3. **An exact selection is cheaper than most approximate ones.** On a CPU, at a density of 0.1 %,
   MSTopK takes [library/selector-speed|MSTopK / top-k] of the time of `lax.top_k`, DGC
   [library/selector-speed|DGC / top-k], and our exact selection
   [library/selector-speed|our `topk` / top-k]; only a threshold that is reused is cheaper. So the
   default is exact; the others are there for comparison, and for GPUs, where nothing was timed.

"""


def page(
    claims: Sequence[Claim], store: Store, figures: Sequence[str] = (), old: Sequence[str] = ()
) -> str:
    """The whole page, in Markdown.

    Args:
      claims: in their order.
      store: their results.
      figures: the names of those that there are.
      old: of those that have lines which are older than the code.
    """
    rows: dict[str, list[str]] = {name: [] for name in VERDICTS}
    quick, older = False, 0
    for claim in claims:
        found = store.best(claim)
        numbers = [result["numbers"] for result in found]
        decided, note = verdict(claim, numbers)
        short = any(result["quick"] for result in found)
        quick = quick or short
        stale = store.old(claim)
        older += stale
        rows[decided].append(_row(claim, numbers, decided, note, short=short, stale=stale))
    counts = Counter({name: len(lines) for name, lines in rows.items()})
    checked = len(claims) - counts[UNCHECKED]
    lines = [
        _TITLE,
        "",
        f"**{len(claims)} claims, {checked} of them checked.**",
        "",
        "| verdict | claims |",
        "|---|---|",
        *(f"| {name} | {counts[name]} |" for name in VERDICTS if counts[name]),
        "",
        *([f"Of {older} claims the results are older than the code.", ""] if older else []),
        _INTRODUCTION,
        _filled(_SURPRISES, claims, store).rstrip(),
        "",
    ]
    if quick:
        lines += ["Results marked with (q) are of the short trainings of `--quick`.", ""]
    for figure in FIGURES:
        if figure.name in figures:
            image = f"![{figure.title}]({FOLDER}/{figure.name}.png)"
            caption = figure.caption + (_OLD if figure.name in old else "")
            lines += [f"## {figure.title}", "", image, "", caption, ""]
    lines += [
        "## All claims",
        "",
        "| claim | source | the paper's number | setting here | rule | ours | verdict |",
        "|---|---|---|---|---|---|---|",
        *(line for name in VERDICTS for line in rows[name]),
        "",
        "## With what",
        "",
        *_machines(claims, store),
    ]
    return "\n".join(lines) + "\n"


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
    return re.sub(
        rf"Of \d+ claims the results are older than the code\.\n\n|{re.escape(_OLD)}", "", text
    )


def _row(
    claim: Claim,
    numbers: Sequence[dict[str, float]],
    decided: str,
    note: str,
    *,
    short: bool,
    stale: bool,
) -> str:
    ours = "; ".join(
        f"{name}: {shown(worse)}"
        + ("" if shown(worse) == shown(better) else f" to {shown(better)}")
        for name, worse, better in spread(claim, numbers)
    )
    rule = "; ".join(map(str, claim.rule))
    if claim.elsewhere:
        rule += f". Or {claim.elsewhere.where}: {'; '.join(map(str, claim.elsewhere.rule))}"
    result = f"**{decided}**" + (f": {note}" if note else "") + (_OLD if stale else "")
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

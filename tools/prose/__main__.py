"""Finds phrases that readers stumble over, in pages, docstrings and comments.

    python -m tools.prose [FILE ...]

Without files it reads every page and every Python file that git does not ignore. Each rule of
rules.toml is a pattern, with the advice that is printed for a hit. Code and the targets of links
are left out.
"""

import ast
import inspect
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

RULES = Path(__file__).with_name("rules.toml")
_NOT_PROSE = re.compile(
    r"(?P<fence>^ *(?P<mark>```+|~~~+).*?^ *(?P=mark) *$)|(?P<code>``[^`]+``|`[^`]+`)"
    r"|(?P<target>(?<=\])\([^)]+\)|<[^ >]+>|https?://\S+)",
    re.MULTILINE | re.DOTALL,
)
# Programs in docstrings: doctests, and commands in an indented paragraph.
_EXAMPLE = re.compile(
    r"^ *>>> .*?(?=^\s*$|\Z)|(?<=\n)^ {4}(?:python|sudo|\$|make|srun|git) .*?$",
    re.MULTILINE | re.DOTALL,
)


def without_code(text: str) -> str:
    """Text of the same lines in which code is `x`, and without the targets of links."""

    def instead(found: re.Match[str]) -> str:
        lines = "\n" * found[0].count("\n")
        return "`x`" + lines if found["code"] else lines

    return _NOT_PROSE.sub(instead, text)


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Blocks of a page with the number of their first line; a row of a table is also a block."""
    block: list[str] = []
    first = 1
    for number, line in enumerate([*without_code(text).splitlines(), ""], 1):
        new = re.match(r"\s*([-*|#>]|\d+\.)(\s|\|)", line)
        if block and (new or not line.strip()):
            yield first, "\n".join(block)
            block = []
        if line.strip():
            first = first if block else number
            block.append(line)


def prose_of_code(text: str) -> Iterator[tuple[int, str]]:
    """The blocks of docstrings, and each group of consecutive comments as one block."""
    for node in ast.walk(ast.parse(text)):
        # A string that stands alone is a docstring, of an attribute for example.
        said = getattr(node.value, "value", None) if isinstance(node, ast.Expr) else None
        if isinstance(node, ast.Expr) and isinstance(said, str):
            written = _EXAMPLE.sub(lambda x: "\n" * x[0].count("\n"), inspect.cleandoc(said))
            yield from ((node.lineno + n - 1, block) for n, block in prose_of_page(written))
    comments: list[str] = []
    first = last = 0
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    for token in (*(x for x in tokens if x.type == tokenize.COMMENT), None):
        if comments and (token is None or token.start[0] != last + 1):
            yield first, without_code("\n".join(comments))
            comments = []
        if token is not None:
            first = first if comments else token.start[0]
            last = token.start[0]
            comments.append(token.string.removeprefix("#").strip())


def hits(text: str, is_code: bool, rules: list[dict[str, str]]) -> Iterator[tuple[int, str, str]]:
    """The line, the phrase and the advice for each place that a rule matches."""
    kept = [rule for rule in rules if not (is_code and rule.get("only") == "pages")]
    compiled = [(re.compile(rule["pattern"], re.MULTILINE), rule["advice"]) for rule in kept]
    for first, block in (prose_of_code if is_code else prose_of_page)(text):
        for pattern, advice in compiled:
            for found in pattern.finditer(block):
                line = first + block.count("\n", 0, found.start())
                yield line, " ".join(found[0].split()), advice


def main(names: list[str]) -> int:
    """Prints the hits of all files; returns 1 if there are any."""
    if not names:
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", "*.py"]
        names = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split()
        names = [name for name in dict.fromkeys(names) if Path(name).exists()]
    rules = tomllib.loads(RULES.read_text(encoding="utf-8"))["rule"]
    count = 0
    for name in names:
        text = Path(name).read_text(encoding="utf-8")
        for line, phrase, advice in sorted(hits(text, name.endswith(".py"), rules)):
            print(f"{name}:{line}: '{phrase}': {advice}")
            count += 1
    print(f"{count} hits" if count else "no hits", file=sys.stderr)
    return int(count > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

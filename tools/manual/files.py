"""Turns links from the manual to programs of the repository into pages with the program's text.

On GitHub the link leads to the file itself.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
# A relative link to a Python file.
_LINK = re.compile(r"\]\((?!https?:)([\w./-]+\.py)\)")


def _target(page: str, link: str) -> str:
    """The file in the repository to which a link of a page leads."""
    return posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))


def _source(file: str) -> str:
    """The page that shows the file."""
    return f"source/{file}.md"


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that show programs."""
    found = set()
    for page in files.documentation_pages():
        for link in _LINK.findall(page.content_string):
            found.add(_target(page.src_uri, link))
    for file in sorted(found):
        text = (ROOT / file).read_text()
        content = f"# {file}\n\n````python\n{text}````\n"
        hidden = InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, _source(file), content=content, inclusion=hidden))
    return files


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Redirects the links to these pages."""
    del kwargs
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown

    def moved(match: re.Match[str]) -> str:
        target = _source(_target(here, match[1]))
        return f"]({posixpath.relpath(target, posixpath.dirname(here) or '.')})"

    return _LINK.sub(moved, markdown)

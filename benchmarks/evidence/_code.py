"""The measurements that claims and figures name, and the code that each of them depends on.

A result is older than the code if a file of this repository has changed that its module can import,
or start by a name in a string, or if its arguments or its data have changed. Docstrings and
comments do not count.
"""

import ast
import functools
import hashlib
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .._common.processes import ROOT

# Files that a claim is judged by.
DATA = ROOT / "docs" / "data"
_PACKAGES = ("sparse_collectives", "optax_ext", "benchmarks", "examples")
_LENGTH = 12
# A line of a figure.
Points = tuple[np.ndarray, np.ndarray]


class Check:
    """``check(seed, quick)`` of a function in a module of this folder.

    It is exact if the function takes no seed.

    Args:
      name: of the module and the function, both without their underscores.
      given: the arguments before the seed.
      data: the files in docs/data that it reads.
    """

    def __init__(self, name: str, *given: Any, data: tuple[str, ...] = ()):
        module, _, function = name.partition(".")
        found = importlib.import_module(f"{__package__}._{module}")
        self._function = getattr(found, f"_{function}")
        self._file, self._name, self.given, self._data = Path(found.__file__), name, given, data
        self.exact = "seed" not in inspect.signature(self._function).parameters

    def __call__(self, seed: int, quick: bool) -> Any:
        """The numbers, or the points of a line, that the function measures."""
        drawn = () if self.exact else (seed, quick)
        return self._function(*self.given, *drawn)

    @functools.cached_property
    def code(self) -> str:
        """A digest of everything that the result depends on, in its present form."""
        files = [*reached(self._file.resolve()), *(DATA / name for name in self._data)]
        parts = [repr((self._name, self.given)).encode(), *map(_content, files)]
        digests = "".join(hashlib.sha256(part).hexdigest() for part in parts)
        return hashlib.sha256(digests.encode()).hexdigest()[:_LENGTH]


def _content(file: Path) -> bytes:
    """The bytes of a data file, or the code of a module."""
    return _code_of(file.read_bytes()) if file.suffix == ".py" else file.read_bytes()


@functools.cache
def _code_of(source: bytes) -> bytes:
    """The code of a module without its docstrings and comments."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            node.value = ast.Constant("")
    return ast.dump(tree).encode()


@functools.cache
def reached(file: Path) -> tuple[Path, ...]:
    """A file, and everything that it can import."""
    found, waiting = set[Path](), {file}
    while waiting:
        found |= waiting
        waiting = set[Path]().union(*map(_imported, waiting)) - found
    return tuple(sorted(found))


@functools.cache
def _imported(file: Path) -> frozenset[Path]:
    package = file.relative_to(ROOT).parent.parts
    names = {".".join((*package, "__init__"))}
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = package[: len(package) - node.level + 1] if node.level else ()
            origin = (*origin, *filter(None, [node.module]))
            names |= {".".join((*origin, alias.name)) for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            names.add(node.value)
    return frozenset(path for name in names for path in _files_of(name))


def _files_of(name: str) -> Iterator[Path]:
    """The files of a module, of the packages that contain it, and of a program of that name."""
    parts = name.split(".")
    if not all(map(str.isidentifier, parts)):
        return
    # Programs in examples import their neighbors in that folder.
    for folder in (ROOT, ROOT / "examples"):
        places = [folder.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
        modules = [x for place in places for x in (place.with_suffix(".py"), place / "__init__.py")]
        for path in (*modules, places[-1] / "__main__.py"):
            if path.is_file() and path.relative_to(ROOT).parts[0] in _PACKAGES:
                yield path

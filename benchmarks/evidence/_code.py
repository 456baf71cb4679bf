"""Which code a measurement is of: a fingerprint of all definitions that it can reach.

A check is followed from definition to definition, function, class or assignment, through the
modules of this repository. So a result is older than the code where one of those has changed, and
not where a comment, a docstring, an annotation, the place of a file, or something beside them has.
Where the name is in a string, as in ``getattr(module, name)``, it is the whole module that is
reached, and so it is where a string is the name of a module, which a process is started with. The
packages of others are not followed: a result names their versions.
"""

import ast
import functools
import hashlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

from .._common.processes import ROOT

PACKAGES = ("sparse_collectives", "optax_ext", "benchmarks", "examples")
# Files that a claim is judged by.
DATA = ROOT / "docs" / "data"
_EVERYTHING = "*"
_LENGTH = 12
_DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_IMPORT = ast.Import | ast.ImportFrom
# A module, and a name in it.
Place = tuple[str, str]


class Module(NamedTuple):
    """What a file of Python defines."""

    tree: ast.Module
    # The statements that bind a name, by name.
    definitions: dict[str, list[ast.stmt]]
    # What an import binds to a name: a module, and a name in it, which may be empty.
    imports: dict[str, Place]
    # Statements that bind nothing, and so may do anything.
    others: list[ast.stmt]


class Code:
    """The definitions of some packages, read when they are asked for.

    Args:
      source: the file of a module by its name; None where there is none.
    """

    def __init__(self, source: Callable[[str], Path | None]):
        self._source = source
        self._modules: dict[str, Module | None] = {}
        self._places: dict[Place, tuple[str, set[Place]]] = {}

    def fingerprint(self, check: Callable[..., Any], data: Mapping[str, bytes] = {}) -> str:
        """Of a function and of all that it can reach, and of what it reads: a short hexadecimal."""
        found = {f"{name} {hashlib.sha256(text).hexdigest()}" for name, text in data.items()}
        reached: set[Place] = set()
        for part in _parts(check):
            if not isinstance(part, FunctionType):
                found.add(_text_of(part))
            elif module := self._module(part.__module__):
                name = part.__qualname__.partition(".")[0]
                if name != "<lambda>":
                    reached.add((part.__module__, name))
                    continue
                for node in ast.walk(module.tree):
                    if isinstance(node, ast.Lambda) and node.lineno == part.__code__.co_firstlineno:
                        found.add(_digest(node))
                        reached |= self._named(part.__module__, [node])
        found |= {self._known(place)[0] for place in self._all_of(reached)}
        return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()[:_LENGTH]

    def reached(self, module: str, name: str) -> set[Place]:
        """All definitions that one can reach."""
        return self._all_of({(module, name)})

    def _all_of(self, places: set[Place]) -> set[Place]:
        done: set[Place] = set()
        waiting = list(places)
        while waiting:
            place = waiting.pop()
            if place not in done:
                done.add(place)
                waiting += self._known(place)[1]
        return done

    def _known(self, place: Place) -> tuple[str, set[Place]]:
        """The digest of a definition, and the definitions that it names."""
        if place not in self._places:
            name, what = place
            module = self._module(name)
            assert module is not None, place
            statements = (*module.definitions.get(what, ()), *module.others)
            named = self._named(name, statements)
            if what == _EVERYTHING:
                named |= {(name, key) for key in module.definitions}
                named |= {x for key in module.imports for x in self._resolved(name, [key])}
            self._places[place] = "".join(map(_digest, statements)), named
        return self._places[place]

    def _named(self, module: str, nodes: Iterable[ast.AST]) -> set[Place]:
        found: set[Place] = set()
        for node in nodes:
            for chain in _chains(node):
                found |= self._resolved(module, chain)
            for inner in ast.walk(node):
                name = inner.value if isinstance(inner, ast.Constant) else None
                if isinstance(name, str) and "." in name and self._module(name) is not None:
                    found.add((name, _EVERYTHING))
        return found

    def _resolved(self, name: str, chain: list[str]) -> set[Place]:
        """What ``chain[0].chain[1]`` and so on means in a module."""
        module = self._module(name)
        if module is None:
            return set()
        if not chain:
            return {(name, _EVERYTHING)}
        first, *rest = chain
        if first in module.definitions:
            return {(name, first)}
        # A package that imports a part of itself gets a module.
        if module.imports.get(first, (name, first)) != (name, first):
            inside, attribute = module.imports[first]
            return self._resolved(inside, [attribute, *rest] if attribute else rest)
        return self._resolved(f"{name}.{first}", rest)

    def _module(self, name: str) -> Module | None:
        if name not in self._modules:
            path = self._source(name)
            self._modules[name] = None if path is None else _read(name, path)
        return self._modules[name]


@functools.cache
def code() -> Code:
    """That of this repository, as it was when it was asked for first."""
    return Code(_source_of)


@functools.cache
def fingerprint(check: Callable[..., Any], data: tuple[str, ...] = ()) -> str:
    """That of a check, and of the files in docs/data that it reads."""
    return code().fingerprint(check, {name: (DATA / name).read_bytes() for name in data})


def _source_of(module: str) -> Path | None:
    top, *rest = module.split(".")
    if top not in PACKAGES or not all(part.isidentifier() for part in rest):
        return None
    spec = importlib.util.find_spec(top)
    if spec is None or not spec.submodule_search_locations:
        return None
    place = Path(next(iter(spec.submodule_search_locations))).joinpath(*rest)
    paths = (place / "__init__.py", place.with_name(f"{place.name}.py"))
    return next((path for path in paths if path.is_file()), None)


def _read(name: str, path: Path) -> Module:
    module = Module(ast.parse(path.read_text(encoding="utf-8")), {}, {}, [])
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                module.imports[alias.asname or whole] = (whole, "")
        elif isinstance(node, ast.ImportFrom):
            origin = package.split(".")[: len(package.split(".")) - node.level + 1]
            origin = [*(origin if node.level else ()), *filter(None, [node.module])]
            for alias in node.names:
                module.imports[alias.asname or alias.name] = (".".join(origin), alias.name)
    for statement in module.tree.body:
        names = _bound(statement)
        for bound in names:
            module.definitions.setdefault(bound, []).append(statement)
        harmless = isinstance(statement, _IMPORT) or _is_text(statement) or _is_main(statement)
        if not (names or harmless):
            module.others.append(statement)
    return module


def _bound(statement: ast.stmt) -> set[str]:
    """The names that a statement of a module binds, imports left out."""
    if isinstance(statement, _DEFINITION):
        return {statement.name}
    nodes = list(ast.walk(statement))
    names = {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}
    return names | {node.name for node in nodes if isinstance(node, _DEFINITION)}


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_main(statement: ast.stmt) -> bool:
    """Whether it is the ``if __name__ == "__main__"`` of a program."""
    return isinstance(statement, ast.If) and "__name__" in {
        node.id for node in ast.walk(statement.test) if isinstance(node, ast.Name)
    }


def _children(node: ast.AST) -> Iterator[tuple[str, Any]]:
    """The fields that make a difference: no docstrings, annotations of functions, or imports."""
    skipped = {"ctx", "kind", "type_comment", "type_ignores", "type_params", "returns"}
    if isinstance(node, ast.arg):
        skipped.add("annotation")
    for name, value in ast.iter_fields(node):
        if name in skipped or value in (None, []):
            continue
        if isinstance(value, list):
            value = [x for x in value if not isinstance(x, _IMPORT)]
            if isinstance(node, ast.JoinedStr):
                # Python 3.12 has an empty string at the end of some.
                value = [x for x in value if getattr(x, "value", None) != ""]
            if name == "body" and value and _is_text(value[0]):
                value = value[1:]
        yield name, value


def _chains(node: ast.AST) -> Iterator[list[str]]:
    """Each name that is read, with the attributes that follow it."""
    attributes, inner = [], node
    while isinstance(inner, ast.Attribute):
        attributes.insert(0, inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name):
        yield [inner.id, *attributes]
        return
    for _, value in _children(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _chains(child)


def _canonical(value: Any) -> str:
    """The same text for the same program, in every version of Python."""
    if isinstance(value, ast.AST):
        fields = ",".join(f"{name}={_canonical(child)}" for name, child in _children(value))
        return f"{type(value).__name__}({fields})"
    if isinstance(value, list):
        return f"[{','.join(map(_canonical, value))}]"
    return repr(value)


def _digest(node: ast.AST) -> str:
    return hashlib.sha256(_canonical(node).encode()).hexdigest()


def _parts(value: Any) -> Iterator[Any]:
    """The functions that a check is made of, and what they are given or keep from where they are.

    A function is there itself and not its text.
    """
    if isinstance(value, functools.partial):
        value = (value.func, value.args, *value.keywords.items())
    if type(value) is tuple:
        for part in value:
            yield from _parts(part)
        return
    value = getattr(value, "__wrapped__", value)
    yield value
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            yield from _parts(cell.cell_contents)


def _functions(value: Any) -> list[FunctionType]:
    """A function and those that it is made of."""
    return [part for part in _parts(value) if isinstance(part, FunctionType)]


def _text_of(value: Any) -> str:
    """As it is written, without the place in memory of what has no text."""
    text = repr(value)
    return type(value).__qualname__ if " at 0x" in text else text

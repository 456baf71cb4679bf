"""The objects of a run: their names in the store, and reading them with every check."""

import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from optax_ext.sites import _payload
from optax_ext.sites._payload import PayloadError
from optax_ext.sites._store import Store

_T = TypeVar("_T")
log = logging.getLogger("optax_ext.sites")
# The name of a site.
SITE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PATH = re.compile(
    rf"(?:snapshot|round)/(?P<number>[0-9]{{8,15}})(?:/(?P<kind>list|payload)(?:/(?P<site>{SITE.pattern}))?)?"
    r"(?:!(?P<version>[0-9]{1,6}))?"
)


class Name(NamedTuple):
    """The name of an object.

    Attributes:
      kind: snapshot, list or payload.
      number: the number of the round; a snapshot has the parameters before it.
      site: the site of a payload.
      version: counts the objects of the same name before it, none of which can be used.
    """

    kind: str
    number: int
    site: str = ""
    version: int = 0

    @property
    def folder(self) -> str:
        """The folder that has all objects of this kind and number."""
        return self.kind if self.kind == "snapshot" else f"round/{self.number:08d}"

    @property
    def path(self) -> str:
        """The name in the store."""
        number = f"{self.number:08d}"
        last = {"snapshot": number, "list": "list", "payload": f"payload/{self.site}"}[self.kind]
        return f"{self.folder}/{last}" + (f"!{self.version}" if self.version else "")


def name_of(path: str) -> Name | None:
    """The inverse of :attr:`Name.path`; None for the name of anything else."""
    if not (found := _PATH.fullmatch(path)):
        return None
    number, kind, site, version = found.group("number", "kind", "site", "version")
    name = Name(kind or "snapshot", int(number), site or "", int(version or 0))
    return name if name.path == path else None


class Opened(NamedTuple):
    """An object with the right tag: its header, its body, and its digest."""

    header: dict[str, Any]
    body: bytes
    digest: str


class Objects:
    """Reads and writes objects, of which only those count that pass every check.

    An object that does not counts as if it were not there: it is left out with a line, and a site
    that finds it in its way writes the next version of the name. An object is never written twice.

    Attributes:
      run: the identifier of the run, which each object has.
    """

    def __init__(self, store: Store, key: bytes | None):
        self.store = store
        self.run = ""
        self._key = key
        self._refused: set[Name] = set()

    def names(self, folder: str) -> dict[Name, int]:
        """The bytes of each object in a folder that was not refused yet, versions in order."""
        sizes = self.store.sizes(folder)
        found = ((name_of(path), size) for path, size in sizes.items())
        return dict(sorted((x, size) for x, size in found if x and x not in self._refused))

    def read(
        self, names: Mapping[Name, int], body: tuple[int, int], check: Callable[[Name, Opened], _T]
    ) -> dict[Name, _T]:
        """The results of a check for the objects that pass it, all read at the same time.

        A body has at least and at most the bytes of ``body``, and an object with more or fewer is
        not read. The check raises a PayloadError for an object that can't be used.
        """
        call = functools.partial(self._checked, body=body, check=check)
        return self._told(zip(names, self.store.at_once(call, names.items()), strict=True))

    def first(
        self, names: Mapping[Name, int], body: tuple[int, int], check: Callable[[Name, Opened], _T]
    ) -> _T | None:
        """As :meth:`read`, of the first object that passes, which is the last that is read."""

        def results() -> Iterator[tuple[Name, _T | PayloadError | None]]:
            for item in names.items():
                result = self._checked(item, body, check)
                yield item[0], result
                if not isinstance(result, PayloadError | None):
                    return

        return next(iter(self._told(results()).values()), None)

    def _checked(
        self, item: tuple[Name, int], body: tuple[int, int], check: Callable[[Name, Opened], _T]
    ) -> _T | PayloadError | None:
        """The result of a check, or why there is none; None if the object is not there."""
        name, size = item
        most = body[1] + _payload.AROUND
        try:
            if not body[0] <= size <= most:
                raise PayloadError(f"it has {size} bytes")
            if (data := self.store.get(name.path, most)) is None:
                return None
            header, content = _payload.unpack(data, self._key, run=self.run, number=name.number)
            if not body[0] <= len(content) <= body[1]:
                raise PayloadError(f"its body has {len(content)} bytes")
            return check(name, Opened(header, content, _payload.digest(data)))
        except PayloadError as error:
            return error

    def _told(self, results: Iterable[tuple[Name, _T | PayloadError | None]]) -> dict[Name, _T]:
        """The results of objects that can be used; one line says which can't be."""
        used: dict[Name, _T] = {}
        refused: dict[Name, PayloadError] = {}
        for name, result in results:
            if isinstance(result, PayloadError):
                refused[name] = result
            elif result is not None:
                used[name] = result
        self._refused |= refused.keys()
        if refused:
            first, reason = next(iter(refused.items()))
            more = f", and {len(refused) - 1} more objects" if len(refused) > 1 else ""
            where = f"{first.path} at {self.store.name}"
            log.warning("%s is left out: %s%s", where, reason, more)
        return used

    def decide(
        self, name: Name, header: dict[str, Any], body: bytes, there: Callable[[], bool]
    ) -> None:
        """Writes an object, unless one of this name can be used, which ``there()`` says.

        One of concurrent calls decides.
        """
        header = {"run": self.run, "number": name.number, **header}
        data = _payload.pack(header, body, self._key)
        versions = (name._replace(version=x) for x in itertools.count())
        for version in versions:
            # A name that was refused is taken.
            if version not in self._refused and (self.store.create(version.path, data) or there()):
                return

    def remove_before(self, number: int) -> None:
        """Removes all objects of earlier numbers, and what a killed writer has left of them."""
        paths = [*self.store.sizes("snapshot"), *self.store.sizes("round")]
        # A folder has a part of an object under its name, # and digits.
        names = {path: name_of(path.partition("#")[0]) for path in paths}
        self.store.delete([path for path, x in names.items() if x and x.number < number])

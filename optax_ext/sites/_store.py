"""An object store: how a site reads and writes it, with errors of one line."""

import concurrent.futures
import contextlib
import os
import stat
import urllib.parse
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, TypeVar

from optax_ext.sites._credentials import is_path_of_url, scrubbed, without_credentials
from optax_ext.sites._payload import PayloadError

_T = TypeVar("_T")
_U = TypeVar("_U")
# Objects that are read at the same time.
_AT_ONCE = 32
_WHERE = "a folder, a URL such as s3://bucket/run (gs://, az://), or a store of obstore"


class StoreError(OSError):
    """The store has failed at an operation, which may succeed a moment later."""


class Store:
    """Objects by their name in a folder, or in a bucket of S3, Google Cloud Storage or Azure."""

    def __init__(self, url: str | Path | Any):
        """``url`` is a folder, a URL such as ``s3://bucket/run``, or a store of obstore."""
        try:
            import obstore
            import obstore.exceptions
            import obstore.store
        except ImportError as error:
            raise ImportError(
                "optax_ext.sites reads and writes objects by obstore: pip install obstore."
            ) from error
        self._obstore = obstore
        self._url = str(url)
        self.name = without_credentials(self._url)
        if isinstance(url, obstore.store.ObjectStore):
            self._store = url
        elif not isinstance(url, str | Path) or not self._url or is_path_of_url(self._url):
            raise TypeError(f"store must be {_WHERE}, got {self.name!r} ({type(url).__name__}).")
        else:
            self._store = self._opened(self._url)
            if isinstance(self._store, obstore.store.MemoryStore):
                raise ValueError(
                    f"store must be {_WHERE}, got {self.name}: each site would have a store of "
                    "its own. Give all sites of a process one obstore.store.MemoryStore()."
                )
        if isinstance(self._store, obstore.store.HTTPStore):
            raise ValueError(
                f"store must be {_WHERE}, got {self.name}: of several sites that write an object "
                "to a web server, none knows whether it was the first."
            )
        self._folder: Path | None = None
        if isinstance(self._store, obstore.store.LocalStore):
            # One of the whole file system has no prefix.
            self._folder = Path(self._store.prefix or "/")

    def _opened(self, url: str) -> Any:
        store = self._obstore.store
        try:
            folder = _folder_of(url)
            if folder is None:
                return store.from_url(url)
            folder.mkdir(parents=True, exist_ok=True)
            return store.LocalStore(folder)
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise StoreError(f"can't open the store at {self.name}: {self._line(error)}") from None

    def create(self, name: str, data: bytes) -> bool:
        """Whether this call has written the object: of concurrent calls only one does."""
        try:
            with self._said("write", name):
                self._obstore.put(self._store, name, data, mode="create")
        except FileExistsError:
            return False
        return True

    def get(self, name: str, most: int) -> bytes | None:
        """The object; None if there is none.

        Raises:
          PayloadError: it has more than this number of bytes, which are not read.
        """
        try:
            with self._said("read", name):
                found = self._obstore.get(self._store, name)
                if (size := found.meta["size"]) <= most:
                    return bytes(found.bytes())
        except FileNotFoundError:
            return None
        raise PayloadError(f"it has {size} bytes")

    def at_once(self, function: Callable[[_T], _U], each: Iterable[_T]) -> list[_U]:
        """The results for each, at the same time: over slow links each read takes long."""
        each = list(each)
        if len(each) < 2:
            return [function(x) for x in each]
        with concurrent.futures.ThreadPoolExecutor(min(len(each), _AT_ONCE)) as pool:
            return list(pool.map(function, each))

    def sizes(self, folder: str) -> dict[str, int]:
        """The bytes of each object in a folder and those below it, by its name."""
        with self._said("list", folder):
            if self._folder is None:
                found = (x for chunk in self._obstore.list(self._store, folder) for x in chunk)
                return {x["path"]: x["size"] for x in found}
            return _files(self._folder, folder)

    def delete(self, names: Iterable[str]) -> None:
        """Removes the objects that it can remove, and the folders that are then empty."""
        for name in names:
            with contextlib.suppress(FileNotFoundError, StoreError), self._said("remove", name):
                if self._folder is None:
                    self._obstore.delete(self._store, name)
                    continue
                path = self._folder / name
                path.unlink()
                # The first folder of a name stays, since others write to it.
                for above in path.relative_to(self._folder).parents[:-2]:
                    with contextlib.suppress(OSError):
                        (self._folder / above).rmdir()

    @contextlib.contextmanager
    def _said(self, what: str, name: str) -> Generator[None]:
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(name) from None
        except (self._obstore.exceptions.AlreadyExistsError, FileExistsError):
            raise FileExistsError(name) from None
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise StoreError(f"can't {what} {name} at {self.name}: {self._line(error)}") from None

    def _line(self, error: BaseException) -> str:
        """The first line of an error, without credentials."""
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return scrubbed(line, self._url)


def _folder_of(url: str) -> Path | None:
    """The folder that a path names, or a ``file`` URL of this machine; None for another URL."""
    if "://" not in url:
        return Path(url).expanduser().absolute()
    if not url.lower().startswith("file://"):
        return None
    parts = urllib.parse.urlsplit(url)
    path = os.fsdecode(urllib.parse.unquote_to_bytes(parts.path))
    return Path("/", path) if parts.netloc.lower() in ("", "localhost") else None


def _files(root: Path, folder: str) -> dict[str, int]:
    """As :meth:`Store.sizes`, of files; links to folders, and what can't be read, are left out.

    The listing of obstore ends at a link that loops, and at a name that is not UTF-8.
    """
    top = root / folder

    def failed(error: OSError) -> None:
        if error.filename == str(top) and not isinstance(error, FileNotFoundError):
            raise error

    sizes = {}
    for above, _, files in os.walk(top, onerror=failed):
        for name in files:
            path = Path(above, name)
            with contextlib.suppress(OSError):
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    sizes[path.relative_to(root).as_posix()] = status.st_size
    return sizes

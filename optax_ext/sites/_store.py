"""An object store: how a site reads and writes it, with errors of one line."""

import concurrent.futures
import contextlib
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

# Objects that are read at the same time.
_AT_ONCE = 32


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
        self.name = str(url)
        if not isinstance(url, str | Path):
            self._store = url
            return
        try:
            if "://" not in self.name:
                folder = Path(url).expanduser().absolute()
                folder.mkdir(parents=True, exist_ok=True)
                self._store = obstore.store.LocalStore(folder)
            else:
                self._store = obstore.store.from_url(self.name)
        except (obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise StoreError(f"can't open the store at {self.name}: {_line(error)}") from None

    def create(self, name: str, data: bytes) -> bool:
        """Whether this call has written the object: of concurrent calls only one does."""
        try:
            with self._said("write", name):
                self._obstore.put(self._store, name, data, mode="create")
        except FileExistsError:
            return False
        return True

    def get(self, name: str) -> bytes | None:
        """The object; None if there is none."""
        try:
            with self._said("read", name):
                return bytes(self._obstore.get(self._store, name).bytes())
        except FileNotFoundError:
            return None

    def get_all(self, names: Sequence[str]) -> list[bytes | None]:
        """The objects of these names, read at the same time: over slow links each takes long."""
        if len(names) < 2:
            return [self.get(name) for name in names]
        with concurrent.futures.ThreadPoolExecutor(min(len(names), _AT_ONCE)) as pool:
            return list(pool.map(self.get, names))

    def sizes(self, prefix: str) -> dict[str, int]:
        """The bytes of each object below a prefix, by the rest of its name."""
        with self._said("list", prefix):
            found = (x for chunk in self._obstore.list(self._store, prefix) for x in chunk)
            return {x["path"].removeprefix(f"{prefix}/"): x["size"] for x in found}

    def delete(self, names: Iterable[str]) -> None:
        """Removes objects, if they exist."""
        for name in names:
            with contextlib.suppress(FileNotFoundError), self._said("remove", name):
                self._obstore.delete(self._store, name)

    @contextlib.contextmanager
    def _said(self, what: str, name: str) -> Generator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(name) from error
        except (self._obstore.exceptions.AlreadyExistsError, FileExistsError) as error:
            raise FileExistsError(name) from error
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            raise StoreError(f"can't {what} {name} at {self.name}: {_line(error)}") from None


def _line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

"""What the objects of a run contain: snapshots, lists and payloads, written and checked."""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from optax_ext.sites import _payload
from optax_ext.sites._objects import SITE, Name, Opened
from optax_ext.sites._parameter_change import Change, Messages
from optax_ext.sites._payload import PayloadError

# The most sites in the list of a round, and the most whose last delivery is in a snapshot.
MOST_SITES = 4096
# The most bytes of JSON for them.
MOST_ROWS = 256 * MOST_SITES
# The tokens of a payload are fewer.
MOST_TOKENS = 2**53
_LIFE = re.compile("[0-9a-f]{16}")

# For each site its last delivered payload: the life of the site, and the number of the round.
Delivered = dict[str, tuple[str, int]]


class Share(NamedTuple):
    """A site's part in a round, from its payload.

    Attributes:
      site: the name of the site.
      life: distinguishes a site from an earlier one of the same name.
      base: the digest of the parameters from which it moved.
      tokens: the data it has trained on; the weights of a round are shares of their sum.
      change: of its parameters.
      digest: of the payload.
    """

    site: str
    life: str
    base: str
    tokens: int
    change: Change
    digest: str


class Snapshot(NamedTuple):
    """The parameters before a round, ``f32[n]``, and the deliveries before it."""

    number: int
    params: np.ndarray
    delivered: Delivered


def digest_of(params: np.ndarray) -> str:
    """The digest of the bits of the parameters, which all sites share before a round."""
    return _payload.digest(params.astype("<f4").tobytes())[:16]


def share_of(name: Name, opened: Opened, messages: Messages) -> Share:
    """The content of a payload; raises a PayloadError if it may not be taken."""
    site, life, base, tokens = map(opened.header.get, ("site", "life", "base", "tokens"))
    if site != name.site:
        raise PayloadError(f"its site is {str(site)[:40]!r}")
    if type(tokens) is not int or not 0 < tokens < MOST_TOKENS:
        raise PayloadError(f"its tokens are {str(tokens)[:40]!r}")
    if not isinstance(life, str) or not _LIFE.fullmatch(life):
        raise PayloadError(f"its life is {str(life)[:40]!r}")
    change = messages.decode(opened.body)
    return Share(name.site, life, str(base)[:64], tokens, change, opened.digest)


def list_of(shares: Mapping[Name, Share]) -> bytes:
    """The body of the list of a round with these payloads, of each site one."""
    rows = [(x.site, x.version, share.digest) for x, share in sorted(shares.items())]
    return _json(rows[:MOST_SITES])


def listed(name: Name, opened: Opened) -> dict[Name, str]:
    """The digests of the payloads in a list; raises a PayloadError if it is none."""
    found = {
        Name("payload", name.number, site, version): digest
        for site, version, digest in _rows(opened.body, (str, int, str))
        if SITE.fullmatch(site) and 0 <= version < 1_000_000
    }
    if not found or len({x.site for x in found}) < len(found):
        raise PayloadError("it is no list of payloads")
    return found


def snapshot_body(snapshot: Snapshot) -> bytes:
    """The body of a snapshot."""
    rows = [(site, life, number) for site, (life, number) in snapshot.delivered.items()]
    newest = sorted(rows, key=lambda row: -row[2])[:MOST_SITES]
    return snapshot.params.astype("<f4").tobytes() + _json(newest)


def snapshot_of(name: Name, opened: Opened, size: int) -> Snapshot:
    """The content of a snapshot of ``f32[size]``; raises a PayloadError if it can't be used."""
    params = np.frombuffer(opened.body, "<f4", size).astype(np.float32)
    if opened.header.get("digest") != digest_of(params):
        raise PayloadError("it is not what it says it is")
    if not np.isfinite(params).all():
        raise PayloadError("a value is not finite")
    rows = _rows(opened.body[4 * size :], (str, str, int))
    return Snapshot(name.number, params, {site: (life, x) for site, life, x in rows})


def _json(rows: list[Any]) -> bytes:
    return json.dumps(rows, separators=(",", ":")).encode()


def _rows(data: bytes, types: tuple[type, ...]) -> list[Any]:
    """Rows of JSON with values of these types."""
    try:
        rows = json.loads(data)
    except (ValueError, RecursionError):
        raise PayloadError("its rows are no JSON") from None
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and tuple(map(type, row)) == types for row in rows
    ):
        raise PayloadError("its rows are none of this format")
    return rows

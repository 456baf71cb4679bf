"""The objects that a site puts into the store: a header, a body, and a tag over both."""

import hashlib
import hmac
import json
import struct
from typing import Any

_MAGIC = b"optax_ext.sites/1\n"
_LENGTH = struct.Struct("<I")
_TAG = 32
# The largest header, which is JSON, in bytes.
LARGEST_HEADER = 4096
# The most bytes of an object besides its body.
AROUND = len(_MAGIC) + _LENGTH.size + LARGEST_HEADER + _TAG


class PayloadError(ValueError):
    """An object is not what it should be; the message is one line."""


def pack(header: dict[str, Any], body: bytes, key: bytes | None) -> bytes:
    """The object of a header, which has at most 4,096 bytes of JSON, and a body.

    It is signed with the key, or has a checksum if that is None, which detects only damage.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > LARGEST_HEADER:
        raise ValueError(f"the header has {len(text)} bytes, and at most {LARGEST_HEADER}.")
    data = b"".join((_MAGIC, _LENGTH.pack(len(text)), text, body))
    return data + _tag(data, key)


def unpack(data: bytes, key: bytes | None, **wanted: Any) -> tuple[dict[str, Any], bytes]:
    """The header and the body of an object.

    Raises:
      PayloadError: it is cut off, damaged, of another format, or not signed with the key.
      PayloadError: a value of its header is not the wanted one.
    """
    start = len(_MAGIC) + _LENGTH.size
    if not data.startswith(_MAGIC) or len(data) < start + _TAG:
        raise PayloadError("it is no object of this format")
    if not hmac.compare_digest(data[-_TAG:], _tag(memoryview(data)[:-_TAG], key)):
        raise PayloadError(
            "it is damaged" if key is None else "its signature is not that of the key"
        )
    (length,) = _LENGTH.unpack_from(data, len(_MAGIC))
    if length > LARGEST_HEADER or start + length + _TAG > len(data):
        raise PayloadError("its header is too long")
    try:
        header = json.loads(data[start : start + length])
    except (ValueError, RecursionError):
        raise PayloadError("its header is no JSON") from None
    if not isinstance(header, dict):
        raise PayloadError("its header is no object of JSON")
    for name, value in wanted.items():
        found = header.get(name)
        # 1.0 and true are equal to 1.
        if type(found) is not type(value) or found != value:
            raise PayloadError(f"its {name} is {str(found)[:40]!r}, not {value!r}")
    return header, data[start + length : -_TAG]


def digest(data: bytes) -> str:
    """A digest of an object, by which a list names it."""
    return hashlib.sha256(data).hexdigest()


def _tag(data: bytes | memoryview, key: bytes | None) -> bytes:
    return hashlib.sha256(data).digest() if key is None else hmac.digest(key, data, "sha256")

"""URLs without their credentials, for messages."""

import re
import urllib.parse

_URL = re.compile(r"([a-z][a-z0-9+.-]+:/+)(.*)", re.IGNORECASE | re.DOTALL)
# Parts of a URL with fewer letters are no secrets, and are in too many words.
_SHORTEST = 4


def without_credentials(text: str) -> str:
    """The text, whose URL has neither a user nor anything after its path."""
    return _URL.sub(lambda found: found[1] + _parts(found[2])[0], text)


def scrubbed(text: str, url: str) -> str:
    """A text about a store, without the credentials of its URL or of any other."""
    if found := _URL.search(url):
        text = text.replace(url, without_credentials(url))
        for secret in sorted(_parts(found[2])[1], key=len, reverse=True):
            text = text.replace(secret, "...")
    return " ".join(without_credentials(word) for word in text.split(" "))


def is_path_of_url(text: str) -> bool:
    """Whether a text is a URL that ``Path`` has taken a / from."""
    found = _URL.match(text)
    return found is not None and not found[1].endswith("//")


def _parts(rest: str) -> tuple[str, set[str]]:
    """Host and path after the ``://`` of a URL, and its credentials, quoted and unquoted."""
    user, _, place = rest.rpartition("@")
    if re.search("[?#]", user):
        # The @ may end a password that has a ?, or be in a signature.
        place, credentials = "...", rest
    else:
        place, _, query = place.replace("#", "?").partition("?")
        credentials = f"{user}?{query}"
    words = {*re.split("[:?#&=]", credentials), *re.split("[:?#&=@]", credentials)}
    words = {x for x in words if len(x) >= _SHORTEST}
    return place, words | {urllib.parse.unquote(x) for x in words}

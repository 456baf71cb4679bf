"""No message has the credentials of a URL."""

import urllib.parse

import obstore.store
import pytest

from optax_ext.sites._credentials import scrubbed, without_credentials
from optax_ext.sites._store import Store, StoreError

SECRET = "pass/wo@rd+1"
QUOTED = urllib.parse.quote(SECRET, safe="")
URLS = {
    f"s3://KEY:{SECRET}@bucket/run": "s3://bucket/run",
    f"s3://KEY:{QUOTED}@bucket/run": "s3://bucket/run",
    "s3://bucket/run": "s3://bucket/run",
    f"az://container/run?sig={SECRET}": "az://...",
    f"az://container/run?sig={QUOTED}&se=2026": "az://container/run",
    f"az://container/run#{QUOTED}": "az://container/run",
    f"nothing://user:{SECRET}@host/run": "nothing://host/run",
    f"https://user:{SECRET}@127.0.0.1:9/bucket?{QUOTED}": "https://127.0.0.1:9/bucket",
    f"https://127.0.0.1:9/bucket?X-Amz-Signature={QUOTED}": "https://127.0.0.1:9/bucket",
    f"http://user: {QUOTED}@127.0.0.1:9/bucket": "http://127.0.0.1:9/bucket",
    f"s3:/KEY:{SECRET}@bucket/run": "s3:/bucket/run",
    "http://user:pass?wo#rd+1@127.0.0.1:9/bucket": "http://...",
    "/a/folder@home/run?x": "/a/folder@home/run?x",
    "run": "run",
}


def secret_in(text: str) -> bool:
    return any(part in text for part in ("pass", "wo@rd", "rd+1", QUOTED))


@pytest.mark.parametrize("url", URLS)
def test_what_is_shown_of_a_url(url):
    assert without_credentials(url) == URLS[url]
    assert not secret_in(URLS[url])
    for text in (
        f"can't read {url}",
        f"GET {url}/run failed: redirect to <https://x:{SECRET}@y/z>, or (https://y?sig={QUOTED})",
        f"source: {url!r}",
    ):
        said = scrubbed(text, url)
        assert not secret_in(said), said
        assert said.split()[0] == text.split()[0]
    if secret_in(url) and SECRET in url and "?" not in url:
        assert scrubbed(f"the key {SECRET!r} is not valid", url) == "the key '...' is not valid"


@pytest.mark.parametrize("url", URLS)
def test_what_a_store_says(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [url if not url.startswith("/") else "x"]
    if url.startswith("https://user:"):
        given.append(obstore.store.HTTPStore.from_url(f"https://u:{QUOTED}@127.0.0.1:9/x"))
    for one in given:
        try:
            store = Store(one)
        except (StoreError, TypeError, ValueError) as error:
            said = str(error)
        else:
            with pytest.raises(StoreError) as raised, store._said("read", "run"):
                raise OSError(f"GET {url} failed: {SECRET if SECRET in url else ''}\nand more")
            said = str(raised.value)
            assert "GET" in said
        assert not secret_in(said), said
        assert "\n" not in said

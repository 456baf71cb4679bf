"""The only use of what jax does not document: a version that moves it is adapted to here."""

from jax._src import dispatch


def programs(jitted) -> int:
    """How many programs a jitted function has: one for each type that it was called with."""
    return jitted._cache_size()


def forget_failed_callbacks() -> None:
    """Else jax would report a callback that failed a second time, when the process ends."""
    dispatch.runtime_tokens.clear()

"""The only uses of undocumented jax: a version that moves them is adapted to here."""

from jax._src import dispatch


def programs(jitted) -> int:
    """How many programs a jitted function has: one for each type that it was called with."""
    return jitted._cache_size()


def forget_failed_callbacks() -> None:
    """Keeps jax from reporting a failed callback a second time, when the process ends."""
    dispatch.runtime_tokens.clear()

"""The error of this package."""


class CacheError(ValueError):
    """A source, a cache or an option is wrong; the message is one line for the user."""

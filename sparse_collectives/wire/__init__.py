"""How value-index pairs are encoded for an exchange."""

from sparse_collectives.wire._raw import raw as raw

__all__ = ["raw"]

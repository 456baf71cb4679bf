"""Sites that train a model together through an object store, and may come and go.

Each site is a job of its own, with any optimizer; :class:`Site` exchanges its parameter changes.
``docs/between_sites.md`` says when this is worthwhile.
"""

from optax_ext.sites._member import RoundInfo
from optax_ext.sites._site import Site
from optax_ext.sites._store import StoreError

__all__ = ["RoundInfo", "Site", "StoreError"]

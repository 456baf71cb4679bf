"""A site that takes part in rounds until it is killed, and says the digest after each."""

import numpy as np

from optax_ext import sites
from optax_ext.sites._contents import digest_of
from tests import groups
from tests.sites.helpers import PARAMS, RAW, flat, moved


def main() -> None:
    """Exchanges without end."""
    given = groups.settings()
    groups.launcher.die_with_parent()
    rng = np.random.default_rng(given["seed"])
    options = {"density": 0.1, "codec": RAW, "poll": 0.005, "grace": 0.1, "give_up": 60.0}
    site = sites.Site(given["store"], given["name"], PARAMS, snapshot_every=4, **options)
    params = site.params
    while True:
        groups.say("round", round=site.round, digest=digest_of(flat(site.params)))
        wait = bool(rng.random() < 0.7)
        params = moved(params, site.round, given["seed"])
        params = site.exchange(params, tokens=int(rng.integers(1, 9)), wait=wait)


if __name__ == "__main__":
    groups.run(main)

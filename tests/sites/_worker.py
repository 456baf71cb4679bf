"""A process of a site whose parameters are sharded over its processes."""

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from optax_ext import sites
from tests import groups
from tests.sites.helpers import PARAMS, RAW, SIZE


def main() -> None:
    """Three rounds; with ``fails`` the store of the first process fails before them."""
    given = groups.settings()
    groups.join(given)
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))

    def sharded(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, rows, lambda index: x[index])

    params = jax.tree.map(sharded, PARAMS)
    options = {"density": 0.1, "codec": RAW, "poll": 0.01, "quorum": 2, "give_up": 60.0}
    if given["fails"]:
        options |= {"quorum": 1, "give_up": 0.1}
    site = sites.Site(given["store"], "two", params, **options)
    if given["fails"] and site._member is not None:
        site._member._run.store.create = fails
    add = jax.jit(lambda x, y: jax.tree.map(jax.numpy.add, x, y), donate_argnums=0)
    for step in range(3):
        moved = np.random.default_rng([step, 7]).integers(-8, 9, SIZE).astype(np.float32)
        of = {"a": moved[: SIZE // 2, None], "b": moved[SIZE // 2 :]}
        params = add(params, jax.tree.map(sharded, of))
        try:
            params = site.exchange(params, tokens=1, wait=True)
        except TimeoutError as error:
            groups.say("failed", kind=type(error).__name__, text=str(error))
            if site._member is not None:
                del site._member._run.store.create
            params = site.exchange(params, tokens=1, wait=True)
    assert all(x.sharding == rows for x in jax.tree.leaves(params))
    mine = multihost(params)
    groups.say("done", round=site.round, shared=flat(site.params), params=flat(mine))
    site.close()


def fails(*_: object) -> bool:
    """A store that is full."""
    raise sites.StoreError("can't write: no space left on device")


def multihost(params: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """All of the parameters, on each process."""
    from jax.experimental import multihost_utils

    return {name: multihost_utils.process_allgather(x, tiled=True) for name, x in params.items()}


def flat(tree: dict[str, np.ndarray]) -> list[float]:
    """As a list, which JSON has."""
    return [float(x) for name in sorted(tree) for x in np.asarray(tree[name]).ravel()]


if __name__ == "__main__":
    groups.run(main)

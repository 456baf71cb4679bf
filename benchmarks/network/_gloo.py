"""JAX processes that are one group over Gloo."""

from collections.abc import Callable
from typing import Any


def join(config: dict[str, Any]) -> None:
    """Makes this process one of the group, before anything else of jax runs.

    Args:
      config: ``coordinator``, an address; ``workers``, P; and ``host``, the number of this one.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        config["coordinator"],
        num_processes=config["workers"],
        process_id=config["host"],
        cluster_detection_method="deactivate",
    )


def barrier(mesh: Any) -> Callable[[], None]:
    """A function that returns when all workers of a mesh with one axis have called it."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    (axis,) = mesh.axis_names
    token = jax.make_array_from_process_local_data(NamedSharding(mesh, P(axis)), jnp.ones((1,)))
    summed = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, axis), mesh=mesh, in_specs=P(axis), out_specs=P())
    )

    def wait() -> None:
        summed(token).block_until_ready()

    return wait

"""JAX processes that are one group over Gloo."""

from collections.abc import Callable
from typing import Any


def join(config: dict[str, Any], devices: int = 1) -> None:
    """Makes this process one of the group, before anything else of jax runs.

    Args:
      config: ``coordinator``, an address; ``workers``, P; and ``host``, the number of this one.
      devices: of this process.
    """
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        config["coordinator"],
        num_processes=config["workers"],
        process_id=config["host"],
        cluster_detection_method="deactivate",
    )


def barrier(mesh: Any) -> Callable[[], None]:
    """A function that returns when the processes of all devices of a mesh have called it."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    axis = mesh.axis_names
    where = NamedSharding(mesh, P(axis))
    own = jnp.ones((len(mesh.local_devices),))
    token = jax.make_array_from_process_local_data(where, own)
    summed = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, axis), mesh=mesh, in_specs=P(axis), out_specs=P())
    )

    def wait() -> None:
        summed(token).block_until_ready()

    return wait

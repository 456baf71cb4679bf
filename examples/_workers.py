"""The simulated workers of a training in one process."""

import jax

from _data import InputError


def start_workers(count: int) -> jax.sharding.Mesh:
    """Returns a mesh of `count` simulated CPU devices, the workers, on one axis "data"."""
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # jax runs already, as it does in a test: take the devices it has
        pass
    devices = jax.devices("cpu")[:count]
    if len(devices) < count:
        raise InputError(f"--workers is {count}, but jax runs with {len(devices)} devices")
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((count,), ("data",), axis_types=auto, devices=devices)

"""A GPU that is described and not there: XLA compiles for it all the same."""

import importlib.util
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from .._common.options import InputError

NAME = "NVIDIA H100 80GB HBM3"
AXIS = "data"
# What XLA is told of it, in the fields of its GpuDeviceInfoProto.
_DEVICE = {
    "core_count": 132,
    "fpus_per_core": 128,
    "clock_rate_ghz": 1.98,
    "memory_bandwidth": 3_352_320_000_000,
    "device_memory_size": 84_978_434_048,
    "l2_cache_size": 50 * 2**20,
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "threads_per_core_limit": 2048,
    "registers_per_block_limit": 2**16,
    "registers_per_core_limit": 2**16,
    "shared_memory_per_block": 48 * 2**10,
    "shared_memory_per_block_optin": 227 * 2**10,
    "shared_memory_per_core": 228 * 2**10,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
}


def mesh(devices: int) -> Mesh:
    """A mesh of that many described GPUs of one host; an InputError without the compiler."""
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise InputError(
            "XLA's compiler for CUDA is missing (it needs no GPU); in an environment of its own: "
            f"pip install 'jax[cuda12]=={jax.__version__}' optax ."
        )
    # The plugin would look for a driver, and jax for a GPU: neither is needed to compile.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.config.update("jax_platforms", "cpu")
    name = f"1x1x{devices}"
    fields = "\n".join(f"  {field}: {value}" for field, value in _DEVICE.items())
    target = (
        f"gpu_device_info {{\n{fields}\n  cuda_compute_capability {{ major: 9 }}\n}}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 8 }\n"
        f'device_description_str: "{NAME}"\n'
    )
    described = topologies.get_topology_desc(
        platform="cuda", topology_name=name, topology=name, target_config=target
    )
    return Mesh(np.array(described.devices), (AXIS,), axis_types=(AxisType.Auto,))


def description(devices: int) -> dict[str, Any]:
    """What a file of results says about the device."""
    return {"name": NAME, "compute_capability": 9, "devices": devices, **_DEVICE}

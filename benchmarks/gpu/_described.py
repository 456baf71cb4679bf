"""Programs for a GPU that is only described to XLA, which can compile for it all the same."""

import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
from sparse_collectives import Selector

from .._common.contestants import Contestant
from .._common.options import InputError
from ._contestants import AXIS, layers, layout, map_update

# The description, as text of XLA's GpuTargetConfigProto.
_TARGET = Path(__file__).with_name("h100.txtpb")
NAME = "NVIDIA H100 80GB HBM3"


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
    name, target = f"1x1x{devices}", _TARGET.read_text(encoding="utf-8")
    described = topologies.get_topology_desc(
        platform="cuda", topology_name=name, topology=name, target_config=target
    )
    return Mesh(np.array(described.devices), (AXIS,), axis_types=(AxisType.Auto,))


def compile_selector(selector: Selector, size: int, mesh: Mesh) -> Any:
    """The program of one selection on one device."""
    whole = NamedSharding(mesh, P())
    state = jax.eval_shape(lambda: selector.init(layout(size)))
    program = jax.jit(selector.select, in_shardings=whole, out_shardings=whole)
    return program.lower(jax.ShapeDtypeStruct((size,), jnp.float32), state).compile()


def compile_step(step: Contestant, size: int, density: float, mesh: Mesh) -> Any:
    """The program of ``tx.update`` on each device of the mesh, of a vector or of matrices.

    The state is donated. The gradients are not, since in a training step the same program computes
    them.
    """

    def shapes(*more: int) -> Any:
        each = layers(size) if step.matrices else [(size,)]
        made = [jax.ShapeDtypeStruct((*more, *shape), jnp.float32) for shape in each]
        return made if step.matrices else made[0]

    workers, params = mesh.shape[AXIS], shapes()
    tx = step.make(density, AXIS)
    state = jax.eval_shape(lambda p: optax_ext.init_state(tx, p, {AXIS: workers}), params)
    mapped = map_update(tx, state, mesh)
    return jax.jit(mapped, donate_argnums=1).lower(shapes(workers), state, params).compile()

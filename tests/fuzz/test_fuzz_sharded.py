"""With sharded parameters each device does what it would do alone, in any combination.

Every update and every residual has the same bits as in runs of the parts, one for each device of a
worker. The properties that `test_fuzz.py` checks for those runs, such as equal replicas and
conservation, then hold here as well.
"""

import dataclasses
import itertools
import math
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import optax_ext
import sparse_collectives as sc
from optax_ext._error_feedback import _param_sharding
from tests.fuzz.configurations import Configuration, configurations
from tests.fuzz.data import STEPS, gradients
from tests.fuzz.test_fuzz import IN_A_PART, PARTS, _settings
from tests.optax_ext import shards

SHAPES = {"kernel": (6, 8), "other": (4, 6), "bias": (8,), "odd": (5,), "scale": ()}
# Sizes of the axes that shard; a dimension is sharded over none, one or both of them.
INSIDE = ((2, 1), (1, 2), (2, 2), (4, 1), (1, 1))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Sharded:
    """A configuration with other parameters, and how they are sharded."""

    configuration: Configuration
    inside: tuple[int, int]
    specs: dict[str, PartitionSpec]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(("fsdp", "tensor"), self.inside, strict=True))

    @property
    def places(self) -> list[tuple[int, ...]]:
        """The places of the devices of a worker."""
        return list(np.ndindex(self.inside))

    def shard(self, array: np.ndarray, name: str, place: tuple[int, ...]) -> np.ndarray:
        """The part of a leaf that the device at ``place`` holds, by NumPy."""
        at = dict(zip(self.sizes, place, strict=True))
        for dim, axis in enumerate(self.specs[name]):
            if axis is not None:
                array = np.split(array, self.sizes[axis], axis=dim)[at[axis]]
        return array

    def __repr__(self) -> str:
        dtypes = {name: leaf.dtype.name for name, leaf in self.configuration.params.items()}
        return f"{self.configuration}, of {dtypes}, inside {self.inside}, {self.specs}"


@st.composite
def sharded(draw: Any) -> Sharded:
    """A configuration that parts reproduce, and how it is sharded."""
    drawn = draw(configurations(of_parts=True).filter(lambda c: c.workers not in (6, 8)))
    dtypes = draw(
        st.sampled_from((("float32",) * 5, ("bfloat16",) * 5, ("float32", "float16") * 3))
    )
    params = {
        name: jax.ShapeDtypeStruct(shape, dtype)
        for (name, shape), dtype in zip(SHAPES.items(), dtypes, strict=False)
    }
    inside = draw(st.sampled_from(INSIDE))
    sizes = dict(zip(("fsdp", "tensor"), inside, strict=True))
    specs = {}
    for name, shape in SHAPES.items():
        free, dims = list(sizes), []
        for length in shape:
            fits = [axis for axis in free if length % sizes[axis] == 0]
            axis = draw(st.sampled_from([None, *fits]))
            dims.append(axis)
            free = [other for other in free if other != axis]
        specs[name] = PartitionSpec(*dims)
    # Ties were drawn for the other parameters, and do not hold for these.
    configuration = dataclasses.replace(drawn, params=params, tied={})
    return Sharded(configuration, inside, specs)


def run(drawn: Sharded) -> tuple[list[dict], Any, Any]:
    """Updates of all steps and the last state ``[P, f, t, ...]``, and the gradients."""
    configuration, workers = drawn.configuration, drawn.configuration.workers
    tx, (axis,) = configuration.tx, configuration.axes
    shape, names = (workers, *drawn.inside), {axis: workers, **drawn.sizes}
    given = gradients(configuration)

    def init(_: Any) -> Any:
        params = {k: jnp.zeros(x.shape, x.dtype) for k, x in configuration.params.items()}
        specs = {f"['{k}']": s for k, s in drawn.specs.items()}
        return tx.init(_param_sharding.sharded(params, _param_sharding.ParamSharding(names, specs)))

    everywhere = jax.jit(init)
    for name, size in reversed(names.items()):
        everywhere = jax.vmap(everywhere, axis_name=name, axis_size=size)
    state = everywhere(jnp.zeros(shape))
    step = sc.simulate(
        lambda state, gradient: tx.update(gradient, state), axis=tuple(names), axis_size=shape
    )
    made = []
    for t in range(STEPS):
        of_devices = {}
        for name, leaf in given.items():
            pieces = [[drawn.shard(x, name, place) for place in drawn.places] for x in leaf[t]]
            array = np.asarray(pieces)
            of_devices[name] = jnp.asarray(array.reshape(*shape, *array.shape[2:]))
        update, state = step(state, of_devices)
        made.append(jax.tree.map(np.asarray, update))
    return made, jax.device_get(state), given


def _of_rounded_means(configuration: Configuration) -> bool:
    """Whether XLA may leave a bit of a residual open.

    The part of ``total / P`` that a 16-bit leaf cannot hold is kept. Unless P is a power of two,
    the quotient is rounded, except if XLA fuses it with the difference, as only some programs do.
    """
    narrow = any(leaf.dtype != jnp.float32 for leaf in configuration.params.values())
    return narrow and configuration.workers.bit_count() != 1


def check(drawn: Sharded) -> None:
    updates, state, given = run(drawn)
    node = optax_ext.get_state(state)
    (axis,) = drawn.configuration.axes
    whole = {name: np.asarray(leaf) for name, leaf in given.items()}
    expected, residuals = shards.by_parts(
        drawn.configuration.tx, whole, node.layout, axis=axis, scanned=False
    )
    rounded = _of_rounded_means(drawn.configuration)
    largest = max(np.abs(np.asarray(x, np.float64)).max() for x in jax.tree.leaves(updates))
    for made, wanted in zip(updates, expected, strict=True):
        for name, leaf in wanted.items():
            for worker, place in itertools.product(made[name], drawn.places):
                mine = drawn.shard(np.asarray(leaf, made[name].dtype), name, place)
                if rounded:
                    # Such a part, which may be delivered alone, has that bit of the mean.
                    found, other = (np.asarray(x, np.float64) for x in (worker[place], mine))
                    allowed = STEPS * 2.0**-23 * largest + 2.0**-7 * np.abs(other)
                    assert (np.abs(found - other) <= allowed).all(), f"{name} at {place}"
                else:
                    assert worker[place].tobytes() == mine.tobytes(), f"{name} at {place}"
    parts = math.prod(drawn.inside)
    found = np.asarray(node.residual).reshape(len(residuals), parts, -1)
    residuals = residuals.astype(found.dtype).reshape(found.shape)
    if rounded:
        # In a step the mean may differ by such a bit, and the residual then rounds another number.
        step = 2 * 2.0**-23 * largest
        if found.dtype == jnp.bfloat16:
            # One bit may choose the other neighbor in a random rounding.
            step += 2.0**-7 * np.abs(residuals.astype(np.float64)).max()
        difference = np.abs(found.astype(np.float64) - residuals.astype(np.float64))
        assert difference.max(initial=0) <= STEPS * step
    else:
        assert found.tobytes() == residuals.tobytes()
    assert int(node.skipped.max()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(max(1, PARTS // 2)))
def test_sharded_devices_do_what_they_would_do_alone(part):
    @hypothesis.seed(part)
    @hypothesis.given(sharded())
    @_settings(IN_A_PART // 5)
    def holds(drawn):
        check(drawn)

    holds()

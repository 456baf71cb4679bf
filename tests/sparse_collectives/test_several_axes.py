"""Collectives of several axes: workers have the order of the names, whatever the mesh is."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import sparse_collectives as sc
from sparse_collectives import transport
from tests.sparse_collectives import helpers

SIZES = {"a": 2, "b": 3}
P = 6
GIVEN = np.random.default_rng(0).standard_normal((P, 2 * P)).astype(np.float32)
SUM = GIVEN.sum(axis=0)
RING, SOME = [(i, (i + 1) % P) for i in range(P)], [(4, 2), (0, 3)]
RECEIVED = np.zeros_like(GIVEN)
RECEIVED[[2, 3]] = GIVEN[[4, 0]]
# The function of a worker for each collective, and what all workers get.
COLLECTIVES = {
    "axis_index": (lambda x, axis: transport.axis_index(axis), np.arange(P)),
    "psum": (transport.psum, np.tile(SUM, (P, 1))),
    "psum_scatter": (transport.psum_scatter, SUM.reshape(P, 2)),
    "all_gather": (transport.all_gather, np.tile(GIVEN, (P, 1, 1))),
    "all_to_all": (
        lambda x, axis: transport.all_to_all(x.reshape(P, 2), axis),
        GIVEN.reshape(P, P, 2).swapaxes(0, 1),
    ),
    "ppermute, all": (functools.partial(transport.ppermute, pairs=RING), np.roll(GIVEN, 1, axis=0)),
    "ppermute, some": (functools.partial(transport.ppermute, pairs=SOME), RECEIVED),
}


@pytest.mark.parametrize("way", ["mesh", "mesh with another axis", "direct messages", "simulate"])
@pytest.mark.parametrize("axis", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_workers_have_the_order_of_the_names(name, axis, way):
    function, expected = COLLECTIVES[name]
    if way == "simulate":
        sizes = tuple(SIZES[each] for each in axis)
        simulated = sc.simulate(lambda x: function(x, axis), axis=axis, axis_size=sizes)
        found = simulated(GIVEN.reshape(*sizes, 2 * P))
    else:
        others = {"a": 2, "other": 1, "b": 3} if "another" in way else SIZES
        on, rows = helpers.mesh(tuple(others.values()), tuple(others)), PartitionSpec(axis)

        def of_worker(x):
            return function(x[0], axis)[None]

        try:
            transport.use_direct_messages("direct" in way)
            mapped = jax.shard_map(
                of_worker, mesh=on, in_specs=rows, out_specs=rows, check_vma=False
            )
            found = jax.jit(mapped)(GIVEN)
        finally:
            transport.use_direct_messages(False)
    np.testing.assert_allclose(np.reshape(found, expected.shape), expected, rtol=1e-5)

"""HiTopKComm: the pieces, their words, and what is wrong with a call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives.allreduce import _hierarchical
from tests.sparse_collectives.helpers import slow

AXES = ("node", "device")
TOPK_A = sc.allreduce.topk_a()


def pipeline(h, size, density, workers, inside):
    """A step without residuals: scatter, select, reduce, gather."""
    selector = sc.select.topk(density=density)

    def step(gradient):
        shard = h.scatter(gradient)
        coo, _, _ = selector.select(shard, selector.init(shard.shape[0]))
        state = h.init(size, workers)
        total, undelivered, _, info = h.reduce(coo, state, axis=AXES)
        total = total.to_dense() if isinstance(total, sc.PaddedCOO) else total
        return h.gather(total, size), shard, info

    return step


@pytest.mark.parametrize("shape", [(1, 3), *slow((3, 1), (2, 3))])
def test_scatter_and_gather_are_a_dense_sum(shape):
    h = sc.allreduce.hierarchical(inner_axis="device", outer=TOPK_A)
    size = 10
    gradients = np.random.default_rng(0).integers(-9, 9, (*shape, size)).astype(np.float32)
    step = pipeline(h, size, 1.0, shape[0] * shape[1], shape[1])
    total, shards, info = sc.simulate(step, axis=AXES, axis_size=shape)(gradients)
    expected = gradients.sum(axis=(0, 1))
    np.testing.assert_array_equal(total, np.broadcast_to(expected, gradients.shape))
    of_node = np.asarray(shards).reshape(shape[0], -1)[:, :size]
    np.testing.assert_array_equal(of_node, gradients.sum(axis=1))
    assert (np.asarray(info.delivered) == np.count_nonzero(expected)).all()


OUTERS = {
    "topk_a": sc.allreduce.topk_a(),
    "gtopk": sc.allreduce.gtopk(density=0.1),
    "dense": sc.allreduce.dense(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OUTERS)
def test_info_reports_the_words_that_the_program_moves(name):
    h = sc.allreduce.hierarchical(inner_axis="device", outer=OUTERS[name])
    shape, size = (3, 2), 101
    step = pipeline(h, size, 0.1, 6, 2)
    gradients = np.random.default_rng(0).standard_normal((*shape, size)).astype(np.float32)
    _, _, info = sc.simulate(step, axis=AXES, axis_size=shape)(gradients)
    shard = jax.ShapeDtypeStruct((size,), jnp.float32)
    traffic = sc.traffic.of_function(step, shard, axis=AXES, axis_size=shape)
    np.testing.assert_allclose(info.words, traffic.words, rtol=1e-6)
    outer = sc.traffic.of_allreduce(OUTERS[name], size=51, capacity=5, axis_size=3)
    assert traffic.by_scope(2)["hierarchical/outer"] == pytest.approx(outer.words)
    for field in (info.delivered, info.threshold, info.words):
        assert (np.asarray(field) == np.asarray(field)[0, 0]).all()


def test_words_between_nodes_are_those_of_the_paper():
    """16 nodes of 8 workers: 2 rho d / n (m - 1) words (equation 9, values and indices)."""
    nodes, inside, size, density = 16, 8, 80_000, 0.01
    h = sc.allreduce.hierarchical(inner_axis="device", outer=TOPK_A)
    step = pipeline(h, size, density, nodes * inside, inside)
    gradient = jax.ShapeDtypeStruct((size,), jnp.float32)
    traffic = sc.traffic.of_function(step, gradient, axis=AXES, axis_size=(nodes, inside))
    scopes = traffic.by_scope(2)
    between = 2 * density * size / inside * (nodes - 1)
    assert scopes["hierarchical/outer"] == between
    inner = 2 * size * (inside - 1) / inside + 3 * (inside - 1)
    assert scopes["hierarchical/inner"] == pytest.approx(inner)
    flat = sc.traffic.of_allreduce(
        TOPK_A, size=size, capacity=round(density * size), axis_size=nodes * inside
    )
    # Of what a worker receives in the flat one, (P - w) / (P - 1) comes from other nodes.
    from_outside = flat.words * (nodes * inside - inside) / (nodes * inside - 1)
    assert from_outside / between == pytest.approx(inside**2)


def test_names_of_the_axes():
    outer_axis = _hierarchical.outer_axis
    assert outer_axis(("node", "device"), "device") == "node"
    assert outer_axis(("device", "node"), "device") == "node"
    assert outer_axis(("rack", "node", "device"), "device") == ("rack", "node")
    assert outer_axis(("rack", "node", "device"), ("node", "device")) == "rack"
    for axis, inner in ((("node",), "device"), ("device", "device"), (("a", "b"), ("a", "b"))):
        with pytest.raises(ValueError, match="must name the axis of the nodes and inner_axis"):
            outer_axis(axis, inner)


def test_what_is_wrong_with_a_call():
    with pytest.raises(TypeError, match="outer must be a SparseAllreduce"):
        sc.allreduce.hierarchical(inner_axis="device", outer=sc.select.topk(density=0.1))
    h = sc.allreduce.hierarchical(inner_axis="device", outer=TOPK_A)
    with pytest.raises(ValueError, match="outer deals out vectors over"):
        sc.allreduce.hierarchical(inner_axis="node", outer=h)
    with pytest.raises(ValueError, match="axis_size=6 is not a multiple of the 4 workers"):
        sc.simulate(lambda x: h.init(100, 6), axis="device", axis_size=4)(jnp.ones(4))
    with pytest.raises(ValueError, match="axis='device' is not bound"):
        sc.simulate(h.scatter, axis="node", axis_size=2)(jnp.ones((2, 4)))

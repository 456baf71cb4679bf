"""What is wrong with a call of an allreduce or a codec is named, with what to write instead."""

import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from tests.sparse_collectives import helpers, table

HIERARCHICAL = sc.allreduce.hierarchical(inner_axis="device", outer=sc.allreduce.topk_a())
TORUS = sc.allreduce.published.torus_2d()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ok_topk", {"density": 0.0}, "density must be in"),
        ("ok_topk", {"density": 1.5}, "density must be in"),
        ("ok_topk", {"density": "0.1"}, "density must be a number"),
        ("ok_topk", {"slack": 0.5}, "slack must be a number"),
        ("ok_topk", {"repartition_period": 0}, "repartition_period must be an integer"),
        ("ok_topk", {"global_period": 1.5}, "global_period must be an integer"),
        ("ok_topk", {"schedule": "ring"}, "'all_to_all', 'rotation'"),
        ("ok_topk", {"messages_in_flight": 0}, "messages_in_flight must be an integer"),
        ("ok_topk", {"regions": "even"}, "'hashed', 'balanced', 'equal', got 'even'"),
        ("ok_topk", {"balance": True}, "'auto', 'always', 'never', got True"),
        ("ssar_recursive_double", {"capacity": 0}, "capacity must be an integer of at least 1"),
        ("ssar_split_allgather", {"slack": 0.5}, "slack must be a number"),
        ("ssar_split_allgather", {"fill": 0.5}, "fill must be a number"),
        ("dsar_split_allgather", {"slack": None}, "slack must be a number"),
        ("dsar_split_allgather", {"sparse_sizes": 0}, "sparse_sizes must be an integer"),
        ("ring_sparse", {"fill": "all"}, "fill must be a number"),
        *(
            ("agreed", {"bits": bits}, "bits must be 32, 16, 10 or 8, or None")
            for bits in (4, 0, True, "16")
        ),
        *(
            ("dense_bucketed", {"buckets": buckets}, "buckets must be an integer of at least 1")
            for buckets in (0, -1, 1.5, True)
        ),
    ],
)
def test_an_option_of_an_allreduce(name, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        table.make(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qsgd", {"bits": 3}, "bits must be 2, 4 or 8"),
        ("qsgd", {"bits": True}, "bits must be 2, 4 or 8"),
        ("qsgd", {"bits": 2, "bucket": 24}, "bucket must be a multiple of 16"),
        ("qsgd", {"bucket": 0}, "bucket must be an integer"),
        ("qsgd", {"norm": "l1"}, "'max', 'l2'"),
        ("narrow8", {"block": 0}, "block must be an integer"),
        ("narrow8", {"block": 30}, "block must be a multiple of 4"),
        ("narrow8", {"escapes": -1}, "escapes must be a number"),
        ("narrow8", {"stochastic": "yes"}, "stochastic must be True or False"),
        ("narrow16", {"escapes": 2}, "escapes must be a number"),
    ],
)
def test_an_option_of_a_codec(name, options, message):
    with pytest.raises(ValueError, match=message):
        table.CODECS[name](**options)


def test_a_message_that_a_codec_can_not_have_made():
    with pytest.raises(ValueError, match="4 words in a row"):
        sc.wire.bf16().decode(jnp.zeros(4, jnp.int32), 9, jnp.float32)


@pytest.mark.parametrize("name", table.LOSSY_CODECS)
def test_values_of_other_types_are_rejected(name):
    coo = sc.PaddedCOO(jnp.ones(4, jnp.int32), jnp.arange(4, dtype=jnp.int32), 9)
    with pytest.raises(TypeError, match="values must be of a real floating type"):
        table.CODECS[name]().encode(coo, np.uint32(0))


def test_an_unbound_axis_is_named_with_what_to_write():
    allreduce = table.make("ok_topk", 0.5)
    coo = sc.PaddedCOO(jnp.ones(2), jnp.arange(2), 4)
    with pytest.raises(ValueError, match=r"axis='nodes' is not bound.*shard_map.*axis_name"):
        allreduce.reduce(coo, allreduce.init(4, 2), axis="nodes")
    with pytest.raises(ValueError, match="axis='device' is not bound"):
        sc.simulate(HIERARCHICAL.scatter, axis="node", axis_size=2)(jnp.ones((2, 4)))


def torus_step(axis):
    coo = sc.PaddedCOO(jnp.ones(4), jnp.arange(4, dtype=jnp.int32), 4)
    return sc.simulate(
        lambda _: TORUS.reduce(coo, TORUS.init(4, 2), axis=axis)[0], axis="node", axis_size=2
    )(jnp.ones(2))


@pytest.mark.parametrize("axis", ["node", ("node",), ("node", "node"), ("a", "b", "c")])
def test_a_torus_needs_two_axes(axis):
    with pytest.raises(ValueError, match=r"axis must be a pair \(outer, inner\).*torus_2d"):
        torus_step(axis)


def test_a_torus_needs_axes_that_are_bound():
    with pytest.raises(ValueError, match="is not bound here"):
        torus_step(("node", "device"))


def test_a_state_for_other_workers_is_rejected():
    allreduce = table.make("ok_topk", 0.5)
    acc = np.ones((4, 8), np.float32)
    with pytest.raises(ValueError, match="made for 3 workers, but the axis has 4"):
        helpers.run_once(sc.select.topk(density=0.5), allreduce, acc, allreduce.init(8, 3))
    with pytest.raises(ValueError, match="axis_size=6 is not a multiple of the 4 workers"):
        sc.simulate(lambda x: HIERARCHICAL.init(100, 6), axis="device", axis_size=4)(jnp.ones(4))


def test_what_hierarchical_is_around():
    with pytest.raises(TypeError, match="outer must be a SparseAllreduce"):
        sc.allreduce.hierarchical(inner_axis="device", outer=sc.select.topk(density=0.1))
    with pytest.raises(ValueError, match="outer deals out vectors over"):
        sc.allreduce.hierarchical(inner_axis="node", outer=HIERARCHICAL)


def test_too_many_workers_for_the_bits():
    with pytest.raises(ValueError, match="too few for the sum of 40000 workers. Give bits=32"):
        sc.traffic.of_allreduce(
            sc.allreduce.agreed(bits=16), size=10**6, capacity=2, axis_size=40_000
        )

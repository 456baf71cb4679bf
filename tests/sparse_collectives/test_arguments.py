"""What is wrong with a call of an allreduce or a codec is named, with what to write instead."""

import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from tests.sparse_collectives import helpers, table

HIERARCHICAL = sc.allreduce.hierarchical(inner_axis="device", outer=sc.allreduce.topk_a())
TORUS = sc.allreduce.published.torus_2d()


@pytest.mark.parametrize(
    ("name", "option", "values", "message"),
    [
        ("ok_topk", "density", (0.0, 1.5), "density must be in"),
        ("ok_topk", "density", ("0.1",), "density must be a number"),
        ("ok_topk", "slack", (0.5,), "slack must be a number"),
        ("ok_topk", "repartition_period", (0,), "repartition_period must be an integer"),
        ("ok_topk", "global_period", (1.5,), "global_period must be an integer"),
        ("ok_topk", "schedule", ("ring",), "'all_to_all', 'rotation'"),
        ("ok_topk", "messages_in_flight", (0,), "messages_in_flight must be an integer"),
        ("ok_topk", "regions", ("even",), "'hashed', 'balanced', 'equal', got 'even'"),
        ("ok_topk", "balance", (True,), "'auto', 'always', 'never', got True"),
        ("ssar_recursive_double", "capacity", (0,), "capacity must be an integer of at least 1"),
        ("ssar_split_allgather", "slack", (0.5,), "slack must be a number"),
        ("ssar_split_allgather", "fill", (0.5,), "fill must be a number"),
        ("dsar_split_allgather", "slack", (None,), "slack must be a number"),
        ("dsar_split_allgather", "sparse_sizes", (0,), "sparse_sizes must be an integer"),
        ("ring_sparse", "fill", ("all",), "fill must be a number"),
        ("agreed", "bits", (4, 0, True, "16"), "bits must be 32, 16, 10 or 8, or None"),
        ("dense_bucketed", "buckets", (0, 1.5, True), "buckets must be an integer of at least 1"),
        ("qsgd", "bits", (3, True), "bits must be 2, 4 or 8"),
        ("qsgd", "bucket", (0,), "bucket must be an integer"),
        ("qsgd", "bucket", (9,), "bucket must be a multiple of 4 with bits=8"),
        ("qsgd", "norm", ("l1",), "'max', 'l2'"),
        ("narrow8", "block", (0,), "block must be an integer"),
        ("narrow8", "block", (30,), "block must be a multiple of 4"),
        ("narrow8", "escapes", (-1,), "escapes must be a number"),
        ("narrow8", "stochastic", ("yes",), "stochastic must be True or False"),
        ("narrow16", "escapes", (2,), "escapes must be a number"),
    ],
)
def test_an_option(name, option, values, message):
    make = table.CODECS.get(name) or (lambda **options: table.make(name, **options))
    for value in values:
        with pytest.raises((TypeError, ValueError), match=message):
            make(**{option: value})


COO = sc.PaddedCOO(jnp.ones(4), jnp.arange(4, dtype=jnp.int32), 9)


@pytest.mark.parametrize("name", table.LOSSY_CODECS)
def test_values_of_other_types_are_rejected(name):
    coo = sc.PaddedCOO(jnp.ones(4, jnp.int32), COO.indices, 9)
    with pytest.raises(TypeError, match="values must be of a real floating type"):
        table.CODECS[name]().encode(coo, np.uint32(0))


def over_a_torus(axis):
    sc.simulate(
        lambda _: TORUS.reduce(COO, TORUS.init(9, 2), axis=axis)[0], axis="node", axis_size=2
    )(jnp.ones(2))


def with_the_state_of_others():
    allreduce = table.make("ok_topk", 0.5)
    acc = np.ones((4, 8), np.float32)
    helpers.run_once(sc.select.topk(density=0.5), allreduce, acc, allreduce.init(8, 3))


A_PAIR = r"axis must be a pair \(outer, inner\).*torus_2d"
CALLS = [
    (lambda: sc.wire.bf16().decode(jnp.zeros(4, jnp.int32), 9, jnp.float32), "4 words in a row"),
    (
        lambda: table.make("topk_a").reduce(COO, table.make("topk_a").init(9, 2), axis="nodes"),
        r"axis='nodes' is not bound.*shard_map.*axis_name",
    ),
    (
        lambda: sc.simulate(HIERARCHICAL.scatter, axis="node", axis_size=2)(jnp.ones((2, 4))),
        "axis='device' is not bound",
    ),
    (lambda: over_a_torus("node"), A_PAIR),
    (lambda: over_a_torus(("node", "node")), A_PAIR),
    (lambda: over_a_torus(("a", "b", "c")), A_PAIR),
    (lambda: over_a_torus(("node", "device")), "is not bound here"),
    (with_the_state_of_others, "made for 3 workers, but the axis has 4"),
    (
        lambda: sc.simulate(lambda x: HIERARCHICAL.init(100, 6), axis="device", axis_size=4)(
            jnp.ones(4)
        ),
        "axis_size=6 is not a multiple of the 4 workers",
    ),
    (
        lambda: sc.allreduce.hierarchical(inner_axis="device", outer=sc.select.topk(density=0.1)),
        "outer must be a SparseAllreduce",
    ),
    (
        lambda: sc.allreduce.hierarchical(inner_axis="node", outer=HIERARCHICAL),
        "outer deals out vectors over",
    ),
    (
        lambda: sc.traffic.of_allreduce(
            sc.allreduce.agreed(bits=16), size=10**6, capacity=2, axis_size=40_000
        ),
        "too few for the sum of 40000 workers. Give bits=32",
    ),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_a_call(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()

"""Errors in a call are named, with the fix.

test_selector_contract.py covers the density and the accumulator of every selector.
"""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives import cost_model
from sparse_collectives.cost_model import Workload
from tests.sparse_collectives import helpers, table

HIERARCHICAL = sc.allreduce.hierarchical(inner_axis="device", outer=sc.allreduce.topk_a())
TORUS = sc.allreduce.published.torus_2d()


NUMBERS = (-0.1, math.nan, -math.inf, True, "0.1", None)
COUNTS = (0, -1, 1.5, True, "32", None)
# Wrong values for the options of the part with that name.
WRONG = {
    "mstopk": {"samplings": COUNTS},
    "bucketed": {"bucket": COUNTS},
    "threshold": {"magnitude": NUMBERS},
    "random_k": {"seed": (-1, 2**31, 1.0, True, None)},
    "gaussian_k": {"headroom": NUMBERS, "adjust": (1,)},
    "redsync": {"headroom": NUMBERS, "rounds": COUNTS},
    "sidco": {"headroom": NUMBERS, "distribution": ("normal",), "period": COUNTS},
    "dgc": {"sample_share": (0.0, 1.5), "seed": (-1,)},
    "adtopk": {"row_axis": (0.5, "last", None, True)},
    "adtopk_threshold": {"headroom": NUMBERS, "steps": COUNTS, "warmup": (-1,), "period": COUNTS},
    "threshold_reuse": {"servo": ("no",), "period": COUNTS},
    "threshold_reuse of": {"tolerance": NUMBERS, "headroom": NUMBERS},
    "ok_topk": {"density": (0.0, 1.5, "0.1"), "slack": (0.5,), "schedule": ("ring",)},
    "ok_topk of": {"regions": ("even",), "balance": (True,), "messages_in_flight": COUNTS},
    "ok_topk every": {"repartition_period": (0,), "global_period": (0, 1.5)},
    "ssar_recursive_double": {"capacity": (0,)},
    "ssar_split_allgather": {"slack": (0.5,), "fill": (0.5,)},
    "dsar_split_allgather": {"slack": (None,)},
    "ring_sparse": {"fill": ("all",)},
    "partitioned_topk": {"bits": (4, 0, True, "16")},
    "dense_bucketed": {"buckets": COUNTS},
    "shared_random": {"density": (0.0,), "seed": (2**31,)},
    "qsgd": {"bits": (3, True), "bucket": (0, 9), "norm": ("l1",)},
    "narrow8": {"block": (0, 30), "escapes": (-1,)},
    "narrow16": {"escapes": (2,)},
    "two_bits": {"gap_bits": (10, True), "block": (0, 40), "escapes": (2,)},
    "auto": {"density": (0.0, 1), "latency": ("5",), "bandwidth": (0,)},
    "auto of": {"candidates": (["bogus"],), "codecs": (["bogus"], [])},
    "workload": {"size": (0,), "selected": (0, 11), "workers": (0,), "inner_size": (3,)},
    "measure": {"axis": ("bogus",), "rounds": (0,)},
}
# Arguments that are also required.
GIVEN = {
    "adtopk_threshold": {"density": 0.1, "steps": 10},
    "auto": {"density": 0.1, "latency": "5us", "bandwidth": "1Gbit"},
    "workload": {"size": 10, "selected": 1, "workers": 8},
    "measure": {},
}


def made(name, **options):
    if name in table.ALGORITHMS:
        return table.make(name, **options)
    others = {"auto": sc.planner.auto, "workload": Workload, "measure": sc.measure, **table.CODECS}
    given = {} if name in table.CODECS else GIVEN.get(name, {"density": 0.1})
    return (others.get(name) or helpers.selector_factory(name))(**{**given, **options})


@pytest.mark.parametrize("name", WRONG)
def test_options_that_are_wrong_are_named_with_their_value(name):
    for option, values in WRONG[name].items():
        for value in values:
            with pytest.raises((TypeError, ValueError), match=f"{option} must be") as raised:
                made(name.partition(" ")[0], **{option: value})
            # The wrong value of a list.
            assert repr(value).strip("[]") in str(raised.value)


LOAD = Workload(10, 1, 2)
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


def drawn_by_each(**options):
    selector = sc.select.random_k(density=0.1, **options)
    return selector.select(jnp.ones(10), selector.init(10))


def summed(name, coo, **options):
    allreduce = table.make(name, 0.5)
    call = functools.partial(allreduce.reduce, axis="w", **options)
    sc.simulate(lambda _: call(coo, allreduce.init(9, 2))[0], axis="w", axis_size=2)(jnp.ones(2))


NO_SLOTS = sc.PaddedCOO(COO.values[:0], COO.indices[:0], 9)
A_PAIR = r"axis must be a pair \(outer, inner\).*torus_2d"
CALLS = [
    (lambda: drawn_by_each(axis="workers"), "'workers' is not bound"),
    (
        lambda: sc.traffic.of_allreduce(TORUS, size=1000, capacity=0, axis_size=8),
        "`capacity` is 0",
    ),
    (lambda: sc.measure(helpers.mesh(1)), "axis must have at least 2 workers, got 1"),
    (lambda: sc.measure(sizes=(64, 64)), r"sizes must hold at least 2 different sizes, got \[64\]"),
    (lambda: sc.measure(sizes=(0, 64)), "sizes must be an integer of at least 1, got 0"),
    (lambda: cost_model.paper_cost("bogus", LOAD), "name must be one of dense.*'bogus'"),
    (lambda: cost_model.predict("bogus", LOAD), "name must be one of dense.*'bogus'"),
    (lambda: cost_model.predict("dense", LOAD, "bogus"), "codec must be one of raw.*'bogus'"),
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
    (lambda: summed("ok_topk", NO_SLOTS), "coo has no slots, of a vector of 9 entries"),
    (lambda: summed("topk_a", NO_SLOTS), "coo has no slots.*Give it at least one"),
    (lambda: summed("shared_random", COO, acc=jnp.ones(5)), r"acc has shape \(5,\).*9 entries"),
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
            sc.allreduce.partitioned_topk(bits=16), size=10**6, capacity=2, axis_size=40_000
        ),
        "too few for the sum of 40000 workers. Give bits=32",
    ),
]


@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_calls_that_are_wrong_say_what_to_write(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()

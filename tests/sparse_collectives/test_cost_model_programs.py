"""The words that the cost model predicts are those of the traced programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import sparse_collectives as sc
from sparse_collectives import cost_model, traffic
from sparse_collectives.cost_model import Workload, _implementation
from tests.sparse_collectives import helpers, table
from tests.sparse_collectives.test_cost_model import TWO_LEVELS


def traced(name, load, codec, *, check_vma=False):
    """A step of an algorithm for P workers, or m nodes of w, traced without devices."""
    axes, coo_size, capacity, workers = {"w": load.workers}, load.size, load.selected, load.workers
    codec, hierarchical = table.CODECS[codec](), name.startswith("hierarchical")
    if name in TWO_LEVELS:
        axes = {"node": load.workers // load.inner_size, "device": load.inner_size}
    if hierarchical:
        made = table.make(name.rstrip(")").split("(")[1], load.density, codec)
        allreduce = sc.allreduce.hierarchical(inner_axis="device", outer=made)
        coo_size = -(-load.size // load.inner_size)
        capacity, workers = round(load.density * coo_size), axes["node"]
    elif name == "torus_2d":
        made = allreduce = sc.allreduce.published.torus_2d()
    else:
        options = {"bits": None} if name == "agreed(few)" else {}
        made = allreduce = table.make(name.partition("(")[0], load.density, codec, **options)

    def step(values, indices, vector, state):
        if hierarchical:
            vector = allreduce.scatter(vector)
            # Only so that the exchange is not dead code.
            values = values + vector[0]
        coo = sc.PaddedCOO(values[:capacity], indices[:capacity], coo_size)
        axis = tuple(axes) if len(axes) > 1 else "w"
        total, _, _, info = allreduce.reduce(coo, state, axis=axis)
        total = total.to_dense() if isinstance(total, sc.PaddedCOO) else total
        return allreduce.gather(total, load.size) if hierarchical else total, info.words

    split, whole = P(tuple(axes)), P()
    mapped = jax.shard_map(
        step,
        mesh=helpers.abstract_mesh(**axes),
        in_specs=(split, split, split, whole),
        out_specs=whole,
        check_vma=check_vma,
    )
    shapes = (
        jax.ShapeDtypeStruct((load.workers * capacity,), jnp.float32),
        jax.ShapeDtypeStruct((load.workers * capacity,), jnp.int32),
        jax.ShapeDtypeStruct((load.workers * load.size,), jnp.float32),
    )
    state = jax.eval_shape(lambda: made.init(coo_size, workers))
    return jax.jit(mapped).trace(*shapes, state)


# (n, k, P): for exact pairs, and for each of the other encodings.
EXACT = [(1000, 100, 2), (999, 5, 6), (20_000, 1000, 5), (64, 64, 3)]
ALSO = {
    "ok_topk": [(4000, 1, 3), (10**5, 9000, 20)],
    "agreed(few)": [(10**5, 5000, 11), (10**5, 500, 40)],
    "gtopk": [(10**4, 100, 48)],
    "spardl": [(10**4, 100, 48)],
    "ssar_recursive_double": [(10**4, 700, 11)],
    # From few entries, where a short form does, to more than a dense one holds.
    "dsar_split_allgather": [(10**4, 10, 8), (10**4, 3000, 7)],
}
POINTS = [
    (name, "raw", point)
    for name in cost_model.ALGORITHMS
    for point in (*EXACT, *ALSO.get(name, ()))
]
POINTS += [
    (name, codec, (1999, 100, 3))
    for name in cost_model.ALGORITHMS
    for codec in table.LOSSY_CODECS
    if "dense" not in name and name not in (*TWO_LEVELS, "agreed", "agreed(few)", "leader")
]
POINTS += [
    (name, "narrow8", (20_000, 1000, 6))
    for name in ("ok_topk", "gtopk", "dsar_split_allgather", "hierarchical(ok_topk)")
]

# With a codec their programs take long to trace.
LONG = ("ok_topk", "hierarchical(ok_topk)", "spardl", "dsar_split_allgather", "ring_sparse")
LONG += ("ssar_recursive_double",)


def traces_for_long(name, codec, point):
    if codec != "raw":
        return name in LONG
    if "ok_topk" in name:
        return point[1] >= 100
    return "spardl" in name and point not in ((1000, 100, 2), (64, 64, 3))


@pytest.mark.parametrize(
    ("name", "codec", "point"),
    [
        pytest.param(
            *each,
            id="-".join(map(str, each)),
            marks=pytest.mark.slow if traces_for_long(*each) else (),
        )
        for each in POINTS
    ],
)
def test_words_are_those_of_the_traced_program(name, codec, point):
    n, k, workers = point
    # Two nodes, or as many as there are workers where these are an odd number.
    inner = workers // 2 if name in TWO_LEVELS and workers % 2 == 0 else 1
    load = Workload(n, k, workers, inner)
    estimate = cost_model.predict(name, load, codec)._asdict()
    program = traced(name, load, codec)
    for bound, conditional in (("lower", "best"), ("upper", "worst")):
        measured = traffic.of_traced(program, conditional=conditional)
        outer = measured.words
        if name in TWO_LEVELS:
            scopes = measured.by_scope(2)
            outer = sum(words for scope, words in scopes.items() if scope.endswith("/outer"))
            if "ok_topk" in name:
                # The sum over the node is in the scope of what needs it.
                nodes = Workload(-(-n // inner), max(1, round(k / inner)), workers // inner)
                least, _, most = _implementation.ok_topk_flags(nodes)
                told = least if bound == "lower" else most
                outer -= 2 * told * (load.inner_size - 1) / load.inner_size
            inside = measured.words - outer
            assert estimate[bound].inner_words == pytest.approx(inside, rel=1e-9), bound
        if name == "ssar_recursive_double" and bound == "upper":
            continue  # the next test
        assert estimate[bound].words == pytest.approx(outer, rel=1e-9), bound


@pytest.mark.parametrize(("n", "k", "workers"), [(1000, 100, 2), (999, 50, 6), (1999, 100, 3)])
def test_recursive_doubling_is_expected_to_be_typed_as_replicated(n, k, workers):
    load = Workload(n, k, workers)
    program = traced("ssar_recursive_double", load, "raw", check_vma=True)
    estimate = cost_model.predict("ssar_recursive_double", load)
    assert estimate.expected.words == pytest.approx(traffic.of_traced(program).words, rel=1e-9)


@pytest.mark.parametrize(
    ("n", "k", "workers", "way"),
    [
        pytest.param(20_000, 1000, 6, {"delivery": (0, 1)}, marks=pytest.mark.slow),
        # Windows of so many workers would be long: a neighbour takes the surplus.
        (100_000, 10_000, 64, {"balance": (0, 1, 0, 0)}),
    ],
    ids=["windows", "neighbours"],
)
def test_the_expected_words_of_ok_topk(n, k, workers, way):
    measured = traffic.of_allreduce(
        sc.allreduce.ok_topk(density=k / n), size=n, capacity=k, axis_size=workers, frequencies=way
    )
    expected = cost_model.predict("ok_topk", Workload(n, k, workers)).expected
    assert expected.words == pytest.approx(measured.words, rel=1e-9)


def test_the_expected_form_of_dsar_is_the_one_that_runs():
    # Uniform selections: the form at run time is the expected one.
    n, k, workers = 20_000, 1000, 6
    rng = np.random.default_rng(0)
    indices = np.stack([np.sort(rng.choice(n, k, replace=False)) for _ in range(workers)])
    allreduce = sc.allreduce.published.dsar_split_allgather(slack=1.25)

    def step(indices):
        coo = sc.PaddedCOO(jnp.ones(k, jnp.float32), indices, n)
        return allreduce.reduce(coo, allreduce.init(n, workers), axis="workers")[3].words

    words = sc.simulate(step, axis_size=workers)(indices.astype(np.int32))
    expected = cost_model.predict("dsar_split_allgather", Workload(n, k, workers)).expected
    np.testing.assert_allclose(words, expected.words, rtol=1e-6)

"""The choice of an allreduce when a program is traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from sparse_collectives import allreduce, cost_model, planner
from sparse_collectives.planner import _auto
from tests.sparse_collectives import helpers

NET = {"latency": "5us", "bandwidth": "100Mbit"}
FLAT = {
    row.name
    for row in cost_model.ALGORITHMS.values()
    if row.planned and not row.two_level and not row.complete
}


def program(reducer, n, workers, k):
    """The text of a step of k entries of each worker."""

    def body(values, indices):
        coo = sc.PaddedCOO(values, indices, n)
        return reducer.reduce(coo, reducer.init(n, workers), axis="workers")

    arguments = (jnp.zeros((workers, k), jnp.float32), jnp.zeros((workers, k), jnp.int32))
    return str(jax.make_jaxpr(jax.vmap(body, axis_name="workers"))(*arguments))


@pytest.mark.parametrize("chosen", ["dense", *helpers.slow("ok_topk")])
def test_auto_is_the_program_of_the_chosen_one(chosen):
    n, k, workers = 4000, 40, 4
    # A latency that dwarfs the rest leaves the psum, which has the fewest messages.
    options = NET if chosen == "ok_topk" else {"latency": "1s", "bandwidth": "1Gbit"}
    options = {"density": k / n, "candidates": ["ok_topk"], **options}
    assert planner.explain_auto(n, workers, **options).name == chosen

    plain = allreduce.dense() if chosen == "dense" else allreduce.ok_topk(density=k / n)
    given = n, workers, k
    assert program(planner.auto(**options), *given) == program(plain, *given)


def test_auto_runs():
    reducer = planner.auto(density=0.5, latency="1s", bandwidth="1Gbit", candidates=[])

    def body(values, indices):
        coo = sc.PaddedCOO(values, indices, 4)
        return reducer.reduce(coo, reducer.init(4, 2), axis="workers")[0]

    values, indices = jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([[0, 1], [1, 3]])
    total = sc.simulate(body, axis_size=2)(values, indices)
    np.testing.assert_array_equal(total, [[1.0, 5.0, 0.0, 4.0]] * 2)


@pytest.mark.parametrize(
    "name",
    helpers.slow_but(
        ("dense", "dense_bucketed", "topk_a", "ssar_split_allgather", "dsar_split_allgather"),
        sorted(FLAT),
    ),
)
def test_auto_can_make_every_candidate(name):
    reducer = cost_model.ALGORITHMS[name].make(cost_model.Workload(64, 8, 3))

    def body(values, indices):
        coo = sc.PaddedCOO(values, indices, 64)
        total, *_ = reducer.reduce(coo, reducer.init(64, 3), axis="workers")
        return total.to_dense() if isinstance(total, sc.PaddedCOO) else total

    # As many for every owner, whether regions are hashed or not.
    places = [0, 1, 2, 24, 25, 26, 45, 46]
    indices = jnp.tile(jnp.asarray(places, jnp.int32), (3, 1))
    totals = sc.simulate(body, axis_size=3)(jnp.ones((3, 8)), indices)
    np.testing.assert_array_equal(totals, [[3.0 if i in places else 0.0 for i in range(64)]] * 3)


def test_auto_has_a_row_for_every_codec():
    assert set(_auto._CODECS) == set(helpers.CODECS)


@pytest.mark.parametrize(
    "codec", helpers.slow_but(("bf16", "narrow16", "qsgd", "raw"), helpers.CODECS)
)
def test_auto_gives_the_codec_to_the_chosen_one(codec):
    made = getattr(sc.wire, codec)()
    reducer = cost_model.ALGORITHMS["topk_a"].make(cost_model.Workload(64, 8, 3), made)
    plain = allreduce.topk_a(codec=made)

    assert program(reducer, 64, 3, 8) == program(plain, 64, 3, 8)


def test_auto_explains_itself():
    choice = planner.explain_auto(10**6, 64, density=0.01, candidates=["ok_topk"], **NET)
    assert {name for name, _, _ in choice.predictions} == {"dense", "ok_topk"}
    everything = planner.explain_auto(10**6, 64, density=0.01, codecs=helpers.CODECS, **NET)
    assert {name for name, _, _ in everything.predictions} == FLAT
    assert str(choice).startswith("ok_topk with raw: ")
    assert choice.seconds == choice.predictions[0][2]
    alone = planner.explain_auto(10**6, 1, density=0.01, **NET)
    assert alone.name == "dense"
    assert "optax_ext.dense" in alone.reason


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"density": 0.0}, "density"),
        ({"density": 1}, "density=1.0"),
        ({"candidates": ["bogus"]}, "candidates"),
        ({"codecs": ["bogus"]}, "codecs"),
        ({"codecs": []}, "codecs"),
        ({"latency": "5"}, "latency"),
        ({"bandwidth": 0}, "bandwidth"),
    ],
)
def test_auto_names_a_bad_argument(options, match):
    with pytest.raises(ValueError, match=match):
        planner.auto(**{"density": 0.01, **NET, **options})

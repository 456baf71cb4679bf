"""The traffic meter: the words of collectives, over any axes and groups, and of functions."""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import sparse_collectives as sc
from sparse_collectives import traffic
from tests.sparse_collectives import helpers

N = 26_880  # divisible by each P
PSUM = 2 * N * 3 / 4  # of f32[N], P = 4


def shape(n=N, dtype="float32"):
    return jax.ShapeDtypeStruct((n,), dtype)


def measure(fn, *args, P=4, **kwargs):
    return traffic.of_function(fn, *(args or (shape(),)), axis="w", axis_size=P, **kwargs)


def psum(x):
    return lax.psum(x, "w")


def rotate(x):
    P = lax.psum(1, "w")
    return lax.ppermute(x, "w", [(i, (i + 1) % P) for i in range(P)])


def permuted(*pairs):
    return lambda x: lax.ppermute(x, "w", list(pairs))


def words_of(measured):
    return [row.words for row in measured.collectives]


# Each with its kind, and the words of P workers as a multiple of (P-1) N / P.
COLLECTIVES = {
    "psum": ("all_reduce", psum, lambda P: 2),
    "pmax": ("all_reduce", lambda x: lax.pmax(x, "w"), lambda P: 2),
    "pmin": ("all_reduce", lambda x: lax.pmin(x, "w"), lambda P: 2),
    "all_gather": ("all_gather", lambda x: lax.all_gather(x, "w"), lambda P: P),
    "all_to_all": ("all_to_all", lambda x: lax.all_to_all(x, "w", 0, 0, tiled=True), lambda P: 1),
    "psum_scatter": ("reduce_scatter", lambda x: lax.psum_scatter(x, "w", tiled=True), lambda P: 1),
    "pbroadcast": ("collective_broadcast", lambda x: lax.pbroadcast(x, "w", 0), lambda P: 1),
    "ppermute": ("collective_permute", rotate, lambda P: P / max(P - 1, 1)),
}


@pytest.mark.parametrize("P", [1, 2, 3, 6, 256])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_words_of_each_collective(P, name):
    kind, collective, times = COLLECTIVES[name]
    measured = measure(collective, P=P)
    assert measured.words == pytest.approx(times(P) * N * (P - 1) / P)
    for row in measured.collectives:
        assert (row.kind, row.group_size, row.weight) == (kind, P, 1)


@pytest.mark.parametrize(
    ("fn", "P", "words"),
    [
        # A worker sends nothing to itself.
        (permuted((0, 1), (1, 0), (2, 2), (3, 3)), 4, N / 2),
        # Workers without a source lower the mean.
        (permuted((0, 1), (1, 2)), 8, N * 2 / 8),
        (lambda x: x + 1, 4, 0),
        (lambda x: lax.all_gather(x, "w", axis_index_groups=[[0, 1], [2, 3]]), 4, N),
        # The members of a batch are on one worker, which exchanges their sum.
        (
            lambda x: jax.vmap(lambda row: lax.psum(row, ("w", "batch")), axis_name="batch")(
                x.reshape(6, -1)
            ),
            4,
            PSUM / 6,
        ),
        (lambda x: jax.vmap(psum)(x.reshape(6, -1)), 4, PSUM),
    ],
)
def test_words_are_means_over_the_workers(fn, P, words):
    assert measure(fn, P=P).words == words


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        *(("float32", N), ("bfloat16", N / 2), ("int8", N / 4)),
        *(("bool", N / 4), ("complex64", 2 * N), ("float8_e4m3fn", N / 4)),
    ],
)
def test_words_follow_the_width_of_the_dtype(dtype, words):
    assert measure(rotate, shape(dtype=dtype)).words == words


def test_all_operands_count_and_may_be_arrays():
    measured = measure(lambda x, y: lax.psum((x, y), "w"), shape(), shape(4, "bfloat16"))
    assert measured.words == PSUM + 2 * 2 * 3 / 4
    assert measure(psum, jnp.zeros(N)).words == PSUM
    spec = PartitionSpec("w")
    assert measure(rotate, in_specs=spec, out_specs=spec).words == N / 4


def test_groups_of_several_axes():
    def three(x):
        sums = lax.psum(x, "b"), lax.psum(x, ("b", "c")), lax.all_gather(x, ("a", "c"))
        return *sums, lax.ppermute(x, "a", [(0, 1), (1, 0)])

    measured = traffic.of_function(three, shape(), axis=("a", "b", "c"), axis_size=(2, 3, 4))
    assert words_of(measured) == pytest.approx([2 * N * 2 / 3, 2 * N * 11 / 12, N * 7, N])
    assert [row.group_size for row in measured.collectives] == [3, 12, 8, 2]


def test_words_of_an_axis_within_an_axis():
    """One `shard_map` in another, each over one axis of a mesh of two."""
    whole = PartitionSpec()

    def over(fn, name, mesh=None):
        return jax.shard_map(
            fn, mesh=mesh, in_specs=whole, out_specs=whole, axis_names={name}, check_vma=False
        )

    def outer(x):
        return over(lambda x: lax.psum(x, "gpu"), "gpu")(lax.psum(x, "node"))

    mesh = helpers.abstract_mesh(node=3, gpu=2)
    measured = traffic.of_traced(jax.jit(over(outer, "node", mesh)).trace(shape()))
    assert [row.group_size for row in measured.collectives] == [3, 2]
    assert measured.words == pytest.approx(2 * N * 2 / 3 + N)


def test_words_of_an_allreduce_of_two_levels():
    allreduce = sc.allreduce.hierarchical(inner_axis="device", outer=sc.allreduce.topk_a())
    options = {"size": 1000, "capacity": 10, "axis": ("node", "device"), "axis_size": (2, 4)}
    found = traffic.of_allreduce(allreduce, **options)
    # The pairs of the other node, and three numbers of each of the others in the node.
    assert found.words == 2 * 10 + 3 * 3


@pytest.mark.parametrize("name", [x for x in COLLECTIVES if x not in ("pmin", "pbroadcast")])
def test_words_do_not_depend_on_the_types_of_what_varies(name):
    P, (kind, collective, times) = 6, COLLECTIVES[name]
    if name == "all_gather":
        collective = functools.partial(lax.all_gather, axis_name="w", to="invarying")
    whole = jax.shard_map(
        lambda x: x + jnp.sum(collective(x)),
        mesh=helpers.abstract_mesh(w=P),
        in_specs=PartitionSpec("w"),
        out_specs=PartitionSpec("w"),
        check_vma=True,
    )
    (row,) = traffic.of_traced(jax.jit(whole).trace(shape(P * N))).collectives
    assert (row.kind, row.group_size) == (kind, P)
    assert row.words == pytest.approx(times(P) * N * (P - 1) / P)


def test_words_under_pmap():
    program = jax.pmap(psum, axis_name="w", devices=jax.devices()[:4])
    measured = traffic.of_traced(jax.make_jaxpr(program)(jnp.ones((4, N))))
    assert [(row.kind, row.words) for row in measured.collectives] == [("all_reduce", PSUM)]


# Programs that the meter cannot read.


def bind(primitive_name, x, /, **parameters):
    """A primitive that the meter does not support."""
    primitive = jax.extend.core.Primitive(primitive_name)
    primitive.def_abstract_eval(lambda aval, **_: aval)
    return primitive.bind(x, **parameters)


@pytest.mark.parametrize(
    "parameters", [{"axis_name": "w"}, {"axes": ("w", 0)}, {"axes": frozenset("w")}]
)
def test_unknown_collective_is_an_error_that_names_it(parameters):
    def step(x):
        with jax.named_scope("algorithm"), jax.named_scope("s"):
            return bind("pmedian", x, **parameters)

    with pytest.raises(ValueError, match=r"a pmedian over \['w'\] in scope 'algorithm/s'.*jax"):
        measure(step)


@pytest.mark.parametrize("parameters", [{}, {"axes": (0,)}, {"name": "w"}])
def test_unknown_primitive_over_no_axis_is_free(parameters):
    assert measure(lambda x: psum(bind("median", x, **parameters))).words == PSUM


def ragged(x):
    return lax.ragged_all_to_all(x, x, *[jnp.zeros(4, jnp.int32)] * 4, axis_name="w")


def solve(x):
    return lax.custom_linear_solve(lambda x: 2 * psum(x), x, lambda _, x: psum(x) / 2)


def solve_locally(x):
    diagonal = 2.0 + lax.axis_index("w").astype(x.dtype)
    return lax.custom_linear_solve(lambda x: diagonal * x, x, lambda _, x: x / diagonal)


def test_volume_that_depends_on_data_is_an_error():
    for fn, message in (
        (solve, "custom_linear_solve in scope .* with collectives"),
        (ragged, "ragged_all_to_all in scope .* depends on data"),
        (lambda x: bind("allreduce_mpi", x, comm=1), "allreduce_mpi in scope .* over MPI"),
    ):
        with pytest.raises(ValueError, match=message):
            measure(fn)
    assert measure(solve_locally).words == 0


def test_axes_must_be_bound_and_their_sizes_match():
    program = jax.make_jaxpr(psum, axis_env=[("w", 4)])(shape())
    with pytest.raises(ValueError, match=r"psum over \['w'\] .* outside of a `shard_map`"):
        traffic.of_traced(program)
    with pytest.raises(ValueError, match="one size per name"):
        traffic.of_function(psum, shape(), axis=("w", "v"), axis_size=4)
    with pytest.raises(ValueError, match="sizes >= 1"):
        traffic.of_function(psum, shape(), axis="w", axis_size=0)

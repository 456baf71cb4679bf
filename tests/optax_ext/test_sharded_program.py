"""What a step with sharded parameters holds and sends, read from its program."""

import collections
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import optax_ext
import sparse_collectives as sc
from sparse_collectives import traffic
from tests.optax_ext import collectives, shards
from tests.optax_ext.helpers import normal, slow

SPARSE = {
    "ok_topk": lambda: optax_ext.ok_topk(0.01, axis="data"),
    "topk_a": lambda: optax_ext.topk_a(0.01, axis="data"),
    "agreed": lambda: optax_ext.sparse_allreduce(
        sc.select.topk(density=0.01), sc.allreduce.agreed(), axis="data"
    ),
}
SIZE = 64
N = 2 * 4 * SIZE**2 + 4 * SIZE
LAYOUTS = {
    "tensor": {"up": PartitionSpec(None, "model"), "down": PartitionSpec("model")},
    "fsdp": {"up": PartitionSpec("model"), "down": PartitionSpec("model")},
}

OK_TOPK_SLOW = [slow(name) if name == "ok_topk" else name for name in SPARSE]


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["bias"][None])
    return jnp.mean((hidden @ params["down"] - x) ** 2)


def compiled(tx, layout, mesh):
    """``(state, text, params)``, the text of the program of a training step."""
    params = {
        "up": normal((SIZE, 4 * SIZE)),
        "bias": np.zeros(4 * SIZE, np.float32),
        "down": normal((4 * SIZE, SIZE)),
    }
    params = shards.placed(params, mesh, {"bias": PartitionSpec(), **LAYOUTS[layout]})
    spec = PartitionSpec(("data", "model")) if layout == "fsdp" else None
    tx = optax.chain(tx, optax.adam(0.1))
    state = optax_ext.init_state(tx, params, mesh)
    step = optax_ext.make_train_step(loss_fn, tx, mesh, batch_spec=spec)
    return state, step.lower(params, state, jnp.ones((8, SIZE))).compile().as_text(), params


@pytest.mark.parametrize("layout", ["tensor", slow("fsdp")])
def test_no_device_holds_what_the_others_have(layout):
    """Of what is as large as the parameters, or their part of a residual, each has its share."""
    mesh = shards.mesh_of((2, 4))
    state, program, params = compiled(SPARSE["ok_topk"](), layout, mesh)
    assert max(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state)) <= N // 4
    if layout == "tensor":
        assert max(map(math.prod, shards.shapes_in(program))) <= N // 4

    def gradient(state, params):
        return optax_ext.consolidate(params, state)[0]

    # And what waits is put together by parts.
    program = jax.jit(gradient).lower(state, params).compile().as_text()
    assert max(map(math.prod, shards.shapes_in(program[program.index("ENTRY") :]))) <= N // 4
    assert all(x.axes == ("data",) for x in collectives.of_program(program, mesh))
    found = gradient(state, params)
    for name in LAYOUTS[layout]:
        assert found[name].sharding.is_equivalent_to(params[name].sharding, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OK_TOPK_SLOW)
def test_what_is_sent_beyond_the_dense_step(name, layout):
    mesh = shards.mesh_of((2, 4))
    of_step = [
        collectives.of_program(compiled(tx, layout, mesh)[1], mesh)
        for tx in (SPARSE[name](), optax_ext.dense(axis="data"))
    ]
    sparse, dense = of_step
    # Between workers no leaf and no part of one, but by the dense step.
    between = [x.entries for x in sparse if "data" in x.axes]
    assert max(between) < N // 4 // 16
    assert max(x.entries for x in dense if "data" in x.axes) >= SIZE * SIZE
    # All devices together agree on whether the step is taken, by one number.
    assert [x.entries for x in sparse if len(x.axes) == 2] == [1]
    # Inside a worker all is the dense step's; which kind it is of, the compiler chooses.
    inside = [
        collections.Counter(x.entries for x in step if x.axes == ("model",)) for step in of_step
    ]
    more = list((inside[0] - inside[1]).elements())
    # But the results for the leaf that all hold, and twice the numbers of the step's info. It is
    # gathered, and so is Adam's step of it, which the compiler splits as it likes.
    large = [x for x in more if x >= 4 * SIZE]
    assert large in ([], [4 * SIZE], [4 * SIZE] * 2)
    # And what ok_topk asks all devices before it takes one of its ways.
    assert len(more) - len(large) <= 5
    assert sum(more) - sum(large) <= 64


@pytest.mark.parametrize("sizes", [(2, 4), (4, 8), (16, 16)], ids=str)
@pytest.mark.parametrize("name", [*OK_TOPK_SLOW, "dense"])
def test_words_between_the_workers_are_those_of_a_part(sizes, name):
    """Read from the program, beside that of parameters of the size of a part."""
    workers, parts = sizes
    shapes = {
        "columns": ((64, 16 * parts), PartitionSpec(None, "model")),
        "whole": ((8 * parts, 64), PartitionSpec()),
    }
    specs = {leaf: spec for leaf, (_, spec) in shapes.items()}
    tx = optax_ext.dense(axis="data") if name == "dense" else SPARSE[name]()
    mesh = AbstractMesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    like = {k: jax.ShapeDtypeStruct(shape, "float32") for k, (shape, _) in shapes.items()}
    state = jax.eval_shape(lambda p: optax_ext.init_state(tx, p, mesh, specs=specs), like)

    def step(gradients, state):
        return tx.update(jax.tree.map(lambda x: x[0], gradients), state)

    stacked = {
        k: jax.ShapeDtypeStruct((workers, *shape), "float32") for k, (shape, _) in shapes.items()
    }
    of_state = optax_ext.state_specs(state)
    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=({k: PartitionSpec("data", *spec) for k, spec in specs.items()}, of_state),
        out_specs=(specs, of_state),
    )
    found = traffic.of_traced(jax.jit(mapped).trace(stacked, state)).by_axes()

    part = {"columns": (64, 16), "whole": (8, 64)}
    if name == "dense":  # Each device takes the mean of all that it holds.
        part["whole"] = shapes["whole"][0]
    like = {k: jax.ShapeDtypeStruct(shape, "float32") for k, shape in part.items()}

    def alone(gradients):
        return tx.update(gradients, tx.init(gradients))[0]

    expected = traffic.of_function(alone, like, axis="data", axis_size=workers).words
    # Whether all are finite is agreed on with the devices of the other parts, and not among the
    # workers alone.
    agreed = 0.0 if name == "dense" else 2 * (workers - 1) / workers
    assert found[("data",)] == pytest.approx(expected - agreed)
    others = {axes: words for axes, words in found.items() if axes != ("data",)}
    if name == "dense":
        assert not others
    else:
        # The mean of what all hold, some numbers of the step, and whether it is taken.
        assert others.pop(("data", "model")) <= 2
        gathered = 8 * 64 * (parts - 1)
        assert gathered < others.pop(("model",)) <= gathered + 16 * (parts - 1)
        assert not others

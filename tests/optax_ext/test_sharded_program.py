"""The memory and messages of a step with sharded parameters, read from its program."""

import collections
import math
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import optax_ext
import sparse_collectives as sc
from sparse_collectives import traffic
from tests.optax_ext import shards
from tests.optax_ext.helpers import normal, on_mesh, slow

SPARSE = {
    "ok_topk": lambda: optax_ext.ok_topk(0.01, axis="data"),
    "topk_a": lambda: optax_ext.topk_a(0.01, axis="data"),
    "partitioned_topk": lambda: optax_ext.sparse_allreduce(
        sc.select.topk(density=0.01), sc.allreduce.partitioned_topk(), axis="data"
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
@pytest.mark.slow
def test_no_device_holds_what_the_others_have(layout):
    """Each device has its share of every array as large as the parameters or the residual."""
    mesh = shards.mesh_of((2, 4))
    state, program, params = compiled(SPARSE["ok_topk"](), layout, mesh)
    assert max(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(state)) <= N // 4
    if layout == "tensor":
        assert max(map(math.prod, shards.shapes_in(program))) <= N // 4

    def gradient(state, params):
        return optax_ext.consolidate(params, state)[0]

    # The residual is also consolidated by parts.
    program = jax.jit(gradient).lower(state, params).compile().as_text()
    assert max(map(math.prod, shards.shapes_in(program[program.index("ENTRY") :]))) <= N // 4
    assert all(x.axes == ("data",) for x in collectives_of(program, mesh))
    found = gradient(state, params)
    for name in LAYOUTS[layout]:
        assert found[name].sharding.is_equivalent_to(params[name].sharding, 2)


_KINDS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
_CALL = re.compile(rf"= (.*?) (?:{_KINDS})(?:-start)?\(.*")
# Numbers of devices: 0,1,2 or [2,4] or [2,4]T(1,0), a range in that shape, transposed.
_RANGE = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\((.*?\)?)\))? *\{(.*?)\}")


class Collective(NamedTuple):
    """The axes over which it communicates, and the number of entries of its largest result."""

    axes: tuple[str, ...]
    entries: int


def collectives_of(text, mesh):
    """All collectives in the order of the text; ``mesh`` numbers its devices in order."""
    assert [d.id for d in mesh.devices.flat] == list(range(mesh.size))
    found = []
    for match in _CALL.finditer(text):
        differ = np.zeros(len(mesh.axis_names), bool)
        for group in _groups(match[0], mesh.size):
            places = np.stack(np.unravel_index(group, mesh.devices.shape))
            differ |= (places != places[:, :1]).any(axis=1)
        axes = tuple(name for name, d in zip(mesh.axis_names, differ, strict=True) if d)
        entries = max(int(np.prod(shape)) for shape in shards.shapes_in(match[1]))
        found.append(Collective(axes, entries))
    return found


def _groups(line, devices):
    """The device numbers of each group, in the four ways in which XLA writes them."""
    if (pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line)) is not None:
        return _listed(pairs[1])
    if (shaped := re.search(r"replica_groups=\[([\d,]+)\]<=(\S+)", line)) is not None:
        return _numbers(shaped[2], devices).reshape(_integers(shaped[1]))
    if (named := _MESH.search(line)) is not None:
        # A mesh of XLA's own, and the axes of it that a group spans.
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        ids = _numbers(named[2], devices).reshape(list(sizes.values()))
        over = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", named[3])]
        length = np.prod([ids.shape[i] for i in over])
        return np.moveaxis(ids, over, range(len(over))).reshape(length, -1).T
    listed = re.search(r"replica_groups=\{(.*?)\}\}", line)
    assert listed is not None, line
    return _listed(listed[1])


def _numbers(text, devices):
    if text is None:
        return np.arange(devices)
    if (found := _RANGE.match(text)) is None:
        return np.array(_integers(text))
    ids = np.arange(devices).reshape(_integers(found[1]))
    return ids.transpose(_integers(found[2]) if found[2] else None)


def _listed(text):
    return [_integers(group.strip("{} ,")) for group in text.split("},")]


def _integers(text):
    return [int(x) for x in text.split(",")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OK_TOPK_SLOW)
@pytest.mark.one_in(2)
def test_what_is_sent_beyond_the_dense_step(name, layout):
    mesh = shards.mesh_of((2, 4))
    of_step = [
        collectives_of(compiled(tx, layout, mesh)[1], mesh)
        for tx in (SPARSE[name](), optax_ext.dense(axis="data"))
    ]
    sparse, dense = of_step
    # Only the dense step sends a leaf, or a part of one, between workers.
    between = [x.entries for x in sparse if "data" in x.axes]
    assert max(between) < N // 4 // 16
    assert max(x.entries for x in dense if "data" in x.axes) >= SIZE * SIZE
    # All devices together agree on whether the step is taken, by one number.
    assert [x.entries for x in sparse if len(x.axes) == 2] == [1]
    # Inside a worker everything is from the dense step; the compiler chooses the kind.
    inside = [
        collections.Counter(x.entries for x in step if x.axes == ("model",)) for step in of_step
    ]
    more = list((inside[0] - inside[1]).elements())
    # The exceptions are the gathered results for the leaf that all hold and Adam's step of it,
    # which the compiler may split, and twice the numbers of the step's info.
    large = [x for x in more if x >= 4 * SIZE]
    assert large in ([], [4 * SIZE], [4 * SIZE] * 2)
    # ok_topk also asks all devices before it takes one of its branches.
    assert len(more) - len(large) <= 5
    assert sum(more) - sum(large) <= 64


@pytest.mark.parametrize("sizes", [(2, 4), (4, 8), (16, 16)], ids=str)
@pytest.mark.parametrize("name", [*OK_TOPK_SLOW, "dense"])
@pytest.mark.one_in(3)
def test_words_between_the_workers_are_those_of_a_part(sizes, name):
    """Read from the program, and compared with parameters of the size of a part."""
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
    of_stacked = {k: PartitionSpec("data", *spec) for k, spec in specs.items()}
    mapped = on_mesh(step, mesh, (of_stacked, of_state), (specs, of_state))
    found = collections.Counter()
    for row in traffic.of_traced(mapped.trace(stacked, state)).collectives:
        found[row.axes] += row.words * row.weight

    part = {"columns": (64, 16), "whole": (8, 64)}
    if name == "dense":  # Each device takes the mean of everything it holds.
        part["whole"] = shapes["whole"][0]
    like = {k: jax.ShapeDtypeStruct(shape, "float32") for k, shape in part.items()}

    def alone(gradients):
        return tx.update(gradients, tx.init(gradients))[0]

    expected, at_init = (
        traffic.of_function(function, like, axis="data", axis_size=workers).words
        for function in (alone, tx.init)
    )
    expected -= at_init
    # The agreement on non-finite values includes the devices of the other parts, and not the
    # workers alone.
    agreed = 0.0 if name == "dense" else 2 * (workers - 1) / workers
    assert found[("data",)] == pytest.approx(expected - agreed)
    others = {axes: words for axes, words in found.items() if axes != ("data",)}
    if name == "dense":
        # The devices of a worker hold parts of the mean, and agree whether it is finite.
        assert others == {("model",): pytest.approx(2 * (parts - 1) / parts)}
    else:
        # The mean of the leaf that all hold, some numbers of the step, and whether it is taken.
        assert others.pop(("data", "model")) <= 2
        gathered = 8 * 64 * (parts - 1)
        assert gathered < others.pop(("model",)) <= gathered + 16 * (parts - 1)
        assert not others

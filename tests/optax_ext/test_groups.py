"""Groups of leaves: frozen ones, masks of weight decay, and rounds for some of the leaves."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.helpers import (
    NODES,
    bits,
    mesh,
    normal,
    over_nodes,
    refused,
    same,
    slow,
    slow_but,
)

STEPS, WORKERS = 4, 4
MESH = mesh(WORKERS)
PREFIX = {"base": "freeze", "lora": "train"}
OF_LEAVES = {"base": {"a": "freeze", "c": "freeze"}, "lora": {"b": "train"}}


def start():
    return {
        "base": {"a": normal((16, 8)), "c": np.zeros(8, np.float32)},
        "lora": {"b": np.zeros((16, 8), np.float32)},
    }


def loss_of(base, lora, x):
    return jnp.mean((x @ (base["a"] + lora["b"]) + base["c"][None] - x[:, :8]) ** 2)


def loss_fn(params, x):
    return loss_of(params["base"], params["lora"], x)


def adamw(**options):
    return optax_ext.sparse_adamw(1e-2, axis="data", density=0.25, **options)


def trained(tx, params, loss=loss_fn, steps=STEPS, on=MESH):
    state = optax_ext.init_state(tx, params, on)
    step = optax_ext.make_train_step(loss, tx, on, donate=False)
    for i in range(steps):
        params, state, _ = step(params, state, normal((8 * WORKERS, 16), i))
    return params, state


@functools.cache
def adapters_alone(make=adamw):
    base = start()["base"]
    return trained(make(), start()["lora"], lambda lora, x: loss_of(base, lora, x))


def grouped(labels, freeze=optax.set_to_zero, make=adamw):
    return optax.multi_transform({"train": make(), "freeze": freeze()}, labels)


def where(frozen):
    return {"base": frozen, "lora": not frozen}


def of_parts(train, freeze):
    """The two groups by ``optax.masked``, in the order of the arguments."""
    return optax.chain(
        *(
            optax.masked(adamw() if part == "train" else optax.set_to_zero(), where(frozen))
            for part, frozen in (train, freeze)
        )
    )


WAYS = {
    "labels of leaves": lambda: grouped(OF_LEAVES),
    "labels of subtrees": lambda: grouped(PREFIX),
    "a function": lambda: grouped(lambda _: OF_LEAVES),
    "a function of subtrees": lambda: grouped(lambda _: PREFIX),
    "masked": lambda: of_parts(("train", False), ("freeze", True)),
    "zeros first": lambda: of_parts(("freeze", True), ("train", False)),
    # Moments of zeros are also the same on all workers.
    "frozen with a state": lambda: grouped(
        PREFIX, lambda: optax.chain(optax.set_to_zero(), optax.adam(1e-2))
    ),
}


@pytest.mark.parametrize(
    "way", slow_but(("labels of subtrees", "masked", "frozen with a state"), WAYS)
)
def test_frozen_leaves_keep_their_bits_and_exchange_nothing(way):
    params, state = trained(WAYS[way](), start())
    alone, its_state = adapters_alone()
    same(params["base"], start()["base"])
    assert bits(params["lora"]) == bits(alone)
    assert float(optax_ext.get_info(state).words) == float(optax_ext.get_info(its_state).words)
    assert optax_ext.get_state(state).layout.size == alone["b"].size


@pytest.mark.parametrize(
    "name", ["diloco", slow("sparse_loco"), slow("local_steps"), slow("every")]
)
def test_rounds_of_a_group_are_those_of_its_leaves_alone(name):
    inner = optax.adam(1e-2)
    make = {
        "diloco": lambda: optax_ext.published.diloco(inner, axis="data", every=2),
        "sparse_loco": lambda: optax_ext.published.sparse_loco(
            inner, density=0.25, axis="data", every=2
        ),
        "local_steps": lambda: optax_ext.local_steps(
            inner, optax_ext.sparse_sgd(1.0, density=0.25, axis="data"), every=2
        ),
        "every": lambda: adamw(every=2),
    }[name]
    params, _ = trained(grouped(PREFIX, make=make), start())
    same(params["base"], start()["base"])
    assert bits(params["lora"]) == bits(adapters_alone(make)[0])


@pytest.mark.parametrize("around", ["multi_steps", "MultiSteps", "every"])
def test_frozen_leaves_next_to_a_branch_that_exchanges(around):
    """The zeros are a result of that branch, whose other results depend on gradients."""
    exchange = optax.chain(optax_ext.topk_a(0.3, axis="data"), optax.sgd(0.1))
    tx = {
        "multi_steps": lambda: optax_ext.multi_steps(grouped(PREFIX, make=lambda: exchange), 2),
        "MultiSteps": lambda: optax.MultiSteps(
            grouped(PREFIX, make=lambda: exchange), 2
        ).gradient_transformation(),
        "every": lambda: grouped(PREFIX, make=functools.partial(adamw, every=2)),
    }[around]()
    params, _ = trained(tx, start())
    same(params["base"], start()["base"])
    assert np.any(params["lora"]["b"])


@pytest.mark.parametrize("split", ["parameters", slow("nodes")])
def test_frozen_leaves_beside_two_exchanges_of_shards(split):
    """Whether the zeros are finite decides about the step of all groups."""
    on = mesh((2, 2), NODES)
    if split == "nodes":
        sparse, spec, axis = over_nodes(sc.allreduce.ok_topk(density=0.25)), P(), NODES
    else:
        sparse, spec, axis = optax_ext.ok_topk(0.25, axis="node"), P("device"), "node"
    dense = optax.chain(optax_ext.dense(axis=axis), optax.sgd(0.1))
    groups = {"sparse": optax.chain(sparse, optax.adam(0.1)), "dense": dense}
    params, rest = start(), start()
    for tree in (params, rest):
        tree["lora"]["b"] = jax.device_put(tree["lora"]["b"], NamedSharding(on, spec))
    frozen = rest["base"].pop("a")
    labels = {"base": {"a": "freeze", "c": "dense"}, "lora": "sparse"}
    tx = optax.multi_transform(groups | {"freeze": optax.set_to_zero()}, labels)
    params, _ = trained(tx, params, on=on)

    def loss(rest, x):
        return loss_of(rest["base"] | {"a": frozen}, rest["lora"], x)

    tx = optax.multi_transform(groups, {"base": {"c": "dense"}, "lora": "sparse"})
    rest, _ = trained(tx, rest, loss, on=on)
    assert bits(params["base"].pop("a")) == bits(frozen)
    assert bits(params) == bits(rest) != bits(start())


def test_a_group_that_nothing_reduces_is_named():
    advice = r"update of params\['base'\]\['a'\] differs.*optax\.set_to_zero\(\)"
    for tx in (
        optax.masked(adamw(), where(False)),
        grouped(PREFIX, lambda: optax.sgd(0.1)),
        # Zeros, but of a NaN they are NaN.
        grouped(PREFIX, lambda: optax.scale(0.0)),
    ):
        refused(advice, trained, tx, start())
    momentum = grouped(PREFIX, lambda: optax.chain(optax.trace(0.9), optax.set_to_zero()))
    refused(r"opt_state.*trace.*differs", trained, momentum, start())


class Net(eqx.Module):
    base: dict
    lora: dict

    def __call__(self, x):
        return x


MASKS = {
    "leaves": {"base": {"a": True, "c": False}, "lora": {"b": True}},
    "prefix": {"base": True, "lora": False},
    "one bool": True,
    "no leaf": False,
    "function": lambda params: jax.tree.map(lambda x: x.ndim > 1, params),
    "function of subtrees": lambda _: {"base": True, "lora": False},
}


def decayed(tx, params):
    """The leaves that a step with zero gradients changes."""
    moved, _ = trained(tx, params, lambda p, x: 0.0 * jnp.sum(x), steps=1)
    return jax.tree.map(lambda a, b: bool(np.any(np.asarray(a) != b)), moved, params)


def ones(tree):
    return jax.tree.map(np.ones_like, tree)


@pytest.mark.parametrize(
    ("mask", "in_group"),
    [
        *(("leaves", False), ("leaves", True), ("prefix", False), ("one bool", False)),
        ("function", False),
        *(slow(mask, True) for mask in MASKS if mask != "leaves"),
        *(slow(mask, False) for mask in ("no leaf", "function of subtrees")),
    ],
)
def test_weight_decay_takes_each_mask_that_optax_takes(mask, in_group):
    dense = optax.chain(
        optax_ext.dense(axis="data"), optax.adamw(1e-2, weight_decay=0.5, mask=MASKS[mask])
    )
    sparse = adamw(weight_decay=0.5, mask=MASKS[mask])
    if in_group:  # The mask of the whole model, in a group that has some of its leaves.
        sparse, dense = (grouped(OF_LEAVES, make=lambda tx=tx: tx) for tx in (sparse, dense))
    assert decayed(sparse, ones(start())) == decayed(dense, ones(start()))


def test_weight_decay_takes_a_mask_that_is_a_callable_module():
    net = Net(**ones(start()))
    mask = jax.tree.map(lambda x: x.ndim > 1, net)
    got = decayed(adamw(weight_decay=0.5, mask=mask), net)
    assert got.base == {"a": True, "c": False}


def test_labels_of_nnx_variables():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.body, self.head = (nnx.Linear(16, m, rngs=rngs) for m in (16, 8))

        def __call__(self, x):
            return self.head(nnx.relu(self.body(x)))

    def labels(params):
        return nnx.map_state(lambda path, _: "freeze" if "body" in path else "train", params)

    model = Model(nnx.Rngs(0))
    body = jax.tree.map(np.asarray, nnx.state(model.body, nnx.Param))
    head = jax.tree.map(np.asarray, nnx.state(model.head, nnx.Param))
    tx = optax_ext.with_mesh(grouped(labels), mesh(2))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    @optax_ext.data_parallel
    def step(model, optimizer, x):
        def loss(model):
            return jnp.mean((model(x) - x[:, :8]) ** 2)

        value, gradients = nnx.value_and_grad(loss)(optax_ext.ahead(model, optimizer))
        optimizer.update(model, gradients)
        return value

    for i in range(2):
        step(model, optimizer, normal((8, 16), i))
    assert bits(nnx.state(model.body, nnx.Param)) == bits(body)
    assert bits(nnx.state(model.head, nnx.Param)) != bits(head)

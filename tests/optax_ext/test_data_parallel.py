"""The arguments of ``data_parallel``: the split ones, the traced ones, and errors."""

import functools
import inspect
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct

import optax_ext
from tests.optax_ext.helpers import refused

WORKERS = 2
MESH = jax.make_mesh((WORKERS,), ("data",), devices=jax.devices()[:WORKERS])
TX = optax_ext.with_mesh(optax_ext.sparse_sgd(0.1, density=0.5, axis="data"), MESH)
PARAMS = {"w": np.full((6, 3), 0.1, np.float32), "b": np.zeros(3, np.float32)}
X = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
Y = X[:, :3]
KEY, OLD = jax.random.key(0), jax.random.PRNGKey(0)
FIRST = ("params", "state")
VALUES = {
    "x": X,
    "y": Y,
    "batch": {"x": X, "y": Y},
    "rng": KEY,
    "rngs": {"dropout": KEY},
    "keys": jax.random.split(KEY, WORKERS),
    "old": OLD,
    "olds": {"dropout": OLD},
    "epoch": 3,
    "rate": 0.5,
    "train": True,
    "none": None,
    "stats": {"mean": np.zeros(5, np.float32)},
}


def called(names, batch, **options):
    """The results of a step with arguments of these names, and their shapes on a worker."""
    seen = {}

    def step(*args):
        arguments = dict(zip(names, args, strict=True))
        seen.update({name: jax.tree.map(jnp.shape, x) for name, x in arguments.items()})
        params, state, examples = (arguments[x] for x in (*FIRST, batch))
        x = examples["x"] if isinstance(examples, dict) else examples

        def loss_fn(p):
            return jnp.mean((x @ p["w"] + p["b"][None]) ** 2)

        loss, gradients = jax.value_and_grad(loss_fn)(optax_ext.ahead(params, state))
        updates, state = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    step.__signature__ = inspect.Signature([inspect.Parameter(x, kind) for x in names])
    values = VALUES | {"params": PARAMS, "state": TX.init(PARAMS)}
    results = optax_ext.data_parallel(step, **options)(*[values[name] for name in names])
    return results, seen


@pytest.mark.parametrize("where", [2, 3])
@pytest.mark.one_in(2)
def test_the_batch_is_split_and_keys_and_numbers_are_whole_wherever_they_are(where):
    others = [*FIRST, "batch"]
    expected, _ = called(others, "batch")
    for one in ("rng", "rngs", "keys", "old", "olds", "epoch", "rate", "train"):
        results, seen = called([*others[:where], one, *others[where:]], "batch")
        assert seen["batch"] == {"x": (4, 6), "y": (4, 3)}
        assert seen[one] == jax.tree.map(jnp.shape, VALUES[one])
        jax.tree.map(np.testing.assert_array_equal, results, expected)


SPLIT = [
    ([*FIRST, "x", "y", "rng"], {"examples": ("x", "y")}, "xy"),
    (["x", "y", *FIRST], {"examples": ("y", "x")}, "xy"),
    (["x", *FIRST, "rng"], {"examples": "x"}, "x"),
    ([*FIRST, "x", "y"], {"examples": 2}, "xy"),
    (["stats", *FIRST, "x", "none"], {}, "x"),
    ([*FIRST, "y", "x"], {"examples": "x"}, "x"),
]


@pytest.mark.parametrize(("names", "options", "split"), SPLIT, ids=str)
def test_the_batch_is_what_examples_names(names, options, split):
    _, seen = called(names, "x", **options)
    for name in {"x", "y"} & set(names):
        assert seen[name][0] == (4 if name in split else 8), name


REFUSED = [
    ([*FIRST, "x", "y"], {}, r"argument 2 \(x\).*argument 3 \(y\) does.*examples=\('x', 'y'\)"),
    ([*FIRST, "x", "y", "rng"], {}, r"only the latter would be split.*examples=\('x', 'y'\)"),
    ([*FIRST, "batch", "x"], {}, r"examples=\('batch', 'x'\)"),
    (["x", "y", *FIRST], {}, r"ends with argument 3 \(state\), the .*examples=\('x', 'y'\)"),
    (["x", "state", "params"], {}, r"ends with argument 2 \(params\).*examples='x'"),
    ([*FIRST, "rng"], {}, r"ends with argument 1 \(state\), the model or its optimizer"),
    ([*FIRST, "batch", "keys"], {"examples": 1}, r"argument 3 \(keys\).*no array to split"),
    ([*FIRST, "batch", "old"], {"examples": 1}, r"argument 3 \(old\).*no array to split"),
    ([*FIRST, "batch", "rate"], {"examples": 1}, r"argument 3 \(rate\).*no array to split"),
    ([*FIRST, "batch", "old"], {"examples": 2}, r"batch\[1\] is one PRNG key"),
    ([*FIRST, "batch", "rng"], {"examples": 2}, r"batch\[1\] is one PRNG key"),
    ([*FIRST, "batch"], {"examples": "y"}, r"examples='y' must be names of arguments of step"),
    ([*FIRST, "batch"], {"examples": 0}, "examples"),
]


@pytest.mark.parametrize(("names", "options", "message"), REFUSED, ids=str)
def test_arguments_among_which_the_batch_cannot_be_told_are_refused(names, options, message):
    refused(message, lambda: called(names, "batch" if "batch" in names else "x", **options))


def test_an_older_key_in_a_batch_is_not_cut_in_two():
    tx = optax_ext.sparse_sgd(0.1, density=0.5, axis="data")
    step = optax_ext.make_train_step(lambda p, b: jnp.mean(b[0] @ p["w"]), tx, MESH, donate=False)
    state = optax_ext.init_state(tx, PARAMS, MESH)
    refused(r"batch\[1\] is one PRNG key", lambda: step(PARAMS, state, (X, OLD)))
    # Two examples of another kind in the batch make it one number for each.
    *_, loss = step(PARAMS, state, (X[:2], np.arange(2, dtype=np.uint32)))
    assert np.isfinite(loss)


def test_modules_are_no_batch():
    class Model(nnx.Module):
        def __init__(self):
            self.layer = nnx.Linear(6, 3, rngs=nnx.Rngs(0))

    @optax_ext.data_parallel
    def step(x, optimizer, model):
        raise AssertionError("not reached")

    model = Model()
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    refused(r"ends with argument 2 \(model\).*examples='x'", lambda: step(X, optimizer, model))


NUMBERS = {
    "float": lambda k: 1.0 + k,
    "complex": lambda k: complex(1.0 + k),
    "dict": lambda k: {"scale": [1.0 + k], "zname": "sum"},
    "tuple": lambda k: (1.0 + k, 2),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_number_that_changes_is_traced_once_as_by_jit(kind):
    traces = []

    @optax_ext.data_parallel
    def step(params, state, scale, x):
        traces.append(None)
        scale = jax.tree.leaves(scale)[0]
        assert scale.aval.weak_type
        scaled = jnp.real(scale) * x.astype(jnp.bfloat16)
        assert scaled.dtype == jnp.bfloat16
        return params, state, jnp.mean(scaled.astype(jnp.float32))

    state = TX.init(PARAMS)
    losses = [float(step(PARAMS, state, NUMBERS[kind](k), X + 1)[2]) for k in range(5)]
    assert len(traces) == 1
    assert losses == sorted(losses)
    assert len(set(losses)) == 5


UNEVEN = {
    "string": ({"x": X, "name": "train"}, TypeError, r"batch\['name'\] is 'train', a str"),
    "list": ([(x, 1) for x in X], ValueError, r"batch\[0\]\[1\] is a scalar.*list of 8.*stack"),
}


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("way", ["step", "data_parallel"])
def test_a_batch_that_is_no_tree_of_arrays_of_examples_is_refused(name, way):
    batch, kind, message = UNEVEN[name]
    tx = optax_ext.sparse_sgd(0.1, density=0.5, axis="data")
    state = optax_ext.init_state(tx, PARAMS, MESH)
    if way == "step":
        step = optax_ext.make_train_step(lambda p, b: jnp.mean(p["w"]), tx, MESH, donate=False)
    else:
        step = optax_ext.data_parallel(lambda params, state, batch: (params, state))
    refused(message, step, PARAMS, state, batch, error=kind)


def test_an_error_of_the_step_has_no_other_advice():
    @optax_ext.data_parallel
    def step(params, state, rng, x):
        return params, state, x @ x

    with pytest.raises(TypeError) as caught:
        step(PARAMS, TX.init(PARAMS), KEY, X)
    assert not any("split over the workers" in x for x in getattr(caught.value, "__notes__", []))


IN_ROUNDS = {
    "every": optax_ext.sparse_sgd(0.1, axis="data", every=2),
    "local_steps": optax_ext.published.diloco(optax.sgd(0.1), axis="data", every=2),
}


@pytest.mark.parametrize("name", IN_ROUNDS)
def test_rounds_are_refused(name):
    @optax_ext.data_parallel
    def step(params, state, x):
        gradients = optax_ext.ahead(params, state)
        updates, state = IN_ROUNDS[name].update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = optax_ext.init_state(IN_ROUNDS[name], PARAMS, MESH)
    refused("for exchanges at every step: use optax_ext.make_train_step", step, PARAMS, state, X)


def test_parameters_of_one_of_two_optimizers_are_no_batch():
    """They have as many rows as the batch."""
    first, second = {"w": np.ones((8, 5), np.float32)}, {"w": np.ones((5, 2), np.float32)}

    def loss_fn(first, second, x):
        return jnp.mean((x.T @ first["w"] @ second["w"]) ** 2)

    @optax_ext.data_parallel
    def step(first, of_first, second, of_second, x):
        ahead = optax_ext.ahead(first, of_first), optax_ext.ahead(second, of_second)
        one, other = jax.grad(loss_fn, argnums=(0, 1))(*ahead, jnp.tile(x, (WORKERS, 1)))
        one, of_first = TX.update(one, of_first, first)
        other, of_second = TX.update(other, of_second, second)
        applied = optax.apply_updates(first, one), optax.apply_updates(second, other)
        return *applied, of_first, of_second

    one, other, *_ = step(first, TX.init(first), second, TX.init(second), X)
    assert not np.array_equal(one["w"], first["w"])
    assert not np.array_equal(other["w"], second["w"])


def test_arguments_may_be_named():
    @optax_ext.data_parallel
    def step(params, state, x, scale=1.0, shift=0.0):
        gradients = jax.grad(lambda p: jnp.mean((scale * x @ p["w"] + shift) ** 2))(
            optax_ext.ahead(params, state)
        )
        updates, state = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, TX.init(PARAMS)
    expected = step(params, state, X, 1.0, 2.0)[0]
    for call in (
        lambda: step(params, state, x=X, shift=2.0),
        lambda: step(x=X, shift=2.0, state=state, params=params),
    ):
        jax.tree.map(np.testing.assert_array_equal, call()[0], expected)
    for message, given in (
        ("step takes no argument 'y'", {"x": X, "y": 1}),
        ("missing a required argument: 'x'", {"shift": 2.0}),
        ("multiple values for argument 'state'", {"x": X, "state": state}),
    ):
        refused(message, step, params, state, error=TypeError, **given)


def test_a_part_of_the_batch_may_have_a_default():
    @functools.partial(optax_ext.data_parallel, examples=("x", "mask"))
    def step(params, state, x, mask=None):
        mask = jnp.ones(len(x)) if mask is None else mask
        gradients = jax.grad(lambda p: jnp.mean(mask[:, None] * (x @ p["w"]) ** 2))(
            optax_ext.ahead(params, state)
        )
        updates, state = TX.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    state = TX.init(PARAMS)
    ends = [step(PARAMS, state, X)[0], step(PARAMS, state, X, np.ones(len(X), np.float32))[0]]
    jax.tree.map(np.testing.assert_array_equal, *ends)
    refused("missing a required argument: 'x'", step, PARAMS, state, error=TypeError)


class Held(struct.PyTreeNode):
    """As the ``TrainState`` of flax, and without names."""

    params: dict[str, jax.Array]
    opt_state: optax.OptState


class Pair(NamedTuple):
    params: dict[str, jax.Array]
    state: optax.OptState


def parts(held):
    return held if isinstance(held, tuple) else (held.params, held.opt_state)


@pytest.mark.parametrize("holder", [Held, Pair])
def test_a_rate_that_is_set_by_hand_is_traced(holder):
    traced = []
    rate = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    tx = optax.chain(optax_ext.dense(axis="data"), rate)

    @optax_ext.data_parallel
    def step(held, x):
        traced.append(held)
        params, opt_state = parts(held)
        grads = jax.grad(lambda params: jnp.sum(params["w"] * x.mean()))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return holder(optax.apply_updates(params, updates), opt_state)

    held = holder({"w": jnp.zeros(3)}, optax_ext.init_state(tx, {"w": jnp.zeros(3)}, MESH))
    for k in range(3):
        params, opt_state = parts(held)
        opt_state[1].hyperparams["learning_rate"] = 2.0**k
        held = step(holder(params, opt_state), np.ones((2, 3), np.float32))
    params, _ = parts(held)
    np.testing.assert_array_equal(params["w"], -7.0)
    assert len(traced) == 1

"""What is wrong with a checkpoint is an error, also where check_metadata was not asked."""

import collections
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optax_ext
import sparse_collectives as sc
from tests.optax_ext.test_checkpoint import PARAMS, batches, bits, loss_fn, mesh, transformation

# Orbax leaves coroutines behind when a read fails.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]
CORRECTION = optax_ext.momentum_correction(0.9)


def made(tx, workers=8):
    return optax_ext.init_state(tx, PARAMS, mesh(workers))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The state of eight workers after a step, saved with its metadata."""
    tx = transformation()
    step = optax_ext.make_train_step(loss_fn, tx, mesh())
    _, state, _ = step(PARAMS, made(tx), batches(1)[0])
    folder = tmp_path_factory.mktemp("checkpoint") / "state"
    with ocp.StandardCheckpointer() as checkpointer:
        metadata = optax_ext.checkpoint_metadata(state)
        checkpointer.save(folder, state, custom_metadata=metadata)
    return folder


def restore(folder, tx, workers=8, params=PARAMS):
    target = optax_ext.abstract_state(tx, params, mesh(workers))
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, target)


def saved_metadata(folder):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.metadata(folder).custom_metadata


@pytest.mark.parametrize(
    ("tx", "workers", "params", "message"),
    [
        (transformation(), 4, PARAMS, r"shape.*not compatible with the stored shape"),
        (transformation(), 8, {"w": np.ones((10, 6))}, r"not compatible with the stored shape"),
        (transformation(alias=optax_ext.gtopk), 8, PARAMS, r"(?s)do not match.*boundaries"),
        (transformation(alias=optax_ext.topk_a), 8, PARAMS, r"(?s)do not match.*threshold"),
    ],
    ids=["workers", "parameters", "gtopk", "topk_a"],
)
def test_orbax_itself_refuses_other_arrays(folder, tx, workers, params, message):
    params = jax.tree.map(np.float32, params)
    with pytest.raises(ValueError, match=message):
        restore(folder, tx, workers, params)
    expected = optax_ext.abstract_state(tx, params, mesh(workers))
    with pytest.raises(ValueError, match="saved from another optimizer state"):
        optax_ext.check_metadata(saved_metadata(folder), expected)


def test_only_the_metadata_tells_another_density(folder):
    """Its arrays are the same, so that orbax restores them: whole, and a step is possible."""
    tx = transformation(0.2)
    expected = optax_ext.abstract_state(tx, PARAMS, mesh())
    with pytest.raises(ValueError, match=r"topk\(density=0.1\) in the checkpoint, topk\(density=0"):
        optax_ext.check_metadata(saved_metadata(folder), expected)
    state = restore(folder, tx)
    assert bits(state) == bits(restore(folder, transformation()))
    step = optax_ext.make_train_step(loss_fn, tx, mesh())
    _, state, _ = step(PARAMS, state, batches(1)[0])
    assert (np.asarray(state[0].info.selected) == 14).all()


def test_a_correction_that_the_checkpoint_has_not(folder):
    tx = transformation(correction=CORRECTION)
    expected = optax_ext.abstract_state(tx, PARAMS, mesh())
    with pytest.raises(ValueError, match=r"correction: none in the checkpoint, momentum_corr"):
        optax_ext.check_metadata(saved_metadata(folder), expected)
    # Orbax takes an empty tuple for an array that is not there.
    state = restore(folder, tx)
    step = optax_ext.make_train_step(loss_fn, tx, mesh())
    with pytest.raises(ValueError, match=r"state.velocity is \(\), but .* has a correction"):
        step(PARAMS, state, batches(1)[0])
    # What the message advises.
    moved = optax_ext.reshard(state, made(tx))
    assert bits(moved[0].residual) == bits(state[0].residual)
    step(PARAMS, moved, batches(1)[0])


def test_a_checkpoint_without_metadata():
    with pytest.raises(TypeError, match=r"saved must be what checkpoint_metadata returned.*None"):
        optax_ext.check_metadata(None, made(transformation()))  # pyright: ignore[reportArgumentType]


def test_a_state_of_another_version_is_named(folder, tmp_path):
    state = made(transformation())
    saved = json.loads(json.dumps(optax_ext.checkpoint_metadata(state)))
    del saved["arrays"]["[0].clipped"]
    with pytest.raises(ValueError, match=r"(?s)version: 0\.0\.9 in the checkpoint, .*==0\.0\.9"):
        optax_ext.check_metadata({**saved, "version": "0.0.9"}, state)
    # A state that lacks a field of this version: orbax names it.
    fields = [name for name in state[0]._fields if name != "clipped"]
    older = collections.namedtuple("SparseAllreduceState", fields)
    old = older(*(getattr(state[0], name) for name in fields))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "old", (old, *state[1:]))
    with pytest.raises(ValueError, match=r"(?s)do not match.*clipped"):
        restore(tmp_path / "old", transformation())


@pytest.mark.parametrize("fault", ["deleted", "cut"])
@pytest.mark.parametrize("pattern", ["d/*", "manifest.ocdbt", "_METADATA"])
def test_a_damaged_checkpoint_is_an_error(folder, tmp_path, fault, pattern):
    damaged = tmp_path / "state"
    shutil.copytree(folder, damaged)
    (file,) = damaged.glob(pattern)
    whole = file.read_bytes()
    file.unlink()
    if fault == "cut":
        file.write_bytes(whole[: len(whole) // 2])
    # The kind of error is orbax's; what matters is that no state comes back.
    with pytest.raises((ValueError, OSError, KeyError)):
        restore(damaged, transformation())
    file.write_bytes(whole)
    assert bits(restore(damaged, transformation())) == bits(restore(folder, transformation()))


def factory(option):
    def select(acc, state):
        return acc, state, option

    return sc.Selector(lambda layout: (), select)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((0.1, 0.2), (0.1, 0.3)),
        (("a", (1, None)), ("a", (2, None))),
        ([1, 2], [1, 2, 3]),
        ({"a": 1, "b": (2,)}, {"a": 1, "b": (3,)}),
        ({1, 2}, {1, 3}),
        (np.arange(3), np.arange(4)),
        (np.arange(3), np.array([0, 1, 3])),
        (np.arange(3), np.arange(3.0)),
        (jnp.ones(3), jnp.array([1.0, 1.0, 2.0])),
        ({"per_layer": jnp.ones(3)}, {"per_layer": jnp.zeros(3)}),
        (np.float32(0.1), np.float32(0.2)),
        (jnp.float32, jnp.bfloat16),
        ((sc.select.topk(density=0.1),), (sc.select.topk(density=0.2),)),
        (jax.jit(factory((1, 2)).select), jax.jit(factory((1, 3)).select)),
    ],
    # Functions are printed with their address, and two test processes must agree on a name.
    ids=lambda option: type(option).__name__,
)
def test_states_that_differ_in_an_option_are_told_apart(one, other):
    def settings(option):
        tx = optax_ext.sparse_allreduce(
            factory(option), sc.allreduce.topk_a(), axis="w", axis_size=2
        )
        return tx.init(PARAMS).settings

    assert settings(one) == settings(one)
    assert settings(one) != settings(other)


def test_the_order_of_a_dictionary_makes_no_difference():
    describe = optax_ext._settings.describe
    assert describe(factory({"a": 1, "b": 2})) == describe(factory({"b": 2, "a": 1}))
    assert describe(factory({"b": {3, 1}})) == "factory(option={'b': {1, 3}})"
    assert "0x" not in describe(factory((object(), lambda x: x)))


def test_a_tracer_among_the_options_is_described_without_its_content():
    names = []

    @jax.jit
    def traced(x):
        names.append(optax_ext._settings.describe(factory(x)))
        return x

    traced(jnp.zeros((2, 3)))
    assert names == ["factory(option=float32[2,3])"]


def test_a_whole_checkpoint_gives_the_next_step_the_same_bits_with_momentum_correction(tmp_path):
    tx = optax.chain(optax_ext.dgc(0.1, axis="data", masking=False, nesterov=True), optax.sgd(1e-2))
    step = optax_ext.make_train_step(loss_fn, tx, mesh(), donate=False)
    params, state = PARAMS, made(tx)
    for batch in batches(2):
        params, state, _ = step(params, state, batch)
    assert np.asarray(state[0].velocity).any()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, state))
    whole = NamedSharding(mesh(), PartitionSpec())
    shapes = {"w": jax.ShapeDtypeStruct((10, 7), "float32", sharding=whole)}
    target = (shapes, optax_ext.abstract_state(tx, PARAMS, mesh()))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", target)
    assert bits(restored) == bits((params, state))
    batch = batches(1, seed=1)[0]
    assert bits(step(*restored, batch)) == bits(step(params, state, batch))

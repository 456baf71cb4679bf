"""What is wrong with a checkpoint is an error, also where check_metadata was not asked."""

import collections
import json
import shutil

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import optax_ext
from optax_ext._state import _checkpoint
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize("saved", [None, [], "text", {}, {1: 2}, np.arange(3), "x" * 10**6])
def test_a_checkpoint_without_metadata(saved):
    with pytest.raises(TypeError, match="saved must be what checkpoint_metadata returned") as error:
        optax_ext.check_metadata(saved, made(transformation()))
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("found", [None, 1, 2, 4, "2", True, 2.0, np.arange(2), [2]])
def test_another_format_is_named(found):
    state = made(transformation())
    saved = {**optax_ext.checkpoint_metadata(state), "format": found, "version": "0.0.9"}
    if found is None:  # As those that were written before there was a number.
        del saved["format"]
    with pytest.raises(ValueError, match=r"(?s)has format .*0\.0\.9.*reads format 3: .*consol"):
        optax_ext.check_metadata(saved, state)
    assert optax_ext.checkpoint_metadata(state)["format"] == _checkpoint.FORMAT == 3


def some_metadata():
    state = made(transformation())
    return json.loads(json.dumps(optax_ext.checkpoint_metadata(state))), state


@pytest.mark.parametrize(
    "other",
    [
        {"workers": np.arange(3)},
        {"workers": "x" * 10**6},
        {"sparse": np.zeros((2, 2))},
        {"sparse": {7: {"n": 1}}},
        {"sparse": {"x" * 10**6: 1}},
        {"sparse": [np.arange(3)]},
        {"arrays": {3: np.float32(1), "[0].count": np.arange(2)}},
        {"arrays": None},
        {"arrays": b"x" * 10**6},
        {5: "something", "more": {}},
    ],
    ids=lambda other: str(next(iter(other))),
)
def test_metadata_of_anything_gives_an_error_that_can_be_read(other):
    saved, state = some_metadata()
    with pytest.raises(ValueError, match="saved from another optimizer state") as error:
        optax_ext.check_metadata({**saved, **other}, state)
    assert len(str(error.value)) < 10_000


def test_metadata_with_integers_of_numpy_is_the_same():
    saved, state = some_metadata()
    for path in ("[0]",):
        saved["sparse"][path]["n"] = np.int64(saved["sparse"][path]["n"])
    optax_ext.check_metadata({**saved, "workers": np.int32(8), "format": np.int64(3)}, state)


@pytest.mark.slow
def test_a_state_with_another_field_is_named(folder, tmp_path):
    state = made(transformation())
    saved = json.loads(json.dumps(optax_ext.checkpoint_metadata(state)))
    del saved["arrays"]["[0].withheld"]
    with pytest.raises(ValueError, match=r"arrays\.\[0\]\.withheld: None in the checkpoint, int32"):
        optax_ext.check_metadata(saved, state)
    # A state that lacks a field of this version: orbax names it.
    fields = [name for name in state[0]._fields if name != "withheld"]
    older = collections.namedtuple("SparseAllreduceState", fields)
    old = older(*(getattr(state[0], name) for name in fields))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "old", (old, *state[1:]))
    with pytest.raises(ValueError, match=r"(?s)do not match.*withheld"):
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


@pytest.mark.slow
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

"""Orbax saves and restores the whole state; mismatched and damaged states are refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import optax_ext
import sparse_collectives as sc
from optax_ext._state import _checkpoint, _wrappers
from tests.optax_ext.helpers import bits, mesh, normal, refused, slow, train

# Orbax leaves unfinished coroutines when a read fails.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]
PARAMS = {"w": np.ones((10, 7), np.float32)}
BATCHES = [normal((16, 10), seed) for seed in range(4)]
CORRECTION = optax_ext.momentum_correction(0.9)


def loss_fn(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def transformation(density=0.1, alias=optax_ext.ok_topk, **options):
    return optax.chain(alias(density, axis="data", **options), optax.adamw(1e-2))


def trained(tx, batches=BATCHES[:1], **options):
    return train(tx, loss_fn, PARAMS, batches, mesh(8), **options)[-1]


def expected(tx, workers=8, params=PARAMS):
    return optax_ext.abstract_state(tx, params, mesh(workers))


def metadata_of(state):
    return json.loads(json.dumps(optax_ext.checkpoint_metadata(state)))


def save(folder, state, **options):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, state, **options)


def restore(folder, like):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(folder, like)


SAVED, LOW = transformation(), transformation(2, optax_ext.acp_sgd)


@pytest.mark.parametrize(
    "tx",
    [
        transformation(selector=sc.select.threshold_reuse(density=0.1)),
        slow(transformation(selector=sc.select.published.adtopk(density=0.1))),
        slow(transformation(alias=optax_ext.published.dgc, masking=False, nesterov=True)),
        LOW,
        slow(transformation(2, optax_ext.powersgd)),
        slow(optax_ext.sparse_adamw(0.1, axis="data", moments="factors")),
        slow(optax.chain(optax_ext.quantized(axis="data"), optax.sgd(0.1))),
    ],
    ids=[
        *("threshold_reuse", "adtopk", "momentum correction", "acp_sgd", "powersgd", "factors"),
        "quantized",
    ],
)
@pytest.mark.one_in(2)
def test_the_step_after_a_restore_has_the_same_bits(tmp_path, tx):
    params, state, _ = trained(tx, BATCHES[:3])
    save(tmp_path / "state", (params, state))
    whole = NamedSharding(mesh(8), P())
    shapes = {"w": jax.ShapeDtypeStruct((10, 7), "float32", sharding=whole)}
    restored = restore(tmp_path / "state", (shapes, expected(tx)))
    assert jax.tree.structure(restored) == jax.tree.structure((params, state))
    assert bits(restored) == bits((params, state))
    same = jax.tree.map(lambda a, b: a.sharding == b.sharding, restored[1], state)
    assert all(jax.tree.leaves(same))
    ends = [
        train(tx, loss_fn, p, BATCHES[3:], mesh(8), state=s)[-1]
        for p, s in (restored, (params, state))
    ]
    assert bits(ends[0]) == bits(ends[1])


NOTHING_SPARSE = {
    "dense leaves": transformation(dense_leaves="dense"),
    "momentum": transformation(dense_leaves="dense", correction=CORRECTION),
    "quantized": optax.chain(optax_ext.quantized(axis="data", dense_leaves="dense"), optax.sgd(1)),
    "low rank": transformation(2, optax_ext.powersgd, dense_leaves="dense"),
    "sparse_adamw": optax_ext.sparse_adamw(0.1, axis="data", dense_leaves="dense"),
    "a group": optax.partition(
        {"a": SAVED, "b": optax_ext.sparse_sgd(0.1, axis="data")}, lambda x: {"w": "a"}
    ),
}


@pytest.mark.parametrize("name", NOTHING_SPARSE)
def test_a_state_whose_residual_has_no_entries(tmp_path, name):
    """Orbax saves no empty array."""
    tx = NOTHING_SPARSE[name]
    params, state, _ = trained(tx, BATCHES[:2])
    save(tmp_path / "state", (params, state))
    _, restored = restore(tmp_path / "state", (params, expected(tx)))
    assert bits(restored) == bits(state)
    ends = [
        train(tx, loss_fn, params, BATCHES[2:], mesh(8), state=s)[-1] for s in (state, restored)
    ]
    assert bits(ends[0]) == bits(ends[1])
    assert np.isfinite(list(optax_ext.metrics(state).values())).all()
    for workers in (3, 4):
        moved = optax_ext.reshard(state, optax_ext.init_state(tx, PARAMS, mesh(workers)))
        *_, last = _wrappers.get_states(moved)
        assert last.residual.shape == (workers, 1)
        assert not np.asarray(last.residual).any()
        train(tx, loss_fn, params, [BATCHES[0][:12]], mesh(workers), state=moved)
    gradient, _ = optax_ext.consolidate(params, state)
    assert name == "a group" or not np.asarray(gradient["w"]).any()


CORRECTED = transformation(correction=CORRECTION)
OTHER_CORRECTION = transformation(correction=optax_ext.momentum_correction(0.8))
DECAYING = transformation(residual=optax_ext.residual(decay=0.9))
DENSE = {"dense_leaves": {"w": "dense"}}
SGD = optax.chain(optax_ext.ok_topk(0.1, axis="data"), optax.sgd(0.1))
ENTRIES, FACTORS, ROWS = (
    optax_ext.sparse_adamw(0.1, density=0.1, axis="data", moments=moments)
    for moments in ("entries", "factors", "rows")
)


@pytest.mark.parametrize(
    ("tx", "other", "message"),
    [
        (SAVED, transformation(0.2), r"selector: topk\(density=0.1\) in the checkpoint, topk\(de"),
        (SAVED, transformation(alias=optax_ext.published.gtopk), r"allreduce: ok_topk\(.*gtopk\("),
        (SAVED, transformation(local=optax.scale(0.1)), "local: none in the checkpoint, Empty"),
        (SAVED, SGD, r"arrays\."),
        (SAVED, CORRECTED, r"correction: none in the checkpoint, momentum_corr"),
        (CORRECTED, OTHER_CORRECTION, r"correction: momentum_correction\(.*momentum=0.9"),
        (DECAYING, SAVED, r"residual: residual\(decay=0.9, .* in the checkpoint, "),
        (LOW, transformation(2, optax_ext.powersgd), r"allreduce: acp_sgd\(rank=2, seed=0\) .*, p"),
        (LOW, transformation(3, optax_ext.acp_sgd), r"allreduce: .*acp_sgd\(rank=3"),
        (LOW, transformation(4, optax_ext.acp_sgd, **DENSE), r"n: 70 .*, 0 here"),
        (ENTRIES, FACTORS, "local: ScaleByLocalAdamState, .* checkpoint, ScaleByLocalFactorsState"),
        (FACTORS, ROWS, "local: ScaleByLocalFactorsState, .* checkpoint, ScaleByLocalRowsState"),
        (SAVED, transformation(**DENSE), r"dense: .* in the checkpoint, .*'w'.* here"),
    ],
)
def test_a_checkpoint_of_other_settings_workers_or_parameters_is_refused_by_name(
    tx, other, message
):
    saved = metadata_of(expected(tx))
    # Another version of the library, or NumPy integers, do not make it another state.
    optax_ext.check_metadata({**saved, "version": "0.0.1", "workers": np.int32(8)}, expected(tx))
    for wrong, text in (
        (expected(other), message),
        (expected(tx, 4), r"workers: 8 in the checkpoint, 4 here[^$]*reshard"),
        (expected(tx, params={"w": jnp.ones((10, 6))}), r"n: 70 .*, 60 here"),
    ):
        refused(text, optax_ext.check_metadata, saved, wrong)


@pytest.mark.parametrize("saved", [None, {}, [1, 2], np.arange(3), "x" * 10**6], ids=type)
def test_what_is_no_metadata_is_an_error(saved):
    check, message = optax_ext.check_metadata, "saved must be what .* returned"
    text = refused(message, check, saved, expected(SAVED), error=TypeError)
    assert len(text) < 1000


def test_a_state_with_other_fields_has_another_format():
    """Otherwise a checkpoint of before would be read with the fields of now."""
    fields = (
        "count skipped dropped withheld missed owner residual velocity dense_velocity local "
        "selector allreduce info layout settings"
    )
    found = optax_ext.SparseAllreduceState._fields
    assert {_checkpoint.FORMAT: found} == {8: tuple(fields.split())}


@pytest.mark.parametrize("found", [None, 4, _checkpoint.FORMAT + 1, "2", True, np.arange(2)])
def test_another_format_is_named(found):
    saved = {**metadata_of(expected(SAVED)), "format": found, "version": "0.0.9"}
    if found is None:  # As in metadata from before there was a number.
        del saved["format"]
    message = rf"(?s)has format .*0\.0\.9.*reads format {_checkpoint.FORMAT}: .*consol"
    refused(message, optax_ext.check_metadata, saved, expected(SAVED))
    assert metadata_of(expected(SAVED))["format"] == _checkpoint.FORMAT


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"workers": np.arange(3)}, "workers"),
        ({"workers": "x" * 10**6}, "workers"),
        ({"sparse": {7: {"n": 1}}}, "sparse"),
        ({"sparse": {"x" * 10**6: 1}}, "sparse"),
        ({"sparse": [np.arange(3)]}, "sparse"),
        ({"arrays": {3: np.float32(1), "[0].count": np.arange(2)}}, r"arrays"),
        ({"arrays": {}}, r"arrays\.\[0\]\.count: None in the checkpoint, int32"),
        ({5: "something", "more": {}}, ""),
    ],
)
def test_metadata_of_anything_gives_an_error_that_can_be_read(other, message):
    state = expected(SAVED)
    saved = {**metadata_of(state), **other}
    message = "(?s)saved from another optimizer state.*" + message
    assert len(refused(message, optax_ext.check_metadata, saved, state)) < 10_000


def test_an_abstract_state_needs_a_place():
    given = SAVED, PARAMS, AbstractMesh((3,), ("data",))
    refused("mesh is an AbstractMesh", optax_ext.abstract_state, *given)
    where = SingleDeviceSharding(jax.devices()[0])
    state = optax_ext.abstract_state(*given, sharding=where)
    assert state[0].residual.shape == (3, 70)


@pytest.mark.parametrize(
    ("local", "expected"),
    [
        (optax.scale(0.1), "EmptyState"),
        (optax.scale_by_schedule(lambda count: 0.1), "ScaleByScheduleState"),
        (optax.chain(optax.clip(1.0), optax.ema(0.9)), "EmptyState, EmaState"),
        # It was made for this tree of parameters and no other.
        (optax.masked(optax.ema(0.9), {"w": True}), "MaskedState, EmaState"),
        (optax.GradientTransformation(lambda p: None, lambda u, s, p=None: (u, s)), "no state"),
    ],
)
def test_the_metadata_names_the_states_of_a_local_transformation(local, expected):
    state = optax_ext.init_state(transformation(local=local), PARAMS, {"data": 2})
    assert optax_ext.checkpoint_metadata(state)["sparse"]["[0]"]["local"] == expected


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The state of eight workers after a step, saved with its metadata."""
    _, state, _ = trained(SAVED)
    folder = tmp_path_factory.mktemp("checkpoint") / "state"
    save(folder, state, custom_metadata=optax_ext.checkpoint_metadata(state))
    return folder


@pytest.mark.slow
def test_orbax_refuses_other_arrays_and_the_metadata_alone_tells_another_density(folder):
    refused("not compatible with the stored shape", restore, folder, expected(SAVED, 4))
    other = expected(transformation(alias=optax_ext.topk_a))
    refused(r"(?s)do not match.*threshold", restore, folder, other)
    # Its arrays have the same shapes, so orbax restores them, and a step is possible.
    tx = transformation(0.2)
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(folder).custom_metadata
    message = r"topk\(density=0.1\) in the checkpoint"
    refused(message, optax_ext.check_metadata, saved, expected(tx))
    state = restore(folder, expected(tx))
    assert bits(state) == bits(restore(folder, expected(SAVED)))
    _, state, _ = trained(tx, state=state)
    assert (np.asarray(state[0].info.selected) == 14).all()


@pytest.mark.slow
def test_a_correction_that_the_checkpoint_has_not(folder):
    # Orbax takes an empty tuple for a missing array.
    state = restore(folder, expected(CORRECTED))
    message = r"state.velocity is \(\), but .* has a correction"
    refused(message, trained, CORRECTED, state=state)
    # The advice of the message.
    moved = optax_ext.reshard(state, optax_ext.init_state(CORRECTED, PARAMS, mesh(8)))
    assert bits(moved[0].residual) == bits(state[0].residual)
    trained(CORRECTED, state=moved)


@pytest.mark.parametrize("fault", ["deleted", "cut"])
@pytest.mark.parametrize("pattern", ["d/*", "manifest.ocdbt", "_METADATA"])
@pytest.mark.one_in(3)
def test_a_damaged_checkpoint_is_an_error(folder, tmp_path, fault, pattern):
    damaged = tmp_path / "state"
    shutil.copytree(folder, damaged)
    (file,) = damaged.glob(pattern)
    whole = file.read_bytes()
    file.unlink()
    if fault == "cut":
        file.write_bytes(whole[: len(whole) // 2])
    # The kind of error is orbax's; what matters is that no state comes back.
    refused(None, restore, damaged, expected(SAVED), error=(ValueError, OSError, KeyError))
    file.write_bytes(whole)
    assert bits(restore(damaged, expected(SAVED))) == bits(restore(folder, expected(SAVED)))

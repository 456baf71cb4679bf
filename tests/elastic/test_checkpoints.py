"""Checkpoints whose parts are written by workers that may die at any moment."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives
from optax_ext.elastic import _checkpoints, _handover, _programs
from tests.optax_ext.helpers import bits

PARAMS = {"w": jnp.arange(24.0).reshape(4, 6) / 7.0, "b": jnp.full(5, -0.0, jnp.bfloat16)}
TX = optax.chain(optax_ext.ok_topk(0.3, axis="data"), optax.adam(0.1))
PROGRAMS = _programs.Programs(lambda p, x: jnp.mean(p["w"]), TX, "data", jax.devices())


def state_of(workers, seed=0):
    """A state whose arrays are random."""
    rng = np.random.default_rng(seed)
    state = optax_ext.init_state(TX, PARAMS, {"data": workers})

    def filled(x):
        return jnp.asarray(rng.integers(0, 100, x.shape)).astype(x.dtype)

    return jax.tree.map(filled, state)


def row(state, worker, workers):
    specs = optax_ext.state_specs(state)
    return jax.tree.map(
        lambda spec, x: x[worker * (len(x) // workers) :][: len(x) // workers] if len(spec) else x,
        specs,
        state,
    )


def _programs_of(tx):
    return _programs.Programs(lambda p, x: 0.0, tx, "data", jax.devices())


def checkpoints(folder, process=0, tx=TX, params=PARAMS):
    return _checkpoints.Checkpoints(folder, 10, process, params, _programs_of(tx).state_of)


def save(folder, step, members, state, mark="5a"):
    """The checkpoint of all members."""
    for number, process in enumerate(members):
        each = checkpoints(folder, process)
        each.save(step, members, mark, PARAMS, row(state, number, len(members)))
        assert each.wait() is None


def residual(state):
    return np.asarray(optax_ext.get_state(state).residual, np.float64)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_number_of_workers_may_begin_from_it(tmp_path, size):
    members, state = (0, 2, 5), state_of(3)
    save(tmp_path, 20, members, state)
    reader = checkpoints(tmp_path, 7)
    assert reader.newest() == 20
    total = np.zeros_like(residual(state)[0])
    for rank in range(size):
        written, params, saved = reader.load(20, rank, size)
        assert written == 3
        assert bits(params) == bits(PARAMS)
        if rank >= 3:
            assert saved is None
            continue
        fresh = PROGRAMS.fresh(size, rank, PARAMS)
        carried = _handover.carried(saved, fresh)
        total += residual(carried)[0]
        # The part that all share, such as the moments after the exchange.
        assert bits(carried[1]) == bits(state[1])
    np.testing.assert_array_equal(total, residual(state).sum(0))


def test_only_what_all_members_have_written_counts(tmp_path):
    state = state_of(2)
    save(tmp_path, 10, (0, 1), state)
    save(tmp_path, 20, (0, 1), state)
    first = checkpoints(tmp_path)
    first.save(30, (0, 1), "5a", PARAMS, row(state, 0, 2))
    first.wait()
    assert first.newest() == 20
    # A file that is being written has another name.
    (tmp_path / "30" / "0-1.5a" / "1.77").write_bytes(b"half")
    assert first.newest() == 20
    assert sorted(x.name for x in tmp_path.iterdir()) == ["20", "30"]


def test_of_a_step_that_was_taken_again_the_later_one_counts(tmp_path):
    save(tmp_path, 10, (0, 1), state_of(2, 1))
    save(tmp_path, 10, (0,), state_of(1, 2))
    reader = checkpoints(tmp_path)
    written, _, saved = reader.load(10, 0, 1)
    assert written == 1
    np.testing.assert_array_equal(residual(saved), residual(state_of(1, 2)))


def test_parts_of_two_lives_make_no_checkpoint(tmp_path):
    members, state = (0, 1), state_of(2)
    save(tmp_path, 10, members, state)
    for number, mark in ((1, "5a"), (0, "6b")):
        one = checkpoints(tmp_path, number)
        one.save(20, members, mark, PARAMS, row(state, number, 2))
        assert one.wait() is None
    assert one.newest() == 10


@pytest.mark.parametrize("name", ["\xb2", "007", "\u0663", "latest", "30"])
def test_what_else_is_in_the_folder_stops_nobody(tmp_path, name):
    (tmp_path / name).write_text("of someone else")
    (tmp_path / "40" / "0-\xb2.5a").mkdir(parents=True)
    (tmp_path / "40" / "notes").mkdir()
    save(tmp_path, 10, (0,), state_of(1))
    save(tmp_path, 20, (0,), state_of(1))
    assert checkpoints(tmp_path).newest() == 20
    assert sorted(x.name for x in tmp_path.iterdir()) == sorted(["20", "40", name])


@pytest.mark.parametrize("damage", ["cut", "empty", "of the line", "of an array", "of the sum"])
def test_a_part_that_is_damaged_is_an_error(tmp_path, damage):
    save(tmp_path, 10, (0, 1), state_of(2))
    part = tmp_path / "10" / "0-1.5a" / "1"
    data = bytearray(part.read_bytes())
    place = {"of the line": 20, "of the sum": -20}.get(damage, data.index(b"\n") + 20)
    data[place] ^= 1
    part.write_bytes({"cut": data[:-200], "empty": b""}.get(damage, data))
    reader = checkpoints(tmp_path)
    reader.load(10, 0, 2)
    with pytest.raises(ValueError, match="0-1.5a/1 can't be read .*Remove the folder of its step"):
        reader.load(10, 1, 2)


def test_a_part_that_was_moved_is_an_error(tmp_path):
    save(tmp_path, 10, (0, 1), state_of(2))
    (tmp_path / "10").rename(tmp_path / "20")
    with pytest.raises(ValueError, match=r"can't be read \(it is 10/0-1.5a/0\)"):
        checkpoints(tmp_path).load(20, 0, 2)


RENAMED = {"b": PARAMS["b"], "z": PARAMS["w"]}
TRANSPOSED = {**PARAMS, "w": PARAMS["w"].T}
OTHERS = {
    "a renamed leaf": (TX, RENAMED, r"\['z'\] is None there"),
    "a transposed leaf": (TX, TRANSPOSED, r"\['w'\] is float32\[4, 6\] there, and float32\[6, 4\]"),
    "another dtype": (TX, {**PARAMS, "b": jnp.zeros(5)}, r"\['b'\] is bfloat16\[5\] there"),
    "another density": (
        optax.chain(optax_ext.ok_topk(0.2, axis="data"), optax.adam(0.1)),
        PARAMS,
        r"selector is .*density=0.3.* there, and .*density=0.2.* here",
    ),
    "residuals of updates": (optax_ext.sparse_sgd(0.1, axis="data"), PARAMS, "local is None"),
    "rounds": (optax_ext.sparse_adamw(0.1, axis="data", every=3), PARAMS, "every is"),
    "another optimizer": (
        optax.chain(optax_ext.ok_topk(0.3, axis="data"), optax.sgd(1.0)),
        PARAMS,
        "arrays.*None here",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(tmp_path, other):
    tx, params, message = OTHERS[other]
    save(tmp_path, 10, (0,), state_of(1))
    reader = checkpoints(tmp_path, tx=tx, params=params)
    for size in (1, 2):
        with pytest.raises(ValueError, match="10/0.5a/0 is of another model.*" + message) as error:
            reader.load(10, 0, size)
        assert "\n" not in str(error.value)


def test_a_disk_that_is_full_is_a_line_and_the_next_checkpoint_tries_again(
    tmp_path, caplog, monkeypatch
):
    one = checkpoints(tmp_path)

    def fails(_):
        raise OSError(28, "No space left on device")

    for step, whole in ((10, True), (20, False), (30, True)):
        with monkeypatch.context() as full:
            if not whole:
                # After the content.
                full.setattr(os, "fsync", fails)
            one.save(step, (0,), "5a", PARAMS, row(state_of(1), 0, 1))
            error = one.wait()
        assert (error is None) == whole
        assert [str(x.relative_to(tmp_path)) for x in tmp_path.rglob("*") if x.is_file()] == [
            f"{step if whole else step - 10}/0.5a/0"
        ]
    assert caplog.messages == [
        "the checkpoint of step 20 is not written: [Errno 28] No space left on device"
    ]


def test_without_a_folder_there_are_none():
    none = _checkpoints.Checkpoints(None, None, 0, PARAMS, PROGRAMS.state_of)
    assert not none.is_due(10)
    assert none.newest() == -1
    assert none.wait() is None
    with pytest.raises(ValueError, match="save_every must be a whole number"):
        _checkpoints.Checkpoints("folder", 0, 0, PARAMS, PROGRAMS.state_of)


def test_an_optimizer_that_can_not_be_described_is_an_error_at_the_beginning(tmp_path):
    allreduce = sparse_collectives.allreduce.topk_a()._replace(spec=None)
    tx = optax_ext.sparse_sgd(0.1, axis="data", density=0.1, allreduce=allreduce)
    with pytest.raises(ValueError, match="the allreduce declares no spec"):
        checkpoints(tmp_path, tx=tx)


def test_a_checkpoint_that_only_another_process_sees(tmp_path):
    save(tmp_path / "here", 20, (0, 1), state_of(2))
    for folder in (tmp_path / "there", None):
        with pytest.raises(
            ValueError, match="from the checkpoint of step 20, and this one finds no"
        ):
            checkpoints(folder, 1).load(20, 1, 2)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_in_a_state(tmp_path, impl):
    noise = optax.add_noise(0.1, 0.5, jax.random.key(7, impl=impl))
    tx = optax.chain(optax_ext.ok_topk(0.3, axis="data"), noise, optax.sgd(0.1))
    state = optax_ext.init_state(tx, PARAMS, {"data": 1})
    each = checkpoints(tmp_path, tx=tx)
    each.save(10, (0,), "5a", PARAMS, state)
    assert each.wait() is None
    _, _, saved = checkpoints(tmp_path, tx=tx).load(10, 0, 1)
    carried = _handover.carried(saved, _programs_of(tx).fresh(1, 0, PARAMS))
    assert jax.tree.structure(carried) == jax.tree.structure(state)
    assert carried[1].rng_key.dtype == state[1].rng_key.dtype
    words = [jax.random.key_data(x[1].rng_key).tolist() for x in (state, carried)]
    assert words[0] == words[1]

"""Checkpoints whose parts are written by workers that may die at any moment."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
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


def save(folder, step, members, state):
    """The checkpoint of all members."""
    for number, process in enumerate(members):
        each = _checkpoints.Checkpoints(folder, 10, process)
        each.save(step, members, PARAMS, row(state, number, len(members)))
        each.wait()


def residual(state):
    return np.asarray(optax_ext.get_state(state).residual, np.float64)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_any_number_of_workers_may_begin_from_it(tmp_path, size):
    members, state = (0, 2, 5), state_of(3)
    save(tmp_path, 20, members, state)
    reader = _checkpoints.Checkpoints(tmp_path, 10, 7)
    assert reader.newest() == 20
    total = np.zeros_like(residual(state)[0])
    for rank in range(size):
        written, params, saved = reader.load(20, rank, size, PARAMS, PROGRAMS.state_of)
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
    first = _checkpoints.Checkpoints(tmp_path, 10, 0)
    first.save(30, (0, 1), PARAMS, row(state, 0, 2))
    first.wait()
    assert first.newest() == 20
    # A file that is being written has another name.
    (tmp_path / "30" / "0-1" / "1.77").write_bytes(b"half")
    assert first.newest() == 20
    assert sorted(x.name for x in tmp_path.iterdir()) == ["20", "30"]


def test_of_a_step_that_was_taken_again_the_later_one_counts(tmp_path):
    save(tmp_path, 10, (0, 1), state_of(2, 1))
    save(tmp_path, 10, (0,), state_of(1, 2))
    reader = _checkpoints.Checkpoints(tmp_path, 10, 0)
    written, _, saved = reader.load(10, 0, 1, PARAMS, PROGRAMS.state_of)
    assert written == 1
    np.testing.assert_array_equal(residual(saved), residual(state_of(1, 2)))


@pytest.mark.parametrize("damage", ["cut", "a bit", "empty"])
def test_a_part_that_is_damaged_is_an_error(tmp_path, damage):
    save(tmp_path, 10, (0, 1), state_of(2))
    part = tmp_path / "10" / "0-1" / "1"
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes({"cut": data[:-200], "a bit": data, "empty": b""}[damage])
    reader = _checkpoints.Checkpoints(tmp_path, 10, 0)
    reader.load(10, 0, 2, PARAMS, PROGRAMS.state_of)
    with pytest.raises(ValueError, match="0-1/1 can't be read .*Remove the folder of its step"):
        reader.load(10, 1, 2, PARAMS, PROGRAMS.state_of)


def test_an_error_of_the_writer_is_raised_at_the_next_checkpoint(tmp_path):
    one = _checkpoints.Checkpoints(tmp_path / "run", 10, 0)
    one.save(10, (0,), PARAMS, row(state_of(1), 0, 1))
    one.wait()
    (tmp_path / "run" / "20").write_text("no folder")
    one.save(20, (0,), PARAMS, row(state_of(1), 0, 1))
    with pytest.raises(OSError, match="20"):
        one.save(30, (0,), PARAMS, row(state_of(1), 0, 1))


def test_without_a_folder_there_are_none():
    none = _checkpoints.Checkpoints(None, None, 0)
    assert not none.is_due(10)
    assert none.newest() == -1
    none.wait()
    with pytest.raises(ValueError, match="save_every must be a whole number"):
        _checkpoints.Checkpoints("folder", 0, 0)

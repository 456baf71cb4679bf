"""Wrong arguments, each with one line that names it."""

import dataclasses
import functools
import signal
import socket
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext import elastic
from optax_ext.elastic import __main__, _arguments, _jax_internals, _job, _programs, _training_state

PARAMS = {"w": jnp.zeros((4, 3))}
ROWS = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 0}, "num_processes must be a whole number of at least 1, got 0"),
        ({"process_id": 4}, r"process_id must be in \[0, 4\).*larger --processes"),
        ({"process_id": -1}, "process_id must be in"),
        ({"heartbeat_seconds": 0.5}, "heartbeat_seconds must be a whole number"),
        ({"devices": 0}, "devices must be a whole number"),
        ({"devices": 1001}, "devices must be at most 1000, got 1001"),
        ({"num_processes": 5 * 10**9}, "num_processes must be at most 100000"),
        ({"heartbeat_seconds": 2**31}, "heartbeat_seconds must be at most 2147483647"),
        ({"collective_seconds": 2**31}, "collective_seconds must be at most"),
        ({"connect_seconds": True}, "connect_seconds must be a whole number"),
        ({"stuck_seconds": float("inf")}, "stuck_seconds must be a whole number"),
        ({"address": "127.0.0.1:65536"}, "address must be 'host:port' with a port from 1 to 65535"),
        ({"address": "127.0.0.1:0"}, "address must be 'host:port'.*got '127.0.0.1:0'"),
        ({"address": "127.0.0.1:\xb2"}, "address must be 'host:port'"),
        ({"address": ":1234"}, "address must be 'host:port'"),
        ({"address": None}, "address must be 'host:port'.*got None"),
    ],
)
def test_a_job_that_is_none(options, message):
    given = {"address": "127.0.0.1:1", "num_processes": 4, "process_id": 0, **options}
    with pytest.raises(ValueError, match=message):
        elastic.connect(**given)


def test_a_job_after_jax_has_begun():
    assert jax.device_count()
    with pytest.raises(RuntimeError, match="connect comes too late"):
        elastic.connect("127.0.0.1:1", 2, 0)


def in_a_new_process(text: str) -> str:
    """The last line of what a program says on standard error."""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False
    )
    return done.stderr.strip().splitlines()[-1]


def test_a_coordinator_that_nobody_answers():
    with socket.socket() as taken:
        # The socket is bound, but does not listen.
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        said = in_a_new_process(
            f"from optax_ext import elastic\nelastic.connect({place!r}, 2, 0, connect_seconds=1)"
        )
    assert said.startswith(f"ConnectionError: no coordinator answers at address='{place}'")
    assert "python -m optax_ext.elastic --address" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address", "nothing", "--processes", "2"], "--address must be 'host:port' with a port"),
        (["--address", "127.0.0.1:99999", "--processes", "2"], "with a port from 1 to 65535"),
        (["--address", "127.0.0.1:0", "--processes", "2"], "got '127.0.0.1:0'"),
        (["--address", "127.0.0.1:1", "--processes", "0"], "--processes must be a whole number"),
        (["--address", "127.0.0.1:1", "--processes", "5000000000"], "must be at most 100000"),
        (
            ["--address", "127.0.0.1:1", "--processes", "2", "--heartbeat-seconds", "99999999999"],
            "--heartbeat-seconds must be at most 2147483647, got 99999999999",
        ),
    ],
)
def test_a_coordinator_that_is_none(options, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["elastic", *options])
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "256.1.1.1", "192.0.2.1"])
@pytest.mark.parametrize("shares", [False, True])
def test_a_coordinator_that_can_not_listen(host, shares, capsys, monkeypatch):
    # As gRPC does: a second one would get a part of the connections.
    with socket.socket() as taken:
        if shares:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"{host}:{taken.getsockname()[1]}"
        monkeypatch.setattr(sys, "argv", ["elastic", "--address", address, "--processes", "2"])
        monkeypatch.setattr(_jax_internals, "serve", None)
        assert __main__.main() == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"can't listen at {address}: [Errno")


class Job:
    """A job of one process."""

    process_id, num_processes = 0, 2

    def devices_of(self, process_id):
        return jax.devices()

    def begin(self):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"give_up": float("nan")}, "give_up must be a positive number of seconds, got nan"),
        ({"give_up": "5"}, "give_up must be a positive number of seconds, got '5'"),
        ({"give_up": 0}, "give_up must be a positive number"),
        ({"leave_on": signal.SIGTERM}, "leave_on must be a sequence"),
        ({"params": {"w": jnp.array([1.0, jnp.nan])}}, r"params\['w'\] must be finite"),
        ({"folder": "x", "save_every": 0}, "save_every must be a whole number"),
        ({"check_every": 0}, "check_every must be a whole number of at least 1, got 0"),
        ({"min_workers": 3}, "min_workers is 3, but the job has 2 processes"),
        ({"folder": "x"}, "folder is 'x' and save_every None: checkpoints need both"),
        ({"save_every": 3}, "folder is None and save_every 3"),
        (
            {
                "tx": optax_ext.local_steps(
                    optax.adam(0.1), optax_ext.sparse_sgd(1.0, axis="data"), every=3
                )
            },
            "tx has rounds of local steps that end at a step of their own",
        ),
        ({"axis": "other"}, "axis"),
    ],
)
def test_a_training_that_is_none(options, message):
    tx = optax_ext.sparse_adamw(0.1, axis="data")
    given = {"tx": tx, "params": PARAMS, "batch_of": lambda request: None, **options}
    with pytest.raises(ValueError, match=message):
        elastic.Training(Job(), lambda p, x: 0.0, **given)


class Client:
    """The keys of a coordinator."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite):
        self.values[key] = value

    def key_value_delete(self, key):
        self.values = {x: y for x, y in self.values.items() if not x.startswith(key)}

    def key_value_dir_get(self, folder):
        return [(x, y) for x, y in self.values.items() if x.startswith(folder)]


@pytest.fixture
def jobs():
    """Two processes with the same number."""
    client = Client()
    made = [_job.Job(client, 1, 2, stuck_seconds=3600) for _ in range(2)]
    yield made
    made[0].lift_deadline()


def test_a_second_training_of_a_job(jobs):
    jobs[0].begin()
    with pytest.raises(RuntimeError, match="this job has a Training.*larger number of steps"):
        jobs[0].begin()


def test_a_second_process_of_the_same_number(jobs):
    one, two = jobs
    one.begin()
    assert one.someone_waits()
    two.begin()
    assert two.someone_waits()
    with pytest.raises(RuntimeError, match="another process has begun with process_id=1"):
        one.someone_waits()


@pytest.mark.parametrize("steps", [0, float("nan"), "5"])
def test_steps_that_are_none(steps):
    tx = optax_ext.sparse_adamw(0.1, axis="data")
    training = elastic.Training(Job(), lambda p, x: 0.0, tx, PARAMS, lambda request: None)
    with pytest.raises(ValueError, match="steps must be a whole number of at least 1"):
        next(training.run(steps))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (None, "batch_of must return arrays, and at step 3 it returned None"),
        ({"x": ROWS, "t": 0.5}, r"batch\['t'\] is a scalar"),
        ([[1.0, 2.0]], r"batch\[0\]\[0\] is a scalar"),
        ({"x": "text"}, r"batch\['x'\]"),
        ({"x": ROWS, "key": jax.random.key(0)}, r"batch\['key'\] is one PRNG key"),
        ({"x": ROWS[:1]}, r"returned .*float32\[1,3\].* at step 3, and .*float32\[2,3\].* before"),
        ({"x": ROWS.astype(np.int32)}, "int32.* request.size alone"),
    ],
)
def test_a_batch_that_is_none(batch, message):
    before = {"x": jax.typeof(ROWS)}
    with pytest.raises((ValueError, TypeError), match=message):
        _arguments.check_batch(batch, "data", before, 3)


def test_a_batch_may_have_keys():
    keys = jax.random.split(jax.random.key(0), 1)
    batch = _arguments.check_batch({"x": jnp.asarray(ROWS), "key": keys}, "data", None, 0)
    assert isinstance(batch["x"], np.ndarray)
    assert batch["key"] is keys


def test_programs_of_other_arguments_are_kept_apart(tmp_path, monkeypatch):
    """They may have the same text."""
    monkeypatch.setattr(_jax_internals, "cache_folder", lambda: str(tmp_path))
    monkeypatch.setattr(_jax_internals, "compiled", lambda lowered, devices: str(lowered.in_tree))
    key = jax.random.split(jax.random.key(0), 1)
    given = {"a": ROWS}, {"b": ROWS}, {"a": key}, {"a": jax.random.key_data(key)}
    lowered = [jax.jit(lambda x: 0.0).lower(x) for x in given]
    for each in lowered * 2:
        assert _programs._kept_or_compiled(each, jax.devices()[:1]) == str(each.in_tree)
    assert len(list(tmp_path.iterdir())) == 4


def test_a_model_with_functions_in_it_has_one_description():
    """In each process a function has another address."""

    class Function:
        def __call__(self, x):
            return x

    @functools.partial(
        jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=["activation"]
    )
    @dataclasses.dataclass
    class Model:
        w: Any
        activation: Any

    tx = optax_ext.sparse_adamw(0.1, axis="data")
    models = [Model(jnp.zeros(16), Function()) for _ in range(2)]
    states = [optax_ext.init_state(tx, model, {"data": 1}) for model in models]
    assert repr(jax.tree.structure(models[0])) != repr(jax.tree.structure(models[1]))
    described = [_training_state.description(*x) for x in zip(models, states, strict=True)]
    assert described[0] == described[1]

"""Wrong arguments, each with one line that names it."""

import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_ext
from optax_ext import elastic

PARAMS = {"w": jnp.zeros((4, 3))}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 0}, "num_processes must be a whole number of at least 1, got 0"),
        ({"process_id": 4}, r"process_id must be in \[0, 4\).*larger --processes"),
        ({"process_id": -1}, "process_id must be in"),
        ({"heartbeat_seconds": 0.5}, "heartbeat_seconds must be a whole number"),
        ({"devices": 0}, "devices must be a whole number"),
    ],
)
def test_a_job_that_is_none(options, message):
    given = {"num_processes": 4, "process_id": 0, **options}
    with pytest.raises(ValueError, match=message):
        elastic.connect("127.0.0.1:1", **given)


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
        (["--address", "nothing", "--processes", "2"], "--address must be host:port"),
        (["--address", "127.0.0.1:1", "--processes", "0"], "--processes must be at least 1"),
    ],
)
def test_a_coordinator_that_is_none(options, message, capsys, monkeypatch):
    from optax_ext.elastic import __main__

    monkeypatch.setattr(sys, "argv", ["elastic", *options])
    with pytest.raises(SystemExit):
        __main__.main()
    assert message in capsys.readouterr().err


class Job:
    """A job of one process."""

    process_id, num_processes = 0, 2

    def devices_of(self, process_id):
        return jax.devices()

    def announce(self):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
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

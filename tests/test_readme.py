"""The programs in the README run as they stand, one after the other."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import optax_ext

pytestmark = pytest.mark.usefixtures("default_promotion")

README = Path(__file__).parents[1] / "README.md"


def test_the_programs_run():
    programs = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(programs) == 2
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal((16, 10)).astype(np.float32) for _ in range(3)]
    names = {
        "params": {"w": jnp.ones((10, 7))},
        "loss_fn": lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
        "batches": batches,
    }
    for program in programs:
        exec(program, names)
    losses = [float(names["loss"])]
    for batch in batches:
        names["params"], names["opt_state"] = names["step"](
            names["params"], names["opt_state"], batch
        )
        losses.append(float(names["loss_fn"](names["params"], batch)))
    assert losses[-1] < losses[0]
    assert int(optax_ext.get_state(names["opt_state"]).count) == 6
    assert isinstance(names["info"], optax_ext.StepInfo)
    assert jax.device_count() == 8


def test_the_programs_about_training_run(capsys):
    text = (README.parent / "docs" / "training.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(programs) == 4
    rng = np.random.default_rng(0)
    names = {
        "params": {"w": jnp.ones((10, 7)), "b": jnp.zeros(7)},
        "loss_fn": lambda params, batch: jnp.mean((batch @ params["w"] + params["b"]) ** 2),
        "batches": [rng.standard_normal((16, 10)).astype(np.float32) for _ in range(4)],
    }
    for program in programs:
        exec(program, names)
    written = capsys.readouterr().out
    # Every second step, by the monitor.
    assert written.count("sparse/residual_norm") == 2
    states = optax_ext.get_states(names["opt_state"])
    # The bucket of the bias is all dense, that of the matrix all sparse.
    assert [(s.layout.size, s.layout.dense_size) for s in states] == [(70, 0), (0, 7)]
    assert [int(s.count) for s in states] == [4, 4]

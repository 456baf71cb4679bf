"""The programs in the README run as they stand, one after the other."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import optax_ext

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

"""The table of docs/selectors.md that writes the papers' systems as compositions."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from benchmarks.local import select_speed

TEXT = (Path(__file__).parents[1] / "docs" / "selectors.md").read_text()
ROWS = re.findall(r"^\| [^|]+ \| `(optax_ext\.topk_a\(.*sc\.select\.(\w+)\(.*)` \|$", TEXT, re.M)
NAMES = [
    *("mstopk", "dgc", "gaussian_k", "redsync", "sidco"),
    *("adtopk", "adtopk_interleaved", "adtopk_threshold"),
]


def test_every_system_is_in_the_table():
    assert [name for _, name in ROWS] == NAMES


SLOW = ("adtopk_interleaved", "adtopk_threshold")


@pytest.mark.parametrize(
    ("code", "name"),
    [
        pytest.param(code, name, id=name, marks=pytest.mark.slow if name in SLOW else ())
        for code, name in ROWS
    ],
)
def test_the_composition_goes_before_an_optimizer(code, name):
    del name
    tx = eval(code, {"optax_ext": optax_ext, "sc": sc, "density": 0.25})
    chain = optax.chain(tx, optax.sgd(0.1))
    gradients = {"w": jnp.zeros((2, 3, 4)), "b": jnp.zeros((2, 4))}

    def step(gradients):
        state = chain.init(gradients)
        updates, state = chain.update(gradients, state, gradients)
        info = optax_ext.get_info(state)
        assert info is not None
        return updates, info.words

    # Traced only: what the selectors select is tested elsewhere.
    updates, words = jax.eval_shape(sc.simulate(step, axis="data", axis_size=2), gradients)
    assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, gradients)
    assert words.shape == (2,)


def test_the_benchmark_of_speed_has_every_selector():
    made = select_speed.selectors(0.01)
    assert all(isinstance(selector, sc.Selector) for selector in made.values())
    assert {"topk", "adtopk_threshold", "random_k"} <= made.keys()

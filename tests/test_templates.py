"""The contracts of a selector and an allreduce, from docs/templates/ or from your own files.

    make contract SELECTOR=my_file.py:my_selector ALLREDUCE=my_file.py:my_allreduce

Each is ``file.py:factory``, or ``package.module:factory``, and is called with ``density=``.
"""

import importlib
import os
import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import optax_ext
import sparse_collectives as sc
from tests import jax_internals
from tests.sparse_collectives import helpers, selecting

TEMPLATES = Path(__file__).parents[1] / "docs" / "templates"
SIZE = 203
DENSITY = 0.05
K = 10
LAYERS = ((20, 10), (3,))


def factory(variable):
    """The factory that an environment variable names, or the template's."""
    template = f"{TEMPLATES / f'my_{variable.lower()}.py'}:my_{variable.lower()}"
    place, _, name = (os.environ.get(variable) or template).rpartition(":")
    if place.endswith(".py"):
        return runpy.run_path(place)[name]
    return getattr(importlib.import_module(place), name)


SELECTOR, ALLREDUCE = factory("SELECTOR"), factory("ALLREDUCE")


def types_of(tree):
    return jax.tree.map(lambda leaf: (jnp.shape(leaf), jnp.result_type(leaf)), tree)


@pytest.fixture(scope="module")
def allreduce():
    return ALLREDUCE(density=DENSITY)


class TestSelector:
    """``init(layout) -> state`` and ``select(acc, state) -> (coo, state, info)``."""

    selector = SELECTOR(density=DENSITY)

    @pytest.mark.parametrize("dtype", selecting.DTYPES)
    def test_selection_has_entries_of_the_accumulator(self, dtype):
        """Their indices are unique and ascending, zeros are not sent, and padding comes last.

        The state keeps its structure, and all steps share one program.
        """
        select, state = jax.jit(self.selector.select), self.selector.init(SIZE)
        types = types_of(state)
        before = jax_internals.programs(select)
        for accs in helpers.hard_accumulators(1, SIZE).values():
            acc = selecting.as_dtype(accs[0], dtype)
            out = select(acc, state)
            selecting.check(out, acc)
            state, info = out[1:]
            assert isinstance(info, sc.SelectInfo)
            assert types_of(list(info)) == [((), jnp.int32), ((), jnp.int32), ((), jnp.float32)]
            assert all(float(x) >= 0 for x in info)
            assert types_of(state) == types
        assert jax_internals.programs(select) == before + 1

    def test_selector_lets_no_index_wait_for_ever(self):
        """If gradients stay the same, every entry is sent sooner or later; with a layout."""
        gradient = np.linspace(1, 2, SIZE, dtype=np.float32)
        select, state = jax.jit(self.selector.select), self.selector.init(sc.Layout(LAYERS))
        residual, sent = np.zeros(SIZE, np.float32), np.zeros(SIZE)
        for _ in range(20 * round(1 / DENSITY)):
            residual = residual + gradient
            coo, state, _ = select(residual, state)
            delivered = np.asarray(coo.to_dense())
            residual, sent = residual - delivered, sent + (delivered != 0)
        assert sent.all()


class TestAllreduce:
    """``init(layout, P) -> state`` and ``reduce(coo, state, axis=)``."""

    selector = sc.select.topk(density=DENSITY)

    @pytest.mark.parametrize("workers", [1, 2, pytest.param(3, marks=pytest.mark.slow), 5])
    def test_allreduce_loses_nothing_and_all_workers_agree(self, allreduce, workers):
        for name, acc in helpers.hard_accumulators(workers, SIZE).items():
            state = allreduce.init(SIZE, workers)
            types = types_of(state)
            for step in range(3):
                acc = np.roll(acc, 7 * step, axis=1)
                out = helpers.run_once(self.selector, allreduce, acc, state)
                state = helpers.next_state(out)
                assert types_of(state) == types
                helpers.check_conserved(out, f"{name}, step {step}")
                for indices in np.asarray(out["indices"]):
                    used = indices[indices < SIZE]
                    assert len(np.unique(used)) == len(used), name
                for field in ("delivered", "threshold", "words"):
                    values = np.asarray(getattr(out["info"], field))
                    assert (values == values[0]).all(), f"{name}: {field}"
                    assert values[0] >= 0, f"{name}: {field}"
                if workers == 1 and name == "normal":
                    np.testing.assert_array_equal(out["total"], out["sent"])
                    assert out["info"].words[0] == 0
        assert jax_internals.programs(helpers.simulated_reduce(allreduce, workers)) == 1

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_sixteen_bit_values(self, allreduce, dtype):
        acc = jnp.asarray(helpers.hard_accumulators(3, SIZE)["normal"]).astype(dtype)
        out = helpers.run_once(self.selector, allreduce, acc)
        assert out["total"].dtype == dtype
        helpers.check_conserved(out, tolerance=4 * float(jnp.finfo(dtype).eps))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_sums_of_sixteen_bit_values_are_rounded_once(self, allreduce, dtype):
        """Each of many summands is lost if the sum so far is rounded."""
        eps = float(jnp.finfo(dtype).eps)
        acc = np.zeros((33, SIZE), np.float32)
        acc[:, :K] = eps / 2
        acc[0, :K] = 1
        out = helpers.run_once(self.selector, allreduce, jnp.asarray(acc).astype(dtype))
        helpers.check_conserved(out, tolerance=4 * eps)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_sums_of_finite_entries_stay_finite_and_the_rest_is_kept(self, allreduce, dtype):
        acc = np.zeros((3, SIZE), np.float32)
        acc[:, :K] = float(jnp.finfo(dtype).max)
        out = helpers.run_once(self.selector, allreduce, jnp.asarray(acc).astype(dtype))
        assert np.isfinite(out["total"]).all()
        assert np.isfinite(out["kept"]).all()
        helpers.check_conserved(out, tolerance=4 * float(jnp.finfo(dtype).eps))

    @pytest.mark.parametrize("workers", [2, 3, 4, 5])
    def test_words_are_those_of_the_program(self, allreduce, workers):
        """For an exchange without choices; for others, see `frequencies` of `traffic`."""
        acc = helpers.hard_accumulators(workers, SIZE)["normal"]
        words = helpers.run_once(self.selector, allreduce, acc)["info"].words[0]
        given = {"size": SIZE, "capacity": K, "axis_size": workers}
        least, most = (
            sc.traffic.of_allreduce(allreduce, **given, conditional=conditional).words
            for conditional in ("best", "worst")
        )
        assert least <= words <= most


@pytest.mark.parametrize("check_vma", [True, False])
def test_training_step_with_both(check_vma):
    """It runs on a mesh, with and without types for values that vary over the workers."""
    selector, allreduce = SELECTOR(density=DENSITY), ALLREDUCE(density=DENSITY)
    tx = optax_ext.sparse_allreduce(selector, allreduce, axis="data")
    on, params = helpers.mesh(3, "data"), {"w": jnp.zeros((20, 10)), "b": jnp.zeros((3,))}
    state = optax_ext.init_state(tx, params, on)
    weights = np.random.default_rng(0).standard_normal((3, SIZE)).astype(np.float32)
    step = optax_ext.make_train_step(
        lambda params, batch: jnp.mean(batch @ ravel_pytree(params)[0]), tx, on, check_vma=check_vma
    )
    for _ in range(3):
        params, state, _ = step(params, state, weights)
    found = optax_ext.get_state(state)
    assert found is not None
    given = 3 * ravel_pytree(params)[0] + found.residual.sum(axis=0)
    np.testing.assert_allclose(given, 3 * weights.sum(axis=0), rtol=1e-5, atol=1e-5)
    assert int(found.count) == 3


@pytest.mark.usefixtures("default_promotion")
def test_program_of_the_page_runs(monkeypatch):
    monkeypatch.syspath_prepend(TEMPLATES)
    page = (TEMPLATES.parent / "architecture.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(program, names)
    state = optax_ext.get_state(names["opt_state"])
    assert state is not None
    assert int(state.count) == 3
    # Both have a spec, so a checkpoint has their metadata.
    metadata = str(optax_ext.checkpoint_metadata(names["opt_state"]))
    assert "my_selector(density=0.1)" in metadata
    assert "my_allreduce(density=0.1)" in metadata

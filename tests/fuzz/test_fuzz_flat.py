"""All leaves as one vector, with ``optax.flatten``: the same training."""

from typing import Any

import hypothesis
import jax
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import optax_ext
from tests.fuzz.composed import AHEAD, AROUND, OTHERS, SHAPES, STEPS, WORKERS, Case, Composed
from tests.fuzz.configurations import SEEDS
from tests.fuzz.moved_laws import check_resharded, loss_fn
from tests.fuzz.test_fuzz import PARTS, _settings, check_part
from tests.optax_ext.helpers import mesh

# These treat leaves by their shapes, or several leaves as one bucket.
BY_LEAF = {
    *("sparse_adamw, factors", "sparse_sgd, correction", "powersgd, ema"),
    *("bucketed sparse_sgd", "bucketed, if finite"),
}
EXCHANGES = {name: make for name, make in (AHEAD | OTHERS).items() if name not in BY_LEAF}
EXAMPLES = 2


@st.composite
def cases(draw: Any) -> Case:
    """An exchange, what may be around it, and at least one entry."""
    text = draw(st.sampled_from(tuple(EXCHANGES)))
    tx = EXCHANGES[text]()
    if draw(st.booleans()):
        name = draw(st.sampled_from(("multi_steps", "delayed", "chain")))
        text, tx = f"{name}({text})", AROUND[name](tx)
    return Case(
        of=Composed(text, tx),
        shapes=(draw(st.sampled_from(SHAPES[:4])), *(draw(st.sampled_from(SHAPES)) for _ in "abc")),
        dtypes=("float32",) * 4,
        workers=(draw(st.sampled_from(WORKERS)), draw(st.sampled_from(WORKERS))),
        steps=draw(st.integers(1, STEPS)),
        moving="not",
        scale=1.0,
        seed=draw(SEEDS),
    )


def trained(tx: Any, case: Case) -> tuple[Any, Any]:
    """The parameters and the state after all steps."""
    params, on = case.params(), mesh(case.workers[0])
    state = optax_ext.init_state(tx, params, on)
    step = optax_ext.make_train_step(loss_fn, tx, on, donate=False)
    for i in range(case.steps):
        params, state, _ = step(params, state, case.batch(case.workers[0], i))
    # jax counts the device of one worker and the mesh with it as two places.
    assert step.jitted._cache_size() == 1 or case.workers[0] == 1
    return params, state


def outcome(call: Any, params: Any, state: Any) -> Any:
    """The parameters or the gradient that it makes, or its error."""
    try:
        return call(params, state)[0]
    except ValueError as error:
        return str(error)


def check_equal(found: Any, expected: Any) -> None:
    """Checks for the same error, or the same numbers: XLA rounds matrices in other places."""
    if isinstance(expected, str):
        assert found == expected
        return
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), found, expected)


def check(case: Case) -> None:
    flat = optax.flatten(case.of.tx)
    pairs = [trained(tx, case) for tx in (case.of.tx, flat)]
    whole, vector = pairs
    check_equal(vector[0], whole[0])
    for call in (optax_ext.flush, optax_ext.consolidate):
        check_equal(outcome(call, *vector), outcome(call, *whole))
    fresh = optax_ext.init_state(flat, vector[0], mesh(case.workers[1]))
    moved = optax_ext.reshard(vector[1], fresh)
    check_resharded(case, vector[1], moved, fresh, *case.workers)


@hypothesis.given(cases())
@_settings(EXAMPLES)
def test_a_few_exchanges_compute_the_same_in_one_vector(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_exchanges_compute_the_same_in_one_vector(part):
    check_part(part, cases(), check, 4 * EXAMPLES)

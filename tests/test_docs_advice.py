"""What README and the manual recommend to begin with: one list, of expressions that work."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType

import optax_ext
from optax_ext._optimizers import _parts
from tools.tables import _advice, _registry
from tools.tables._pages import ROOT

pytestmark = pytest.mark.usefixtures("default_promotion")

EXPRESSIONS = {
    name: value.strip("`")
    for name, value in vars(_advice).items()
    if name.isupper() and str(value).startswith("`")
}
OURS = ("sparse_adamw", "ok_topk_sgd", "ok_topk", "powersgd", "dense")


def built(expression):
    """The transformation, with what the pages say that the names stand for."""
    names = {name: functools.partial(getattr(optax_ext, name), axis="data") for name in OURS}
    rate, given = 1e-2, {"m": 0.9, "r": 2, "optimizer": optax.lion(1e-3)}
    return eval(expression, names | given | {"optax": optax, "rate": rate})


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_an_expression_gives_a_transformation_that_can_be_trained_with(name):
    tx = built(EXPRESSIONS[name])
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = {"w": jnp.ones((40, 30))}
    state = optax_ext.abstract_state(tx, params, mesh)
    step = optax_ext.make_train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2), tx, mesh)
    step.trace(params, state, jnp.ones((8, 40)))


def test_the_three_tables_recommend_nothing_else():
    """Whole optimizers of a cell, and chains, are those of the list."""
    pattern = r"`((?:optax\.chain|sparse_adamw|sparse_sgd|ok_topk_sgd)\(.*?\))`"
    allowed = set(EXPRESSIONS.values())
    for rows in (_advice.readme(), _advice.choosing(), _advice.training()):
        found = [x for row in rows for cell in row for x in re.findall(pattern, cell)]
        assert found
        assert set(found) <= allowed


def test_they_are_the_tables_of_the_pages():
    made = {(table.page, table.rows) for table in _registry.MADE}
    assert ("README.md", _advice.readme) in made
    assert ("docs/choosing.md", _advice.choosing) in made
    assert ("docs/training.md", _advice.training) in made


def test_sentences_recommend_the_same():
    def text(page):
        return " ".join((ROOT / page).read_text(encoding="utf-8").split())

    head = text("docs/works_with.md").split("## Optimizers")[0]
    for name in ("ADAMW", "MOMENTUM"):
        expression = EXPRESSIONS[name].removesuffix(")")
        assert f'`optax_ext.{expression}, axis="data")`' in head, name
    index = text("docs/index.md")
    assert "For SGD with momentum m, `ok_topk_sgd` at its rate over 1 - m" in index
    assert "`sparse_adamw` takes the place of AdamW" in index
    # The rate is the dense run's, at any number of workers.
    for page in ("README.md", "docs/index.md", "docs/choosing.md", "docs/training.md"):
        assert "1.5 * rate" not in text(page)


def test_what_sparse_adamw_takes_of_adamw():
    """The table of arguments in docs/training.md."""
    ours = inspect.signature(optax_ext.sparse_adamw).parameters
    theirs = inspect.signature(optax.adamw).parameters
    for name in ("b2", "eps", "weight_decay", "mask"):
        assert ours[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert ours[name].default == theirs[name].default
    assert list(ours)[:2] == ["learning_rate", "density"]
    assert _parts.DENSITY == 0.05
    assert list(theirs)[:2] == ["learning_rate", "b1"]
    for name in ("b1", "nesterov", "mu_dtype", "eps_root"):
        assert name in theirs
        with pytest.raises((TypeError, ValueError)):
            optax_ext.sparse_adamw(1e-3, axis="data", **{name: 0.5})

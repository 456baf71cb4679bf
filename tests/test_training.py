"""benchmarks.training: measures of recorded trainings by hand, models against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from benchmarks.training import (
    _measures,
    _replay,
    _small_models,
    _small_tasks,
    _text_models,
    _unions,
    load_balance,
)
from benchmarks.training import _simulated_training as training
from benchmarks.training._measures import Leaf
from sparse_collectives import select

pytestmark = pytest.mark.usefixtures("default_promotion")

# Rows: 2 words, 3 output channels, 1 whole bias.
LAYOUT = [
    Leaf("embedding", (2, 3), 0, 0),
    Leaf("kernel", (2, 3), 6, -1),
    Leaf("bias", (4,), 12, -1),
]
TWO_LEAVES = [Leaf("a", (2, 3), 0, -1), Leaf("b", (4,), 6, -1)]
X = np.zeros(16, np.float32)
X[[0, 1, 7, 12]] = [-9, 8, 7, 0.5]
# Owners have 0 to 3, 4 to 5, and 6 to 9; 10 is padding.
SELECTED, EDGES = np.array([[0, 1, 4], [0, 5, 9], [3, 8, 10]]), np.array([0, 4, 6, 10])
GROWING = [np.array(x) for x in ([0, 3, 9], [3, 4, 10], [10, 10, 10], [0, 1, 2])]
SHARES = {"a": {"parameters": 0.6, "selected": 0.25}, "b": {"parameters": 0.4, "selected": 0.75}}
BY_HAND = [
    (_measures.missing_rows, (np.array([0, 2]), LAYOUT), [1, 3, 1]),
    # Entries 6 and 9 are in the first column, and 11 is in the last; 16 is padding.
    (_measures.missing_rows, (np.array([6, 9, 11]), LAYOUT), [2, 1, 1]),
    (_measures.missing_rows, (np.array([16, 16]), LAYOUT), [2, 3, 1]),
    # k is 3 of 16 globally, and 1 of 6, 1 of 6 and 1 of 4 by layer; zeros are never selected.
    (lambda *x: np.sort(_measures.largest(*x)), (X, 0.2), [0, 1, 7]),
    (lambda *x: np.sort(_measures.layer_selection(*x)), (X, LAYOUT, 0.2), [0, 7, 12]),
    (lambda *x: np.sort(_measures.largest(*x)), (X, 1.0), [0, 1, 7, 12]),
    (_unions.growth, (GROWING, 10), [3, 4, 4, 6]),
    # A worker keeps its own.
    (_replay.received, (SELECTED, EDGES), [2, 1, 1]),
    # A region may have no width.
    (_replay.owned, (np.array([[9, 10, 0], [4, 3, 10]]), np.array([0, 4, 4, 10])), [2, 0, 2]),
    (_replay.unevenness, (np.array([6, 0, 0]),), 3),
    (_replay.unevenness, (np.array([0, 0]),), 1),
    (load_balance.concentration, (np.array([[0, 7, 8], [9, 10, 10]]), TWO_LEAVES), SHARES),
]


@pytest.mark.parametrize(("measure", "given", "expected"), BY_HAND)
def test_measures_are_those_counted_by_hand(measure, given, expected):
    found = measure(*given)
    assert (found.tolist() if isinstance(found, np.ndarray) else found) == expected


def test_unions_of_uniform_selections_are_near_the_formula():
    rows = _unions.uniform(2000, 0.02, trials=20, seed=1)["rows"]
    assert rows[0]["expected"] == pytest.approx(2000 * (1 - 0.98**2))
    assert all(abs(row["errors_off"]) < 5 for row in rows)


def test_unions_that_follow_the_model_are_predicted():
    # Uniform over half of the places: every number of workers predicts the same.
    size, k = 1000, 10
    growth = np.array([500 * (1 - (1 - k / 500) ** p) / size for p in range(1, 9)])
    reports = [
        {"workers": p, "growth": growth[:p], "series": np.full(3, growth[p - 1])}
        | {"union": {"mean": growth[p - 1]}, "size": size, "k": k, "uniform": 0.0}
        for p in (4, 8)
    ]
    table = _unions.predictions(reports)
    assert table["measured"] == growth[-1]
    assert list(table["same_run"]) == [2, 4]
    for kind in ("same_run", "other_runs", "other_runs_by_step"):
        assert [*table[kind].values()] == pytest.approx([growth[-1]] * len(table[kind]))


# Simulated trainings.


@pytest.fixture
def line():
    """A task with one parameter and eight examples, x to fit 2 x; the parameter is its value."""
    x = np.arange(8.0, dtype=np.float32)
    return training.Task(
        name="line",
        init=lambda seed: {"slope": jnp.float32(seed)},
        loss=lambda params, x: jnp.mean((params["slope"] * x - 2 * x) ** 2),
        batch_of=lambda chosen: x[chosen],
        count=8,
        evaluate=lambda params: float(params["slope"]),
        once=True,
    )


def test_order_has_each_example_once_in_an_epoch(line):
    order = training.order_of(line, steps=5, batch=4, seed=3)
    assert order.shape == (5, 4)
    assert sorted(order[:2].ravel()) == sorted(order[2:4].ravel()) == list(range(8))
    with pytest.raises(ValueError, match="9 examples, of 8"):
        training.order_of(line, steps=1, batch=9, seed=0)


@pytest.mark.parametrize("workers", [2, 4])
def test_dense_training_is_that_of_one_worker(line, workers):
    variant = training.Variant(optax_ext.dense(axis=training.AXIS), optax.sgd(0.01))
    options = {"workers": workers, "steps": 5, "every": 2, "batch": 4, "label": ""}
    curves = training.train(line, lambda *_: variant, seeds=range(2), **options)
    for (_, seed), curve in curves.items():
        slope, expected = float(seed), {0: float(seed)}
        for step, chosen in enumerate(training.order_of(line, steps=5, batch=4, seed=seed)):
            slope -= 0.01 * np.mean(2.0 * chosen**2 * (slope - 2))
            expected[step + 1] = slope
        assert curve.steps == [0, 2, 4, 5]
        np.testing.assert_allclose(curve.values, [expected[i] for i in curve.steps], rtol=1e-5)
        # The words of the one parameter, as a mean over the steps.
        assert curve.words == pytest.approx(2 * (workers - 1) / workers)


@pytest.mark.slow
@pytest.mark.parametrize("nonzero", [2, 1000])
def test_exact_top_k_selects_what_topk_does(nonzero):
    x = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    x[nonzero:] = 0
    x[5:9] = x[1]
    found = []
    for selector in (training.exact_top_k(0.01), select.topk(density=0.01)):
        coo, _, info = selector.select(jnp.asarray(x), selector.init(1000))
        found.append((coo.indices.tolist(), coo.values.tolist(), int(info.selected)))
    assert found[0] == found[1]


# Models.


def test_patches_make_a_convolution():
    random = np.random.default_rng(2)
    x = jnp.asarray(random.normal(size=(2, 5, 4, 3)), jnp.float32)
    kernel = jnp.asarray(random.normal(size=(3, 3, 3, 6)), jnp.float32)
    numbers = ("NHWC", "HWIO", "NHWC")
    expected = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    found = _small_models._patches(x) @ kernel.reshape(27, 6)
    np.testing.assert_allclose(found, expected, atol=1e-5)


TRANSFORMER = (_small_models.transformer(7), _small_models.CONTEXT, 40)


@pytest.mark.parametrize(
    ("network", "length", "at"),
    [
        pytest.param(*TRANSFORMER, marks=pytest.mark.slow, id="transformer"),
        pytest.param(_text_models.lstm(7, cells=4), 12, 8, id="lstm"),
    ],
)
def test_models_of_text_do_not_look_ahead(network, length, at):
    params = network.init(0)
    tokens = np.random.default_rng(3).integers(0, 7, (1, length))
    changed = tokens.copy()
    changed[0, at] = (tokens[0, at] + 1) % 7
    before, after = (np.asarray(jax.jit(network.apply)(params, x)) for x in (tokens, changed))
    difference = np.abs(before - after)[0].max(1)
    assert difference[:at].max() <= 1e-6
    assert (difference[at:] > 1e-5).all()


def test_network_of_words_has_sparse_gradients_and_an_exact_loss():
    network = _text_models.words(width=4)
    params = network.init(0)
    tokens = np.random.default_rng(1).integers(0, 200, (2, _text_models.WORDS + 1))
    batch = tokens[:, :-1], tokens[:, 1:]
    loss, gradient = jax.jit(jax.value_and_grad(network.loss))(params, batch)
    used = np.unique(tokens[:, :-1])
    rows = np.flatnonzero(np.abs(gradient["embedding"]).sum(1))
    np.testing.assert_array_equal(rows, used)
    # Only groups of the target words.
    groups = np.flatnonzero(np.abs(gradient["members"]).sum((1, 2)))
    assert set(groups) == set(tokens[:, _text_models.BEFORE :].ravel() // _text_models.MEMBERS)
    # The loss by hand: the probabilities of all words add up to one.
    p = jax.tree.map(np.asarray, params)
    losses = []
    for row in tokens:
        for i in range(_text_models.BEFORE, len(row)):
            x = p["embedding"][row[i - _text_models.BEFORE : i]].ravel()
            x = np.asarray(jax.nn.gelu(x @ p["hidden"]["kernel"] + p["hidden"]["bias"]))
            x = x @ p["state"]["kernel"] + p["state"]["bias"]
            group, member = np.exp(x @ p["group"]["kernel"]), np.exp(p["members"] @ x)
            every = (group / group.sum())[:, None] * member / member.sum(1, keepdims=True)
            np.testing.assert_allclose(every.sum(), 1, rtol=1e-5)
            losses.append(-np.log(every.ravel()[row[i]]))
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)


def test_words_are_numbered_by_how_frequent_they_are():
    text = "The cat, the dog; the cat's THE " * 30
    task = _small_tasks.word_task(text, windows=64, width=2)
    inputs, labels = task.batch_of(np.array([0]))
    # "the" has number 0; ",", ";" and "cat's" are words.
    np.testing.assert_array_equal(inputs[0, 1:], labels[0, :-1])
    assert inputs[0, [0, 3, 6, 8]].tolist() == [0, 0, 0, 0]
    assert len(set(inputs[0, :8].tolist())) == 6

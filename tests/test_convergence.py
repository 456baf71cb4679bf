"""The pieces of benchmarks.training.convergence and training_tricks by hand, and both in small."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from benchmarks.training import _simulated_training as training
from benchmarks.training import _small_models as models
from benchmarks.training import convergence, training_tricks
from sparse_collectives import select

pytestmark = pytest.mark.usefixtures("default_promotion")


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


def report(task, variant, workers, values):
    curves = [{"values": [0.0, value]} for value in values]
    return {"task": task, "variant": variant, "workers": workers, "curves": curves}


def test_the_order_has_each_example_once_in_an_epoch(line):
    order = training.order_of(line, steps=5, batch=4, seed=3)
    assert order.shape == (5, 4)
    assert sorted(order[:2].ravel()) == sorted(order[2:4].ravel()) == list(range(8))


def test_a_batch_of_more_examples_than_there_are(line):
    with pytest.raises(ValueError, match="9 examples, of 8"):
        training.order_of(line, steps=1, batch=9, seed=0)


@pytest.mark.parametrize("workers", [2, 4])
def test_dense_training_is_that_of_one_worker(line, workers):
    variant = training.Variant(optax_ext.dense(axis=training.AXIS), optax.sgd(0.01))
    options = {"workers": workers, "steps": 5, "every": 2, "batch": 4, "label": ""}
    curves = training.train(line, variant, seeds=range(2), **options)
    for seed, curve in enumerate(curves):
        slope, expected = float(seed), {0: float(seed)}
        for step, chosen in enumerate(training.order_of(line, steps=5, batch=4, seed=seed)):
            slope -= 0.01 * np.mean(2.0 * chosen**2 * (slope - 2))
            expected[step + 1] = slope
        assert curve.steps == [0, 2, 4, 5]
        np.testing.assert_allclose(curve.values, [expected[i] for i in curve.steps], rtol=1e-5)
        # Of the one parameter, as a mean over the steps.
        assert curve.words == pytest.approx(2 * (workers - 1) / workers)


@pytest.mark.slow
@pytest.mark.parametrize("nonzero", [2, 1000])
def test_the_fast_top_k_selects_what_topk_does(nonzero):
    x = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    x[nonzero:] = 0
    x[5:9] = x[1]
    fast, exact = training.exact_top_k(0.01), select.topk(density=0.01)
    coo, _, info = fast.select(jnp.asarray(x), fast.init(1000))
    expected, _, expected_info = exact.select(jnp.asarray(x), exact.init(1000))
    assert coo.indices.tolist() == expected.indices.tolist()
    assert coo.values.tolist() == expected.values.tolist()
    assert int(info.selected) == int(expected_info.selected)


def test_patches_make_a_convolution():
    random = np.random.default_rng(2)
    x = jnp.asarray(random.normal(size=(2, 5, 4, 3)), jnp.float32)
    kernel = jnp.asarray(random.normal(size=(3, 3, 3, 6)), jnp.float32)
    numbers = ("NHWC", "HWIO", "NHWC")
    expected = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    np.testing.assert_allclose(models._patches(x) @ kernel.reshape(27, 6), expected, atol=1e-5)


@pytest.mark.slow
def test_the_transformer_does_not_look_ahead():
    network = models.transformer(7)
    params = network.init(0)
    tokens = np.random.default_rng(3).integers(0, 7, (1, models.CONTEXT))
    changed = tokens.copy()
    changed[0, 40] = (tokens[0, 40] + 1) % 7
    before, after = (network.apply(params, jnp.asarray(x)) for x in (tokens, changed))
    np.testing.assert_allclose(before[0, :40], after[0, :40], atol=1e-5)
    assert not np.allclose(before[0, 40:], after[0, 40:], atol=1e-3)


def test_gaps_are_to_the_dense_run_of_the_same_seed():
    gaps = convergence.gaps
    dense = report("images", "dense", 16, [0.9, 0.8])
    other = report("images", "dense", 32, [0.5, 0.5])
    sparse = report("images", "ok_topk", 16, [0.89, 0.81, 0.7])
    np.testing.assert_allclose(gaps(sparse, [other, dense, sparse]), [1, -1])
    text = report("text", "ok_topk", 32, [2.1])
    assert gaps(text, [dense, text]) is None
    reports = [dense, report("text", "dense", 16, [2.0]), text]
    np.testing.assert_allclose(gaps(text, reports), [5])


@pytest.mark.slow
def test_convergence_in_small(tmp_path, capsys):
    main = convergence.main
    kept, plot = tmp_path / "kept.json", tmp_path / "plot.png"
    small = ["--steps", "4", "--points", "2", "--seeds", "1", "--workers", "2"]
    names = ["dense", "ok_topk", "momentum correction", "warm-up, small leaves dense"]
    batches = ["--batch-images", "8", "--batch-text", "4", "--density", "0.05"]
    assert main([*small, *batches, "--only", *names, "--json", str(kept)]) == 0
    printed = capsys.readouterr().out
    reports = json.loads(kept.read_text())
    assert [(entry["task"], entry["variant"]) for entry in reports] == [
        *(("images", name) for name in names[:3]),
        *(("text", name) for name in (*names[:2], names[3])),
    ]
    for entry in reports:
        (curve,) = entry["curves"]
        assert curve["steps"] == [0, 2, 4]
        assert np.isfinite(curve["values"] + curve["losses"]).all()
        assert curve["words"] > 0
    # Reading them prints the same.
    assert main(["--read", str(kept), "--plot", str(plot)]) == 0
    assert capsys.readouterr().out == printed
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_tricks_in_small(tmp_path, capsys):
    main = training_tricks.main
    kept = tmp_path / "kept.json"
    names = ["dense", "top-k", "correction, masking", "all, density warm-up"]
    small = ["--steps", "6", "--seeds", "2", "--workers", "2", "--only", *names]
    assert main([*small, "--json", str(kept)]) == 0
    curves = json.loads(kept.read_text())["curves"]
    assert list(curves) == names
    assert all(len(runs) == 2 for runs in curves.values())
    assert all(np.isfinite(run["losses"]).all() for runs in curves.values() for run in runs)
    printed = capsys.readouterr().out
    assert all(name in printed for name in curves)

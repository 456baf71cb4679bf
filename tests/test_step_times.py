"""The time of a step over links: what is measured of each contestant, and what is shown."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sparse_collectives as sc
from benchmarks.learning import _over_links, step_times


def answering(times):
    """Workers that take these seconds, by contestant and round."""

    class Hosts:
        def limit(self, link):
            self.link = link

    class Group:
        def ask(self, do, *, contestant, warmup, **_):
            assert (do, warmup) == ("begin", 7)
            return [{"seconds": 0.5}, {"seconds": times[contestant].pop(0)}]

    return Hosts(), lambda name: Group()


def test_a_round_is_as_slow_as_its_slowest_worker(monkeypatch, capsys, tmp_path):
    times = {name: [8.0, 8.0] for name in _over_links.in_buckets()}
    times |= {"nothing exchanged": [2.0, 4.0], "dense, 4 buckets": [5.0, 10.0]}
    hosts, group_of = answering(times)
    monkeypatch.setattr(step_times.time, "started", lambda *_: contextlib.nullcontext(group_of))
    monkeypatch.setattr(step_times, "interrupt_when_told", lambda: None)
    monkeypatch.setattr(step_times.namespaces, "unusable", lambda: None)
    monkeypatch.setattr(step_times.namespaces, "network", lambda _: contextlib.nullcontext(hosts))
    arguments = ["--group", "buckets", "--link", "1gbit", "--rounds", "2", "--steps", "7"]
    assert step_times.main([*arguments, "--json", str(tmp_path / "times.json")]) == 0
    assert not any(times.values())
    lines = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    # Of an exchange of 6 and of 4 seconds, half costs no time; half as much again is added.
    assert lines["dense, 4 buckets"].split()[3:] == [
        *["7500", "1.20", "(0.80", "to", "1.60)", "0.00", "(-0.50", "to", "0.50)"]
    ]
    assert lines["nothing exchanged"].split()[2:] == ["3000", "3.00", "(2.00", "to", "4.00)", "-"]
    assert (tmp_path / "times.json").exists()


def test_what_exchanges_nothing_computes_all_of_the_gradient():
    tree = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.ones(4)}
    tx = _over_links.in_buckets()[_over_links.NOTHING](lambda count: 0.1)

    def step(scale):
        update, _ = tx.update(jax.tree.map(lambda x: scale * x, tree), tx.init(tree), tree)
        return update

    update = sc.simulate(step, axis=_over_links.AXIS, axis_size=3)(jnp.arange(3.0))
    assert jax.tree.map(jnp.shape, update) == {"a": (3, 2, 3), "b": (3, 4)}
    assert all((np.asarray(leaf) == np.asarray(leaf)[0]).all() for leaf in jax.tree.leaves(update))


def test_the_norms_are_the_same_whoever_computes_them():
    rng = np.random.default_rng(0)
    # One of them so large that it is cut into slices.
    shapes = {"a": (200, 130), "b": (7,), "c": (3, 5)}
    params, gradients = (
        {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
        for _ in range(2)
    )

    def update_of(make):
        tx = make(lambda count: 0.1)

        def step(gradients):
            return tx.update(gradients, tx.init(params), params)[0]

        run = sc.simulate(step, axis=_over_links.AXIS, axis_size=3, in_axes=None)
        return run(gradients)

    expected, *others = (update_of(make) for make in _over_links.with_norms().values())
    for found in others:
        for name in shapes:
            np.testing.assert_allclose(found[name], expected[name], rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [(["--batch", "6"], "can't be dealt out"), (["--workers", "1"], "--workers"),
     (["--group", "x"], "--group"), (["--link", "0mbit"], "--link")],
)  # fmt: skip
def test_bad_options_are_one_line(arguments, error, capsys):
    with pytest.raises(SystemExit) as ended:
        step_times.main(arguments)
    assert ended.value.code == 2
    assert error in capsys.readouterr().err.splitlines()[-1]

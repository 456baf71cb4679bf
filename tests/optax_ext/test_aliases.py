"""Each alias is the composition that its docstring names, and keeps what that promises."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
import sparse_collectives as sc
from sparse_collectives import allreduce, select, wire

DENSITY, RATE, STEPS, WORKERS = 0.1, 0.25, 4, 8
PARAMS = {"a": jnp.zeros((9, 10)), "b": jnp.zeros(11)}
SIZE = 101
NODES, DEVICES = 4, 2


def composed(selector, exchange):
    return functools.partial(optax_ext.sparse_allreduce, selector, exchange)


def with_topk(exchange):
    return composed(select.topk(density=DENSITY), exchange)


def with_topk_a(selector):
    return composed(selector, allreduce.topk_a())


def ok_topk_sgd(**options):
    sparse = with_topk(allreduce.ok_topk(density=DENSITY))(**{"learning_rate": RATE, **options})
    return optax.chain(sparse, optax.scale(-1.0))


def dgc(**options):
    correction = optax_ext.momentum_correction(0.9)
    return with_topk_a(select.dgc(density=DENSITY))(**{"correction": correction, **options})


def hitopk(**options):
    exchange = allreduce.hierarchical(inner_axis="device", outer=allreduce.topk_a())
    return optax_ext.sparse_allreduce(select.mstopk(density=DENSITY), exchange, **options)


# For each alias the arguments besides density and axis that it needs, and the composition.
ALIASES = {
    "adtopk": ({}, with_topk_a(select.adtopk(density=DENSITY))),
    "adtopk_interleaved": ({}, with_topk_a(select.adtopk_interleaved(density=DENSITY))),
    "adtopk_threshold": (
        {"steps": 9},
        with_topk_a(select.adtopk_threshold(density=DENSITY, steps=9)),
    ),
    "dgc": ({}, dgc),
    "gaussian_k": ({}, with_topk_a(select.gaussian_k(density=DENSITY))),
    "gtopk": ({}, with_topk(allreduce.gtopk(density=DENSITY))),
    "hitopk": ({"inner_axis": "device"}, hitopk),
    "mstopk": ({}, with_topk_a(select.mstopk(density=DENSITY))),
    "ok_topk": ({}, with_topk(allreduce.ok_topk(density=DENSITY))),
    "ok_topk_sgd": ({"learning_rate": RATE}, ok_topk_sgd),
    "quantized_topk": ({}, with_topk(allreduce.dsar_split_allgather(codec=wire.qsgd()))),
    "redsync": ({}, with_topk_a(select.redsync(density=DENSITY))),
    "sidco": ({}, with_topk_a(select.sidco(density=DENSITY))),
    "topk_a": ({}, with_topk(allreduce.topk_a())),
    "topk_dsa": ({}, with_topk(allreduce.dsar_split_allgather())),
}


def axes_of(name):
    return (("node", "device"), (NODES, DEVICES)) if name == "hitopk" else ("w", WORKERS)


def alias(name, **options):
    needed = {"density": DENSITY, "axis": axes_of(name)[0], **ALIASES[name][0]}
    return getattr(optax_ext, name)(**{**needed, **options})


def composition(name, **options):
    return ALIASES[name][1](axis=axes_of(name)[0], **options)


def gradients(name):
    rng = np.random.default_rng(0)
    shape = (NODES, DEVICES) if name == "hitopk" else (WORKERS,)
    return jax.tree.map(
        lambda x: rng.standard_normal((STEPS, *shape, *x.shape)).astype(np.float32), PARAMS
    )


def program(name, tx):
    """Some steps of all workers: updates and states, ``[STEPS, workers, ...]``."""

    def train(gradients):
        def step(state, gradient):
            updates, state = tx.update(gradient, state)
            return state, (updates, optax_ext.get_state(state))

        first = jax.tree.map(lambda x: x[0], gradients)
        return jax.lax.scan(step, tx.init(first), gradients)[1]

    axis, axis_size = axes_of(name)
    return sc.simulate(train, axis=axis, axis_size=axis_size, in_axes=1, out_axes=1)


@functools.cache
def run(name):
    return jax.tree.map(np.asarray, program(name, alias(name))(gradients(name)))


def flat(tree, lead):
    """``[*lead, n]``, the leaves side by side."""
    return np.concatenate([np.reshape(x, (*lead, -1)) for x in jax.tree.leaves(tree)], -1)


def test_every_alias_has_a_row():
    def is_alias(part):
        return inspect.isfunction(part) and "density" in inspect.signature(part).parameters

    public = {name: getattr(optax_ext, name) for name in optax_ext.__all__}
    assert {name for name, part in public.items() if is_alias(part)} == set(ALIASES)
    in_files = {name for name, part in public.items() if part.__module__.endswith("_aliases")}
    assert in_files == set(ALIASES)


# Eight workers compile for seconds. The parts of all aliases are compared quickly further down.
ON_EIGHT_WORKERS = [
    pytest.param(name, marks=() if name in ("hitopk", "topk_a") else pytest.mark.slow)
    for name in ALIASES
]


@pytest.mark.parametrize("name", ON_EIGHT_WORKERS)
def test_it_is_its_composition_bit_for_bit(name):
    expected = program(name, composition(name))(gradients(name))
    assert jax.tree.structure(run(name)) == jax.tree.structure(expected)
    for got, wanted in zip(jax.tree.leaves(run(name)), jax.tree.leaves(expected)):
        assert got.tobytes() == np.asarray(wanted).tobytes()


@pytest.mark.parametrize("name", ON_EIGHT_WORKERS)
def test_nothing_is_lost_and_all_workers_agree(name):
    updates, state = run(name)
    lead = state.count.shape
    updates = flat(updates, lead).reshape(STEPS, WORKERS, SIZE)
    assert (updates == updates[:, :1]).all()
    assert (state.info.delivered > 0).all()
    rows = lead if name != "hitopk" else (STEPS, NODES)

    def sums(rows_of_workers):
        return flat([rows_of_workers], rows)[..., :SIZE].sum(1, dtype=np.float64)

    kept = sums(state.residual)
    given = flat(gradients(name), (STEPS, WORKERS)).sum(1, dtype=np.float64)
    if name == "dgc":  # What is accumulated are velocities.
        given[1:] += 0.9 * sums(state.velocity)[:-1]
    scale = -WORKERS / RATE if name == "ok_topk_sgd" else WORKERS
    kept = kept / RATE if name == "ok_topk_sgd" else kept
    before = np.concatenate([np.zeros((1, SIZE)), kept[:-1]])
    applied = scale * updates[:, 0].astype(np.float64)
    np.testing.assert_allclose(applied + kept, before + given, rtol=1e-5, atol=2e-5)


DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(optax_ext.sparse_allreduce).parameters.items()
}
OPTIONS = {
    "nonfinite": "drop",
    "learning_rate": 0.125,
    "correction": optax_ext.momentum_correction(0.5),
    "density_schedule": 0.05,
    "dense_steps": 2,
}


def text(name, tx):
    """The program of one step for few workers, which is traced in no time."""
    axis, _ = axes_of(name)
    shape = (2, 2) if name == "hitopk" else (2,)
    gradient = jax.tree.map(lambda x: jnp.zeros((*shape, *x.shape)), PARAMS)

    def step(gradient):
        return tx.update(gradient, tx.init(gradient))

    return sc.simulate(step, axis=axis, axis_size=shape).lower(gradient).as_text()


@pytest.mark.parametrize("name", ALIASES)
def test_options_and_parts_reach_sparse_allreduce(name, monkeypatch):
    """What the alias and its composition give to sparse_allreduce is the same."""
    given = []

    def record(selector, allreduce, **options):
        describe = optax_ext._settings.describe
        # An alias may say what is the default anyway.
        known = {key: value for key, value in options.items() if value != DEFAULTS.get(key)}
        given.append((describe(selector), describe(allreduce), known))
        return optax.identity()

    monkeypatch.setattr(optax_ext._aliases, "sparse_allreduce", record)
    monkeypatch.setattr(optax_ext, "sparse_allreduce", record)
    # The compositions were made with the function itself.
    parts = ALIASES[name][1]
    alias(name, **OPTIONS)
    if isinstance(parts, functools.partial):
        record(*parts.args, axis=axes_of(name)[0], **OPTIONS)
    else:
        composition(name, **OPTIONS)
    assert len(given) == 2
    assert given[0] == given[1]
    assert given[0][2] == {"axis": axes_of(name)[0], **OPTIONS}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIASES)
def test_options_make_the_program_of_the_composition(name):
    """All options at once make the same program, so that none is left out."""
    expected = text(name, composition(name, **OPTIONS))
    assert text(name, alias(name, **OPTIONS)) == expected
    assert text(name, alias(name)) != expected


@pytest.mark.parametrize("name", ALIASES)
def test_axis_size_is_for_init_outside(name):
    if name == "hitopk":  # Its state says how many workers a node has; axis_size does not.
        with pytest.raises(ValueError, match=r"axis=\('node', 'device'\) is not bound"):
            alias(name, axis_size=8).init(PARAMS)
        return
    state = optax_ext.get_state(alias(name, axis_size=5).init(PARAMS))
    assert state is not None
    assert state.residual.shape == (5, SIZE)


@pytest.mark.parametrize("name", ALIASES)
def test_bad_arguments_are_named(name):
    with pytest.raises(TypeError, match="unexpected keyword argument 'densty_schedule'"):
        alias(name, densty_schedule=0.1)
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 1\.5"):
        alias(name, density=1.5)
    with pytest.raises(ValueError, match=r"nonfinite must be one of .*got 'x'"):
        alias(name, nonfinite="x")
    with pytest.raises(TypeError, match=r"missing .*'density'|missing .*'axis'"):
        getattr(optax_ext, name)(**ALIASES[name][0])


def test_arguments_of_their_own():
    """What only some aliases take reaches the part that it is for."""

    def settings(tx):
        return optax_ext.get_state(tx.init(PARAMS)).settings

    outside = {"axis_size": 4}
    narrow = wire.narrow16()
    for name in ("topk_a", "gtopk", "topk_dsa"):
        assert "codec=narrow16" in settings(alias(name, codec=narrow, **outside)).allreduce
        given = alias(name, selector=select.mstopk(density=0.2), **outside)
        assert settings(given).selector == "mstopk(density=0.2, samplings=30)"
    assert "slack=2.0" in settings(alias("topk_dsa", slack=2.0, **outside)).allreduce
    quantized = settings(alias("quantized_topk", bits=4, bucket=64, **outside)).allreduce
    assert "bits=4, bucket=64" in quantized
    for name in ("ok_topk", "ok_topk_sgd"):
        assert "slack=1.5" in settings(alias(name, slack=1.5, **outside)).allreduce
    corrected = alias("dgc", momentum=0.5, nesterov=True, masking=False, max_norm=2.0, **outside)
    assert len(corrected.init(PARAMS)) == 2  # The clipping comes first.

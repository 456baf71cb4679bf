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
from optax_ext._state._whole import whole
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


def ok_topk_sgd(rate=None, **options):
    local = optax.scale(RATE) if rate is None else rate
    sparse = with_topk(allreduce.ok_topk(density=DENSITY))(local=local, **options)

    def update(updates, state, params=None):
        updates, state = sparse.update(updates, state, params)
        return jax.tree.map(jnp.negative, updates), state

    return whole(optax.GradientTransformation(sparse.init, update))


def dgc(**options):
    correction = optax_ext.momentum_correction(0.9)
    return with_topk_a(select.dgc(density=DENSITY))(**{"correction": correction, **options})


def hitopk(**options):
    exchange = allreduce.hierarchical(inner_axis="device", outer=allreduce.topk_a())
    return optax_ext.sparse_allreduce(select.mstopk(density=DENSITY), exchange, **options)


def quantized_topk(**options):
    codec = wire.without_feedback(wire.qsgd(bits=4, bucket=1024))
    exchange = allreduce.dsar_split_allgather(codec=codec)
    selector = select.bucketed(density=DENSITY, bucket=512)
    return optax_ext.sparse_allreduce(selector, exchange, **options)


def other_selection(selector):
    return {"selector": selector}, with_topk_a(selector)


# For each alias the arguments besides density and axis that it needs, and the composition. A
# system that is topk_a with another selection is named "topk_a, selector".
ALIASES = {
    "dgc": ({}, dgc),
    "gtopk": ({}, with_topk(allreduce.gtopk(density=DENSITY))),
    "hitopk": ({"inner_axis": "device"}, hitopk),
    "ok_topk": ({}, with_topk(allreduce.ok_topk(density=DENSITY))),
    "ok_topk_sgd": ({"learning_rate": RATE}, ok_topk_sgd),
    "quantized_topk": ({}, quantized_topk),
    "topk_a": ({}, with_topk(allreduce.topk_a())),
    "topk_dsa": ({}, with_topk(allreduce.dsar_split_allgather())),
    "topk_a, adtopk": other_selection(select.adtopk(density=DENSITY)),
    "topk_a, adtopk_interleaved": other_selection(select.adtopk_interleaved(density=DENSITY)),
    "topk_a, adtopk_threshold": other_selection(select.adtopk_threshold(density=DENSITY, steps=9)),
    "topk_a, gaussian_k": other_selection(select.gaussian_k(density=DENSITY)),
    "topk_a, mstopk": other_selection(select.mstopk(density=DENSITY)),
    "topk_a, redsync": other_selection(select.redsync(density=DENSITY)),
    "topk_a, sidco": other_selection(select.sidco(density=DENSITY)),
}


def function(name):
    return getattr(optax_ext, name.split(",")[0])


def axes_of(name):
    return (("node", "device"), (NODES, DEVICES)) if name == "hitopk" else ("w", WORKERS)


def alias(name, **options):
    needed = {"density": DENSITY, "axis": axes_of(name)[0], **ALIASES[name][0]}
    return function(name)(**{**needed, **options})


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
    rows = {name.split(",")[0] for name in ALIASES}
    # Whole optimizers have tests of their own.
    optimizers = {name for name, part in public.items() if "._optimizers." in part.__module__}
    assert {name for name, part in public.items() if is_alias(part)} - optimizers == rows
    in_files = {name for name, part in public.items() if part.__module__.endswith("_aliases")}
    assert in_files == rows


# They compile for seconds. Of those that differ by the selection alone one with a state stands for
# all; the parts of each are compared quickly further down.
COMPILED = [name for name in ALIASES if "," not in name or name == "topk_a, adtopk_threshold"]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_it_is_its_composition_bit_for_bit(name):
    expected = program(name, composition(name))(gradients(name))
    assert jax.tree.structure(run(name)) == jax.tree.structure(expected)
    for got, wanted in zip(jax.tree.leaves(run(name)), jax.tree.leaves(expected)):
        assert got.tobytes() == np.asarray(wanted).tobytes()


# By intent nobody keeps what `quantized_topk` rounds off: tests/optax_ext/test_lossy.py.
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMPILED if name != "quantized_topk"])
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
    "local": optax.scale(0.125),
    "correction": optax_ext.momentum_correction(0.5),
    "residual": optax_ext.residual(jnp.bfloat16, decay=0.5),
    "dense_steps": 2,
    "dense_leaves": optax_ext.small_leaves(min_size=1, min_ndim=2),
}
# What an alias sets itself is none of its options.
ITS_OWN = {"ok_topk_sgd": "local", "dgc": "correction"}


def options_of(name):
    return {key: value for key, value in OPTIONS.items() if key != ITS_OWN.get(name)}


def comparable(key, value):
    """An option as what it does: two of the same arguments are different functions."""
    if key == "local":
        return float(value.update(jnp.ones(()), value.init(jnp.ones(())))[0])
    return str(value.spec) if key == "correction" else value


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
        # An alias may say what is the default anyway.
        known = {
            key: comparable(key, value)
            for key, value in options.items()
            if value != DEFAULTS.get(key)
        }
        given.append((str(selector.spec), str(allreduce.spec), known))
        return optax.identity()

    monkeypatch.setattr(optax_ext._aliases, "sparse_allreduce", record)
    monkeypatch.setattr(optax_ext, "sparse_allreduce", record)
    # The compositions were made with the function itself.
    parts = ALIASES[name][1]
    options = options_of(name)
    alias(name, **options)
    if isinstance(parts, functools.partial):
        record(*parts.args, axis=axes_of(name)[0], **options)
    else:
        composition(name, **options)
    assert len(given) == 2
    assert given[0] == given[1]
    assert "None" not in given[0][:2]
    expected = {"axis": axes_of(name)[0]} | {k: comparable(k, v) for k, v in options.items()}
    its_own = {"ok_topk_sgd": RATE, "dgc": str(optax_ext.momentum_correction(0.9).spec)}
    if name in ITS_OWN:
        expected[ITS_OWN[name]] = its_own[name]
    assert given[0][2] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_options_make_the_program_of_the_composition(name):
    """All options at once make the same program, so that none is left out."""
    expected = text(name, composition(name, **options_of(name)))
    assert text(name, alias(name, **options_of(name))) == expected
    assert text(name, alias(name)) != expected


@pytest.mark.slow
def test_ok_topk_sgd_puts_a_schedule_in_front_of_the_accumulation():
    schedule = optax.piecewise_constant_schedule(0.5, {2: 0.1})
    written_out = composition("ok_topk_sgd", rate=optax.scale_by_schedule(schedule))
    given = text("ok_topk_sgd", alias("ok_topk_sgd", learning_rate=schedule))
    assert given == text("ok_topk_sgd", written_out)
    assert given != text("ok_topk_sgd", alias("ok_topk_sgd"))


@pytest.mark.parametrize("name", ALIASES)
def test_the_state_of_all_workers_on_one_device(name):
    with pytest.raises(ValueError, match=r"axis=.* is not bound"):
        alias(name).init(PARAMS)
    sizes = {"node": 3, "device": 2} if name == "hitopk" else {"w": 5}
    state = optax_ext.get_state(optax_ext.init_state(alias(name), PARAMS, sizes))
    assert state is not None
    assert state.residual.shape == ((6, 51) if name == "hitopk" else (5, SIZE))


@pytest.mark.parametrize("name", ALIASES)
def test_bad_arguments_are_named(name):
    with pytest.raises(TypeError, match="unexpected keyword argument 'dense_step'"):
        alias(name, dense_step=1)
    with pytest.raises(ValueError, match=r"density must be in \(0, 1\], got 1\.5"):
        alias(name, density=1.5)
    with pytest.raises(ValueError, match=r"nonfinite must be one of .*got 'x'"):
        alias(name, nonfinite="x")
    with pytest.raises(TypeError, match=r"missing .*'density'|missing .*'axis'"):
        function(name)(**ALIASES[name][0])


def test_arguments_of_their_own():
    """What only some aliases take reaches the part that it is for."""

    def settings(tx):
        return optax_ext.get_state(optax_ext.init_state(tx, PARAMS, {"w": 4})).settings

    narrow = wire.narrow16()
    for name in ("topk_a", "gtopk", "topk_dsa"):
        assert "codec=narrow16" in settings(alias(name, codec=narrow)).allreduce
        given = alias(name, selector=select.mstopk(density=0.05))
        assert settings(given).selector == "mstopk(density=0.05, samplings=30)"
    assert "slack=2.0" in settings(alias("topk_dsa", slack=2.0)).allreduce
    quantized = settings(alias("quantized_topk", bits=4, bucket=64)).allreduce
    assert "bits=4, bucket=64" in quantized.replace("bucket=64, bits=4", "bits=4, bucket=64")
    assert quantized.count("without_feedback") == 2
    in_practice = settings(alias("quantized_topk", dense_only=True, feedback=True)).allreduce
    assert "without_feedback" not in in_practice
    assert ", codec=raw(" in in_practice or "(codec=raw(" in in_practice
    assert "slack=1.5" in settings(alias("ok_topk", slack=1.5)).allreduce
    corrected = alias("dgc", momentum=0.5, nesterov=True, masking=False, max_norm=2.0)
    # The clipping comes first.
    assert len(optax_ext.init_state(corrected, PARAMS, {"w": 4})) == 2
    correction = settings(corrected).correction
    assert correction == str(optax_ext.momentum_correction(0.5, nesterov=True, masking=False).spec)
    schedule = optax.piecewise_constant_schedule(0.5, {2: 0.1})
    scheduled = settings(alias("ok_topk_sgd", learning_rate=schedule))
    assert scheduled.local == "ScaleByScheduleState"


@pytest.mark.parametrize(
    "name", [name for name in ALIASES if "selector" in inspect.signature(function(name)).parameters]
)
def test_a_selector_of_a_larger_density_than_the_alias(name):
    for density in (DENSITY, DENSITY / 2):
        alias(name, selector=select.topk(density=density))
    with pytest.raises(ValueError, match=r"the selector has density=0\.5, and density=0\.1"):
        alias(name, selector=select.topk(density=0.5))

"""Each alias is the composition that its docstring names, and its options are those of all."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optax_ext
from optax_ext._state._whole import whole
from sparse_collectives import allreduce, select, wire
from tests.optax_ext.helpers import bits, normal, run

DENSITY, RATE, STEPS, WORKERS = 0.1, 0.25, 4, 8
PARAMS = {"a": jnp.zeros((9, 10)), "b": jnp.zeros(11)}
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
    return with_topk_a(select.published.dgc(density=DENSITY))(
        **{"correction": correction, **options}
    )


def hitopk(**options):
    exchange = allreduce.hierarchical(inner_axis="device", outer=allreduce.topk_a())
    return optax_ext.sparse_allreduce(select.published.mstopk(density=DENSITY), exchange, **options)


def quantized_topk(**options):
    codec = wire.without_feedback(wire.qsgd(bits=4, bucket=1024))
    exchange = allreduce.published.dsar_split_allgather(codec=codec)
    selector = select.bucketed(density=DENSITY, bucket=512)
    return optax_ext.sparse_allreduce(selector, exchange, **options)


def other_selection(selector):
    return {"selector": selector}, with_topk_a(selector)


# For each alias the arguments besides density and axis that it needs, and the composition. A
# system that is topk_a with another selection is named "topk_a, selector".
ALIASES = {
    "dgc": ({}, dgc),
    "gtopk": ({}, with_topk(allreduce.published.gtopk(density=DENSITY))),
    "hitopk": ({"inner_axis": "device"}, hitopk),
    "ok_topk": ({}, with_topk(allreduce.ok_topk(density=DENSITY))),
    "ok_topk_sgd": ({"learning_rate": RATE}, ok_topk_sgd),
    "quantized_topk": ({}, quantized_topk),
    "topk_a": ({}, with_topk(allreduce.topk_a())),
    "topk_dsa": ({}, with_topk(allreduce.published.dsar_split_allgather())),
    "topk_a, adtopk": other_selection(select.published.adtopk(density=DENSITY)),
    "topk_a, adtopk_interleaved": other_selection(
        select.published.adtopk_interleaved(density=DENSITY)
    ),
    "topk_a, adtopk_threshold": other_selection(
        select.published.adtopk_threshold(density=DENSITY, steps=9)
    ),
    "topk_a, gaussian_k": other_selection(select.published.gaussian_k(density=DENSITY)),
    "topk_a, mstopk": other_selection(select.published.mstopk(density=DENSITY)),
    "topk_a, redsync": other_selection(select.published.redsync(density=DENSITY)),
    "topk_a, sidco": other_selection(select.published.sidco(density=DENSITY)),
}


def function(name):
    name = name.split(",")[0]
    return getattr(optax_ext, name, None) or getattr(optax_ext.published, name)


def axes_of(name):
    return (("node", "device"), (NODES, DEVICES)) if name == "hitopk" else ("w", WORKERS)


def alias(name, **options):
    needed = {"density": DENSITY, "axis": axes_of(name)[0], **ALIASES[name][0]}
    return function(name)(**{**needed, **options})


def composition(name, **options):
    return ALIASES[name][1](axis=axes_of(name)[0], **options)


def gradients(name):
    shape = (NODES, DEVICES) if name == "hitopk" else (WORKERS,)
    return {key: normal((STEPS, *shape, *x.shape), 1) for key, x in PARAMS.items()}


def test_every_alias_has_a_row():
    def is_alias(part):
        return inspect.isfunction(part) and "density" in inspect.signature(part).parameters

    public = {name: getattr(optax_ext, name) for name in optax_ext.__all__}
    public = {name: part for name, part in public.items() if hasattr(part, "__module__")}
    public |= {name: getattr(optax_ext.published, name) for name in optax_ext.published.__all__}
    rows = {name.split(",")[0] for name in ALIASES}
    # Whole optimizers have tests of their own.
    optimizers = {name for name, part in public.items() if "._optimizers." in part.__module__}
    assert {name for name, part in public.items() if is_alias(part)} - optimizers == rows
    in_files = {
        name for name, part in public.items() if part.__module__.endswith(("_aliases", "published"))
    }
    assert in_files == rows


# They compile for seconds. Of those that differ by the selection alone one with a state stands for
# all; the parts of each are compared quickly further down.
COMPILED = [name for name in ALIASES if "," not in name or name == "topk_a, adtopk_threshold"]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_it_is_its_composition_bit_for_bit(name):
    got, expected = (
        run(tx, gradients(name), axes_of(name)[0]) for tx in (alias(name), composition(name))
    )
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert bits(got) == bits(expected)
    # Of whole optimizers and gradients alike the updates are something.
    assert all(np.any(leaf) for leaf in jax.tree.leaves(got.updates))


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
    monkeypatch.setattr(optax_ext.published, "sparse_allreduce", record)
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


# The options that functions share, in each signature, and the arguments that each needs besides.
COMMON = {"nonfinite", "residual", "dense_steps", "dense_leaves"}
LOCAL = COMMON | {"local"}
SPARSE = LOCAL | {"correction", "limit"}
SOME_DENSITY = {"density": 0.1}
TAKEN = {
    "sparse_adamw": (COMMON, {"learning_rate": 0.1}),
    "sparse_sgd": (COMMON | {"correction"}, {"learning_rate": 0.1}),
    "ok_topk_sgd": (COMMON | {"correction"}, {"learning_rate": 0.1, **SOME_DENSITY}),
    "powersgd": (LOCAL, {"rank": 1}),
    "acp_sgd": (LOCAL, {"rank": 1}),
    "dgc": (LOCAL, SOME_DENSITY),
    "ok_topk": (SPARSE | {"slack", "codec"}, SOME_DENSITY),
    "topk_a": (SPARSE, SOME_DENSITY),
    "gtopk": (SPARSE, SOME_DENSITY),
    "topk_dsa": (SPARSE, SOME_DENSITY),
    "quantized_topk": (SPARSE, SOME_DENSITY),
    "hitopk": (SPARSE, {**SOME_DENSITY, "inner_axis": "w"}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_each_option_stands_in_the_signature_and_reaches_what_checks_it(name):
    make, (taken, given) = function(name), TAKEN[name]
    parameters = inspect.signature(make).parameters
    assert taken <= set(parameters)
    assert not any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    assert parameters["nonfinite"].default == "skip"
    # A number would be an array to optax.inject_hyperparams.
    assert parameters["dense_steps"].default is None
    axis = ("nodes", "w") if name == "hitopk" else "w"
    policy = r"nonfinite must be one of .*'propagate', got 'ignore'"
    wrong = [(ValueError, policy, {"nonfinite": "ignore"})]
    said = rf"^{name}\(\) got an unexpected keyword .*'dense_step'. Did you mean dense_steps="
    wrong.append((TypeError, said, {"dense_step": 3}))
    if "density" in parameters:
        density = r"density must be in \(0, 1\], got 1\.5"
        wrong.append((ValueError, density, {"density": 1.5}))
    for error, message, arguments in wrong:
        with pytest.raises(error, match=message):
            make(**{**given, "axis": axis, **arguments})
    with pytest.raises(TypeError, match=r"missing .*'axis'"):
        make(**given)


OPTIMIZERS = ("sparse_adamw", "sparse_sgd", "ok_topk_sgd")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_arguments_of_an_optimizer_of_optax_that_would_be_others_here(name):
    """A second one without its name is b1 or a momentum in optax, and would be a density here."""
    make = getattr(optax_ext, name)
    for more in ((0.9,), (0.9, 0.99)):
        message = rf"{name} takes the learning rate and keywords, got 0.9 .*density=0\.9.*b1"
        with pytest.raises(TypeError, match=message):
            make(0.1, *more, axis="data")
    parameters = inspect.signature(make).parameters.values()
    assert [p.name for p in parameters if p.kind != p.KEYWORD_ONLY] == ["learning_rate"]
    for momentum in ("b1", "momentum"):
        with pytest.raises(TypeError, match=f"{name} has no {momentum}=: .*Leave {momentum} out"):
            make(0.1, density=0.1, axis="data", **{momentum: 0.9})


def test_arguments_of_their_own():
    """What only some aliases take reaches the part that it is for."""

    def settings(tx):
        return optax_ext.get_state(optax_ext.init_state(tx, PARAMS, {"w": 4})).settings

    narrow = wire.narrow16()
    for name in ("topk_a", "gtopk", "topk_dsa"):
        assert "codec=narrow16" in settings(alias(name, codec=narrow)).allreduce
        given = alias(name, selector=select.published.mstopk(density=0.05))
        assert settings(given).selector == "mstopk(density=0.05, samplings=30)"
    by_layer = settings(alias("topk_a", selector=select.layerwise(select.topk(density=0.1))))
    assert by_layer.selector == "layerwise(selector=topk(density=0.1))"
    assert (by_layer.local, by_layer.correction) == ("none", "none")
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


TAKE_A_SELECTOR = [
    name
    for name in (*ALIASES, "sparse_adamw", "sparse_sgd")
    if "selector" in inspect.signature(function(name)).parameters
]


@pytest.mark.parametrize("name", TAKE_A_SELECTOR)
def test_a_selector_of_a_larger_density_than_the_alias(name):
    def make(density):
        selector = select.topk(density=density)
        if name in ALIASES:
            return alias(name, selector=selector)
        return function(name)(0.1, density=DENSITY, axis="w", selector=selector)

    make(DENSITY)
    make(DENSITY / 2)
    with pytest.raises(ValueError, match=r"the selector has density=0\.5, and density=0\.1"):
        make(0.5)

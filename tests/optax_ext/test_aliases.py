"""Each alias is the composition that its docstring names, and takes the common options."""

import inspect

import jax.numpy as jnp
import optax
import pytest

import optax_ext
from optax_ext._transforms import _ok_topk, _topk_a
from optax_ext.published import _every_step
from sparse_collectives import allreduce, select, wire
from tests.optax_ext.helpers import refused

DENSITY, RATE = 0.1, 0.25
PARAMS = {"a": jnp.zeros((9, 10)), "b": jnp.zeros(11)}
TOPK, TOPK_A, PUBLISHED = select.topk(density=DENSITY), allreduce.topk_a(), select.published
# For each alias, its required arguments besides density and axis, and its parts. A
# system that is topk_a with another selection is named "topk_a, selector".
ALIASES = {
    "dgc": ({}, PUBLISHED.dgc(density=DENSITY), TOPK_A),
    "gtopk": ({}, TOPK, allreduce.published.gtopk(density=DENSITY)),
    "hitopk": (
        {"inner_axis": "device"},
        PUBLISHED.mstopk(density=DENSITY),
        allreduce.hierarchical(inner_axis="device", outer=TOPK_A),
    ),
    "ok_topk": ({}, TOPK, allreduce.ok_topk(density=DENSITY)),
    "ok_topk_sgd": ({"learning_rate": RATE}, TOPK, allreduce.ok_topk(density=DENSITY)),
    "quantized_topk": (
        {},
        select.bucketed(density=DENSITY, bucket=512),
        allreduce.published.dsar_split_allgather(
            codec=wire.without_feedback(wire.qsgd(bits=4, bucket=1024))
        ),
    ),
    "topk_a": ({}, TOPK, TOPK_A),
    "topk_dsa": ({}, TOPK, allreduce.published.dsar_split_allgather()),
} | {
    f"topk_a, {name}": ({"selector": selector}, selector, TOPK_A)
    for name, selector in {
        "adtopk": PUBLISHED.adtopk(density=DENSITY),
        "adtopk_interleaved": PUBLISHED.adtopk_interleaved(density=DENSITY),
        "adtopk_threshold": PUBLISHED.adtopk_threshold(density=DENSITY, steps=9),
        "gaussian_k": PUBLISHED.gaussian_k(density=DENSITY),
        "mstopk": PUBLISHED.mstopk(density=DENSITY),
        "redsync": PUBLISHED.redsync(density=DENSITY),
        "sidco": PUBLISHED.sidco(density=DENSITY),
    }.items()
}


def function(name):
    name = name.split(",")[0]
    return getattr(optax_ext, name, None) or getattr(optax_ext.published, name)


def axis_of(name):
    return ("node", "device") if name == "hitopk" else "w"


def alias(name, **options):
    needed = {"density": DENSITY, "axis": axis_of(name), **ALIASES[name][0]}
    return function(name)(**{**needed, **options})


def test_aliases_have_a_row_each():
    def is_alias(part):
        return inspect.isfunction(part) and "density" in inspect.signature(part).parameters

    modules = (optax_ext, optax_ext.published)
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    aliases = {name: part for name, part in public.items() if is_alias(part)}
    # Optimizers with a density of their own have other tests, as have rounds of local steps.
    found = {
        name
        for name, part in aliases.items()
        if inspect.signature(part).parameters["density"].default is inspect.Parameter.empty
        and "._diloco" not in part.__module__
    }
    assert found == {name.split(",")[0] for name in ALIASES}


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
# An argument that an alias sets itself is not one of its options.
ITS_OWN = {"ok_topk_sgd": {"local": -RATE}}
ITS_OWN["dgc"] = {"correction": str(optax_ext.momentum_correction(0.9).spec)}


def comparable(key, value):
    """An option by its behavior: two with the same arguments are different functions."""
    if key == "local":
        return float(value.update(jnp.ones(()), value.init(jnp.ones(())))[0])
    return str(value.spec) if key == "correction" else value


@pytest.mark.parametrize("name", ALIASES)
def test_alias_is_its_composition_whose_options_it_takes(name, monkeypatch):
    """It calls sparse_allreduce with the same arguments, so it behaves the same to the bit."""
    given = []

    def record(selector, allreduce, **options):
        # An alias may pass a default explicitly.
        known = {k: comparable(k, v) for k, v in options.items() if v != DEFAULTS.get(k)}
        given.append((str(selector.spec), str(allreduce.spec), known))
        return optax.identity()

    for module in (_ok_topk, _topk_a, _every_step):
        monkeypatch.setattr(module, "sparse_allreduce", record)
    own = ITS_OWN.get(name, {})
    options = {key: value for key, value in OPTIONS.items() if key not in own}
    alias(name, **options)
    _, selector, exchange = ALIASES[name]
    expected = {key: comparable(key, value) for key, value in options.items()} | own
    expected["axis"] = axis_of(name)
    assert given == [(str(selector.spec), str(exchange.spec), expected)]
    assert None not in (selector.spec, exchange.spec)


# The options that functions share, in each signature, and the arguments that each needs besides.
COMMON = {"nonfinite", "residual", "dense_steps", "dense_leaves"}
LOCAL = COMMON | {"local"}
SPARSE = LOCAL | {"correction", "limit", "every"}
SOME_DENSITY = {"density": 0.1}
TAKEN = {
    "sparse_adamw": (COMMON, {"learning_rate": 0.1}),
    "sparse_sgd": (COMMON | {"correction"}, {"learning_rate": 0.1}),
    "ok_topk_sgd": (COMMON | {"correction"}, {"learning_rate": 0.1, **SOME_DENSITY}),
    "sparse_optimizer": (COMMON, {"scaling": optax.identity(), "learning_rate": 0.1}),
    "powersgd": (LOCAL, {"rank": 1}),
    "acp_sgd": (LOCAL, {"rank": 1}),
    "quantized": (LOCAL, {}),
    "dgc": (LOCAL, SOME_DENSITY),
    "ok_topk": (SPARSE | {"slack", "codec"}, SOME_DENSITY),
    "topk_a": (SPARSE, SOME_DENSITY),
    "gtopk": (SPARSE, SOME_DENSITY),
    "topk_dsa": (SPARSE, SOME_DENSITY),
    "quantized_topk": (SPARSE, SOME_DENSITY),
    "hitopk": (SPARSE, {**SOME_DENSITY, "inner_axis": "w"}),
}


def test_every_function_that_takes_options_is_in_the_table():
    found = {
        name
        for module in (optax_ext, optax_ext.published)
        for name in module.__all__
        if inspect.isfunction(getattr(module, name))
        and "nonfinite" in inspect.signature(getattr(module, name)).parameters
    }
    # The others are aliases of it.
    assert found - {"sparse_allreduce"} == TAKEN.keys()


@pytest.mark.parametrize("name", TAKEN)
def test_options_stand_in_the_signature_and_reach_what_checks_them(name):
    make, (taken, given) = function(name), TAKEN[name]
    parameters = inspect.signature(make).parameters
    assert taken <= set(parameters)
    assert not any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    assert parameters["nonfinite"].default == "skip"
    # optax.inject_hyperparams would turn a number into an array.
    assert parameters["dense_steps"].default is None
    refused(r"missing .*'axis'", make, error=TypeError, **given)
    given = {**given, "axis": ("nodes", "w") if name == "hitopk" else "w"}
    refused("nonfinite must be .*'propagate', got 'ignore'", make, **given, nonfinite="ignore")
    said = rf"^{name}\(\) got an unexpected keyword .*'dense_step'. Did you mean dense_steps="
    refused(said, make, error=TypeError, **given, dense_step=3)
    if "density" in parameters:
        refused(r"density must be in \(0, 1\], got 1\.5", make, **given | {"density": 1.5})


WHOLE = [name for name, (_, given) in TAKEN.items() if next(iter(given), "") == "learning_rate"]


@pytest.mark.parametrize("name", WHOLE)
def test_arguments_of_an_optimizer_of_optax_that_would_be_others_here(name):
    """A second positional argument is b1 or momentum in optax, and would be a density here."""
    make = getattr(optax_ext, name)
    for more in ((0.9,), (0.9, 0.99)):
        message = rf"{name} takes the learning rate and keywords, got 0.9 .*density=0\.9.*b1"
        refused(message, make, 0.1, *more, axis="data", error=TypeError)
    parameters = inspect.signature(make).parameters.values()
    assert [p.name for p in parameters if p.kind != p.KEYWORD_ONLY] == ["learning_rate"]
    for momentum in ("b1", "momentum"):
        message, error = f"{name} has no {momentum}=: .*Leave {momentum} out", TypeError
        if (name, momentum) == ("sparse_adamw", "b1"):
            message, error = "b1=0.9 is for rounds .*Leave b1 out", ValueError
        given = {"density": 0.1, "axis": "data", momentum: 0.9}
        refused(message, make, 0.1, error=error, **given)


def settings(name, **options):
    made = optax_ext.init_state(alias(name, **options), PARAMS, {"w": 4})
    return optax_ext.get_state(made).settings


NARROW, MSTOPK = {"codec": wire.narrow16()}, PUBLISHED.mstopk(density=0.05)
DGC = {"momentum": 0.5, "nesterov": True, "masking": False}
CORRECTION = str(optax_ext.momentum_correction(**DGC).spec)
QUANTIZED = {"bits": 4, "bucket": 64}


@pytest.mark.parametrize(
    ("name", "options", "part", "text"),
    [
        *((name, NARROW, "allreduce", "narrow16") for name in ("topk_a", "gtopk", "topk_dsa")),
        *((x, {"selector": MSTOPK}, "selector", str(MSTOPK.spec)) for x in ("topk_a", "gtopk")),
        ("topk_dsa", {"slack": 2.0}, "allreduce", "slack=2.0"),
        ("ok_topk", {"slack": 1.5}, "allreduce", "slack=1.5"),
        ("ok_topk_sgd", {"learning_rate": lambda count: 0.1}, "local", "ScaleByScheduleState"),
        ("dgc", {"max_norm": 2.0, **DGC}, "correction", CORRECTION),
        ("quantized_topk", QUANTIZED, "allreduce", "bits=4"),
        ("quantized_topk", QUANTIZED, "allreduce", "bucket=64"),
    ],
)
def test_options_of_some_aliases_reach_the_part_that_they_are_for(name, options, part, text):
    assert text in getattr(settings(name, **options), part)


def test_quantized_topk_has_its_codec_with_and_without_feedback():
    assert settings("quantized_topk").allreduce.count("without_feedback") == 2
    assert "without_feedback" not in settings("quantized_topk", feedback=True).allreduce


TAKE_A_SELECTOR = [
    name
    for name in (*ALIASES, "sparse_adamw", "sparse_sgd")
    if "selector" in inspect.signature(function(name)).parameters
]


@pytest.mark.parametrize("name", TAKE_A_SELECTOR)
def test_selector_of_a_larger_density_than_the_alias(name):
    def make(density):
        selector = select.topk(density=density)
        if name in ALIASES:
            return alias(name, selector=selector)
        return function(name)(0.1, density=DENSITY, axis="w", selector=selector)

    make(DENSITY)
    make(DENSITY / 2)
    refused(r"the selector has density=0\.5, and the exchange only density=0\.1", make, 0.5)

"""The options that transformations share: in each signature, and blamed on the right function."""

import inspect

import pytest

import optax_ext

COMMON = {"nonfinite", "residual", "dense_steps", "dense_leaves"}
LOCAL = COMMON | {"local"}
SPARSE = LOCAL | {"correction", "limit"}
# For each function the options that it takes, and the arguments that it needs.
TAKEN = {
    "sparse_adamw": (COMMON, {"learning_rate": 0.1}),
    "sparse_sgd": (COMMON | {"correction"}, {"learning_rate": 0.1}),
    "ok_topk_sgd": (COMMON | {"correction"}, {"learning_rate": 0.1, "density": 0.1}),
    "powersgd": (LOCAL, {"rank": 1}),
    "acp_sgd": (LOCAL, {"rank": 1}),
    "dgc": (LOCAL, {"density": 0.1}),
    "ok_topk": (SPARSE | {"slack", "codec"}, {"density": 0.1}),
    "topk_a": (SPARSE, {"density": 0.1}),
    "gtopk": (SPARSE, {"density": 0.1}),
    "topk_dsa": (SPARSE, {"density": 0.1}),
    "quantized_topk": (SPARSE, {"density": 0.1}),
    "hitopk": (SPARSE, {"density": 0.1, "inner_axis": "w"}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_each_option_stands_in_the_signature(name):
    parameters = inspect.signature(getattr(optax_ext, name)).parameters
    assert TAKEN[name][0] <= set(parameters)
    assert not any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    assert parameters["nonfinite"].default == "skip"
    # A number would be an array to optax.inject_hyperparams.
    assert parameters["dense_steps"].default is None


@pytest.mark.parametrize("name", TAKEN)
def test_a_mistyped_option_is_an_error_of_the_function_that_was_called(name):
    given = TAKEN[name][1]
    said = (
        rf"^{name}\(\) got an unexpected keyword argument 'dense_step'. Did you mean dense_steps="
    )
    with pytest.raises(TypeError, match=said):
        getattr(optax_ext, name)(**given, axis="w", dense_step=3)


@pytest.mark.parametrize("name", TAKEN)
def test_an_option_reaches_what_checks_it(name):
    given = TAKEN[name][1]
    axis = ("nodes", "w") if name == "hitopk" else "w"
    with pytest.raises(ValueError, match=r"nonfinite must be .*'ignore'"):
        getattr(optax_ext, name)(**given, axis=axis, nonfinite="ignore")

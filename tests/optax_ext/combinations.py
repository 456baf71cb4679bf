"""Combinations with other libraries: the rows of test_works_with.py and docs/works_with.md."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import optax_ext


class Row(NamedTuple):
    """A combination.

    `code` is the expression that the tests evaluate. In it `reduce` is the allreduce under test
    (sparse, or dense for comparison) and `dense` the dense one. A row without `reduce` is a whole
    SGD of learning rate 0.1 that sends `density` of the entries. `also` names the other mapped
    functions in which it is tested. `how` says in the docs how to write the `model`. `rounding` is
    the tolerance of the comparison with the dense allreduce, if the general one is too small.
    `sharded` is whether the row is also tested with sharded parameters.
    """

    name: str
    code: str
    note: str = ""
    also: tuple[str, ...] = ()
    model: str = "mlp"
    how: str = ""
    rounding: float = 2e-5
    sharded: bool = True
    group: str = ""


ALL = ("pmap", "simulate")
ADAM = "optax.chain(reduce, optax.adam(1e-2))"
WHOLE = "Prefer `optax_ext.sparse_adamw`."
BEHIND = "After the exchange only."
# A sum in another order changes the last bits of a gradient. Newton-Schulz iterations multiply
# small singular values, and their rounding errors, by up to 3.4 each.
MUON = 2e-3
# The dense mean is rounded to bfloat16 (8 bits) during the sum, the sparse one after it. Parameters
# of about 1 then differ by a few units of 2**-8.
BFLOAT16 = 2**-6


def _behind(name: str, optimizer: str, note: str = "", **options: Any) -> Row:
    """An optimizer after the allreduce."""
    return Row(name, f"optax.chain(reduce, {optimizer})", note, **options)


GROUPS = {
    "Optimizers": (
        _behind("`sgd`", "optax.sgd(0.1)", also=ALL),
        _behind("`sgd`, momentum", "optax.sgd(0.1, momentum=0.9)"),
        _behind("`sgd`, Nesterov", "optax.sgd(0.1, momentum=0.9, nesterov=True)"),
        Row("`adam`", ADAM, WHOLE, also=ALL),
        _behind("`adamw`", "optax.adamw(1e-2, weight_decay=0.1)", WHOLE),
        _behind("`lion`", "optax.lion(1e-3)"),
        _behind("`adafactor`", "optax.adafactor(1e-2)"),
        _behind("`lamb`", "optax.lamb(1e-2)"),
        _behind("`lars`", "optax.lars(0.1)"),
        _behind("`optax_ext.contrib.lamb`", 'optax_ext.contrib.lamb(1e-2, axis="data")', also=ALL),
        _behind("`optax_ext.contrib.lars`", 'optax_ext.contrib.lars(0.1, axis="data")'),
        _behind("`contrib.muon`", "optax.contrib.muon(1e-2)", rounding=MUON),
        _behind(
            "`contrib.schedule_free_sgd`",
            "optax.contrib.schedule_free_sgd(0.1)",
            "For evaluation: `schedule_free_eval_params(opt_state[1], params)`.",
        ),
        _behind(
            "`contrib.schedule_free_adamw`",
            "optax.contrib.schedule_free_adamw(1e-2)",
            "For evaluation: `schedule_free_eval_params(opt_state[1], params)`.",
        ),
        Row(
            "`contrib.schedule_free` around the chain",
            "optax.contrib.schedule_free(optax.chain(reduce, optax.sgd(0.1)), 0.1)",
            "For evaluation: `schedule_free_eval_params(opt_state, params)`.",
        ),
        _behind(
            "`polyak_sgd`",
            "optax.polyak_sgd(0.1)",
            "`make_train_step` passes the mean loss as `value`. Your own loop passes `value=`, the "
            "same on every worker.",
        ),
        _behind(
            "`contrib.reduce_on_plateau`",
            "optax.adam(1e-2), optax.contrib.reduce_on_plateau()",
            "It takes `value`, as `polyak_sgd` does. As an optimizer of each worker it needs "
            "`check_vma=False`.",
        ),
        _behind(
            "`contrib.sam`",
            "optax.GradientTransformation(*optax.contrib.sam(optax.sgd(0.1), "
            "optax.chain(optax.contrib.normalize(), optax.sgd(0.05))))",
        ),
        _behind("schedules", "optax.sgd(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10))"),
    ),
    "Wrappers": (
        Row(
            "`optax_ext.multi_steps` around the chain",
            "optax_ext.multi_steps(optax.chain(reduce, optax.adam(1e-2)), 2)",
            also=ALL,
        ),
        Row(
            "`optax_ext.delayed` around the chain",
            "optax_ext.delayed(optax.chain(reduce, optax.adam(1e-2)))",
            "[It costs loss](training.md#a-delay-of-one-step).",
            also=ALL,
        ),
        Row(
            "`MultiSteps` around the chain",
            "optax.MultiSteps(optax.chain(reduce, optax.adam(1e-2)), 2).gradient_transformation()",
            "It exchanges at every mini-step: prefer "
            "[`optax_ext.multi_steps`](#gradient-accumulation).",
            also=ALL,
        ),
        _behind(
            "`MultiSteps` after", "optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation()"
        ),
        _behind(
            "`apply_if_finite`",
            "optax.apply_if_finite(optax.adam(1e-2), 3)",
            BEHIND,
        ),
        _behind(
            "`conditionally_mask`",
            "optax.conditionally_mask(optax.adam(1e-2), lambda step: step % 2 == 0)",
            BEHIND,
        ),
        _behind(
            "`conditionally_transform`",
            "optax.conditionally_transform(optax.scale(0.5), lambda step: step % 2 == 0), "
            "optax.sgd(0.1)",
            BEHIND,
        ),
        Row(
            "`inject_hyperparams`, Ok-Topk SGD",
            "optax.inject_hyperparams(lambda rate: optax.chain(optax_ext.ok_topk(density, "
            'axis="data", local=optax.scale(rate), slack=8.0), optax.scale(-1.0)))(rate=0.1)',
            "[Static arguments](#injected-hyperparameters).",
        ),
        _behind(
            "`inject_hyperparams`, optimizer",
            "optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)",
        ),
        Row(
            "`masked`",
            'optax.chain(optax.masked(reduce, {"w1": True, "b": False, "w2": True}), '
            'optax.masked(dense, {"w1": False, "b": True, "w2": False}), optax.adam(1e-2))',
            "Reduce the other leaves, or [freeze](#lora-and-frozen-parameters) them.",
        ),
        Row(
            "`multi_transform`",
            'optax.multi_transform({"sparse": optax.chain(reduce, optax.adam(1e-2)), "dense": '
            'optax.chain(dense, optax.sgd(0.1))}, {"w1": "sparse", "b": "dense", "w2": '
            '"sparse"})',
            also=ALL,
        ),
        Row(
            "`multi_transform`, frozen leaves",
            'optax.multi_transform({"train": optax.chain(reduce, optax.adam(1e-2)), "freeze": '
            'optax.set_to_zero()}, {"w1": "train", "b": "freeze", "w2": "train"})',
            "See [LoRA](#lora-and-frozen-parameters).",
        ),
    ),
    "Before and after the exchange": (
        Row(
            "`local_clip_by_global_norm` before",
            'optax.chain(optax_ext.local_clip_by_global_norm(0.5, axis="data"), reduce, '
            "optax.sgd(0.1))",
            also=ALL,
        ),
        Row("`clip` before", "optax.chain(optax.clip(0.1), reduce, optax.sgd(0.1))"),
        _behind("`clip_by_global_norm` after", "optax.clip_by_global_norm(0.2), optax.sgd(0.1)"),
        _behind("`ema` after", "optax.ema(0.9), optax.sgd(0.1)"),
        _behind(
            "`freeze`",
            'optax.freeze({"w1": False, "b": True, "w2": False}), optax.sgd(0.1)',
            "Not in optax 0.2.5. The exchange still has the frozen leaf.",
        ),
    ),
    "Models and precision": (
        Row(
            "float32 parameters, bfloat16 compute",
            ADAM,
            model="bfloat16_compute",
            how="cast parameters and inputs to bfloat16 in the loss",
            # Activations are rounded to 8 bits, and the last bit of a parameter can change the
            # direction.
            rounding=2e-3,
        ),
        _behind(
            "bfloat16 parameters, float32 momentum",
            "optax.sgd(0.1, momentum=0.9, accumulator_dtype=jnp.float32)",
            model="bfloat16_params",
            rounding=BFLOAT16,
        ),
        Row("`jax.checkpoint`", ADAM, model="remat", how="`jax.checkpoint(layer)` in the loss"),
        Row("flax linen", ADAM, model="linen", how="`model.apply(params, x)` in the loss"),
        Row(
            "flax linen with `batch_stats`",
            'optax.multi_transform({"params": optax.chain(reduce, optax.adam(1e-2)), '
            '"batch_stats": optax.set_to_zero()}, {"params": "params", '
            '"batch_stats": "batch_stats"})',
            "[With `has_aux=True`](#batch-statistics).",
            model="batch_norm",
            # The gradient of a bias before the normalization consists of rounding errors, which
            # adam scales to whole steps and which differ between programs.
            sharded=False,
        ),
        Row(
            "flax nnx",
            ADAM,
            "See [programs](clients.md).",
            model="nnx",
            how="`graphdef, params = nnx.split(model)`; `nnx.merge(graphdef, params)` in the loss",
        ),
    ),
}
ROWS = tuple(row._replace(group=group) for group, rows in GROUPS.items() for row in rows)


def _mean_square(predicted, y):
    return jnp.mean((predicted - y).astype(jnp.float32) ** 2)


def _mlp(params, x):
    return jnp.tanh(x @ params["w1"] + params["b"][None]) @ params["w2"]


def _params(dtype="float32"):
    rng = np.random.default_rng(0)
    shapes = {"w1": (6, 8), "b": (8,), "w2": (8, 2)}
    return {k: jnp.asarray(rng.standard_normal(s) / 3, dtype) for k, s in shapes.items()}


def model(name: str) -> tuple[Any, Any]:
    """Parameters, and a loss of them and a batch; with auxiliary values for `batch_norm`."""
    inputs = jnp.zeros((1, 6))
    if name in ("mlp", "bfloat16_params"):
        params = _params("float32" if name == "mlp" else "bfloat16")
        return params, lambda p, b: _mean_square(_mlp(p, b[0].astype(p["w1"].dtype)), b[1])
    if name == "bfloat16_compute":

        def compute(p, b):
            half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), p)
            return _mean_square(_mlp(half, b[0].astype(jnp.bfloat16)), b[1])

        return _params(), compute
    if name == "remat":
        return _params(), lambda p, b: _mean_square(jax.checkpoint(_mlp)(p, b[0]), b[1])
    if name == "nnx":
        network = nnx.Sequential(
            nnx.Linear(6, 8, rngs=nnx.Rngs(0)), nnx.tanh, nnx.Linear(8, 2, rngs=nnx.Rngs(1))
        )
        graphdef, params = nnx.split(network)
        return params, lambda p, b: _mean_square(nnx.merge(graphdef, p)(b[0]), b[1])
    if name == "linen":
        network = linen.Sequential([linen.Dense(8), linen.tanh, linen.Dense(2)])
        params = network.init(jax.random.key(0), inputs)
        return params, lambda p, b: _mean_square(network.apply(p, b[0]), b[1])
    assert name == "batch_norm"
    network = linen.Sequential(
        [linen.Dense(8), linen.BatchNorm(use_running_average=False), linen.tanh, linen.Dense(2)]
    )

    def loss(variables, batch):
        predicted, new = network.apply(variables, batch[0], mutable=["batch_stats"])
        return _mean_square(predicted, batch[1]), new["batch_stats"]

    return network.init(jax.random.key(0), inputs), loss


def transformation(row: Row, reduce: Any, density: float | None) -> optax.GradientTransformation:
    """The row's transformation; `density` is None with a dense `reduce`."""
    if "reduce" not in row.code and density is None:
        return optax.chain(reduce, optax.sgd(0.1))
    names = {"optax": optax, "optax_ext": optax_ext, "jnp": jnp, "reduce": reduce}
    names |= {"dense": optax_ext.dense(axis="data"), "density": density}
    return eval(row.code, names)

"""Steps that are not finite: optimizers after the exchange, groups, wrappers, 16-bit leaves."""

import dataclasses
import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import strategies as st

import optax_ext
from optax_ext._error_feedback._dense_state import DenseState
from optax_ext._error_feedback._sparse_state import SparseAllreduceState
from optax_ext._state import _wrappers
from tests.optax_ext.helpers import bits, mesh

SHAPES = {"a": (6, 5), "b": (7,), "c": (3, 2, 4)}
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
PARTS, IN_A_PART = 6, 8
KINDS = SparseAllreduceState | DenseState

# Reductions of gradients, by a policy that skips, and optimizers after them.
REDUCE: dict[str, Any] = {
    "dense": lambda policy: optax_ext.dense(axis="data"),
    "ok_topk": lambda policy: optax_ext.ok_topk(0.3, axis="data", nonfinite=policy),
    "dense leaves": lambda policy: optax_ext.topk_a(
        0.3, axis="data", nonfinite=policy, dense_leaves=optax_ext.small_leaves(min_size=20)
    ),
    "powersgd": lambda policy: optax_ext.powersgd(1, axis="data", nonfinite=policy),
    "quantized": lambda policy: optax_ext.quantized(axis="data", nonfinite=policy),
    "bucketed": lambda policy: optax_ext.bucketed(
        optax_ext.ok_topk(0.3, axis="data", nonfinite=policy), 2
    ),
}
BEHIND: dict[str, Any] = {
    "adamw": lambda: optax.adamw(0.02, eps=1e-4, weight_decay=0.1),
    "momentum": lambda: optax.sgd(0.02, momentum=0.9),
    "schedule": lambda: optax.sgd(lambda count: 0.1 / (1.0 + count.astype(jnp.float32))),
    "lion": lambda: optax.lion(0.02),
    "decay": lambda: optax.chain(optax.add_decayed_weights(0.1), optax.scale(-0.02)),
    "injected": lambda: optax.inject_hyperparams(optax.sgd)(learning_rate=0.02, momentum=0.9),
}
INJECT = functools.partial(optax.inject_hyperparams, hyperparam_dtype=jnp.float32)
WHOLE: dict[str, Any] = {
    "sparse_adamw": lambda policy: optax_ext.sparse_adamw(
        0.02, axis="data", weight_decay=0.1, nonfinite=policy
    ),
    "factors": lambda policy: optax_ext.sparse_adamw(
        0.02, axis="data", moments="factors", nonfinite=policy
    ),
    "sparse_sgd": lambda policy: optax_ext.sparse_sgd(0.02, axis="data", nonfinite=policy),
    "injected": lambda policy: INJECT(optax_ext.sparse_adamw)(
        learning_rate=0.02, axis="data", nonfinite=policy
    ),
}
# Groups that apply what they have accumulated over several steps, with an optimizer.
OVER: dict[str, Any] = {
    "multi_steps": lambda tx: optax_ext.multi_steps(optax.chain(REDUCE["ok_topk"]("skip"), tx), 2),
    "MultiSteps": lambda tx: optax.MultiSteps(optax.chain(REDUCE["dense"]("skip"), tx), 2),
    "delayed": lambda tx: optax_ext.delayed(optax.chain(REDUCE["ok_topk"]("skip"), tx)),
    "local_steps": lambda tx: optax_ext.local_steps(
        tx, optax.chain(REDUCE["dense"]("skip"), optax.sgd(1.0)), every=2
    ),
}
AROUND: dict[str, Any] = {
    "nothing": lambda tx: tx,
    "clipping": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "ema behind": lambda tx: optax.chain(tx, optax.ema(0.9, debias=False)),
}


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A transformation and its inputs."""

    workers: int
    groups: tuple[tuple[str, str], ...]  # of one, or of two groups: a reduction and an optimizer
    of_leaf: tuple[int, ...]  # the group of each leaf
    around: str
    dtype: str
    bad: tuple[str, int, float]  # a leaf and a worker, and the number added to its gradient
    seed: int

    def tx(self) -> optax.GradientTransformation:
        def of(group: tuple[str, str]) -> optax.GradientTransformation:
            kind, behind = group
            if kind in OVER:
                return OVER[kind](BEHIND[behind]())
            if kind in WHOLE:
                return WHOLE[kind]("skip")
            return optax.chain(REDUCE[kind]("skip"), BEHIND[behind]())

        if len(self.groups) == 1:
            return AROUND[self.around](of(self.groups[0]))
        labels = {name: str(group) for name, group in zip(SHAPES, self.of_leaf, strict=True)}
        named = {str(i): of(group) for i, group in enumerate(self.groups)}
        return AROUND[self.around](optax.partition(named, labels))


@st.composite
def configurations(draw: Any) -> Drawn:
    def one_of(*options: Any) -> Any:
        return draw(st.sampled_from(options))

    count, around = one_of(1, 2, 2), one_of("nothing", *AROUND)
    kinds = (*REDUCE, *WHOLE)
    groups = tuple((one_of(*kinds), one_of(*BEHIND)) for _ in range(count))
    if count > 1:
        # Leaves of a masked group are no leaves for a function of the shapes.
        groups = tuple((one_of("dense", "ok_topk", *WHOLE), behind) for _, behind in groups)
    return Drawn(
        workers=one_of(3, 2, 4),
        groups=groups,
        of_leaf=one_of((0, 1, 0), (1, 0, 0), (0, 0, 1)),
        around=around,
        dtype=one_of(*DTYPES),
        bad=(one_of(*SHAPES), one_of(0, 1), one_of(np.nan, np.inf, -np.inf)),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def beside_others(draw: Any) -> Drawn:
    """One group of two accumulates over steps, and a leaf of the other one is bad."""
    drawn = draw(configurations())
    kind = draw(
        st.sampled_from([("dense", "adamw"), ("ok_topk", "momentum"), ("sparse_adamw", "")])
    )
    over = draw(st.sampled_from([*OVER])), draw(st.sampled_from([*BEHIND]))
    of_leaf = draw(st.sampled_from([(0, 1, 0), (0, 1, 1)]))
    # A norm of all gradients would be bad for both groups.
    around = draw(st.sampled_from([x for x in AROUND if x != "clipping"]))
    changes = {"groups": (kind, over), "of_leaf": of_leaf, "around": around}
    return dataclasses.replace(drawn, **changes, bad=("a", *drawn.bad[1:]))


def without_counts(opt_state: Any) -> Any:
    def without(node: Any) -> Any:
        if isinstance(node, SparseAllreduceState):
            return node._replace(skipped=())
        return dataclasses.replace(node, skipped=()) if isinstance(node, DenseState) else node

    return jax.tree.map(without, opt_state, is_leaf=lambda node: isinstance(node, KINDS))


def begun(drawn: Drawn) -> tuple[Any, Any, Any, Any]:
    """A step, parameters and state after two of them, and a function that draws gradients."""
    rng = np.random.default_rng(drawn.seed)

    def normal(*lead: int) -> Any:
        return {k: rng.standard_normal((*lead, *s)).astype(np.float32) for k, s in SHAPES.items()}

    def loss_fn(params: Any, given: Any) -> Any:
        products = [jnp.sum(params[k].astype(jnp.float32) * given[k][0]) for k in SHAPES]
        return sum(products[1:], products[0])

    params = {k: x.astype(DTYPES[drawn.dtype]) for k, x in normal().items()}
    tx, on = drawn.tx(), mesh(drawn.workers)
    step = optax_ext.make_train_step(loss_fn, tx, on, donate=False)
    state = optax_ext.init_state(tx, params, on)
    for _ in range(2):
        params, state, _ = step(params, state, normal(drawn.workers))
    return step, params, state, lambda: normal(drawn.workers)


def spoiled(drawn: Drawn, given: Any) -> Any:
    leaf, worker, value = drawn.bad
    bad = jax.tree.map(np.copy, given)
    bad[leaf][worker].flat[1] += value
    return bad


def check(drawn: Drawn) -> None:
    """The step changes nothing but the counts, and the next one is as if it had not been."""
    step, params, state, draw = begun(drawn)
    bad = spoiled(drawn, draw())
    held, held_state, _ = step(params, state, bad)
    assert bits(held) == bits(params), "parameters moved"
    assert bits(without_counts(held_state)) == bits(without_counts(state)), "the state moved"
    for before, after in zip(
        _wrappers.reductions(state), _wrappers.reductions(held_state), strict=True
    ):
        assert int(after.skipped) == int(before.skipped) + 1
    given = draw()
    next_params, next_state, _ = step(held, held_state, given)
    params_without, state_without, _ = step(params, state, given)
    assert bits(next_params) == bits(params_without)
    assert bits(without_counts(next_state)) == bits(without_counts(state_without))
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(next_params))
    assert bits(next_params) != bits(params), "nothing trains"


def check_beside(drawn: Drawn) -> None:
    """A group is held, and one that accumulates over steps goes on as if all were good."""
    step, params, state, draw = begun(drawn)
    given = [draw() for _ in range(3)]
    good, bad, without = ([] for _ in range(3))
    for found, batches in (
        (good, given),
        (bad, [spoiled(drawn, given[0]), *given[1:]]),
        (without, given[1:]),
    ):
        now = params, state
        for batch in batches:
            now = step(*now, batch)[:2]
            found.append(now[0])
    for name, group in zip(SHAPES, drawn.of_leaf, strict=True):
        if group:
            assert [bits(x[name]) for x in bad] == [bits(x[name]) for x in good], name
        else:
            assert bits(bad[0][name]) == bits(params[name]), name
            assert [bits(x[name]) for x in bad[1:]] == [bits(x[name]) for x in without], name


@pytest.mark.slow
@pytest.mark.parametrize("law", [check, check_beside])
@pytest.mark.parametrize("part", range(PARTS))
def test_a_step_that_is_not_finite_changes_nothing(part, law):
    @hypothesis.seed(part)
    @hypothesis.given(configurations() if law is check else beside_others())
    @hypothesis.settings(
        max_examples=IN_A_PART,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=(hypothesis.Phase.generate,),
    )
    def holds(drawn):
        law(drawn)

    holds()

"""Everything that the library lets a user combine, drawn together."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from hypothesis import strategies as st

import optax_ext
import sparse_collectives as sc
from tests.fuzz.data import DATA
from tests.sparse_collectives import table
from tests.sparse_collectives.table import SELECTORS
from tests.sparse_collectives.table import SHORT_CODECS as CODECS

# Axes and their sizes; seven workers, a prime number and no power of two, come first.
FLAT = tuple((("w",), (workers,)) for workers in (7, 2, 3, 1, 4, 5, 6, 8))
NODES = tuple(
    (("node", "device"), shape)
    for shape in ((2, 2), (3, 2), (2, 3), (1, 2), (7, 1), (1, 7), (1, 1))
)
DENSITIES = (0.1, 0.05, 0.3, 1.0)
TREES: dict[str, dict[str, tuple[int, ...]]] = {
    "one leaf": {"w": (97,)},
    "layers": {"bias": (7,), "kernel": (6, 11), "scale": ()},
    "one entry": {"w": (1,)},
    "tied": {"embedding": (8, 6), "head": (8, 6), "bias": (5,)},
}
# The same array, and the same gradient, under two names.
TIED = {"tied": {"head": "embedding"}}
DTYPES = {
    "float32": (jnp.float32,) * 3,
    "bfloat16": (jnp.bfloat16,) * 3,
    "float16": (jnp.float16,) * 3,
    "mixed": (jnp.float32, jnp.bfloat16, jnp.float16),
}
# A number of first steps, or a function of the number of the step.
DENSE_STEPS: dict[str, Any] = {
    "no": 0,
    "the first": 2,
    "the last": lambda step: step >= 2,
    "every other": lambda step: step % 2 == 1,
}

WITHOUT_PRODUCTS = ("raw", "bf16", "narrow16")
SLACKS = st.sampled_from((1.25, 1.0, 2.0, math.inf))
FILLS = st.sampled_from((None, 1.0, 2.0))
PERIODS = st.sampled_from((1, 3))
# Each allreduce over one axis, with the choices for its options; by default it has no options.
OPTIONS: dict[str, dict[str, Any]] = dict.fromkeys(table.ALGORITHMS, {}) | {
    "ok_topk": {
        "slack": SLACKS,
        "regions": st.sampled_from(("hashed", "balanced", "equal")),
        "balance": st.sampled_from(("auto", "always", "never")),
        "schedule": st.sampled_from(("all_to_all", "all_to_all", "rotation")),
        "global_period": st.sampled_from((1, 2)),
        "repartition_period": PERIODS,
    },
    "ok_topk as published": {
        "paper": st.just(True),
        "slack": st.sampled_from((None, 1.0, math.inf)),
        "global_period": PERIODS,
        "repartition_period": PERIODS,
    },
    "ring_sparse": {"slack": SLACKS, "fill": FILLS},
    "ssar_recursive_double": {"capacity": st.sampled_from((None, 5))},
    "ssar_split_allgather": {"slack": SLACKS, "fill": FILLS},
    "dsar_split_allgather": {"slack": SLACKS},
    "auto": {
        "latency": st.sampled_from(("0us", "1ms")),
        "bandwidth": st.sampled_from(("1Gbit", "1kbit")),
        "candidates": st.sampled_from((None, ("ok_topk",), ("ring_sparse", "gtopk"))),
    },
    "full_sums": {"inner": st.sampled_from(("ok_topk", "gtopk", "spardl", "ring_sparse"))},
    "partitioned_topk": {
        "density": st.booleans(),
        "bits": st.sampled_from((32, 16, 8, None, (1, 3), (2, 4), (8, 8))),
    },
}


@st.composite
def flat_allreduces(
    draw: Any, density: float, codecs: tuple[str, ...] = tuple(CODECS)
) -> tuple[str, sc.SparseAllreduce]:
    """An allreduce over one axis, with all of its options, and a name for it."""
    name, codec_name = draw(st.sampled_from(tuple(OPTIONS))), draw(st.sampled_from(codecs))
    codec = CODECS[codec_name]()
    options = {key: draw(strategy) for key, strategy in OPTIONS[name].items()}
    if name == "dsar_split_allgather":
        options["dense_codec"] = CODECS[draw(st.sampled_from(codecs))]()
    if name == "auto":
        allreduce = sc.planner.auto(density=density, **options)
    elif name == "full_sums":
        allreduce = sc.allreduce.full_sums(table.make(options["inner"], density, codec))
    elif name == "partitioned_topk":
        limit = density if options["density"] else None
        allreduce = sc.allreduce.partitioned_topk(density=limit, bits=options["bits"])
    else:
        allreduce = table.make(name.partition(" ")[0], density, codec, **options)
    return f"{name}/{codec_name}", allreduce


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Configuration:
    """A transformation and its inputs."""

    text: str  # everything that was drawn except the gradients, for the report of a failure
    dense_steps: str  # a key of DENSE_STEPS
    every: int  # steps from one exchange to the next
    tx: optax.GradientTransformation
    around: str  # a key of AROUND, the wrapper of `tx`
    axes: tuple[str, ...]  # of the workers, with their sizes
    shape: tuple[int, ...]
    params: Any  # shapes and dtypes
    policy: str  # what it does with non-finite values
    decay: float  # of the residual
    limited: bool  # whether there is an update clipping
    narrow_residual: bool  # whether it is bfloat16, rounded at random
    momentum: float | None  # of the correction
    nesterov: bool
    data: str  # the kind of gradients
    seed: int
    keeps_others: bool  # whether a worker may keep parts of others' entries
    products: bool  # whether products of factors are exchanged, or of codes and units
    tied: dict[str, str]  # leaves that are the array of another one, by name

    @property
    def workers(self) -> int:
        """P."""
        return math.prod(self.shape)

    def is_dense(self, count: int) -> bool:
        """Whether step ``count`` is dense."""
        which = DENSE_STEPS[self.dense_steps]
        return bool(which(count)) if callable(which) else count < which

    def is_due(self, count: int) -> bool:
        """Whether step ``count`` has an exchange."""
        return (count + 1) % self.every == 0 or self.is_dense(count)

    def __repr__(self) -> str:
        return f"{self.text}, gradients {self.data!r} of seed {self.seed}"


def recording(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """``inner``, with its last result, the accumulated one, in its state."""

    def update(updates: Any, state: Any, params: Any = None):
        updates, inner_state = inner.update(updates, state[0], params)
        return updates, (inner_state, updates)

    return optax.GradientTransformation(
        lambda params: (inner.init(params), jax.tree.map(jnp.zeros_like, params)), update
    )


LOCALS: dict[str, Callable[[], optax.GradientTransformation | None]] = {
    "none": lambda: None,
    "identity": lambda: recording(optax.identity()),
    "schedule": lambda: recording(
        optax.scale_by_schedule(lambda count: 0.5 / (1.0 + count.astype(jnp.float32)))
    ),
    "adam": lambda: recording(optax.scale_by_adam()),
    "factors": lambda: recording(optax_ext.scale_by_local_adam(moments="factors")),
}
LIMITS: dict[str, Any] = {
    "of 0.3": 0.3,
    "that falls": lambda count: 1.0 / (1.0 + count.astype(jnp.float32)),
}
# Without a selector and an allreduce.
WITHOUT: dict[str, Callable[..., optax.GradientTransformation]] = {
    "powersgd(1)": functools.partial(optax_ext.powersgd, 1),
    "acp_sgd(2)": functools.partial(optax_ext.acp_sgd, 2),
    "quantized((1, 3))": functools.partial(optax_ext.quantized, (1, 3)),
    "quantized((2, 4))": optax_ext.quantized,
}
# The number of mini-steps for each exchange.
MINI_STEPS = 2
AROUND: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda tx: tx,
    "delayed": optax_ext.delayed,
    "bucketed": lambda tx: optax_ext.bucketed(tx, 2),
    "multi_steps": lambda tx: optax_ext.multi_steps(tx, MINI_STEPS),
    "delayed bucketed": lambda tx: optax_ext.delayed(optax_ext.bucketed(tx, 2)),
    "multi_steps bucketed": lambda tx: optax_ext.multi_steps(optax_ext.bucketed(tx, 2), MINI_STEPS),
}
SEEDS = st.integers(0, 2**16)
# The wrappers by which steps may be left out.
AGREED = ("not finite", "largest", "huge", "signs of the largest")


def _keeps_others(without: str | None, exchange: Any) -> bool:
    if without is None:
        return exchange.may_keep_partial_sums
    # The owner of an entry keeps the error of a sum.
    return without.startswith("quantized")


@st.composite
def configurations(draw: Any, *, of_parts: bool = False) -> Configuration:
    """One value of every option.

    ``of_parts`` leaves only what runs of parts of the leaves reproduce to the bit. It excludes
    nodes, whose workers share a residual, labels by the shape of a leaf, options that look at
    whole leaves, data by which workers agree not to take a step, and products that a program may
    round together with a sum or before it (momentum, decay, low rank, codecs whose products are
    not exact).
    """

    def one_of(*options: Any) -> Any:
        return draw(st.sampled_from(options))

    density = one_of(*DENSITIES)
    two_levels = not of_parts and one_of(False, False, False, True)
    axes, shape = one_of(*(NODES if two_levels else FLAT))
    codecs = WITHOUT_PRODUCTS if of_parts else tuple(CODECS)
    name, exchange = draw(flat_allreduces(density, codecs))
    # A shard of a node cuts through rows, which is an error.
    if two_levels and "row_topk" not in name and one_of(True, True, False):
        exchange = sc.allreduce.hierarchical(inner_axis="device", outer=exchange)
        name = f"hierarchical({name})"
    elif two_levels:
        name, exchange = "torus_2d", sc.allreduce.published.torus_2d()
    # Options that take long to compile come up less often: all of their branches are computed.
    selector = one_of(*SELECTORS, "topk", "topk", *["threshold"] * 4, *["dgc", "random_k"] * 2)
    local, dtypes = "none" if of_parts else one_of(*LOCALS), one_of(*DTYPES)
    kinds = [kind for kind in DATA if not (of_parts and kind in AGREED)]
    tree, policy, data = one_of(*TREES), one_of("skip", "drop", "propagate"), one_of(*kinds)
    momentum, nesterov, masking = one_of(None, None, 0.9), one_of(False, True), one_of(True, False)
    narrow, decay = one_of(False, True), one_of(1.0, 1.0, 0.75)
    if of_parts:
        momentum, decay = None, 1.0
    dense_steps = one_of("no", *DENSE_STEPS)
    dense_leaves = None if of_parts else one_of(None, "small")
    others = [name for name in WITHOUT if not of_parts or name.startswith("quantized")]
    without = one_of(*[None] * (5 if of_parts else 10), *others)
    limit = one_of(None, None, *LIMITS)
    around = "nothing" if of_parts else one_of(*["nothing"] * 5, *AROUND)
    every = one_of(1, 1, 1, 2, 3)
    seed = draw(SEEDS)
    if LOCALS[local]() is None:
        limit, every = None, 1
    if without is not None:
        limit = momentum = None
        every = 1
    kept: dict[str, Any] = {"dtype": jnp.bfloat16 if narrow else jnp.float32, "decay": decay}
    if LOCALS[local]() is not None:
        # In rounds a worker applies all of its residual at once.
        kept["step_ahead"] = math.inf if every > 1 else 1.0
    options: dict[str, Any] = {
        "axis": axes,
        "nonfinite": policy,
        "local": LOCALS[local](),
        "residual": optax_ext.residual(**kept),
        "dense_steps": DENSE_STEPS[dense_steps],
    }
    if every > 1:
        options["every"], dense_leaves = every, None
    if limit is not None:
        options["limit"] = LIMITS[limit]
    if momentum is not None:
        options["correction"] = optax_ext.momentum_correction(
            momentum, nesterov=nesterov, masking=masking
        )
    if dense_leaves is not None:
        options["dense_leaves"] = optax_ext.small_leaves(min_size=20, min_ndim=1)
    leaves = zip(sorted(TREES[tree]), DTYPES[dtypes])
    if without is not None:
        what, tx = without, WITHOUT[without](**options)
    else:
        chosen = SELECTORS[selector](density)
        what = f"{chosen.spec} -> {exchange.spec} as {name}"
        tx = optax_ext.sparse_allreduce(chosen, exchange, **options)
    tied = TIED.get(tree, {})
    params = {leaf: jax.ShapeDtypeStruct(TREES[tree][leaf], dtype) for leaf, dtype in leaves}
    params |= {leaf: params[other] for leaf, other in tied.items()}
    return Configuration(
        text=f"{what}, {tree=}, {dtypes=}, {local=}, {momentum=}, {nesterov=}, {masking=}, "
        f"{limit=}, {dense_leaves=}, {policy=}, {narrow=}, {decay=}, {dense_steps=}, {every=}, "
        f"{shape=}, {around=}",
        dense_steps=dense_steps,
        every=every,
        tx=tx,
        around=around,
        axes=axes,
        shape=shape,
        params=params,
        policy=policy,
        decay=decay,
        limited=limit is not None,
        narrow_residual=narrow,
        momentum=momentum,
        nesterov=nesterov,
        data=data,
        seed=seed,
        keeps_others=_keeps_others(without, exchange),
        products=without is not None,
        tied=tied,
    )


@st.composite
def of_one_program(draw: Any, count: int) -> list[Configuration]:
    """A configuration with gradients of several kinds; it compiles once, for seconds."""
    first = draw(configurations())
    given = st.lists(
        st.tuples(st.sampled_from([kind for kind in DATA if kind != first.data]), SEEDS),
        min_size=count - 1,
        max_size=count - 1,
        unique_by=lambda each: each[0],
    )
    return [first, *(dataclasses.replace(first, data=kind, seed=n) for kind, n in draw(given))]

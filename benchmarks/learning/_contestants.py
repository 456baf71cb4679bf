"""The ways to train: over simulated workers (learning rate, steps), and over links (learning rate).

A neighbor of a default is the complete optimizer of a task with other options in its name.
"""

import argparse
import contextlib
import functools
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

import optax

import optax_ext
from sparse_collectives import allreduce, select, wire

from .._common.contestants import CONTESTANTS, DECAY, Contestant, find, optimizer
from ..training._recorded_training import MOMENTUM, schedule
from ..training._simulated_training import AXIS, Variant, exact_top_k
from ._optimizers import DENSE, DILOCO, EXCHANGES, INSIDE, OPTIMIZERS, transformations
from ._optimizers import ROUNDS as IN_ROUNDS
from ._tasks import ADAMW, DELAYED, KINDS

NOTHING = "nothing exchanged"
# The sparse ones get as many words as ``ok_topk`` at 1 %.
DENSITY = 0.01
Train = Callable[[float, int], Variant]
Make = Callable[[optax.Schedule], optax.GradientTransformation]
Option = tuple[str, Any]
# The contestant for each name, the dense one first: over simulated workers,
_ADAMW = {
    DENSE: "dense/leaves",
    "dense, float16": "dense16",
    "ok_topk before AdamW": "ok_topk",
    "dense, delayed": "delayed(dense)",
}
_ADAMW |= {name: name for name in CONTESTANTS if name.startswith("sparse_adamw")}
_ADAMW |= {f"powersgd({rank}) before AdamW": f"powersgd{rank}" for rank in (1, 2, 4)}
_ADAMW |= {"acp_sgd(4) before AdamW": "acp_sgd4"}
_SGD = {DENSE: "dense/leaves", "ok_topk before SGD": "ok_topk"}
_SGD |= {name: name for name in ("ok_topk_sgd", "sparse_sgd", "sparse_sgd, ok_topk")}
# over links,
_LINKS = {DENSE: "dense", "dense, float16": "dense16", "sparse_adamw": "sparse_adamw"}
_LINKS |= {"ok_topk before AdamW": "ok_topk/reuse"}
for _low_rank in ("powersgd", "acp_sgd"):
    _LINKS |= {f"{_low_rank}({rank}) before AdamW": f"{_low_rank}{rank}" for rank in (1, 2, 4)}
# exchanges that may begin before the gradient is complete, and others to compare with,
_BUCKETS = {DENSE: "dense", NOTHING: "nothing"}
_BUCKETS |= {f"dense, {count} buckets": f"dense/buckets{count}" for count in (2, 4, 8)}
_BUCKETS |= {"dense, each leaf": "dense/leaves", "ok_topk": "ok_topk/reuse"}
_BUCKETS |= {f"ok_topk, {count} buckets": f"ok_topk/reuse/buckets{count}" for count in (2, 4)}
# and LAMB after a dense exchange, by who computes the norms of the layers.
_NORMS = {name: name for name in CONTESTANTS if name.startswith("lamb")}
# PyTorch's exchanges, before its AdamW; see `_torch_trainer`.
TORCH = {"PyTorch, dense": "ddp", "PyTorch, float16": "ddp/fp16"}
TORCH |= {f"PyTorch, PowerSGD({rank})": f"ddp/powersgd{rank}" for rank in (1, 2, 4)}
# DGC starts with 25 %. All messages have the slots of the first stage, so that one is left out.
STAGES = (0.0625, 0.015625, 0.004)
# The largest norm of a worker's gradient, if it is clipped.
NORM = 4.0
_MASKED = "correction, masking"
# Tricks for the accuracy, such as DGC's, added to an allreduce alone or together: before SGD with
# momentum, at a density so low that an entry stays in the residual for many steps;
_DELAYED_TRICKS = [
    "topk_a",
    *(f"topk_a, {trick}" for trick in ("no momentum", "correction", _MASKED, "clipping")),
    *(f"topk_a, {warm_up} warm-up" for warm_up in ("dense", "density")),
    *(f"topk_a, {_MASKED}, {t}" for t in ("clipping", "dense warm-up", "density warm-up")),
    *(f"topk_a, {_MASKED}, clipping, {warm_up} warm-up" for warm_up in ("dense", "density")),
]
# and the options of Ok-Topk.
_SGD_TRICKS = ["ok_topk, dense warm-up", "ok_topk, correction"]
_ADAMW_TRICKS = ["ok_topk, dense warm-up, small leaves dense"]


def _around_sparse_sgd(inner: Any, *, axis: str, every: int, density: float = 5 * DENSITY) -> Any:
    """Local steps around a sparse exchange, whose residual is separate from the local updates."""
    outer = optax_ext.sparse_sgd(1.0, density=density, selector=exact_top_k(density), axis=axis)
    return optax_ext.local_steps(inner, outer, every=every)


# Two optimizers in rounds, the published ones under their names.
ROUNDS: dict[str, Callable[..., Any]] = {
    name: getattr(optax_ext.published, name)
    for name in ("diloco", "streaming_diloco", "sparse_loco")
} | {"local_steps": _around_sparse_sgd}
# Arguments of the optimizers that are numbers or words.
_PLAIN = (
    "density",
    "b1",
    "b2",
    "eps",
    "weight_decay",
    "gain",
    "limit",
    "moments",
    "dense_steps",
    "every",
)


def contestants(task: str, share: float = 1.0) -> dict[str, Train]:
    """Contestants over simulated workers, by name; every density is multiplied by the share."""
    adamw, density = KINDS[task].optimizer == ADAMW, share * DENSITY
    names, tricks = (_ADAMW, _ADAMW_TRICKS) if adamw else (_SGD, _SGD_TRICKS)
    if task == DELAYED:
        names, tricks = {DENSE: "dense/leaves"}, _DELAYED_TRICKS
    made = {name: _train(find(key), density, task) for name, key in names.items()}
    return made | {name: _with_tricks(name, density, adamw) for name in tricks}


def _train(contestant: Contestant, k: float, task: str) -> Train:
    density = contestant.entries * k

    def variant(rate: float, steps: int) -> Variant:
        at, selector = schedule(rate, steps), exact_top_k(density)
        made = contestant.make(density, AXIS, rate=at, selector=selector)
        if contestant.whole:
            return Variant(made, optax.identity())
        if KINDS[task].optimizer == ADAMW:
            return Variant(made, optax.adamw(at, weight_decay=DECAY))
        return Variant(made, optax.sgd(at, momentum=MOMENTUM))

    return variant


def _with_tricks(name: str, density: float, adamw: bool) -> Callable[[float, int], Variant]:
    """The way to train with that name: an allreduce, and the tricks that are added to it."""
    exchange, *tricks = name.split(", ")

    def made(rate: float, steps: int) -> Variant:
        given = {"axis": AXIS} | _tricks(tricks, density, steps)
        tx = getattr(optax_ext, exchange)(density, **given)
        if "clipping" in tricks:
            tx = optax.chain(optax_ext.local_clip_by_global_norm(NORM, axis=AXIS), tx)
        if adamw:
            return Variant(tx, optax.adamw(schedule(rate, steps), weight_decay=DECAY))
        behind = not {"correction", "no momentum"} & set(tricks)
        # Without momentum the learning rate is multiplied by the sum of the momentum's weights.
        peak = rate / (1 - MOMENTUM) if "no momentum" in tricks else rate
        momentum = MOMENTUM if behind else None
        return Variant(tx, optax.sgd(schedule(peak, steps), momentum=momentum))

    return made


def _tricks(tricks: Sequence[str], density: float, steps: int) -> dict[str, Any]:
    """The options of an allreduce for these tricks, in a run of so many steps."""
    given: dict[str, Any] = {"selector": exact_top_k(density)}
    if "correction" in tricks:
        masking = "masking" in tricks
        given["correction"] = optax_ext.momentum_correction(MOMENTUM, masking=masking)
    if "density warm-up" in tricks:
        stages = [*(stage for stage in STAGES if stage > density), density]
        staged = select.staged_density(max(1, steps // 20), stages)
        given["selector"] = select.scheduled(exact_top_k(stages[0]), staged)
    if "dense warm-up" in tricks:
        given["dense_steps"] = max(1, steps // 10)
    if "small leaves dense" in tricks:
        given["dense_leaves"] = optax_ext.small_leaves()
    return given


def over_links() -> dict[str, dict[str, Make]]:
    """The contestants of JAX, by experiment and by name."""

    def made(name: str) -> Make:
        # A complete optimizer has a density of its own.
        density = None if find(name).whole else DENSITY
        return lambda rate: optimizer(f"{name}/adamw", density, AXIS, rate)

    groups = {"time": _LINKS, "buckets": _BUCKETS, "norms": _NORMS}
    return {key: {name: made(x) for name, x in of.items()} for key, of in groups.items()}


def option(text: str) -> Option:
    """The type of ``gain=2``: a name, and a number or a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text} is not NAME=VALUE, such as gain=2")
    with contextlib.suppress(ValueError):
        value = json.loads(value)
    return name, value


def neighbour(task: str, share: float, given: Sequence[Option]) -> tuple[str, Train]:
    """``sparse_adamw``, or ``sparse_sgd`` if the task trains with SGD, with other options.

    The name includes the options; a density that is not among them is multiplied by ``share``.
    Raises a ValueError or a TypeError for an unknown option or an invalid value.
    """
    make = optax_ext.sparse_adamw if KINDS[task].optimizer == ADAMW else optax_ext.sparse_sgd
    if rounds := _rounds(given, AXIS):
        return rounds[0], lambda rate, steps: Variant(
            rounds[1](schedule(rate, steps)), optax.identity()
        )
    made = {"density": 5 * share * DENSITY, "axis": AXIS} | _arguments(make, given)
    whole = functools.partial(make, **made, selector=exact_top_k(made["density"]))

    def variant(rate: float, steps: int) -> Variant:
        return Variant(whole(schedule(rate, steps)), optax.identity())

    variant(0.1, 10)
    return _name_of(make.__name__, given), variant


def neighbour_over_links(given: Sequence[Option]) -> tuple[str, Make]:
    """The same for ``sparse_adamw`` over links; ``beside=1`` is for `_round_trainer`."""
    named = given
    given = [option for option in given if option[0] != "beside"]
    if rounds := _rounds(given, AXIS):
        return rounds
    make = optax_ext.sparse_adamw
    made = {"axis": AXIS, **_arguments(make, given)}
    make(0.1, **made)
    return _name_of(make.__name__, named), lambda rate: make(rate, **made)


def _rounds(given: Sequence[Option], axis: str) -> tuple[str, Make] | None:
    """Another optimizer than the sparse one, and its name.

    It is AdamW in the rounds of another system, ``optimizer=diloco every=10``; or one of optax and
    its exchange, ``optimizer=muon exchange=quantized(2, 4)``.
    """
    options = dict(given)
    system = options.pop("optimizer", None)
    if system is None:
        return None
    if system in OPTIMIZERS:
        return _of_optax(system, **options)
    if system not in ROUNDS:
        raise ValueError(f"optimizer={system} is none of {', '.join([*ROUNDS, *OPTIMIZERS])}")

    given_to = dict(options)
    if codec := options.get("codec"):
        if codec not in wire.__all__:
            raise ValueError(f"codec={codec} is none of {', '.join(wire.__all__)}")
        given_to["codec"] = getattr(wire, codec)()

    def make(rate: optax.Schedule) -> optax.GradientTransformation:
        return ROUNDS[system](optax.adamw(rate, weight_decay=DECAY), axis=axis, **given_to)

    make(lambda count: 0.1)
    return _name_of(system, list(options.items())), make


def _of_optax(name: str, exchange: str = DENSE) -> tuple[str, Make]:
    if OPTIMIZERS[name].averaged:
        raise ValueError(f"optimizer={name} is of benchmarks.learning.optimizers only")
    known = [*EXCHANGES, *IN_ROUNDS, *DILOCO, *([INSIDE] if OPTIMIZERS[name].scaling else [])]
    if exchange not in known:
        raise ValueError(f"exchange={exchange} of {name} is none of {', '.join(known)}")
    return f"{name}, {exchange}", lambda at: optax.chain(*transformations(name, exchange, at))


def _arguments(make: Callable[..., Any], given: Sequence[Option]) -> dict[str, Any]:
    """The arguments of an optimizer for the options; a ValueError for an unknown option."""
    known = [name for name in inspect.signature(make).parameters if name in _PLAIN]
    for name, _ in given:
        if name not in (*known, "step_ahead", "bits"):
            raise ValueError(
                f"{make.__name__} has no {name!r} here: it has {', '.join(known)}, step_ahead, bits"
            )
    made = {"weight_decay": DECAY} if make is optax_ext.sparse_adamw else {}
    made |= given
    if "step_ahead" in made:
        made["residual"] = optax_ext.residual(step_ahead=made.pop("step_ahead"))
    if "bits" in made:
        made["allreduce"] = allreduce.partitioned_topk(bits=made.pop("bits"))
    return made


def _name_of(name: str, given: Sequence[Option]) -> str:
    """The name of an optimizer with options, independent of their order."""
    values = [f"{x}={f'{y:g}' if isinstance(y, int | float) else y}" for x, y in sorted(given)]
    return " ".join([name, *values])

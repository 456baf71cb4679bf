"""Plans and rounds as text, and a plan for JSON."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sparse_collectives.cost_model._costs import BYTES_PER_WORD
from sparse_collectives.cost_model._numbers import NUMBERS
from sparse_collectives.planner._allreduces import Plan
from sparse_collectives.planner._optimizers import OptimizerPlan
from sparse_collectives.planner._slow_links import SHARE, Round, RoundPlan
from sparse_collectives.planner._ways import MARGIN, TIE, LocalCost, Prediction

# The most names in a list of ties.
_NAMED = 5


def text(plan: Plan, optimizers: OptimizerPlan, *, all_codecs: bool = False) -> str:
    """Two tables of at most 100 columns, fastest first, and the recommendations."""
    rows = plan.predictions if all_codecs else _best_codecs(plan)
    lines = [*_assumptions(plan), "", *_predictions(plan, ("algorithm", "codec"), rows), ""]
    lines += _predictions(plan, ("optimizer", "messages"), optimizers.predictions)
    lines.append("")
    if plan.workload.inner_size > 1:
        lines.append("words and MB are those between the nodes")
    if plan.crowded:
        lines.append(f"left out, as gaps are too long for them here: {', '.join(plan.crowded)}")
    if plan.unknown:
        lines.append(f"left out, without a number of steps: {', '.join(plan.unknown)}")
    chosen = plan.recommended
    if chosen.dense:
        lines.append(f"Use dense here, as {plan.reason}: {chosen.code}")
    else:
        lines.append(f"Use {chosen.name} ({chosen.codec}), {plan.reason}: {chosen.code}")
    ties = _ties(plan)
    if ties:
        lines.append(f"a tie with {chosen.name}, within {TIE - 1:.0%}: {ties}")
    return "\n".join([*lines, *_of_optimizers(optimizers)])


def _predictions(plan: Plan, names: tuple[str, str], rows: Sequence[Prediction]) -> list[str]:
    columns: dict[str, Callable[[Prediction], str]] = {
        names[0]: lambda row: row.name,
        names[1]: lambda row: row.codec,
        "step ms": lambda row: _ms(row.step),
        "steps": lambda row: f"{row.steps:.2f}x",
        "vs dense": lambda row: f"{row.speedup:.2f}x",
        "exchange": lambda row: _ms(row.exchange),
        "local": lambda row: _ms(row.local),
        "hidden": lambda row: _ms(row.hidden),
        "words": lambda row: _short(row.estimate.expected.words),
        "MB": lambda row: f"{row.estimate.expected.words * BYTES_PER_WORD / 1e6:,.1f}",
    }
    for name, used in (("hidden", plan.compute), ("steps", plan.to_loss)):
        if not used:
            del columns[name]
    return _table(columns, rows, left=2)


def _table(
    columns: Mapping[str, Callable[[Any], str]], rows: Sequence[Any], left: int
) -> list[str]:
    """The lines of a table, whose first columns, as many as ``left``, are aligned to the left."""
    lines = [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        for i, width in enumerate(widths):
            line[i] = line[i].ljust(width) if i < left else line[i].rjust(width)
    return ["  ".join(line).rstrip() for line in lines]


def _ties(plan: Plan) -> str:
    """The algorithms that the model cannot separate from the recommended one, each once."""
    chosen = plan.recommended
    most = TIE * chosen.to_loss
    near = [row.name for row in plan.predictions if chosen.to_loss / TIE <= row.to_loss <= most]
    names = [name for name in dict.fromkeys(near) if name != chosen.name]
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _of_optimizers(found: OptimizerPlan) -> list[str]:
    """The recommended optimizer, and others with as short a step."""
    chosen, lines = found.recommended, []
    if found.others:
        named = [
            f"{row.name} ({row.codec}), {row.to_loss / chosen.to_loss:.2f} of its step"
            for row in found.others
        ]
        lines.append(f"no longer than {chosen.name}, to losses of their own: {'; '.join(named)}")
    if not chosen.dense:
        reason = f"{found.ratio:.2f} times as fast as a dense AdamW"
    elif found.ratio is None:
        reason = "there is nothing to compare it with"
    else:
        reason = f"sparse_adamw is only {found.ratio:.2f} times as fast"
    return [*lines, f"Optimizer: {chosen.name}, {reason}: {chosen.code}"]


def _best_codecs(plan: Plan) -> list[Prediction]:
    """The exact encoding and the fastest encoding of each algorithm."""
    chosen: list[Prediction] = []
    for row in plan.predictions:
        if row.codec == "raw" or all(other.name != row.name for other in chosen):
            chosen.append(row)
    return chosen


def _assumptions(plan: Plan) -> list[str]:
    load, net = plan.workload, plan.network
    lines = [
        f"n = {load.size:,}, k = {load.selected:,} (density {load.density:.4g}),"
        f" P = {load.workers:,}"
        + (f", {load.inner_size} in a node" if load.inner_size > 1 else ""),
        f"network: latency {net.latency * 1e6:.4g} us,"
        f" {_gigabits(net.seconds_per_word):.4g} Gbit/s a worker",
    ]
    if load.inner_size > 1:
        lines[-1] += (
            f"; in a node {net.inner_latency * 1e6:.4g} us,"
            f" {_gigabits(net.inner_seconds_per_word):.4g} Gbit/s"
        )
    lines.append(
        f"worker: {_local(plan.local)}; computation {_ms(plan.compute) if plan.compute else 0} ms"
    )
    return lines


def _local(local: LocalCost) -> str:
    given = (
        f"selection {local.select * 1e9:.3g} ns a parameter, merging {local.merge * 1e9:.3g} ns "
        "a pair"
    )
    if local.sharing > 1:
        given += f", {local.sharing:g} workers on a core"
    if not local.gpu:
        return given
    gpu = NUMBERS["gpu"]
    counted = (
        f"a GPU, {gpu['launch'] * 1e6:.3g} us a launch and {gpu['bandwidth'] / 1e12:.3g} TB/s "
        f"(an H200 took {gpu['h200'][0]} to {gpu['h200'][1]} times as long)"
    )
    return f"{counted}; {given}" if local.select or local.merge else counted


def of_rounds(found: RoundPlan) -> str:
    """A table of at most 100 columns, and the recommendation."""
    columns: dict[str, Callable[[Round], str]] = {
        "H": lambda row: str(row.every),
        "density": lambda row: f"{row.density:g}",
        "messages": lambda row: row.messages,
        "step ms": lambda row: f"{1e3 * row.prediction.step:,.1f}",
        "overlapped": lambda row: "" if row.every == 1 else f"{1e3 * row.overlapped:,.1f}",
        "exchange ms": lambda row: f"{1e3 * row.prediction.exchange:,.1f}",
        "words": lambda row: f"{row.prediction.estimate.expected.words / row.every:,.0f}",
        "Mbit/s": lambda row: f"{row.needed / 1e6:,.1f}",
        "loss": lambda row: f"{row.above:+.1f} %",
    }
    why = (
        f"all rows wait for more than {SHARE:.0%} of a round, so overlap the exchange with "
        "optax_ext.make_train_round"
        if found.overlaps
        else f"it has the lowest loss of the rows that wait for at most {SHARE:.0%} of a round"
    )
    notes = (
        "overlapped: step ms with optax_ext.make_train_round, exchanging during the next round",
        "words: received by a worker in a step, as a mean",
        "Mbit/s: the bandwidth that hides the words of an exchange in the computation of a round;",
        f"    a dense exchange at every step needs {found.dense_needed / 1e6:,.0f}",
        "loss: above dense AdamW at every step, for one small model, eight workers, 4,000 steps,",
        "    three seeds; it was measured without overlapped exchanges",
        "",
        f"Here {found.decides}.",
        f"Use {found.recommended.prediction.code}:",
        f"{why}.",
        "On CPUs, call sparse_collectives.transport.use_direct_messages() first: the ring of Gloo",
        "sends more messages in a row than are counted here.",
    )
    return "\n".join([*_table(columns, found.rows, left=0), "", *notes])


def as_dict(plan: Plan, optimizers: OptimizerPlan) -> dict[str, Any]:
    """For a JSON file: the inputs, every prediction in seconds and words, and the choices."""
    found = {
        **vars(plan.workload),
        "network": plan.network,
        "local": plan.local,
        "compute": plan.compute,
        "margin": MARGIN,
        "predictions": plan.predictions,
        "recommended": plan.recommended,
        "optimizers": optimizers.predictions,
        "recommended_optimizer": optimizers.recommended,
        "left_out": plan.crowded,
        "to_loss": plan.to_loss,
        "unknown": plan.unknown,
        "reason": plan.reason,
    }
    return plain(found)


def plain(value: Any) -> Any:
    """Named tuples and dataclasses as dictionaries, at any depth."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, tuple) else value


def _ms(seconds: float) -> str:
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def _short(value: float) -> str:
    for factor, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.2f}{suffix}"
    return f"{value:.0f}"


def _gigabits(seconds_per_word: float) -> float:
    return 8 * BYTES_PER_WORD / seconds_per_word / 1e9 if seconds_per_word else math.inf

"""All measurements of one number of hosts and one number of parameters."""

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from .._common.namespaces import Hosts, network
from ._methods import BASELINE, JAX, REST
from ._problem import SHAPES
from ._workers import WorkerError, Workers, workers

# A new port for every start: a closed one may be in use for a while.
_ports = itertools.count(9000)
# n-sized float32 buffers of a process: gradients, parameters and temporaries; and of each
# method: a residual, or DDP's parameters, buckets, errors and copies.
_BUFFERS = 8
_BUFFERS_OF_JAX, _BUFFERS_OF_TORCH = 1, 4
_LIBRARIES = 0.4e9
# A round of a method takes about so long, so that short steps are not lost in noise.
_ROUND_SECONDS = 0.5
# Words of the operands from which alpha and beta are fitted.
_LATENCY_SIZES = (256, 4096, 65_536)


class Settings(NamedTuple):
    """What the command line says about every session.

    Attributes:
      density: k / n.
      shapes: a key of ``_problem.SHAPES``.
      rounds: how often each method has its turn.
      steps: at most, of a turn.
      warmup: steps before anything is measured, so that residuals have filled.
      pin: whether each process stays on one core.
      breakdown: whether local steps and unlimited links are measured, too.
      seed: of the gradients.
      seconds: after which a missing answer is an error.
    """

    density: float
    shapes: str
    rounds: int
    steps: int
    warmup: int
    pin: bool
    breakdown: bool
    seed: int
    seconds: float


def batches(
    methods: Sequence[str], size: int, hosts: int, available: float, torch_alone: bool = False
) -> list[list[str]]:
    """The methods in groups that fit into the memory together, each with the baseline.

    Args:
      methods: names, the baseline among them.
      size: n.
      hosts: P; all of them share the memory.
      available: bytes.
      torch_alone: whether the methods of PyTorch are to have batches of their own.

    Raises:
      WorkerError: not even one method beside the baseline fits.
    """

    def need(names: Sequence[str]) -> float:
        torch = [name for name in names if name not in JAX]
        buffers = _BUFFERS + _BUFFERS_OF_JAX * (len(names) - len(torch))
        if torch:
            buffers += _BUFFERS + _BUFFERS_OF_TORCH * len(torch)
        return hosts * (4 * size * buffers + _LIBRARIES * (1 + bool(torch)))

    groups: list[list[str]] = [[BASELINE]]
    for name in methods:
        if name == BASELINE:
            continue
        mixed = torch_alone and len(groups[-1]) > 1 and (groups[-1][-1] in JAX) != (name in JAX)
        if mixed or need([*groups[-1], name]) > available:
            if need([BASELINE, name]) > available:
                raise WorkerError(
                    f"{hosts} hosts with {size:,} parameters need about "
                    f"{need([BASELINE, name]) / 1e9:.0f} GB of free memory for {name}, and there "
                    f"are {available / 1e9:.0f}: use fewer --workers or --params"
                )
            groups.append([BASELINE])
        groups[-1].append(name)
    return groups


def measure(
    size: int, hosts: int, links: Sequence[str], groups: Sequence[Sequence[str]], s: Settings, say
) -> dict[str, list[dict[str, Any]]]:
    """Steps over each link, alpha and beta of each, and steps without any exchange.

    Returns:
      ``points``, ``links`` and ``local``, each a list of rows for a JSON file.
    """
    found: dict[str, list[dict[str, Any]]] = {"points": [], "links": [], "local": []}
    where = {"workers": hosts, "params": size}
    with network(hosts) as made:
        for number, names in enumerate(groups):
            with _started(names, made, size, s) as owner:
                if s.breakdown:
                    for name in dict.fromkeys([REST, *names]):
                        if name in JAX and (number == 0 or name not in (BASELINE, REST)):
                            say(f"{name}: a step without exchange")
                            found["local"].append(where | _local(owner[name], name, s))
                words, turns = {}, {}
                for name in names:
                    say(f"{name}: compiling and {s.warmup} steps")
                    answers = owner[name].ask("prepare", method=name, warmup=_warmup(name, s))
                    words[name] = answers[0]["words"]
                for link in links:
                    made.limit(link)
                    if number == 0:
                        say(f"{link}: latency")
                        arguments = {"sizes": _LATENCY_SIZES, "rounds": 5}
                        fitted = owner[BASELINE].ask("latency", **arguments)[0]
                        found["links"].append(where | {"link": link} | fitted)
                    for name in names:
                        seconds = _seconds(owner[name].ask("measure", method=name, steps=1))
                        turns[name] = max(1, min(s.steps, math.ceil(_ROUND_SECONDS / seconds)))
                    rows = {name: _row(where, link, name, words[name]) for name in names}
                    for turn in range(s.rounds):
                        say(f"{link}: round {turn + 1} of {s.rounds}")
                        for name in names:
                            asked = {"method": name, "steps": turns[name]}
                            _add(rows[name], owner[name].ask("measure", **asked))
                    for name, row in rows.items():
                        row["baseline_seconds"] = rows[BASELINE]["seconds"]
                        if number == 0 or name != BASELINE:
                            found["points"].append(row)
                made.limit("none")
    return found


@contextlib.contextmanager
def _started(
    names: Sequence[str], made: Hosts, size: int, s: Settings
) -> Iterator[dict[str, Workers]]:
    """The processes that have each method: those of JAX, and of PyTorch where it is needed."""
    config = {
        "workers": len(made.addresses),
        "density": s.density,
        "shapes": SHAPES[s.shapes](size),
        "seed": s.seed,
        "pin": s.pin,
    }
    with contextlib.ExitStack() as stack:

        def start(program: str) -> Workers:
            own = config | {"coordinator": f"{made.addresses[0]}:{next(_ports)}"}
            options = {"threads": 1 if s.pin else 0, "seconds": s.seconds}
            module = f"{__package__}.{program}"
            return stack.enter_context(workers(module, made, own, **options))

        jax = start("_jax_worker")
        torch = None
        if any(name not in JAX for name in names):
            torch = start("_torch_worker")
        yield {name: jax if name in JAX else torch for name in (REST, *names)}


def _local(group: Workers, name: str, s: Settings) -> dict[str, Any]:
    """The step of one worker on each host, all at once: they share the cores as ever."""
    group.ask("prepare", method=name, warmup=_warmup(name, s), local=True)
    row = _row({}, "local", name, None)
    for _ in range(s.rounds):
        _add(row, group.ask("measure", method=name, steps=s.steps))
    group.ask("drop", method=name)
    return {key: row[key] for key in ("method", "seconds", "cpu_seconds")}


def _warmup(name: str, s: Settings) -> int:
    # Only what keeps a residual has a beginning; a dense step takes seconds on a slow link.
    return s.warmup if name in JAX and not name.startswith("dense") else min(s.warmup, 4)


def _row(where: dict[str, Any], link: str, name: str, words: Any) -> dict[str, Any]:
    lists = {key: [] for key in ("seconds", "cpu_seconds", "received", "sent", "words")}
    return where | {"link": link, "method": name, "program_words": words} | lists


def _add(row: dict[str, Any], answers: Sequence[dict[str, Any]]) -> None:
    """One round: the slowest worker's time, and the mean of what they count."""
    row["seconds"].append(_seconds(answers))
    for key in ("cpu_seconds", "received", "sent"):
        row[key].append(sum(answer[key] for answer in answers) / len(answers))
    if answers[0]["words"] is not None:
        row["words"].append(answers[0]["words"])


def _seconds(answers: Sequence[dict[str, Any]]) -> float:
    return max(answer["seconds"] for answer in answers)

"""The options of the planner's commands, each with its help, its default and its check.

A check raises a ValueError that names the option, the value and what to write instead.
"""

import argparse
import functools
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from sparse_collectives import _units
from sparse_collectives.planner import _option_files
from sparse_collectives.planner._ways import CPU, GPU, LocalCost

# A ring has a message for each worker: with more workers, its cost alone takes seconds.
_MOST_WORKERS = 1 << 16


class Option(NamedTuple):
    """An option of a command."""

    name: str
    # A name for its value; None for a switch.
    metavar: str | None
    # One line, in which {default} stands for the default.
    help: str
    # Converts the text of a value, and is given the name of the option for its error.
    check: Callable[[str, str], Any] | None = None
    # The text that stands for an option that is not given.
    default: str | None = None
    # A remark on the default in the line of assumed options; None: the line does not name it.
    said: str | None = None
    # More arguments of `ArgumentParser.add_argument`.
    more: Mapping[str, Any] = {}

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Adds it to a parser, which reads its text only."""
        how = {"action": "store_true"} if self.metavar is None else {"metavar": self.metavar}
        text = self.help.replace("{default}", str(self.default))
        parser.add_argument(f"--{self.name}", help=text, **how, **self.more)


def values(options: Iterable[Option], args: argparse.Namespace) -> argparse.Namespace:
    """The checked values of parsed options, and in ``assumed`` the defaults to name, by option."""
    found = argparse.Namespace(assumed={})
    for option in options:
        field, name = option.name.replace("-", "_"), f"--{option.name}"
        value = getattr(args, field)
        if value is None:
            value = option.default
            if option.said is not None:
                found.assumed[field] = f"{name} {value}{option.said}"
        if value is not None and option.check is not None:
            value = option.check(name, value)
        setattr(found, field, value)
    return found


def _workers(name: str, text: str, examples: str = "16, 256 or 1k") -> int:
    return _units.count(name, text, most=_MOST_WORKERS, examples=examples)


def _new_file(name: str, text: str) -> str:
    """Checked before anything is measured."""
    if not pathlib.Path(text).parent.is_dir():
        raise ValueError(f"{name} must be in a folder that exists, got {text}.")
    return text


def _density(name: str, text: str) -> float:
    """A share in (0, 1], except a plain 1, which may mean one percent."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found <= 1:
        shown = _units.shown(text)
        raise ValueError(f"{name} must be a share in (0, 1], such as 0.01 for 1 %, got {shown}.")
    if text.strip() == "1":
        raise ValueError(
            f"{name} must be 1.0 to send all entries or 0.01 to send 1 %, got 1, which may mean "
            "either."
        )
    return found


def _expansion(name: str, text: str) -> tuple[float, int]:
    """The fill-in ``X@P``: the union of the selections of P workers is X times k."""
    try:
        factor, _, count = text.partition("@")
        found = float(factor), _workers(name, count)
    except ValueError:
        found = math.nan, 1
    if not 1 <= found[0] <= found[1] or found[1] < 2:
        raise ValueError(
            f"{name} must be X@P with P >= 2 workers and 1 <= X <= P, such as 3.2@16, got "
            f"{_units.shown(text)}."
        )
    return found


def _select_cost(name: str, text: str) -> LocalCost:
    if text in ("cpu", "gpu"):
        return CPU if text == "cpu" else GPU
    seconds = _units.seconds(name, text, form="cpu, gpu or a time such as 0.1ns")
    return LocalCost(seconds, seconds)


_REQUIRED = {"required": True}
PLAN = (
    Option("params", "N", "gradient components: 133M, 133e6", _units.count, more=_REQUIRED),
    Option(
        "density",
        "D",
        "share k/n that is sent, in (0, 1] (default {default})",
        _density,
        # Both packages have this default, and a test compares them.
        default="0.05",
        said=", the default of sparse_adamw",
    ),
    Option("workers", "P", "data-parallel workers", _workers, more=_REQUIRED),
    Option(
        "latency",
        "T",
        "latency of a message: 5us (default {default})",
        _units.seconds,
        default="100us",
        said="",
    ),
    Option(
        "bandwidth",
        "B",
        "bandwidth of a worker while all send: 25Gbit, 3GB/s",
        _units.bandwidth,
    ),
    Option("measured", "FILE", "take both from the file of 'measure --json FILE'"),
    Option(
        "compute",
        "T",
        "forward and backward pass: 300ms (default {default})",
        _units.seconds,
        default="0s",
        said="",
    ),
    Option("inner", "G", "workers in a node; adds two-level schemes", _workers, "1"),
    Option("shard", "M", "devices of a worker that shard its parameters", _workers, "1"),
    Option("links", "L", "links of a worker, shared by its devices", _workers, "1"),
    # NVLink is several times as fast, PCIe is slower.
    Option("inner-latency", "T", "within a node (default {default})", _units.seconds, "2us"),
    Option(
        "inner-bandwidth", "B", "within a node (default {default})", _units.bandwidth, "100GB/s"
    ),
    Option(
        "expansion",
        "X@P",
        "fill-in: at P workers the union of all selections is X times k (default: uniform)",
        _expansion,
    ),
    Option(
        "select-cost",
        "T",
        "local work per parameter: a time such as 0.1ns, 'cpu' (3ns, measured: the default) "
        "or 'gpu' (from the launches and bytes of compiled programs)",
        _select_cost,
        default="cpu",
        said="",
    ),
    Option(
        "workers-per-core",
        "W",
        "workers that share a core, 2 for four on two cores: their local work takes turns",
        functools.partial(_units.number, least=1, most=_MOST_WORKERS),
        default="1",
    ),
    Option(
        "merge-cost",
        "T",
        "work per received pair (default: by --select-cost)",
        functools.partial(_units.seconds, form="a time such as 0.1ns"),
    ),
    Option("exact", None, "only encodings that round nothing"),
    Option(
        "same-loss",
        "FILE",
        "compare times to the same loss: with the measured steps of sparse_adamw, or with "
        "the steps in a JSON file, {algorithm: multiple of the steps of a dense run}",
        more={"nargs": "?", "const": _option_files.ADAMW},
    ),
    Option("all", None, "show every encoding"),
    Option("json", "FILE", "also write all numbers here", check=_new_file),
)

ROUNDS = (
    Option("params", "N", "gradient components: 124M", _units.count, more=_REQUIRED),
    Option("workers", "P", "sites", _workers, more=_REQUIRED),
    Option(
        "latency", "T", "latency of a message between sites: 50ms", _units.seconds, more=_REQUIRED
    ),
    Option("bandwidth", "B", "of a site while all send: 100Mbit", _units.bandwidth, more=_REQUIRED),
    Option("compute", "T", "forward and backward pass: 500ms", _units.seconds, more=_REQUIRED),
    Option("select-cost", "T", "as in 'plan': a time, 'cpu' or 'gpu'", _select_cost, "cpu", ""),
)

MEASURE = (
    Option(
        "devices",
        "N",
        "use N devices (default: all)",
        functools.partial(_workers, examples="4 or 8"),
    ),
    Option(
        "rounds",
        "R",
        "timings of each collective",
        functools.partial(_units.count, examples="9 or 100"),
        default="9",
    ),
    Option("json", "FILE", "write the fit here, for plan --measured", check=_new_file),
)

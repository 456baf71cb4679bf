"""The numbers of machines and of our own trainings; ``numbers.toml`` has them with their sources.

Tests compare them with the recorded files that are named there.
"""

import tomllib
from importlib import resources
from typing import Any, NamedTuple

NUMBERS: dict[str, Any] = tomllib.loads(
    resources.files("sparse_collectives.cost_model")
    .joinpath("numbers.toml")
    .read_text(encoding="utf-8")
)


class Program(NamedTuple):
    """A whole step on a GPU: error feedback, selection, exchange and update.

    Attributes:
      launches: kernel launches, including the kernels of collectives.
      bytes: bytes moved for each entry of the gradient.
    """

    launches: int
    bytes: float

    def seconds(self, entries: float) -> float:
        """Seconds of the step without the time of the network."""
        gpu = NUMBERS["gpu"]
        return self.launches * gpu["launch"] + self.bytes * entries / gpu["bandwidth"]

    def then(self, other: "Program") -> "Program":
        """One program after the other."""
        return Program(self.launches + other.launches, self.bytes + other.bytes)


PROGRAMS = {name: Program(*counts) for name, counts in NUMBERS["gpu"]["programs"].items()}
# For steps that were not compiled: the longest of the compiled ones.
LONGEST = PROGRAMS["spardl"]

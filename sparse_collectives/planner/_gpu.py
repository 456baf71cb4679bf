"""What a sparse step costs on a GPU, from its compiled programs.

None of it was timed. `benchmarks.gpu.programs` compiles the steps for a described H100 and counts
the kernels that a steady step launches, and the bytes they move. A launch is taken as 4 us (they
take 2 to 5), and memory at 60 % of its bandwidth. A test holds the numbers equal to those of
`benchmarks/gpu/programs.json`.
"""

from collections.abc import Mapping
from typing import NamedTuple

# Seconds of a launch, and bytes a second.
LAUNCH, BANDWIDTH = 4e-6, 0.6 * 3.35e12


class Program(NamedTuple):
    """A whole step: error feedback, selection, exchange and update.

    Attributes:
      launches: of kernels, those of collectives included.
      bytes: moved, for each entry of the gradient.
    """

    launches: int
    bytes: float

    def seconds(self, entries: float) -> float:
        """Without what the network takes."""
        return self.launches * LAUNCH + self.bytes * entries / BANDWIDTH


# At n = 14.7M, 1 % and P = 8; of another P the launches are about the same.
PROGRAMS: Mapping[str, Program] = {
    "dense": Program(6, 24.0),
    "sparse_adamw": Program(86, 57.0),
    "sparse_sgd": Program(83, 37.9),
    # Of rank 4.
    "powersgd": Program(90, 70.0),
    "ok_topk": Program(150, 38.4),
    "topk_a": Program(87, 44.3),
    "gtopk": Program(215, 56.0),
    "agreed": Program(71, 37.7),
    "agreed(few)": Program(83, 37.9),
    "spardl": Program(279, 42.3),
    "ssar_recursive_double": Program(118, 65.4),
    "ssar_split_allgather": Program(101, 41.9),
    "dsar_split_allgather": Program(105, 42.3),
}
# What was not compiled: as the longest of those that were.
DEFAULT = max(PROGRAMS.values(), key=lambda program: program.launches)


def program_of(name: str) -> Program:
    """That of an algorithm of the planner; of one in nodes that of its exchange between them."""
    inner = name.removeprefix("hierarchical(").removesuffix(")") if "hierarchical" in name else name
    return PROGRAMS.get(inner, DEFAULT)

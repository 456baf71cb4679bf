"""The cost of a sparse step on a GPU, from its compiled programs.

`benchmarks.gpu.programs` compiles the steps for the description of an H100 and counts the kernels
that a steady step launches and the bytes that they move. A launch is assumed to take 4 us, and
memory to reach 60 % of its bandwidth. Whole steps of one worker took 0.8 to 1.3 times as long on an
H200 (docs/gpu.md). A test checks that the numbers equal those in `benchmarks/gpu/programs.json`.
"""

from typing import NamedTuple

# Seconds of a launch, and bytes per second.
LAUNCH, BANDWIDTH = 4e-6, 0.6 * 3.35e12


class Program(NamedTuple):
    """A whole step: error feedback, selection, exchange and update.

    The numbers are for n = 14.7M, a density of 1 % and P = 8; for another P the launches
    are about the same.

    Attributes:
      launches: kernel launches, including the kernels of collectives.
      bytes: bytes moved for each entry of the gradient.
    """

    launches: int
    bytes: float

    def seconds(self, entries: float) -> float:
        """Seconds of the step without the time of the network."""
        return self.launches * LAUNCH + self.bytes * entries / BANDWIDTH


# For steps that were not compiled: the longest of the compiled ones, with `spardl`.
DEFAULT = Program(281, 42.3)

"""What a sparse step costs on a GPU, from its compiled programs.

None of it was timed. `benchmarks.gpu.programs` compiles the steps for a described H100 and counts
the kernels that a steady step launches, and the bytes they move. A launch is taken as 4 us (they
take 2 to 5), and memory at 60 % of its bandwidth. A test holds the numbers equal to those of
`benchmarks/gpu/programs.json`.
"""

from typing import NamedTuple

# Seconds of a launch, and bytes a second.
LAUNCH, BANDWIDTH = 4e-6, 0.6 * 3.35e12


class Program(NamedTuple):
    """A whole step: error feedback, selection, exchange and update.

    At n = 14.7M, 1 % and P = 8; of another P the launches are about the same.

    Attributes:
      launches: of kernels, those of collectives included.
      bytes: moved, for each entry of the gradient.
    """

    launches: int
    bytes: float

    def seconds(self, entries: float) -> float:
        """Without what the network takes."""
        return self.launches * LAUNCH + self.bytes * entries / BANDWIDTH


# What was not compiled: as the longest of those that were, that of `spardl`.
DEFAULT = Program(281, 42.3)

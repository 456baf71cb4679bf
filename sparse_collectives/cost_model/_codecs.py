"""The sizes of encoded messages, taken from the codecs themselves."""

import math

from sparse_collectives.wire._sizes import SIZES as CODECS
from sparse_collectives.wire._sizes import MessageSizes


def codec_sizes(name: str) -> MessageSizes:
    """The sizes of a codec by the name of its factory, with its default options."""
    if name not in CODECS:
        raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {name!r}.")
    return CODECS[name]


def escapes_per_pair(codec: MessageSizes, density: float) -> float:
    r"""Expected escapes for each pair, on uniform indices.

    The gap G is then geometric, :math:`P(G \ge g) = (1 - d)^{g-1}`, and takes one
    escape for each digit of its multiple of the base. d is the share of the places of a message
    that are selected.
    """
    if codec.gaps is None or density >= 1:
        return 0.0
    base, bits, digits = codec.gaps
    lengths = ((base << (bits * digit)) - 1 for digit in range(digits))
    return math.fsum(math.exp(length * math.log1p(-density)) for length in lengths)


def has_room(codec: MessageSizes, density: float) -> bool:
    """Whether a full message has room for the escapes that uniform indices need.

    Otherwise a part of the selection is left out at every step.
    """
    return escapes_per_pair(codec, density) <= codec.escapes

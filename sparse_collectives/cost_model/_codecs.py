"""Words that a message takes in each encoding."""

import math
from typing import NamedTuple


class CodecCost(NamedTuple):
    """The size of a message.

    Attributes:
      pair_words: words of a value-index pair.
      dense_words: words of a value in a dense run.
      gap_limit: gaps between two indices that reach this take an escape: a pair
        without a value. 0: no gaps are coded, so there are no escapes.
      exact: whether nothing is rounded.
    """

    pair_words: float
    dense_words: float
    gap_limit: int
    exact: bool

    def escapes_per_pair(self, density: float) -> float:
        r"""Expected escapes for each pair, on uniform indices.

        The gap G is then geometric, :math:`P(G \ge g) = (1 - d)^g`, and a gap
        takes one escape for each whole multiple of the limit L in it:

        .. math:: \sum_{j \ge 1} (1-d)^{jL} = \frac{1}{(1-d)^{-L} - 1}

        which is below 1 / (d L): a message over m places never expects more than
        m / L of them.

        Args:
          density: d, the share of the places of a message that are selected.
        """
        if not self.gap_limit or density >= 1:
            return 0.0
        exponent = -self.gap_limit * math.log1p(-density)
        # expm1 overflows where no gap ever reaches the limit.
        return 0.0 if exponent > 700 else 1.0 / math.expm1(exponent)

    def message_words(self, slots: int, density: float) -> float:
        """Words of a message of so many pairs and its expected escapes, rounded up.

        Args:
          slots: pairs, padding included.
          density: the share of the places of the message that are selected.
        """
        escapes = slots * self.escapes_per_pair(density)
        return float(math.ceil((slots + escapes) * self.pair_words))


def qsgd_cost(bits: int, bucket: int) -> CodecCost:
    """QSGD as SparCML uses it (section 6): ``bits`` a value, a float32 scale a bucket."""
    value = bits / 32 + 1 / bucket
    return CodecCost(1 + value, value, 0, exact=False)


# By the name of the factory in `sparse_collectives.wire`, with its default arguments.
CODECS: dict[str, CodecCost] = {
    "raw": CodecCost(2.0, 1.0, 0, exact=True),
    "bf16": CodecCost(1.5, 0.5, 0, exact=False),
    "narrow16": CodecCost(1.0, 0.5, 65535, exact=False),
    # 8 bits of value, 8 bits of gap, one float32 scale for 128 entries.
    "narrow8": CodecCost(0.5 + 1 / 128, 0.25 + 1 / 128, 255, exact=False),
    "qsgd": qsgd_cost(8, 512),
}


def codec_cost(name: str) -> CodecCost:
    """The :class:`CodecCost` of a codec by name.

    Raises:
      ValueError: there is no such codec.
    """
    if name not in CODECS:
        raise ValueError(f"codec is {name!r}; pass one of {', '.join(CODECS)}.")
    return CODECS[name]

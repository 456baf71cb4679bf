"""One step of all entries in few bits, in NumPy: units, codes to owners, codes of sums."""

import numpy as np

from tests.reference.few_bits import arrives

BLOCK, SHARE, SMALLEST = 256, 1 / 32, 0.125


def units(square):
    """The unit of each entry, and how far an update counts."""
    found, most = np.zeros(len(square)), np.zeros(len(square))
    for start in range(0, len(square), BLOCK):
        part = square[start : start + BLOCK]
        # The last block counts as a whole one.
        smallest = SMALLEST * np.sqrt(part.sum() / BLOCK)
        here = slice(start, start + BLOCK)
        has_moved = smallest > 2.0**-62
        found[here] = 2 ** np.floor(np.log2(np.sqrt(part) + smallest)) if has_moved else 1.0
        most[here] = 4 * found[here] if has_moved else np.inf
    return found, most


def step(acc, square, count, bits):
    """The update, the residuals ``f64[P, n]``, and the squares after a step.

    ``acc`` is ``f64[P, n]``; parts of whole blocks belong to the workers in turn.
    """
    workers, size = acc.shape
    up, down = bits
    (unit, most), slots = units(square), BLOCK * -(-size // (workers * BLOCK))
    values, total, given = acc / unit, np.zeros(size), np.zeros_like(acc)
    for part in range(workers):
        owner, here = (part - count) % workers, slice(part * slots, (part + 1) * slots)
        sent = np.stack([arrives(x[here], up) for x in values]).astype(np.float64)
        sent[owner] = values[owner, here]
        total[here] = arrives(sent.sum(0), down)
        sent[owner] -= sent.sum(0) - total[here]
        given[:, here] = sent
    update = total * unit / workers
    seen = np.minimum(np.abs(update), most)
    return update, acc - given * unit, square + SHARE * (seen**2 - square)

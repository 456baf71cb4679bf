"""One step of all entries in few bits, in NumPy: units, codes to owners, codes of sums."""

import numpy as np

from tests.reference.few_bits import arrives

BLOCK, DECAY, SMALLEST = 256, 0.97, 0.1


def units(square):
    """The unit of each entry, from the running mean of the squares of updates."""
    found = np.zeros(len(square))
    for start in range(0, len(square), BLOCK):
        part = square[start : start + BLOCK]
        # The last block counts as a whole one.
        smallest = SMALLEST * np.sqrt(part.sum() / BLOCK)
        found[start : start + BLOCK] = np.sqrt(part) + smallest if smallest > 2.0**-62 else 1.0
    return found


def step(acc, square, count, bits):
    """The update, the residuals ``f64[P, n]``, and the squares after a step.

    ``acc`` is ``f64[P, n]``; parts of whole blocks belong to the workers in turn.
    """
    workers, size = acc.shape
    up, down = bits
    unit, slots = units(square), BLOCK * -(-size // (workers * BLOCK))
    values, total, given = acc / unit, np.zeros(size), np.zeros_like(acc)
    for part in range(workers):
        owner, here = (part - count) % workers, slice(part * slots, (part + 1) * slots)
        sent = np.stack([arrives(x[here], up) for x in values]).astype(np.float64)
        sent[owner] = values[owner, here]
        total[here] = arrives(sent.sum(0), down)
        sent[owner] -= sent.sum(0) - total[here]
        given[:, here] = sent
    update = total * unit / workers
    seen = np.where(unit == 1, np.abs(update), np.minimum(np.abs(update), 4 * unit))
    return update, acc - given * unit, DECAY * square + (1 - DECAY) * seen**2

"""Claims about many hosts, by models with the papers' numbers."""

import numpy as np

# MSTopK, section 5.3: 16 nodes of 8 GPUs with a card of 25 Gbit/s each, 1 %, 2-byte values.
_NODES, _INSIDE, _CARD, _DENSITY, _VALUE, _INDEX = 16, 8, 25e9 / 8, 0.01, 2, 4
_SIZES = {"ResNet-50": 25_000_000, "Transformer": 110_000_000}


def _aggregation_of_halves() -> dict[str, float]:
    """Seconds between nodes, as ratios: the bytes of a node over the rate of its card."""
    found: dict[str, list[float]] = {}
    for size in _SIZES.values():
        pairs = _DENSITY * size * (_VALUE + _INDEX)
        seconds = {
            # All selections of all GPUs reach each GPU, eight of which share a card.
            "NaiveAG": _NODES * _INSIDE * pairs * _INSIDE / _CARD,
            "TreeAR": 2 * size * _VALUE / _CARD,
            "2DTAR": 2 * size * _VALUE * (_NODES - 1) / _NODES / _CARD,
            "HiTopKComm": (_NODES - 1) * pairs / _CARD,
        }
        ordered = list(seconds.items())
        for (slow, more), (fast, less) in zip(ordered, ordered[1:], strict=False):
            found.setdefault(f"{fast} / {slow}", []).append(less / more)
    return {name: max(ratios) for name, ratios in found.items()}


def _rotation() -> dict[str, float]:
    """Message times until P (P - 1) messages have arrived, in the naive order over the rotated one.

    All hosts send to host 0 first, then to host 1, and so on, or rotated: host i to i + 1, i + 2.
    """
    found = {}
    for workers in (16, 64, 256):
        naive = [[x for x in range(workers) if x != i] for i in range(workers)]
        rotated = [[(i + s) % workers for s in range(1, workers)] for i in range(workers)]
        for name, waits in (("waiting", True), ("all sent at once", False)):
            times = [_message_times(order, waits) for order in (naive, rotated)]
            found[f"P = {workers}: naive / rotated, {name}"] = times[0] / times[1]
    return found


def _message_times(order: list[list[int]], waits: bool) -> int:
    """Steps in each of which a host receives one message, and sends one if it ``waits`` for it."""
    remaining, times = [list(reversed(each)) for each in order], 0
    while any(remaining):
        times += 1
        # Who has the most to send comes first.
        senders = sorted(range(len(order)), key=lambda i: -len(remaining[i]))
        busy = set()
        for i in senders:
            for target in remaining[i][-1:] if waits else list(reversed(remaining[i])):
                if target not in busy:
                    busy.add(target)
                    remaining[i].remove(target)
                    if waits:
                        break
    return times


def _balanced_gather(seed: int, quick: bool) -> dict[str, float]:
    """An allgather by recursive doubling of uneven parts, compared with balancing them first.

    Parts are drawn until the largest is above four times the mean, where the paper balances. A step
    of the doubling takes as long as the most that a worker receives in it; balancing takes as long
    as the most that a worker sends or receives.
    """
    random, draws, found = np.random.default_rng(seed), 50 if quick else 200, {}
    for workers in (16, 32, 64):
        gains: list[float] = []
        while len(gains) < draws:
            parts = random.dirichlet(np.full(workers, 0.4)) * workers
            if parts.max() <= 4:
                continue
            begin = np.cumsum(parts) - parts
            places = np.arange(workers)
            # A worker keeps the entries of its own part whose rank is in its share of 1.
            stays = np.minimum(begin + parts, places + 1) - np.maximum(begin, places)
            stays = np.maximum(stays, 0)
            moved = max((parts - stays).max(), (1 - stays).max())
            gains.append(_doubling(parts) / (moved + _doubling(np.ones(workers))))
        found[f"P = {workers}"] = float(np.median(gains))
    values = list(found.values())
    return found | {"least gain": min(values), "largest gain": max(values)}


def _doubling(parts: np.ndarray) -> float:
    """The time of an allgather by recursive doubling, in entries."""
    total, places, distance = 0.0, np.arange(len(parts)), 1
    while distance < len(parts):
        received = parts[places ^ distance]
        total += received.max()
        parts, distance = parts + received, 2 * distance
    return float(total)

"""Which samples go together: subsets of lengths that fill a token budget as far as they can. Pure.

Sums that can be reached are the bits of one large integer: adding a sample of length l to a set of sums is
`bits | bits << l`, a thousand additions at once. Of the subsets that fill the budget equally well the one of the
longest samples is taken, since short ones are what gaps are filled with later. (The heuristic is "minimum bin slack":
Gupta and Ho, 1999.)
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence

#: A micro-step is full when at most this many tokens more would fit.
SLACK = 4
_MOST = 256  # samples whose subsets are looked at
_WINDOW = 4, 24  # budgets, and samples, that are looked at together at the least where there are very many
_SMALL = 64  # budgets of samples up to which several ways are tried
_MORE = 1.0, 1.02, 1.08  # times the size of even micro-steps: budgets that are tried for them, in a few ways each
_WAYS = (0.0005, 0.0, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08)  # parts of the budget that may stay empty


def fill_up(lengths: Sequence[int], room: int, slack: int = 0) -> list[int]:
    """Indices of lengths whose sum is as large as `room` allows, or within `slack` of it; of the longest such."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[at] for at in _fill([lengths[i] for i in order], room, slack)]


def _fill(lengths: Sequence[int], room: int, slack: int) -> list[int]:
    """The same for lengths in ascending order; the indices descend.

    Of very many the longest go in unasked, until what is left can be made up of the shortest.
    """
    chosen = []
    gap = sum(lengths[: _MOST // 4])
    for at in range(len(lengths) - 1, _MOST - 1, -1):
        if lengths[at] + gap <= room:
            chosen.append(at)
            room -= lengths[at]
    mask = (1 << (room + 1)) - 1
    sums, bits = [1], 1
    for length in lengths[:_MOST]:
        if length > room:
            break
        bits |= bits << length & mask
        sums.append(bits)
    high, low = room, min(room - slack, bits.bit_length() - 1)
    for at in range(len(sums) - 2, -1, -1):
        most = high - lengths[at]
        if most >= 0:
            # The shorter ones must be able to make up what is left once this one is in.
            least = max(low - lengths[at], 0)
            if sums[at] >> least & (1 << (most - least + 1)) - 1:
                chosen.append(at)
                low, high = low - lengths[at], most
    return chosen


def pack_all(lengths: Sequence[int], budget: int, ways: Sequence[float] = _WAYS) -> list[list[int]]:
    """All lengths in micro-steps of at most `budget`, as indices; a longer one is alone in its own.

    The micro-steps come in descending size, so that cells that share them end at about the same time. Where there are
    few, several `ways` (parts of the budget that may stay empty) are tried until one needs as few as the tokens allow.
    The time goes by the number of lengths: only so many of them are looked at together.
    """
    alone = [[i] for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]) if lengths[i] > budget]
    rest = [i for i in range(len(lengths)) if lengths[i] <= budget]
    total = sum(lengths[i] for i in rest)
    many = total > _SMALL * budget
    window = (_WINDOW[0] * budget, _WINDOW[1]) if many else (total, len(rest))
    best: list[list[int]] | None = None
    for way in ways:
        made = _pack(lengths, rest, budget, window, int(way * budget))
        if best is None or len(made) < len(best):
            best = made
        if many or (len(best) - 1) * budget < total:
            break
    best = best or []
    best.sort(key=lambda indices: -sum(lengths[i] for i in indices))
    return alone + best


def pack_evenly(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """The same, of as even a size as costs no further micro-step: cells that share them end sooner."""
    packed = pack_all(lengths, budget)
    even = sum(lengths) / max(len(packed), 1)
    for more in _MORE:
        if even * more < budget and len(found := pack_all(lengths, math.ceil(even * more), _WAYS[:2])) <= len(packed):
            return found
    return packed


def _pack(
    lengths: Sequence[int], indices: Sequence[int], budget: int, window: tuple[int, int], slack: int
) -> list[list[int]]:
    """Again and again the longest of those in the window of tokens and lengths, and what fills the budget beside it."""
    made = []
    pool: list[tuple[int, int]] = []  # in ascending order
    tokens, at = 0, 0
    while pool or at < len(indices):
        while at < len(indices) and (tokens < window[0] or len(pool) < window[1]):
            insort(pool, (lengths[indices[at]], indices[at]))
            tokens += lengths[indices[at]]
            at += 1
        longest, index = pool.pop()
        beside = _fill([length for length, _ in pool], budget - longest, slack)
        step = [index, *(pool[i][1] for i in beside)]
        for i in beside:
            del pool[i]
        tokens -= sum(lengths[i] for i in step)
        made.append(step)
    return made

"""Advantages of a group's executions from their scores. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Keeps groups whose scores hardly differ from being blown up to full size.
EPSILON = 1e-4


def group_relative(scores: Sequence[float | None], epsilon: float = EPSILON) -> list[float]:
    """(score - mean) / (standard deviation + epsilon) within the group; all zero where all scores are equal.

    The deviation is the unbiased one. An execution without a score has no say in the mean and gets an advantage of 0.
    """
    known = [score for score in scores if score is not None]
    if len(known) < 2 or min(known) == max(known):
        return [0.0] * len(scores)
    mean = math.fsum(known) / len(known)
    deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in known) / (len(known) - 1))
    return [0.0 if score is None else (score - mean) / (deviation + epsilon) for score in scores]

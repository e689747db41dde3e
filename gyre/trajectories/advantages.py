"""Advantages of a group's executions from their scores. Pure.

An execution without a score has no say in anyone's baseline and gets an advantage of 0. Where all scores are equal, or
fewer than two are known, all advantages are 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Keeps groups whose scores hardly differ from being blown up to full size.
EPSILON = 1e-4


def group_relative(scores: Sequence[float | None], epsilon: float = EPSILON) -> list[float]:
    """(score - mean) / (standard deviation + epsilon) within the group; the deviation is the unbiased one.

    "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models", arXiv 2402.03300, section
    4.1.2, which has no epsilon and leaves open which deviation it takes.
    """
    known = _that_differ(scores)
    if not known:
        return [0.0] * len(scores)
    mean = math.fsum(known) / len(known)
    deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in known) / (len(known) - 1))
    return [0.0 if score is None else (score - mean) / (deviation + epsilon) for score in scores]


def centred(scores: Sequence[float | None]) -> list[float]:
    """score - mean within the group.

    "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv 2503.20783, section 3.2 (Dr. GRPO).
    """
    known = _that_differ(scores)
    if not known:
        return [0.0] * len(scores)
    mean = math.fsum(known) / len(known)
    return [0.0 if score is None else score - mean for score in scores]


def leave_one_out(scores: Sequence[float | None]) -> list[float]:
    """score - mean of the others' scores within the group.

    "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs", arXiv
    2402.14740, the estimator that it calls RLOO.
    """
    known = _that_differ(scores)
    if not known:
        return [0.0] * len(scores)
    total, others = math.fsum(known), len(known) - 1
    return [0.0 if score is None else score - (total - score) / others for score in scores]


def _that_differ(scores: Sequence[float | None]) -> list[float]:
    """The scores that are known; none where they do not differ."""
    known = [score for score in scores if score is not None]
    return known if len(known) > 1 and min(known) < max(known) else []

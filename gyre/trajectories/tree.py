"""The calls of an execution as few token sequences. Pure.

A conversation is asked turn by turn, and each prompt repeats what came before. A call whose prompt begins with the
whole of an earlier call, prompt and answer, extends that call's sequence; any other call forks, and its prompt is
context only. So every sampled token is in exactly one sequence as a sampled one (invariant 12), however often it
appears in later prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Turn:
    """One model call. All arrays are per token: prompt int32 [p], the others [s] for the sampled tokens."""

    prompt: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray  # float32, processed
    versions: np.ndarray  # int32
    temperature: float
    trainable: bool


@dataclass(frozen=True)
class Branch:
    """One sequence: the turns in it, in order, each with the place of its first sampled token."""

    tokens: np.ndarray  # int32 [n]
    turns: tuple[tuple[int, Turn], ...]


class _Growing:
    def __init__(self, turn: Turn) -> None:
        self.tokens = np.concatenate([turn.prompt, turn.sampled])
        self.turns = [(len(turn.prompt), turn)]

    def precedes(self, turn: Turn) -> bool:
        length = len(self.tokens)
        return length <= len(turn.prompt) and np.array_equal(self.tokens, turn.prompt[:length])

    def extend(self, turn: Turn) -> None:
        self.tokens = np.concatenate([turn.prompt, turn.sampled])
        self.turns.append((len(turn.prompt), turn))


def branches(turns: Sequence[Turn]) -> list[Branch]:
    """Merge calls, given in the order in which they were answered, into sequences; the longest match is extended."""
    growing: list[_Growing] = []
    for turn in turns:
        candidates = [branch for branch in growing if branch.precedes(turn)]
        if candidates:
            max(candidates, key=lambda branch: len(branch.tokens)).extend(turn)
        else:
            growing.append(_Growing(turn))
    return [Branch(branch.tokens.astype(np.int32), tuple(branch.turns)) for branch in growing]

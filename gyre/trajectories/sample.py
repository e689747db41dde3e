"""The sample: one token sequence as it was sampled, and nothing computed from it. Pure.

Sampling (`gyre.trajectories.sampling`) makes samples from an execution's records; packing (`gyre.training.packing`)
lays them out for a trainer. An execution gives one sample per branch of its conversation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sample:
    """A sequence of n tokens of one execution, prompt and answers interleaved as the model saw them.

    Invariant 12 rests on `trained`: it is true only for tokens that a policy sampled and whose processed
    log-probability and version were recorded at that moment.
    """

    execution: int
    group: int
    tokens: np.ndarray  # int32 [n]
    trained: np.ndarray  # bool [n]: sampled by the policy, and trained on
    logprobs: np.ndarray  # float32 [n]: recorded processed log-probability, 0 elsewhere
    versions: np.ndarray  # int32 [n]: policy version that sampled the token, -1 elsewhere
    temperatures: np.ndarray  # float32 [n]: temperature it was sampled at, 1 elsewhere

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self) -> None:
        """Raise ValueError unless the arrays agree in length and trained tokens carry what invariant 12 asks for."""
        n = len(self.tokens)
        for name in ("trained", "logprobs", "versions", "temperatures"):
            if getattr(self, name).shape != (n,):
                raise ValueError(f"execution {self.execution}: {name} does not have the shape ({n},)")
        if n and self.trained[0]:
            raise ValueError(f"execution {self.execution}: the first token has no context and cannot be trained on")
        chosen = self.trained
        if not np.isfinite(self.logprobs[chosen]).all() or (self.logprobs[chosen] > 1e-3).any():
            raise ValueError(f"execution {self.execution}: a trained token has no usable log-probability")
        if (self.versions[chosen] < 0).any():
            raise ValueError(f"execution {self.execution}: a trained token has no policy version")
        if (self.temperatures[chosen] <= 0).any():
            raise ValueError(f"execution {self.execution}: a trained token was sampled greedily")

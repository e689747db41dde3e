"""Rows of a ready group: its samples, each with the advantage and the weight of its trained tokens; blocking.

The trainer is blind to how a group was scored. What makes one objective's data differ from another's is decided here:
the advantage, and the weight, over whose sum an update's gradient is divided at its end. By `Objective.averaging`:

execution  1 / (trained tokens of the execution, over all its samples): the mean over an execution's tokens, then over
           the executions of the update, so that each counts the same however long it was, and however often it forked
token      1: the mean over all trained tokens of the update
constant   the sum over an execution's tokens divided by a constant, then the mean over executions. The weight is that
           of `execution`, so the total is the number of executions; what it divides too much, by the execution's
           tokens n in place of the constant c, the advantages make up for: they carry the factor n / c. That is the
           same, since all losses are homogeneous in the advantage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from gyre.config import Config
from gyre.run_dir import RunDir, read_json
from gyre.training.objectives import Objective
from gyre.training.packing import Row
from gyre.trajectories.advantages import centred, group_relative, leave_one_out
from gyre.trajectories.sample import Sample


def rows_of(run_dir: RunDir, config: Config, group: int, executions: list[int]) -> tuple[list[Row], list[float]]:
    """Samples of a group with their advantages and weights, and the scores they come from.

    Executions without a score are left out. With `train.advantages: shuffled` the advantages change places within the
    group, by seed and group alone: what is rewarded then has nothing to do with what was done. With `ones` every token
    is trained on, as a self-test needs it. A group in which every advantage is 0 has no rows.
    """
    from gyre.trajectories.sampling import samples

    objective = Objective.of(config.train)
    outcomes = {n: read_json(run_dir.outcome(n)) or {} for n in executions}
    scored = [n for n in executions if outcomes[n].get("score") is not None]
    scores = [float(outcomes[n]["score"]) for n in scored]
    advantages = advantages_of(objective, scores)
    if config.train.advantages == "ones":
        advantages = [1.0] * len(scores)
    if config.train.advantages == "shuffled":
        order = np.random.default_rng([config.seed, group]).permutation(len(advantages))
        advantages = [advantages[i] for i in order]
    if not any(advantages):
        return [], scores
    rows = []
    for n, advantage in zip(scored, advantages, strict=True):
        own = [replace(sample, group=group) for sample in samples(run_dir, n) if sample.trained.any()]
        for sample in own:
            sample.check()  # invariant 12
        rows += weighted(objective, own, advantage, constant_of(config))
    return rows, scores


def advantages_of(objective: Objective, scores: Sequence[float]) -> list[float]:
    """The advantages of a group's executions; not yet divided by what only the whole update knows."""
    if objective.baseline == "others":
        return leave_one_out(scores)
    return group_relative(scores) if objective.divisor == "group" else centred(scores)


def weighted(objective: Objective, samples: Sequence[Sample], advantage: float, constant: float) -> list[Row]:
    """Rows of the samples of one execution, each of which has trained tokens; `constant` is averaging's, in tokens."""
    trained = sum(int(sample.trained.sum()) for sample in samples)
    weight = 1.0 if objective.averaging == "token" else 1.0 / max(trained, 1)
    if objective.averaging == "constant":
        advantage *= trained / constant
    return [Row(sample, advantage, weight) for sample in samples]


def constant_of(config: Config) -> float:
    """The constant of `constant` averaging: the most tokens that a sample may have."""
    return float(config.train.sample_limit or config.model.max_context)

"""From an execution's records on disk to training samples: exactly the tokens that its policy sampled."""

from __future__ import annotations

import numpy as np

from gyre.proxy.recorder import CallRecord, read_records
from gyre.run_dir import RunDir, read_json
from gyre.trajectories.sample import Sample
from gyre.trajectories.tree import Branch, Turn, branches


def samples(run_dir: RunDir, n: int) -> list[Sample]:
    """The samples of a closed execution, one per branch of its conversations that has a trained token.

    Only the records of the try that closed it count; what earlier tries sampled is dropped.

    Raises:
        FileNotFoundError: the execution has no outcome.
        ValueError: its records are not sound.
    """
    outcome = read_json(run_dir.outcome(n))
    if outcome is None:
        raise FileNotFoundError(f"execution {n} is not closed")
    group = outcome.get("group")
    if group is None:
        group = (read_json(run_dir.spec(n)) or {}).get("group", -1)
    return from_records(read_records(run_dir.execution(n) / outcome["records"], outcome.get("calls")), n, group)


def from_records(records: list[CallRecord], n: int, group: int) -> list[Sample]:
    """Samples of the calls of one execution, in the order in which they were recorded."""
    made = [_sample(branch, n, group) for branch in branches([_turn(record) for record in records])]
    kept = [sample for sample in made if sample.trained.any()]
    for sample in kept:
        sample.check()  # invariant 12
    return kept


def _turn(record: CallRecord) -> Turn:
    return Turn(
        prompt=np.asarray(record.prompt, np.int32),
        sampled=np.asarray(record.sampled, np.int32),
        logprobs=np.asarray(record.logprobs, np.float32),
        versions=np.fromiter(record.versions(), np.int32),
        temperature=record.sampling["temperature"],
        trainable=record.trainable,
    )


def _sample(branch: Branch, n: int, group: int) -> Sample:
    length = len(branch.tokens)
    trained = np.zeros(length, bool)
    logprobs = np.zeros(length, np.float32)
    versions = np.full(length, -1, np.int32)
    temperatures = np.ones(length, np.float32)
    for start, turn in branch.turns:
        end = start + len(turn.sampled)
        if len(turn.versions) != end - start or len(turn.logprobs) != end - start:
            raise ValueError(f"execution {n}: a call's tokens, log-probabilities and versions differ in number")
        if not turn.trainable:
            continue
        trained[start:end] = True
        logprobs[start:end] = turn.logprobs
        versions[start:end] = turn.versions
        temperatures[start:end] = turn.temperature
    return Sample(n, group, branch.tokens, trained, logprobs, versions, temperatures)

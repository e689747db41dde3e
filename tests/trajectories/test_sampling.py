"""Samples are what was sampled, with the log-probability and version of that moment, and only that (invariant 12)."""

import json
from array import array

import numpy as np
import pytest

from gyre.proxy.recorder import CallRecord, Recorder, Span
from gyre.run_dir import RunDir
from gyre.trajectories.sampling import from_records, samples


def record(prompt, sampled, spans=None, temperature=1.0, trainable=True):
    return CallRecord(
        prompt=array("i", prompt),
        sampled=array("i", sampled),
        logprobs=array("f", [-0.5 - i for i in range(len(sampled))]),
        spans=spans or [Span(0, 1, 3, len(sampled))],
        sampling={"temperature": temperature},
        trainable=trainable,
    )


def test_a_conversation_over_two_versions(tmp_path):
    run_dir = RunDir(tmp_path).create()
    directory = run_dir.try_dir(4, 2)
    directory.mkdir(parents=True)
    recorder = Recorder(directory / "records.bin")
    recorder.append(record([1, 2, 3], [4, 5], [Span(0, 1, 3, 1), Span(2, 1, 4, 1)], temperature=0.5))
    recorder.append(record([1, 2, 3, 4, 5, 6], [7]))
    recorder.close()
    for calls in (1, 3):
        run_dir.outcome(4).write_text(json.dumps({"records": "2/records.bin", "group": 9, "calls": calls}))
        with pytest.raises(ValueError, match="2 whole calls"):
            samples(run_dir, 4)
    run_dir.outcome(4).write_text(json.dumps({"records": "2/records.bin", "group": 9, "calls": 2}))
    (sample,) = samples(run_dir, 4)
    assert (sample.execution, sample.group) == (4, 9)
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert sample.trained.tolist() == [False, False, False, True, True, False, True]
    assert sample.logprobs.tolist() == [0, 0, 0, -0.5, -1.5, 0, -0.5]
    assert sample.versions.tolist() == [-1, -1, -1, 3, 4, -1, 3]
    assert sample.temperatures.tolist() == [1, 1, 1, 0.5, 0.5, 1, 1]
    assert sample.tokens.dtype == np.int32 and sample.logprobs.dtype == np.float32


def test_untrainable_calls_are_context_only():
    records = [record([1], [2], temperature=0.0, trainable=False), record([1, 2, 3], [4])]
    (sample,) = from_records(records, 1, 0)
    assert sample.trained.tolist() == [False, False, False, True]
    assert from_records(records[:1], 1, 0) == []


def test_records_that_do_not_add_up_are_refused():
    with pytest.raises(ValueError, match="differ in number"):
        from_records([record([1], [2, 3], [Span(0, 1, 3, 1)])], 1, 0)


def test_an_open_execution_has_no_samples(tmp_path):
    with pytest.raises(FileNotFoundError):
        samples(RunDir(tmp_path).create(), 1)

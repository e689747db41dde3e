"""Rows of a group: advantages from scores, and the control that must not learn."""

import json

import numpy as np
import pytest

from gyre.run_dir import RunDir
from gyre.training import feeder
from tests.training.cells import make_config, make_sample


@pytest.fixture
def group(tmp_path, monkeypatch):
    run_dir = RunDir(tmp_path).create()
    monkeypatch.setattr("gyre.trajectories.sampling.samples", lambda run_dir, n: [make_sample(n, -1)])

    def write(scores):
        for n, score in enumerate(scores):
            run_dir.execution(n).mkdir(exist_ok=True)
            run_dir.outcome(n).write_text(json.dumps({"n": n, "score": score}))
        return run_dir, list(range(len(scores)))

    return write


def test_advantages_follow_scores(group):
    run_dir, executions = group([0.0, None, 1.0, 0.5])
    rows, scores = feeder.rows_of(run_dir, make_config(), 9, executions)
    assert scores == [0.0, 1.0, 0.5]
    assert [row.sample.execution for row in rows] == [0, 2, 3] and {row.sample.group for row in rows} == {9}
    assert rows[0].advantage < 0 < rows[1].advantage and rows[2].advantage == pytest.approx(0)


def test_equal_scores_teach_nothing(group):
    run_dir, executions = group([0.5, 0.5, 0.5])
    assert feeder.rows_of(run_dir, make_config(), 1, executions) == ([], [0.5, 0.5, 0.5])


def test_shuffled_advantages_know_nothing_of_the_scores(group):
    run_dir, executions = group([0.0, 0.0, 1.0, 1.0])
    config = make_config(advantages="shuffled")
    tables = [[row.advantage for row in feeder.rows_of(run_dir, config, g, executions)[0]] for g in range(200)]
    honest = [row.advantage for row in feeder.rows_of(run_dir, make_config(), 0, executions)[0]]
    assert tables[3] == [row.advantage for row in feeder.rows_of(run_dir, config, 3, executions)[0]]
    assert all(sorted(table) == sorted(honest) for table in tables)
    correlations = [np.corrcoef(table, [0, 0, 1, 1])[0, 1] for table in tables]
    assert abs(np.mean(correlations)) < 0.15 and min(correlations) < -0.9 and max(correlations) > 0.9

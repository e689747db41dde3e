"""Rows of a group: advantages from scores, weights of tokens, and the control that must not learn."""

import json
from dataclasses import replace

import numpy as np
import pytest

from gyre.run_dir import RunDir
from gyre.training.objectives import Objective
from gyre.training.rows import rows_of, weighted
from tests.training.cells import make_config, make_sample


def forked(n):
    """Execution n's samples: three, one of them with nothing to train on."""
    parts = [make_sample(n, -1), make_sample(n + 100, -1), make_sample(n + 200, -1)]
    parts[1] = replace(parts[1], trained=np.zeros(len(parts[1]), bool))
    return [replace(part, execution=n) for part in parts]


@pytest.fixture
def group(tmp_path, monkeypatch):
    run_dir = RunDir(tmp_path).create()
    monkeypatch.setattr("gyre.trajectories.sampling.samples", lambda run_dir, n: forked(n))

    def write(scores):
        for n, score in enumerate(scores):
            run_dir.execution(n).mkdir(exist_ok=True)
            run_dir.outcome(n).write_text(json.dumps({"n": n, "score": score}))
        return run_dir, list(range(len(scores)))

    return write


def test_advantages_follow_scores(group):
    run_dir, executions = group([0.0, None, 1.0, 0.5])
    rows, scores = rows_of(run_dir, make_config(), 9, executions)
    assert scores == [0.0, 1.0, 0.5]
    assert [row.sample.execution for row in rows] == [0, 0, 2, 2, 3, 3] and {row.sample.group for row in rows} == {9}
    assert rows[0].advantage < 0 < rows[2].advantage and rows[4].advantage == pytest.approx(0)
    assert all(row.sample.trained.any() for row in rows)


def test_equal_scores_teach_nothing(group):
    run_dir, executions = group([0.5, 0.5, 0.5])
    for objective in ("grpo", "dr_grpo", "rloo", "reinforce++"):
        assert rows_of(run_dir, make_config(objective=objective), 1, executions) == ([], [0.5, 0.5, 0.5])
    rows, _ = rows_of(run_dir, make_config(advantages="ones"), 1, executions)
    assert len(rows) == 6 and {row.advantage for row in rows} == {1.0}


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ("grpo", [-0.5 / 0.70721, 0.5 / 0.70721]),
        ("dapo", [-0.5 / 0.70721, 0.5 / 0.70721]),
        ("gspo", [-0.5 / 0.70721, 0.5 / 0.70721]),
        ("cispo", [-0.5 / 0.70721, 0.5 / 0.70721]),
        ("rloo", [-1.0, 1.0]),
        ("reinforce++", [-0.5, 0.5]),
    ],
)
def test_each_objective_has_its_advantages(group, objective, expected):
    run_dir, executions = group([0.0, 1.0])
    rows, _ = rows_of(run_dir, make_config(objective=objective), 9, executions)
    assert [rows[0].advantage, rows[2].advantage] == pytest.approx(expected, rel=1e-5)


def contributions(rows):
    """By execution: the sum of weights over its tokens, and that of weight x advantage."""
    sums: dict[int, list[float]] = {}
    for row in rows:
        own = sums.setdefault(row.sample.execution, [0.0, 0.0])
        own[0] += row.weight * row.sample.trained.sum()
        own[1] += row.weight * row.advantage * row.sample.trained.sum()
    return sums


def test_a_long_execution_does_not_outweigh_others(group):
    run_dir, executions = group([0.0, 1.0])
    lengths = {n: sum(int(sample.trained.sum()) for sample in forked(n)) for n in executions}
    assert lengths[0] != lengths[1]
    rows, _ = rows_of(run_dir, make_config(), 9, executions)
    assert [total for total, _ in contributions(rows).values()] == pytest.approx([1.0, 1.0])
    assert len({row.weight for row in rows if row.sample.execution == 0}) == 1  # whatever sample a token is in
    rows, _ = rows_of(run_dir, make_config(averaging="token"), 9, executions)
    assert [total for total, _ in contributions(rows).values()] == [lengths[0], lengths[1]]


def test_a_constant_divides_the_sum_over_an_executions_tokens(group):
    """Dr. GRPO: every token has the same coefficient, advantage / constant, and executions are what is averaged."""
    run_dir, executions = group([0.0, 1.0])
    rows, _ = rows_of(run_dir, make_config(objective="dr_grpo", sample_limit=50), 9, executions)
    assert [total for total, _ in contributions(rows).values()] == pytest.approx([1.0, 1.0])
    assert [row.weight * row.advantage for row in rows] == pytest.approx([-0.5 / 50] * 2 + [0.5 / 50] * 2)
    rows, _ = rows_of(run_dir, make_config(objective="dr_grpo", averaging="execution"), 9, executions)
    assert [row.advantage for row in rows] == [-0.5, -0.5, 0.5, 0.5]
    config = make_config(objective="dr_grpo")
    rows, _ = rows_of(run_dir, config, 9, executions)
    assert rows[0].weight * rows[0].advantage == pytest.approx(-0.5 / config.model.max_context)


def test_an_execution_without_trained_tokens_has_no_rows():
    assert weighted(Objective.of(make_config().train), [], 1.0, 100.0) == []


def test_shuffled_advantages_know_nothing_of_the_scores(group):
    run_dir, executions = group([0.0, 0.0, 1.0, 1.0])
    config = make_config(advantages="shuffled")
    tables = [[row.advantage for row in rows_of(run_dir, config, g, executions)[0]][::2] for g in range(200)]
    honest = [row.advantage for row in rows_of(run_dir, make_config(), 0, executions)[0]][::2]
    assert tables[3] == [row.advantage for row in rows_of(run_dir, config, 3, executions)[0]][::2]
    assert all(sorted(table) == sorted(honest) for table in tables)
    correlations = [np.corrcoef(table, [0, 0, 1, 1])[0, 1] for table in tables]
    assert abs(np.mean(correlations)) < 0.15 and min(correlations) < -0.9 and max(correlations) > 0.9

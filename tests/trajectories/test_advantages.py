"""Advantages are relative to the group, and nothing where the group says nothing."""

import statistics

import pytest

from gyre.trajectories.advantages import centred, group_relative, leave_one_out


def test_mean_zero_and_unit_deviation():
    advantages = group_relative([0.0, 1.0, 1.0, 0.0])
    assert sum(advantages) == pytest.approx(0)
    assert advantages[1] == pytest.approx(0.5 / (1 / 3) ** 0.5, rel=1e-3)


SCORES = [0.0, 0.25, 1.0, 0.3, 1.0]


def test_each_against_its_formula():
    mean, deviation = statistics.mean(SCORES), statistics.stdev(SCORES)
    assert group_relative(SCORES, epsilon=0) == pytest.approx([(score - mean) / deviation for score in SCORES])
    assert centred(SCORES) == pytest.approx([score - mean for score in SCORES])
    others = [statistics.mean(SCORES[:i] + SCORES[i + 1 :]) for i in range(len(SCORES))]
    assert leave_one_out(SCORES) == pytest.approx([score - other for score, other in zip(SCORES, others, strict=True)])


@pytest.mark.parametrize("kind", [group_relative, centred, leave_one_out])
def test_equal_scores_teach_nothing(kind):
    assert kind([0.7] * 4) == [0.0] * 4


@pytest.mark.parametrize("kind", [group_relative, centred, leave_one_out])
def test_missing_scores_have_no_say(kind):
    with_gap = kind([0.0, None, 1.0])
    assert with_gap[1] == 0.0 and [with_gap[0], with_gap[2]] == kind([0.0, 1.0])
    assert kind([None, 0.4]) == [0.0, 0.0] and kind([]) == []

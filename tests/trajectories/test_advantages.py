"""Advantages are relative to the group, and nothing where the group says nothing."""

import pytest

from gyre.trajectories.advantages import group_relative


def test_mean_zero_and_unit_deviation():
    advantages = group_relative([0.0, 1.0, 1.0, 0.0])
    assert sum(advantages) == pytest.approx(0)
    assert advantages[1] == pytest.approx(0.5 / (1 / 3) ** 0.5, rel=1e-3)


def test_equal_scores_teach_nothing():
    assert group_relative([0.7] * 4) == [0.0] * 4


def test_missing_scores_have_no_say():
    with_gap = group_relative([0.0, None, 1.0])
    assert with_gap[1] == 0.0 and [with_gap[0], with_gap[2]] == group_relative([0.0, 1.0])
    assert group_relative([None, 0.4]) == [0.0, 0.0] and group_relative([]) == []

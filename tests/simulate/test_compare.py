"""Policies side by side: the same groups for all, the same quotas, and how repeats and splits are summed up."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from gyre.simulate import compare
from gyre.simulate.compare import VARIANTS, Result, Scenario
from gyre.simulate.costs import Costs
from gyre.simulate.workload import Entry, Trace

TRACE = Trace("t", tuple(tuple(Entry(10.0 + 9 * ((3 * g + m) % 7), 1.0 + g) for m in range(4)) for g in range(6)))
SCENARIO = Scenario(4, 2, 4, 3, train_ratio=0.5, costs=Costs(8.5, 3.5))


def split_of(name: str) -> int | None:
    return 3 if VARIANTS[name].split else None


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("lookahead, first", [(0.0, 4), (0.25, 5), (0.7, 6), (1.0, 8), (16.0, 12)])
def test_quotas_are_those_of_the_issue(name, lookahead, first):
    """int((1 + lookahead) x B), then B, and never more than N batches."""
    quotas: list[int] = []

    def note(record: dict) -> None:
        if record["kind"] == "quota_published":
            quotas.append((record["last"] - record["first"] + 1) // 4)

    scenario = replace(SCENARIO, lookahead=lookahead)
    compare.simulate(scenario, TRACE, VARIANTS[name], Random(0), split_of(name), note)
    expected = [first]
    while sum(expected) < 12:
        expected.append(min(4, 12 - sum(expected)))
    assert quotas == expected


def test_all_policies_are_given_the_same_work():
    results = [compare.simulate(SCENARIO, TRACE, VARIANTS[name], Random(7), split_of(name)) for name in VARIANTS]
    assert len({(result.bound_s, result.ideal_s) for result in results}) == 1
    assert all(result.bound_s <= result.makespan_s for result in results)
    assert all(len(result.staleness) == 12 for result in results)
    other = compare.simulate(SCENARIO, TRACE, VARIANTS["elastic"], Random(8))
    assert other.makespan_s != results[0].makespan_s


def test_training_work_by_the_ratio_and_by_the_trace():
    by_ratio = compare.work_of(SCENARIO, TRACE, TRACE.groups)
    assert {group.train_s for group in by_ratio} == {0.5 * TRACE.mean_rollout_s * 4 / 2}
    by_trace = compare.work_of(replace(SCENARIO, train_ratio=None), TRACE, TRACE.groups)
    assert [group.train_s for group in by_trace] == [4.0 + 4 * g for g in range(6)]
    assert [group.rollout_s for group in by_trace] == [tuple(e.rollout_s for e in group) for group in TRACE.groups]


def test_no_cell_idles_twice_nor_works_twice():
    for name in VARIANTS:
        result = compare.simulate(SCENARIO, TRACE, VARIANTS[name], Random(1), split_of(name))
        # All that is done, executions and training, is what the bound is made of, over a time that is longer.
        assert result.busy_fraction == pytest.approx(result.bound_s / result.makespan_s, rel=1e-9)


def test_summaries():
    results = [
        Result(100.0, 80.0, 90.0, 3, 4, (0, 1), 0.8),
        Result(300.0, 120.0, 150.0, 3, 6, (2, 0, 0), 0.4),
    ]
    assert compare.summary(results) == {
        "makespan_s": 200.0,
        "bound_s": 100.0,
        "of_bound": 0.5,
        "ideal_s": 120.0,
        "of_ideal": 0.6,
        "updates": 3,
        "moves": 5.0,
        "staleness_max": 2,
        "staleness_mean": 0.6,
        "busy_fraction": pytest.approx(0.6),
    }


def test_the_best_split_is_the_fastest_over_all_repeats():
    def took(*seconds: float) -> list[Result]:
        return [Result(s, 1.0, 1.0, 1, 0, (0,), 0.1) for s in seconds]

    chosen, figures = compare.best({1: took(10, 50), 2: took(20, 20), 3: took(5, 35)})
    assert chosen == figures["rollout_cells"] == 2  # and not 3, which has the fastest single repeat
    assert figures["splits"] == {"1": 30.0, "2": 20.0, "3": 20.0}
    assert list(compare.splits(SCENARIO, VARIANTS["async"])) == [1, 2, 3]
    assert list(compare.splits(SCENARIO, VARIANTS["elastic"])) == [None]


@pytest.mark.parametrize("switch", ["gain", "stay", "give_back", "at_once", "longest_first", "adapt_lookahead"])
def test_switches_can_be_taken_away(switch):
    variant = compare.without(VARIANTS["elastic"], switch)
    assert variant != VARIANTS["elastic"] or switch == "adapt_lookahead"
    result = compare.simulate(SCENARIO, TRACE, variant, Random(0))
    assert result.updates == 3


def test_what_is_expected_of_a_task_is_learned_in_the_run():
    """Longest first knows nothing of an execution before one of its task has ended: a first round is in order."""
    grants: list[int] = []

    def note(record: dict) -> None:
        if record["kind"] == "execution_granted":
            grants.append(record["n"])

    scenario = replace(SCENARIO, cells=1, updates=1, batch_groups=6, lookahead=0.0)
    compare.simulate(scenario, TRACE, VARIANTS["elastic"], Random(0), record=note)
    assert grants == sorted(grants)

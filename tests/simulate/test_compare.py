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
        "completed": True,
        "groups": 2,
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


def test_a_repeat_that_fell_short_is_no_figure():
    results = [
        Result(100.0, 80.0, 90.0, 3, 4, (0,) * 3, 0.8),
        Result(9.0, 80.0, 90.0, 0, 4, (), 0.8, "nothing is usable"),
    ]
    figures = compare.summary(results)
    assert not figures["completed"] and figures["of_bound"] is figures["of_ideal"] is None
    assert (figures["updates"], figures["groups"], figures["incomplete"]) == (0, 0, 1)
    assert figures["why"] == "nothing is usable"
    whole = [Result(200.0, 80.0, 90.0, 3, 4, (0,) * 3, 0.8)] * 2
    chosen, figures = compare.best({1: results, 2: whole})
    assert chosen == 2 and figures["completed"] and figures["splits"] == {"1": None, "2": 200.0}


def test_a_run_that_trains_less_says_so():
    scenario = replace(SCENARIO, costs=replace(SCENARIO.costs, failed=0.95))
    fell = [compare.simulate(scenario, TRACE, VARIANTS["elastic"], Random(seed)) for seed in range(3)]
    assert all(result.short and len(result.staleness) < 12 for result in fell)
    assert not compare.simulate(SCENARIO, TRACE, VARIANTS["elastic"], Random(0)).short


def test_ideal_and_bound_know_of_the_timeout():
    scenario = replace(SCENARIO, costs=replace(SCENARIO.costs, timeout_s=28.0))
    work = compare.work_of(scenario, TRACE, TRACE.groups)
    assert max(seconds for group in work for seconds in group.rollout_s) == 28.0
    assert [group.train_s for group in work] == [g.train_s for g in compare.work_of(SCENARIO, TRACE, TRACE.groups)]
    cut, whole = (compare.simulate(s, TRACE, VARIANTS["elastic"], Random(0)) for s in (scenario, SCENARIO))
    assert cut.bound_s < whole.bound_s and cut.ideal_s < whole.ideal_s


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
    variant = compare.switched(VARIANTS["elastic"], switch, False)
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

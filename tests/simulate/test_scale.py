"""What an event costs does not grow with the number of cells, and what is kept does not grow with a run's length.

Cost is counted in lines of Python executed, so that the figures are the same everywhere. `benchmarks/scale.py` has
those in seconds, at 1,000 cells.
"""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from gyre.scheduler.state import SchedulerState
from gyre.simulate.compare import VARIANTS, Scenario
from gyre.simulate.costs import Costs, GroupWork
from gyre.simulate.world import World

SLOTS, GROUP_SIZE, MEAN_S = 2, 4, 500.0


def world(policy: str, cells: int, batches: int = 3, costs: Costs | None = None, **changes: Any) -> World:
    """Two executions a slot in every batch, of 100 to 900 s."""
    variant, batch = VARIANTS[policy], cells
    costs = replace(costs or Costs(), to_training_s=8.5, to_rollout_s=3.5, micro_steps=4)
    scenario = Scenario(cells, SLOTS, batch, batches, 0.25, 0.5, costs)
    settings = replace(scenario.settings(GROUP_SIZE, variant, cells * 2 // 3 if variant.split else None), **changes)
    chance = random.Random(0)
    durations = [tuple(chance.uniform(100, 900) for _ in range(GROUP_SIZE)) for _ in range(batch * batches)]
    work = [GroupWork(rollout_s, 0.5 * MEAN_S * GROUP_SIZE / SLOTS) for rollout_s in durations]
    state = SchedulerState(settings, variant.policy, lambda group: group % 7)
    return World(settings, lambda group: work[group % len(work)], costs, state, chance)


def lines(run: Callable[[], Any]) -> int:
    """Lines executed."""
    count = 0

    def line(frame: FrameType, what: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, what, argument: line)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def cost(*arguments: Any, **options: Any) -> float:
    """Lines for each event of a run."""
    tried = world(*arguments, **options)
    return lines(tried.run) / tried.decisions


@pytest.mark.parametrize("policy", ["elastic", "async-stream", "colocate"])
def test_an_event_costs_the_same_with_ten_times_the_cells(policy: str) -> None:
    assert cost(policy, 300) < 1.05 * cost(policy, 30)


@pytest.mark.parametrize("policy", ["elastic", "async-stream"])
def test_engines_that_are_far_behind_cost_no_more_the_more_there_are(policy: str) -> None:
    behind = {"costs": Costs(sync_s=60.0), "max_lag": 0}
    assert cost(policy, 300, **behind) < 1.05 * cost(policy, 30, **behind)


def test_failures_cost_no_more_the_more_cells_there_are() -> None:
    def faults(cells: int) -> Costs:
        return Costs(
            failed=0.05, try_failed=0.05, cell_failures=cells // 10, host_failures=2, restart_s=60.0, horizon_s=2000.0
        )

    few, many = (cost("elastic", cells, costs=faults(cells), hosts=cells) for cells in (30, 300))
    assert many < 1.1 * few


def test_a_run_keeps_nothing_of_what_is_over() -> None:
    def kept(batches: int) -> int:
        """The most bytes in use, looked at every 1,000 s. (A collection also empties the lists of free objects.)"""
        tried, most, until = world("elastic", 20, batches=batches), 0, 0.0
        tracemalloc.start()
        try:
            while tried.ended is None:
                tried.run(until := until + 1000.0)
                gc.collect()
                kept_for_the_report = sys.getsizeof(tried.tally.staleness) + sys.getsizeof(tried.tally.committed_at)
                most = max(most, tracemalloc.get_traced_memory()[0] - kept_for_the_report)
            return most
        finally:
            tracemalloc.stop()

    gc.collect()
    gc.freeze()  # whatever the tests before have left: it is not to be gone through every time
    try:
        kept(4)  # what is made once and for all
        few, many = kept(8), kept(80)
    finally:
        gc.unfreeze()
    assert many < few + 32_768, f"{few} bytes after {8 * 80} executions, {many} after ten times as many"

"""The capacity bound and the ideal, by hand, by brute force, and what is true of them."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.scheduler.settings import Settings
from gyre.scheduler.state import SchedulerState
from gyre.simulate.compare import ANY_VERSION, VARIANTS
from gyre.simulate.costs import Costs, GroupWork
from gyre.simulate.ideal import bound, ideal
from gyre.simulate.world import World


def sizes(cells: int, slots: int, batch_groups: int, updates: int, lookahead: float = 0.0, size: int = 2) -> Settings:
    return Settings(
        cells=cells,
        slots=slots,
        batch_groups=batch_groups,
        group_size=size,
        updates=updates,
        lookahead=lookahead,
        max_staleness=ANY_VERSION,
        max_lag=ANY_VERSION,
    )


def groups(*each: tuple[tuple[float, ...], float]) -> list[GroupWork]:
    return [GroupWork(*one) for one in each]


# -- by hand ---------------------------------------------------------------------------------------------------------
def test_the_bound_is_the_work_over_the_cells():
    work = groups(((10.0, 30.0), 7.0), ((20.0, 20.0), 9.0))
    assert bound(sizes(2, 4, 1, 2), work) == (80 / 4 + 16) / 2


def test_one_slot_does_one_thing_after_the_other():
    work = groups(((10.0, 30.0), 7.0), ((20.0, 20.0), 9.0))
    assert ideal(sizes(1, 1, 1, 2), work) == bound(sizes(1, 1, 1, 2), work) == 96


def test_slots_that_execute_nothing_train():
    # 0-10 both slots execute; 10-30 one does, and there is nothing to train on; from 30 on both train.
    assert ideal(sizes(1, 2, 1, 1), groups(((10.0, 30.0), 8.0))) == 38
    # A second group is ready at 10: at half a cell's speed 8 of its work are done at 26; of the other's, all from 30.
    assert ideal(sizes(1, 3, 2, 1), groups(((10.0, 30.0), 8.0), ((10.0, 0.0), 8.0))) == pytest.approx(30 + 8)


def test_the_next_quota_waits_for_the_batch():
    work = groups(((10.0, 10.0), 4.0), ((6.0, 6.0), 2.0))
    assert ideal(sizes(1, 2, 1, 2), work) == 10 + 4 + 6 + 2
    # With a batch of lookahead the second group runs from 10 to 16, and only then is there a slot to train with.
    assert ideal(sizes(1, 2, 1, 2, lookahead=1.0), work) == 16 + 4 + 2


def test_a_batch_takes_the_groups_that_are_ready_first():
    # The second group is ready first and is the first batch; the first one is trained when it is over.
    work = groups(((9.0, 9.0), 5.0), ((1.0, 1.0), 2.0))
    assert ideal(sizes(1, 4, 1, 2, lookahead=1.0), work) == 9 + 5


# -- by brute force --------------------------------------------------------------------------------------------------
def stepped(given: Settings, work: list[GroupWork]) -> float:
    """The ideal in steps of a unit of time, for durations that are whole and training that is done in whole steps."""
    slots, queue, running, ready = given.cells * given.slots, deque(), [], deque()
    left = [len(group.rollout_s) for group in work]
    dispatched = now = trained = admitted = 0
    units = 0.0  # slot seconds of training that are ready in the present batch

    def dispatch(count: int) -> None:
        nonlocal dispatched
        for number in range(dispatched, min(len(work), dispatched + count)):
            queue.extend([number, int(duration)] for duration in work[number].rollout_s)
            dispatched = number + 1

    dispatch(int((1 + given.lookahead) * given.batch_groups))
    while True:
        while True:
            for one in [one for one in running if one[1] == 0]:
                running.remove(one)
                left[one[0]] -= 1
                if not left[one[0]]:
                    ready.append(one[0])
            while ready and admitted < given.batch_groups:
                admitted += 1
                units += work[ready.popleft()].train_s * given.slots
            if queue and len(running) < slots:
                running.append(queue.popleft())
            elif admitted == given.batch_groups and units <= 0:
                trained, admitted = trained + 1, 0
                if trained == given.batches:
                    return now
                dispatch(given.batch_groups)
            elif not any(one[1] == 0 for one in running):
                break
        units = max(0.0, units - (slots - len(running)))
        for one in running:
            one[1] -= 1
        now += 1


@st.composite
def cases(draw, most_updates: int = 3) -> tuple[Settings, list[GroupWork]]:
    given = sizes(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, most_updates)),
        draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        draw(st.integers(2, 3)),
    )
    count = given.batches * given.batch_groups
    group = st.builds(
        GroupWork, st.tuples(*[st.integers(0, 40).map(float)] * given.group_size), st.integers(0, 12).map(float)
    )
    return given, draw(st.lists(group, min_size=count, max_size=count))


@pytest.mark.parametrize("seed", range(60))
def test_it_is_what_small_steps_come_to(seed):
    # In steps, the last unit of a batch's training may be needed in part only. Durations are so much longer that this
    # does not add up to anything, and so uneven that it does not change which group is ready first.
    random = Random(seed)
    given = sizes(
        random.randint(1, 3),
        random.randint(1, 3),
        random.randint(1, 3),
        random.randint(1, 3),
        random.choice([0, 0.5, 2.0]),
    )
    work = [
        GroupWork((random.randint(0, 900), random.randint(0, 900)), random.randint(0, 300))
        for _ in range(given.batches * given.batch_groups)
    ]
    assert stepped(given, work) == pytest.approx(ideal(given, work), abs=2 * given.batches)


# -- what is true of them --------------------------------------------------------------------------------------------
@settings(max_examples=150, deadline=None)
@given(cases())
def test_it_is_never_below_the_bound_nor_below_any_execution(case):
    given, work = case
    assert ideal(given, work) >= bound(given, work) - 1e-6
    assert ideal(given, work) >= max(max(group.rollout_s) for group in work)


@pytest.mark.parametrize("cells, slots, batch_groups, lookahead", [(2, 4, 4, 0.0), (4, 2, 8, 0.5), (3, 2, 3, 1.0)])
def test_it_is_the_bound_where_all_executions_are_alike_and_fill_the_slots(cells, slots, batch_groups, lookahead):
    given = sizes(cells, slots, batch_groups, 5, lookahead)
    work = groups(*[((10.0, 10.0), 3.0)] * (5 * batch_groups))
    assert ideal(given, work) == pytest.approx(bound(given, work))


def simulated(name: str, given: Settings, work: list[GroupWork], rollout_cells: int = 0) -> float:
    """Seconds that a policy takes where moves cost nothing and executions are granted in the order of dispatch."""
    variant = VARIANTS[name]
    given = replace(given, trainers=given.cells - rollout_cells if variant.split else 0, supply_hold=0.0)
    state = SchedulerState(given, variant.policy)
    return World(given, work, Costs(micro_steps=4), state, Random(0)).run().tally.committed_at[-1]


@settings(max_examples=120, deadline=None)
@given(cases(), st.sampled_from(sorted(VARIANTS)), st.data())
def test_nothing_beats_it_where_all_is_dispatched_at_once(case, name, data):
    """Then no policy has had more executed, or more groups ready, at any time, and what is ready is trained on at once.

    This needs executions to be granted in the order of dispatch, and no quota that waits for a batch to be trained.
    """
    given, work = case
    given = replace(given, lookahead=given.batches - 1)
    if VARIANTS[name].split:
        given = replace(given, cells=given.cells + 1)
    split = data.draw(st.integers(1, max(1, given.cells - 1)))
    assert simulated(name, given, work, split) >= ideal(given, work) - 1e-6


def test_it_is_no_bound():
    """Executions first is not always best: who trains first may dispatch the next quota, with a long one in it, sooner.

    Here that is the plain policy, whose moves cost nothing, and which grants in the order of dispatch like the ideal.
    """
    given = sizes(2, 2, 2, 3, lookahead=1.0)
    work = groups(
        ((60.0, 60.0), 20.0),
        ((60.0, 5.0), 5.0),
        ((5.0, 2.0), 20.0),
        ((60.0, 0.0), 0.0),
        ((60.0, 10.0), 5.0),
        ((5.0, 0.0), 0.0),
    )
    assert bound(given, work) < simulated("plain", given, work) < ideal(given, work)

"""The small parts: their arithmetic and their laws."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre import config
from gyre.errors import InvariantBroken
from gyre.events import ExecutionClosed, GroupsBuilt, RankReady, RoleReached, Tick
from gyre.scheduler import commands as c
from gyre.scheduler.burst import Batch, split
from gyre.scheduler.generations import Generation
from gyre.scheduler.groups import Groups, Ranges
from gyre.scheduler.measures import Lookahead
from gyre.scheduler.policy import Async, Colocate, Elastic, View
from gyre.scheduler.settings import Settings
from gyre.scheduler.slots import Slots
from gyre.scheduler.state import SchedulerState
from gyre.scheduler.waterlevel import Supply, Waterlevel


def outcome(n, usable=True, version=0):
    return ExecutionClosed(n, 1, "completed", 0.5 if usable else None, usable, version if usable else -1, 1.0)


# -- waterlevel and supply -------------------------------------------------------------------------------------------
@given(st.lists(st.sampled_from("dpf"), max_size=40))
def test_counters_obey_their_law_or_raise(steps):
    level = Waterlevel()
    for step in steps:
        before = (level.d, level.p, level.f)
        try:
            {"d": lambda: level.dispatch(1), "p": level.launch, "f": level.finish}[step]()
        except InvariantBroken as error:
            assert error.number == 1 and (before[0] == before[1] or before[1] == before[2])
            return
        assert 0 <= level.f <= level.p <= level.d and level.w == level.d - level.f


def test_supply_lasts_only_without_a_break():
    supply = Supply()
    supply.observe(2, 8, 2.0, 1.0)
    supply.observe(5, 8, 2.0, 2.0)
    assert (supply.amount, supply.threshold, supply.since) == (5, 2.0, 1.0)
    supply.observe(1, 8, 2.0, 3.0)
    assert not supply.suffices
    supply.observe(2, 8, 2.0, 4.0)
    assert supply.since == 4.0
    supply.observe(1, 1, 1, 5.0)  # one group is left to take, and it is there
    assert (supply.threshold, supply.since) == (1, 4.0)
    supply.observe(3, 0, 0, 6.0)
    assert not supply.suffices


# -- policy ----------------------------------------------------------------------------------------------------------
def look(**changes):
    numbers = {
        "now": 20.0, "w": 8, "queued": 0, "capacity": 12, "slots": 4, "all_slots": 28, "cells": 7, "training": 0,
        "batch_groups": 8, "group_size": 4, "supply": 3, "threshold": 2.0, "supply_since": 5.0, "supply_hold": 10.0,
        "remaining": 8,
    }  # fmt: skip
    return View(**{**numbers, **changes})


MEASURED = {"group_work": 40.0, "execution_s": 100.0, "to_training_s": 8.0, "to_rollout_s": 4.0}


@pytest.mark.parametrize(
    "changes, code",
    [
        ({}, "go"),
        ({"now": 14.9}, "hold"),
        ({"supply_since": None}, "supply"),
        ({"remaining": 0}, "taken"),
        ({"remaining": 0, "closing": True}, "go"),
        ({**MEASURED, "now": 5.0}, "hold"),  # measured or not, the plain policy goes by thresholds
    ],
)
def test_plain_elastic_moves(changes, code):
    decision = Elastic.plain().move(look(**changes))
    assert decision.reason and (decision.code == code if code != "go" else decision.yes)


@pytest.mark.parametrize(
    "changes, code",
    [
        ({}, "hold"),  # nothing is measured yet: by thresholds
        (MEASURED, "go"),
        ({**MEASURED, "supply": 0}, "worth"),  # the core has something to begin with, or does not move
        ({**MEASURED, "supply": 0, "training": 7}, "go"),  # the batch's end: 7 * 40 / (7 * 8) = 5 > 4
        ({**MEASURED, "supply": 0, "training": 8}, "worth"),  # 7 * 40 / (8 * 9) = 3.9
        ({**MEASURED, "supply": 0, "training": 7, "queued": 1}, "worth"),
        ({**MEASURED, "supply": 1, "training": 2}, "go"),  # (40 - 2 * 8) / 3 = 8 > 4
        ({**MEASURED, "supply": 1, "training": 3, "queued": 1}, "worth"),  # (40 - 3 * 8) / 4 = 4
        ({**MEASURED, "group_work": 1.0, "w": 1}, "worth"),  # 3 s of work
        ({**MEASURED, "group_work": 1.0, "w": 0, "supply_since": 9.0}, "go"),  # but nothing more will come
        ({**MEASURED, "group_work": 1.0, "remaining": 3, "supply_since": 9.0}, "go"),  # the whole batch is there
    ],
)
def test_elastic_moves_for_what_a_move_gains(changes, code):
    decision = Elastic().move(look(**{"supply_since": 19.0, **changes}))
    assert decision.reason and (decision.code == code if code != "go" else decision.yes)


@pytest.mark.parametrize("changes, code", [({}, "stay"), ({"w": 25}, "waterlevel"), ({"supply_since": None}, "supply")])
def test_plain_elastic_keeps_the_core(changes, code):
    count, decision = Elastic.plain().keep(look(**{"w": 24, **changes}))
    assert (count, decision.code) == (code == "stay", code)


@pytest.mark.parametrize(
    "changes, count",
    [
        # Training takes 40 of 140 cell-seconds a group, so 2 of 7 cells are busy with it all the time.
        ({}, 2),  # 20 slots cover the 8 executions, so nobody waits
        ({"training": 1}, 1),
        ({"supply": 0}, 0),
        ({"w": 30}, 1),  # 3 groups keep one cell busy for 75 s, BUSY, but not two
        ({"w": 50, "supply": 4}, 2),
        ({"w": 60, "supply": 1, "batch_groups": 9}, 1),  # 150 s, WAVES: 3 short groups first feed one cell
        ({"w": 60, "supply": 1, "batch_groups": 8}, 0),
        ({"w": 60, "supply": 0, "batch_groups": 9}, 0),  # it would be given back before the first of them is over
        ({"group_work": None}, 0),
        ({"group_work": 1.0, "supply_since": 5.0}, 1),  # too little for a whole cell, but nobody waits meanwhile
    ],
)
def test_elastic_keeps_cells_that_have_work(changes, count):
    kept, decision = Elastic().keep(look(**{**MEASURED, "training": 7, "supply_since": None, **changes}))
    assert (kept, decision.yes) == (count, count > 0) and decision.reason


def test_a_decision_that_was_due_at_a_time_is_taken_at_that_time():
    """0.1 + 0.2 - 0.1 < 0.2 in floats: the sum that says when to look again is the one that is compared."""
    assert Elastic.plain().move(look(now=0.1 + 0.2, supply_since=0.1, supply_hold=0.2)).yes
    assert Elastic().gives_back(look(**{**MEASURED, "to_training_s": 0.1, "to_rollout_s": 0.2, "queued": 1,
                                       "dry_since": 0.3, "now": 0.3 + 0.1 + 0.2})).yes  # fmt: skip


@pytest.mark.parametrize(
    "changes, yes", [({}, True), ({"queued": 0}, False), ({"dry_since": 8.1}, False), ({"dry_since": None}, False)]
)
def test_elastic_gives_cells_back_that_have_nothing_to_train_on_while_others_wait(changes, yes):
    assert Elastic().gives_back(look(**{**MEASURED, "queued": 1, "dry_since": 8.0, **changes})).yes is yes
    assert not Elastic.plain().gives_back(look(**{**MEASURED, "queued": 1, "dry_since": 8.0, **changes})).yes


@pytest.mark.parametrize(
    "changes, code",
    [
        ({"w": 0}, "go"),
        ({"w": 1}, "open"),
        ({"w": 0, "supply_since": None}, "supply"),
        ({"w": 0, "supply_since": None, "training": 2}, "together"),
    ],
)
def test_colocated_cells_train_together_when_nothing_is_open(changes, code):
    assert Colocate().move(look(**changes)).code == code
    assert Colocate().threshold(8, 5, 0.25) == 5
    assert Colocate().keep(look())[0] == 0


def test_a_fixed_split_begins_with_the_batch_or_with_its_first_group():
    assert (Async().threshold(8, 5, 0.25), Async(streaming=True).threshold(8, 5, 0.25)) == (5, 1)
    assert Async().open(look()).yes and not Async().open(look(supply_since=None)).yes
    assert Async().keep(look(training=3))[0] == 3
    assert (Async().name, Async(streaming=True).name) == ("async", "async-stream")


def test_lookahead_rises_after_a_burst_that_idled_and_falls_slowly_otherwise():
    lookahead = Lookahead(1.0, adapt=True)
    assert lookahead.value == 0.25
    lookahead.observe(0.0, 4, 0.0, 0, None)
    lookahead.observe(90.0, 4, 0.5, 2, 95.0)  # half a cell's slots from now on, and two trainers from 95 s on
    lookahead.observe(100.0, 4, 0.0, 0, None)  # 5 + 10 of 400 cell-seconds
    assert lookahead.burst() == 0.375
    lookahead.observe(200.0, 4, 0.0, 0, None)
    assert lookahead.burst() == 0.375 - 1 / 128
    assert Lookahead(1.0, adapt=False).burst() == 1.0


# -- slots -----------------------------------------------------------------------------------------------------------
@given(st.lists(st.tuples(st.sampled_from(["take", "release", "open", "close"]), st.integers(0, 5)), max_size=60))
def test_slots_are_never_overbooked_and_the_least_loaded_place_is_taken(steps):
    slots, n = Slots(lambda rank: (0, -rank)), 0
    for step, number in steps:
        if step == "open" and number not in slots:
            slots.open(number, 1 + number % 3)
        elif step == "close" and number in slots:
            slots.close(number)
        elif step == "release":
            slots.release(n - number)
        elif step == "take":
            loads = {rank: len(slots.held(rank)) for rank in slots if len(slots.held(rank)) < slots.size(rank)}
            rank = slots.take(n)
            assert rank == (min(loads, key=lambda r: (loads[r], -r)) if loads else None)
            n += 1
        slots.check()


def test_spreading_fills_one_place_after_the_other():
    slots = Slots(lambda rank: (0, rank))
    for rank in (1, 2, 3):
        slots.open(rank, 2)
    slots.take_at(9, 3)
    assert slots.spread([4, 5, 6, 7], [3, 1]) == {4: 3, 5: 1, 6: 1}
    with pytest.raises(InvariantBroken):
        slots.take_at(7, 1)


# -- groups ----------------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(0, 30), max_size=60))
def test_ranges_are_a_set(numbers):
    ranges = Ranges()
    for number in numbers:
        ranges.add(number)
    assert [n for n in range(40) if n in ranges] == sorted(set(numbers)) and len(ranges) == len(set(numbers))
    encoded = ranges.encode()
    assert all(a[1] < b[0] for a, b in zip(encoded, encoded[1:], strict=False))
    assert Ranges(encoded).encode() == encoded


def test_a_group_closes_with_its_last_execution_and_needs_two_usable_ones():
    groups = Groups(3)
    groups.dispatch(2)
    assert groups.close(outcome(1)) is None and groups.close(outcome(0, usable=False)) is None
    group = groups.close(outcome(2))
    assert group.rewards == [None, 0.5, 0.5] and [o.n for o in group.usable] == [1, 2]
    assert groups.fault(group, 0, 2) is None
    groups.admit(group)
    groups.check()
    for n in (3, 4, 5):
        group = groups.close(outcome(n, usable=n == 5))
    assert "1 of 3" in groups.fault(group, 0, 2)
    groups.drop(1)
    groups.check()


def test_a_group_is_as_stale_as_its_oldest_usable_token():
    groups = Groups(2)
    groups.dispatch(1)
    groups.close(outcome(0, version=1))
    group = groups.close(outcome(1, version=4))
    assert groups.fault(group, 3, 2) is None and "policy 1" in groups.fault(group, 4, 2)
    groups.admit(group)
    assert groups.stale(3, 2) == [] and [n for n, _ in groups.stale(4, 2)] == [0]


def test_a_group_is_taken_once_in_the_whole_run():
    groups = Groups(2)
    groups.dispatch(1)
    groups.close(outcome(0))
    groups.admit(groups.close(outcome(1)))
    assert groups.take(0, 1) and not groups.take(0, 1)
    with pytest.raises(InvariantBroken, match="invariant 12"):
        groups.take(0, 2)
    groups.commit()
    groups.check()
    with pytest.raises(InvariantBroken, match="invariant 12"):
        groups.drop(0)


# -- batches and generations -----------------------------------------------------------------------------------------
@given(st.integers(0, 50), st.integers(1, 9))
def test_splits_are_even(groups, updates):
    shares = split(groups, updates)
    assert sum(shares) == groups and max(shares) - min(shares) <= 1 and shares == sorted(shares, reverse=True)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_shortened_batch_has_exactly_what_is_there(updates, share, data):
    batch = Batch(1, [share] * updates, 0, 1)
    index = data.draw(st.integers(0, updates - 1))
    update = batch.update(index)
    update.taken = data.draw(st.integers(0, share))
    batch.taken = share * index + update.taken
    untaken = data.draw(st.integers(0, batch.remaining))
    enough = batch.shorten(update, untaken)
    assert batch.remaining == untaken and update.taken <= update.groups == batch.shares[index]
    assert enough == all(batch.shares[index:])


def test_nobody_can_be_behind_a_dead_member():
    generation, lives = Generation(), {0: 0, 1: 0, 2: 0, 3: 0}
    generation.renew(generation.wanted(lives, []), lives)
    for rank in (0, 1, 3):
        generation.built(rank, 0)
    assert generation.usable == 2
    generation.built(2, 0)
    assert generation.usable == 4
    generation.break_at(2)
    assert (generation.usable, generation.dirty) == (2, True)
    lives[2] = 1
    assert generation.living(lives) == [0, 1, 3]
    assert generation.wanted(lives, [0, 3]) == [0, 3, 1, 2]  # continues the prefix there is
    generation.renew([0, 3, 1, 2], lives)
    generation.shrink()
    assert generation.dirty  # and is put in order when that has shrunk


# -- as a whole ------------------------------------------------------------------------------------------------------
def test_settings_come_from_the_configuration():
    run = config.build(
        {
            "model": {"path": "gyre:tiny"},
            "tasks": {"path": "tasks.jsonl"},
            "harness": {"command": ["true"], "tries": 3, "score": {"command": ["true"]}},
            "cells": {"count": 2, "slots": 3, "standalone": 1},
            "scheduler": {"batch_groups": 4, "group_size": 2, "top_ups": 1},
            "train": {"updates": 6, "updates_per_batch": 2},
        }
    )
    settings = Settings.of(run)
    assert (settings.engines, settings.batches, settings.tries, settings.top_ups) == (3, 3, 3, 1)
    assert settings.batches == run.batches


def test_a_decision_among_a_thousand_cells_takes_less_than_a_millisecond():
    """Events between bursts; a burst's end and a move look at every cell, which is checked to stay affordable."""
    settings = Settings(1000, 16, 1000, 8, updates=2, hosts=20, host_executions=2000, lookahead=1.0)
    state = SchedulerState(settings)
    state.start(0.0)
    for rank in range(1000, 1020):
        state.handle(RankReady(rank, 1, "host"), 0.0)
    for rank in range(1000):
        state.handle(RankReady(rank, 1, "node"), 0.0)
    for rank in range(1000):
        state.handle(RoleReached(rank, 1, 1, "ROLLOUT", version=0), 0.0)
    for rank in range(1000):
        state.handle(GroupsBuilt(rank, 1, state.generation.number), 0.0)
    assert state.executions.running == 16_000
    begun, count = time.process_time(), 0
    for n in range(0, 4000):
        state.handle(outcome(n), 1.0)
        state.handle(Tick(), 1.0)
        count += 2
    each = (time.process_time() - begun) / count
    assert each < 1e-3, f"{each * 1e6:.0f} us"
    commands = []
    begun = time.process_time()
    for step in range(4000, 12_000):
        commands += state.handle(outcome(step), 100.0)
        if any(isinstance(command, c.OrderRole) for command in commands):
            break
    assert time.process_time() - begun < 1.0
    moved = [command.rank for command in commands if isinstance(command, c.OrderRole)]
    assert moved and moved == list(range(len(moved)))

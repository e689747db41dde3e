"""What is lost comes back, late words change nothing, and a resume loses and repeats nothing."""

import pytest

from gyre import events as e
from gyre.errors import InvariantBroken, UserError
from gyre.scheduler import commands as c
from gyre.scheduler.policy import Elastic
from gyre.scheduler.settings import Settings
from gyre.scheduler.state import SchedulerState
from tests.scheduler.hand import Hand
from tests.scheduler.world import Chances, World


# -- executions and hosts --------------------------------------------------------------------------------------------
def test_a_lost_hosts_executions_are_granted_again_as_new_tries_in_order():
    hand = Hand(cells=1, slots=4, hosts=2)
    hand.host(1)
    hand.host(2)
    hand.cell(0)
    first = {n for n, g in hand.granted.items() if g.host == 1}
    assert len(first) == 2  # least loaded host
    hand.say(e.RankLost(1, 1, "silent"))
    assert hand.of(c.Supersede) == [c.Supersede(1, 1)]
    assert [(g.n, g.try_number, g.host, g.p) for g in hand.of(c.Grant)] == [(n, 2, 2, None) for n in sorted(first)]
    assert (hand.state.level.d, hand.state.level.p, hand.state.level.f) == (4, 4, 0)


def test_tries_that_are_used_up_close_the_execution_and_f_waits_for_the_outcome():
    hand = Hand(cells=1, slots=4, tries=2).begin()
    hand.say(e.TryFailed(0, 1, "no sandbox"))
    assert [(g.n, g.try_number) for g in hand.of(c.Grant)] == [(0, 2)]
    hand.say(e.TryFailed(0, 1, "late"))
    assert hand.latest == []
    hand.say(e.TryFailed(0, 2, "no sandbox"))
    assert [(x.n, x.try_number, x.outcome) for x in hand.of(c.Close)] == [(0, 2, "failed")]
    assert hand.state.level.f == 0
    hand.say(e.ExecutionClosed(0, 2, "failed", None, False, -1, 0.0))
    assert [(x.n, x.f) for x in hand.of(c.Finished)] == [(0, 1)]
    hand.say(e.ExecutionClosed(0, 2, "failed", None, False, -1, 0.0))
    assert hand.latest == []


def test_an_outcome_of_a_given_up_try_counts_and_ends_the_other_one():
    hand = Hand(cells=1, slots=4, hosts=2).begin()
    n = next(n for n, g in hand.granted.items() if g.host == 1)
    hand.say(e.RankLost(1, 1, "silent"))
    hand.say(e.ExecutionClosed(n, 1, "completed", 1.0, True, 0, 1.0))
    assert hand.of(c.CancelExecution) == [c.CancelExecution(n, 2, 1)]
    assert len(hand.of(c.Finished)) == 1


def test_grants_never_exceed_slots_or_places():
    hand = Hand(cells=2, slots=3, hosts=2, host_executions=2, batch_groups=4).begin()
    assert len(hand.granted) == 4
    assert sorted(g.host for g in hand.granted.values()) == [2, 2, 3, 3]
    hand = Hand(cells=2, slots=3, batch_groups=4).begin()
    assert [len([g for g in hand.granted.values() if g.engine == r]) for r in (0, 1)] == [3, 3]


def test_a_host_that_comes_late_learns_every_route():
    hand = Hand(cells=2).begin()
    hand.host(2, incarnation=2)
    routes = [r for r in hand.of(c.Route) if r.host == 2]
    assert [sorted(r.engines) for r in routes] == [[0, 1]]


# -- cells -----------------------------------------------------------------------------------------------------------
def test_a_lost_engines_executions_move_to_free_slots_or_are_held_for_the_next():
    hand = Hand(cells=3, slots=2, batch_groups=3, updates=1).begin()
    hand.close(0)  # frees a slot on cell 2
    assert hand.granted[0].engine == 2
    hand.say(e.RankLost(1, 1, "killed"))
    route = next(r for r in hand.of(c.Route) if 1 in r.engines)
    moves = {m.n: m.engine for m in route.moves}
    assert sorted(moves.values(), key=str) == [2, None] and route.engines == {1: None}
    held = next(n for n, engine in moves.items() if engine is None)
    other = next(n for n, g in hand.granted.items() if g.engine == 0)
    hand.close(other)
    assert [m for r in hand.of(c.Route) for m in r.moves] == [c.Move(held, 3, 0)]


def test_a_cell_that_comes_back_loads_the_policy_before_it_is_routed():
    hand = Hand(cells=2).begin()
    hand.say(e.RankLost(1, 1, "killed"))
    hand.say(e.RankReady(1, 2, "node", "http://new"))
    assert [(o.rank, o.incarnation, o.target) for o in hand.of(c.OrderRole)] == [(1, 2, "rollout")]
    assert not hand.state.fleet.cells[1].routed
    hand.reach(1, "SYNCING", "ROLLOUT")
    assert hand.of(c.Route)[0].engines[1].url == "http://new"


def test_a_cell_that_comes_back_with_an_older_policy_is_synced_before_it_is_routed():
    hand = Hand(cells=2, slots=4, updates=4).begin()
    hand.close(*range(4))
    hand.to_training(0)
    hand.take(0, 1)
    hand.open()
    hand.say(e.RankLost(1, 1, "killed"))
    hand.say(e.RankReady(1, 2, "node"))
    hand.step()
    hand.commit()
    hand.reach(1, "SYNCING")
    hand.reach(1, "ROLLOUT", version=0)
    assert [(s.rank, s.version) for s in hand.of(c.OrderSync)] == [(1, 1)] and not hand.of(c.Route)
    hand.reach(1, "ROLLOUT", version=1)
    assert hand.of(c.Route)[0].engines[1].policy == 1


def test_an_engine_that_fails_is_unrouted_and_serves_again_after_its_restart():
    hand = Hand(cells=2).begin()
    hand.say(e.RoleReached(1, 1, 1, "FAILED"))
    assert hand.of(c.Route)[0].engines == {1: None} and not hand.of(c.Supersede)
    hand.say(e.RoleReached(1, 1, 1, "FAILED"))
    hand.say(e.RoleReached(1, 1, 1, "RESTARTING"))
    assert hand.latest == []
    hand.say(e.RankReady(1, 1, "node", "http://1"))
    assert hand.order(1).epoch > 2
    hand.reach(1, "SYNCING", "ROLLOUT")
    assert hand.state.fleet.cells[1].routed


def test_a_failure_that_crossed_an_order_is_heard():
    hand = Hand(cells=2).begin()
    hand.close(*range(4))
    assert hand.order(0).epoch == 2
    hand.say(e.RoleReached(0, 1, 1, "FAILED"))
    assert not hand.state.fleet.moving and not hand.state.fleet.core.up


def test_late_and_repeated_words_change_nothing():
    hand = Hand(cells=2, slots=4).begin()
    hand.close(*range(4))
    hand.to_training(0)
    for event in (
        e.RoleReached(0, 1, 1, "ROLLOUT", version=0),
        e.RoleReached(0, 1, 2, "DRAINING"),
        e.RoleReached(1, 0, 1, "DRAINING"),
        e.RankReady(1, 1, "node"),
        e.RankLost(1, 0, "long ago"),
        e.UpdateOpened(7),
        e.CellJoined(1, 1, 1),
        e.TrainingEnded(1, 1, 1, "done"),
        e.UpdateDone(3, 1, {}, 1.0),
        e.PolicyCommitted(1, "sum", 1.0),
        e.GroupsBuilt(1, 1, 9),
        e.TryFailed(0, 1, "late"),
        e.ExecutionClosed(0, 1, "completed", 1.0, True, 0, 1.0),
        e.ExecutionClosed(99, 1, "completed", 1.0, True, 0, 1.0),
    ):
        assert hand.say(event) == [], event


def test_a_move_is_abandoned_when_a_destination_dies_and_capacity_no_longer_covers_w():
    hand = Hand(cells=3, slots=2, batch_groups=4, supply_fraction=0.25).begin()
    hand.close(*range(4))
    assert hand.order(0).target == "training" and hand.state.level.w == 4
    hand.reach(0, "DRAINING")
    hand.say(e.RankLost(2, 1, "killed"))
    assert [(o.rank, o.epoch, o.target) for o in hand.of(c.OrderRole)] == [(0, 3, "rollout")]
    hand.reach(0, "ROLLOUT", version=0)
    assert hand.state.fleet.cells[0].routed and not hand.state.executions.held


def training(satellites, **settings):
    """A run in which the core and some satellites are in an open update."""
    hand = Hand(cells=4, standalone=1, slots=8, batch_groups=4, supply_fraction=0.25, **settings).begin()
    hand.close(*range(4))
    hand.to_training(0)
    hand.open()
    for position in range(1, satellites + 1):
        hand.to_training(position)
        hand.join(position, position)
    return hand


def test_a_lost_member_is_barred_nobody_joins_behind_it_and_groups_are_built_before_the_next_update():
    hand = training(2, updates_per_batch=2, updates=4)
    assert hand.order(3).target == "training"
    hand.say(e.RankLost(1, 1, "killed"))
    assert [(b.update, b.rank, b.incarnation) for b in hand.of(c.BarMember)] == [(1, 1, 1)]
    hand.to_training(3)
    assert not hand.of(c.Train) and not hand.of(c.BuildGroups)
    hand.say(e.RankReady(1, 2, "node", "http://1"))
    assert not hand.of(c.BuildGroups)
    hand.take(0, 1)
    hand.step(2)
    assert [b.ranks for b in hand.all(c.BuildGroups)][-1] == [0, 2, 3, 1]  # continues the prefix 0, 2, 3
    assert hand.update == 2 and hand.all(c.Train)[-1].update == 1
    hand.build()
    assert hand.all(c.Train)[-1].update == 2
    hand.open()
    assert [(t.rank, t.position, t.members) for t in hand.of(c.Train)] == [(2, 1, (0, 2, 3, 1))]


def test_a_lost_cell_is_left_out_of_the_next_update():
    hand = Hand(cells=3, standalone=1, slots=8, batch_groups=4, supply_fraction=0.25).begin()
    hand.say(e.RankLost(1, 1, "killed"))
    assert [b.ranks for b in hand.of(c.BuildGroups)] == [[0, 2]]
    hand.close(*range(4))
    assert hand.state.decision.code == "groups"
    hand.build()
    hand.to_training(0)
    hand.open()
    assert [o.rank for o in hand.of(c.OrderRole)] == [2]


def test_a_member_that_failed_is_barred_and_started_again():
    hand = training(1)
    hand.say(e.TrainingEnded(1, 1, 1, "failed", "it was silent"))
    assert hand.of(c.BarMember) == [c.BarMember(1, 1, 1)] and hand.of(c.Supersede) == [c.Supersede(1, 1)]


def test_an_update_that_fails_on_the_core_ends_the_attempt():
    hand = training(1)
    hand.say(e.TrainingEnded(0, 1, 1, "failed", "the optimizer says no"))
    assert [x.how for x in hand.of(c.EndRun)] == ["failed"] and "optimizer" in hand.of(c.EndRun)[0].detail


def test_a_core_that_fails_in_training_ends_the_attempt():
    hand = training(1)
    hand.say(e.RoleReached(0, 1, 2, "FAILED", detail="out of memory"))
    assert [x.how for x in hand.of(c.EndRun)] == ["failed"]


def test_cells_in_training_come_back_when_nobody_else_is_left_to_serve():
    hand = Hand(cells=2, slots=4, batch_groups=2, supply_fraction=0.5).begin()
    hand.close(0, 1)
    hand.to_training(0)
    hand.open()
    hand.take(0)
    hand.say(e.RankLost(1, 1, "killed"))
    assert hand.of(c.SuspendUpdate)
    hand.ended(0, "suspended")
    assert [(o.rank, o.target) for o in hand.of(c.OrderRole)] == [(0, "rollout")]
    assert len(hand.all(c.Dispatch)) == 1  # nothing is missing, only held
    hand.to_rollout(0)
    assert [m.n for r in hand.of(c.Route) for m in r.moves] == [2, 3]


def test_an_engine_too_far_behind_is_unrouted_and_synced_at_once():
    hand = Hand(cells=1, standalone=2, slots=4, lookahead=1.0, max_lag=1, updates=4).begin()
    hand.close(*range(8))
    hand.to_training(0)
    for update in (1, 2):
        hand.open()
        hand.take(2 * update - 2, 2 * update - 1)
        hand.step()
        hand.commit()
        hand.close(*range(4 + 4 * update, 8 + 4 * update))
    assert hand.state.fleet.published == 2
    assert not hand.state.fleet.cells[2].routed  # it holds policy 0 and waits behind engine 1, which loads policy 1
    assert [s.rank for s in hand.all(c.OrderSync)] == [1, 2]
    hand.reach(2, "ROLLOUT", version=2)
    assert hand.state.fleet.cells[2].routed


def test_words_that_contradict_each_other_raise():
    hand = Hand(cells=2, slots=4, batch_groups=2, supply_fraction=0.5, lookahead=0.5).begin()
    hand.close(*range(6))
    hand.to_training(0)
    hand.open()
    hand.take(0, 1)
    with pytest.raises(InvariantBroken, match="invariant 8"):
        hand.take(2)
    with pytest.raises(InvariantBroken, match="invariant 12"):
        hand.state.handle(e.GroupTaken(55, 1), 0.0)


# -- resume ----------------------------------------------------------------------------------------------------------
def outcome(n, version=0):
    return e.ExecutionClosed(n, 1, "completed", 1.0, True, version, 1.0)


CURSOR = {
    "version": 1, "batch": 1, "update": 1, "group_size": 2, "groups": 4, "trained": [[0, 2]], "dropped": [], "d": 8,
    "p": 8, "f": 6,
}  # fmt: skip


def resume(issued, closed, cursor=CURSOR, **settings):
    numbers = {"cells": 2, "slots": 8, "batch_groups": 2, "group_size": 2, "updates": 4, "lookahead": 1.0}
    settings = Settings(**{**numbers, **settings})
    state = SchedulerState.resume(settings, cursor, issued, closed)
    assert (state.level.p, state.level.f) == (len(closed), len(closed))
    return Hand(state, **{**numbers, "supply_hold": settings.supply_hold})


def test_after_a_resume_d_is_issued_and_p_and_f_are_closed():
    hand = resume(dict.fromkeys(range(8), 1), [outcome(n) for n in range(6)], lookahead=0.0)
    assert (hand.state.level.d, hand.state.level.p, hand.state.level.f) == (8, 6, 6)
    assert [f.group for f in hand.of(c.Feed)] == [2]  # groups 0 and 1 were trained
    assert hand.of(c.Dispatch)[0].d == 8 and not hand.of(c.Dispatch)[0].executions
    hand.begin()
    assert [(g.n, g.try_number, g.p) for g in hand.all(c.Grant)] == [(6, 2, 7), (7, 2, 8)]
    assert hand.state.batch.number == 2 and hand.state.fleet.published == 1
    assert hand.order(0).version == 1 and hand.order(0).snapshot == 1


def test_executions_issued_after_the_commit_are_found_and_the_rest_of_a_quota_is_dispatched():
    hand = resume({n: min(1, 10 - n) for n in range(11)}, [outcome(n) for n in range(9)])
    assert [p.n for d in hand.of(c.Dispatch) for p in d.executions] == [11]  # its spec had not been written
    assert hand.state.level.d == 12
    assert [f.group for f in hand.of(c.Feed)] == [2, 3]
    assert hand.state.groups.outstanding == 4
    hand.begin()
    assert {g.n: g.try_number for g in hand.all(c.Grant)} == {9: 2, 10: 1, 11: 1}


def test_a_resume_dispatches_the_quota_that_the_crash_prevented():
    hand = resume(dict.fromkeys(range(8), 1), [outcome(n) for n in range(8)], lookahead=1.5, max_staleness=2)
    assert [p.n for d in hand.of(c.Dispatch) for p in d.executions] == list(range(8, 14))


def test_a_resume_before_the_first_commit_begins_with_what_is_on_disk():
    hand = resume(dict.fromkeys(range(8), 1), [outcome(0), outcome(1), outcome(5)], cursor=None)
    assert hand.state.level.d == 8 and [f.group for f in hand.of(c.Feed)] == [0]
    assert hand.state.batch.number == 1


def test_a_resume_after_the_last_commit_ends_at_once():
    done = {**CURSOR, "version": 4, "groups": 8, "trained": [[0, 8]]}
    hand = resume(dict.fromkeys(range(16), 1), [outcome(n) for n in range(16)], cursor=done)
    assert [x.how for x in hand.of(c.EndRun)] == ["completed"]


def test_another_group_size_is_refused():
    with pytest.raises(UserError, match="group_size is 4, but the run was begun with 2"):
        SchedulerState.resume(Settings(1, 1, 2, 4, updates=4), CURSOR, {}, [])


@pytest.mark.parametrize("seed", range(40))
def test_crashes_anywhere_lose_nothing_and_train_on_nothing_twice(seed):
    """The whole run dies up to three times, wherever it is; `World.stepped` and `check_end` see to the rest."""
    settings = Settings(3, 3, 4, 2, updates=6, updates_per_batch=1 + seed % 2, lookahead=0.5, supply_hold=1.0)
    chances = Chances(unusable=0.1, try_failed=0.1, cell_deaths=seed % 3, repeated=0.1, impatient=seed % 2 == 0)
    world = World(settings, seed, chances).start()
    for crash in range(3):
        world.run(until=world.now + 20 + 37 * ((seed + crash) % 5))
        if world.ended:
            break
        world = world.crashed(seed + 100 * crash, lost_specs=seed % 4).start()
    world.run()
    assert world.ended.how == "completed", world.ended


# -- counterexamples of the search over every order of events, to rules that are there because of them ----------------
def test_a_satellite_that_moves_with_the_core_comes_back_when_the_core_fails_on_the_way():
    hand = Hand(cells=2, slots=4, policy=Elastic()).begin()
    hand.close(*range(4))
    assert hand.state.fleet.moving == [0, 1]
    hand.reach(1, "TRAINING")
    hand.say(e.RoleReached(0, 1, hand.order(0).epoch, "FAILED"))
    assert [(o.rank, o.target) for o in hand.of(c.OrderRole)] == [(1, "rollout")]
    assert hand.state.fleet.training == []


def test_an_earlier_rollout_heard_again_does_not_route_a_cell_that_is_on_its_way_back():
    hand = Hand(cells=2, slots=4, policy=Elastic()).begin()
    first = hand.order(1).epoch
    hand.close(*range(4))
    hand.reach(1, "TRAINING")
    hand.say(e.RoleReached(0, 1, hand.order(0).epoch, "FAILED"))
    assert hand.say(e.RoleReached(1, 1, first, "ROLLOUT", version=0)) == []
    assert not hand.state.fleet.cells[1].routed

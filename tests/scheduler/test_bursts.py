"""One burst, rule by rule (docs/architecture.md): quotas, the gate, the order of moves, starvation, the burst's end."""

import pytest

from gyre import events as e
from gyre.errors import InvariantBroken
from gyre.scheduler import acts
from gyre.scheduler import commands as c
from gyre.scheduler.burst import Phase
from gyre.scheduler.policy import Async
from gyre.scheduler.settings import Settings
from tests.scheduler.hand import Hand
from tests.scheduler.world import Chances, World


def dispatched(hand):
    return [len(d.executions) for d in hand.all(c.Dispatch)]


# -- quotas ----------------------------------------------------------------------------------------------------------
def test_the_first_quota_is_one_batch_and_the_lookahead_the_next_ones_a_batch_and_none_exceeds_the_batches():
    world = World(Settings(3, 4, 4, 2, updates=4, lookahead=0.5, supply_hold=1.0)).start().run()
    quotas = [len(d.executions) // 2 for d in world.commands(c.Dispatch) if d.executions]
    assert quotas == [6, 4, 4, 2]


@pytest.mark.parametrize("lookahead", [0, 0.25, 1, 2.5, 16])
@pytest.mark.parametrize("updates", [1, 2, 5])
def test_a_run_without_failures_dispatches_exactly_what_its_batches_need(lookahead, updates):
    world = World(Settings(2, 3, 4, 2, updates=updates, lookahead=lookahead, max_staleness=16, supply_hold=1.0))
    world.start().run()
    assert world.ended.how == "completed"
    assert len(world.specs) == updates * 4 * 2
    assert [p.task_index for p in world.specs.values()] == [n // 2 for n in range(len(world.specs))]


def test_quota_rounds_like_a_person():
    assert Settings(1, 1, 20, 2, updates=9, lookahead=0.15).quota(0, 0, 0.15) == 23  # not int(22.999999999999996)


def test_d_does_not_rise_while_an_update_runs():
    hand = Hand().begin()
    hand.close(0, 1, 2, 3)
    hand.to_training(0)
    with pytest.raises(InvariantBroken, match="invariant 3"):
        acts.dispatch(hand.state, 1, "burst")


# -- the gate --------------------------------------------------------------------------------------------------------
def test_the_core_moves_first_then_satellites_by_index_each_after_the_one_before_has_joined():
    hand = Hand(cells=4, batch_groups=4, slots=8).begin()
    hand.close(0, 1, 2, 3)
    assert [o.rank for o in hand.of(c.OrderRole)] == [0]
    hand.to_training(0)
    assert [t.rank for t in hand.of(c.Train)] == [0] and len(hand.of(c.BeginUpdate)) == 1
    assert hand.order(1).target == "rollout"  # nobody moves before the stream is open
    hand.open()
    assert [o.rank for o in hand.of(c.OrderRole)] == [1]
    hand.to_training(1)
    assert [(t.rank, t.position, t.members) for t in hand.of(c.Train)] == [(1, 1, (0, 1, 2, 3))]
    assert hand.order(2).target == "rollout"
    hand.join(1, 1)
    assert [o.rank for o in hand.of(c.OrderRole)] == [2]


def test_a_satellite_that_missed_the_window_lets_the_next_one_move():
    hand = Hand(cells=3, batch_groups=4, updates_per_batch=2, updates=4, slots=8).begin()
    hand.close(*range(8))
    hand.to_training(0)
    hand.open()
    hand.to_training(1)
    hand.take(0, 1)
    hand.ended(1, "missed")
    assert [o.rank for o in hand.of(c.OrderRole)] == [2]  # for the second update of the batch


def test_a_cell_leaves_only_when_the_slots_left_cover_the_waterlevel():
    hand = Hand(cells=2, slots=3, batch_groups=4).begin()
    hand.close(0, 1, 2, 3)
    assert hand.state.level.w == 4 and not hand.of(c.OrderRole)
    assert hand.state.decision.code == "waterlevel"
    hand.close(4)
    assert hand.state.level.w == 3
    assert [o.rank for o in hand.of(c.OrderRole)] == [0]


def test_supply_is_the_fraction_of_a_batch_or_what_is_left_of_it():
    hand = Hand(cells=2, standalone=1, slots=16, batch_groups=8, supply_fraction=0.25).begin()
    hand.close(0, 1)
    assert not hand.of(c.OrderRole) and hand.state.decision.code == "supply"
    hand.close(2, 3)
    assert [o.rank for o in hand.of(c.OrderRole)] == [0]
    hand.to_training(0)
    hand.open()
    hand.take(0, 1)
    hand.close(*range(4, 14))
    assert hand.order(1).target == "training"
    hand.join(1, 1)
    hand.take(2, 3, 4, 5, 6)
    assert hand.state.supply.threshold == 1  # one group is left to take


def test_supply_must_last_for_the_hold_without_a_break():
    hand = Hand(cells=2, slots=8, supply_hold=10.0).begin()
    hand.close(0, 1)
    assert hand.state.wake_at() == 10.0
    assert not [o for o in hand.wait(9.9) if isinstance(o, c.OrderRole)]
    assert hand.state.decision.code == "hold"
    hand.wait(0.1)
    assert [o.rank for o in hand.of(c.OrderRole)] == [0]


def test_slots_are_reserved_at_standalone_engines_first_then_at_the_cells_that_move_last():
    hand = Hand(cells=3, standalone=1, slots=4, batch_groups=8, supply_fraction=0.125).begin()
    assert {n: g.engine for n, g in hand.granted.items()} == {
        0: 3, 1: 2, 2: 1, 3: 0, 4: 3, 5: 2, 6: 1, 7: 0, 8: 3, 9: 2, 10: 1, 11: 0, 12: 3, 13: 2, 14: 1, 15: 0,
    }  # fmt: skip
    hand.close(0, 4, 2, 1)  # leaves 3, 7, 11, 15 on cell 0, and room for two on 3, one on 2, one on 1
    assert hand.state.level.w == 12
    route = next(r for r in hand.all(c.Route) if r.engines == {0: None})
    assert [(m.n, m.engine) for m in route.moves] == [(3, 3), (7, 3), (11, 2), (15, 1)]
    kinds = [type(x) for x in hand.log if isinstance(x, c.OrderRole | c.Route)]
    assert kinds[-2:] == [c.Route, c.OrderRole]  # the route is withdrawn before the cell is ordered away


def test_the_route_goes_under_the_next_epoch_and_comes_back_only_with_the_cells_word():
    hand = Hand(cells=2, slots=8).begin()
    hand.close(0, 1, 2, 3)
    assert hand.order(0).epoch == 2 and hand.state.fleet.capacity == 8
    hand.to_training(0)
    hand.take(0, 1)
    hand.open()
    hand.step()
    hand.commit()
    assert hand.order(0).target == "rollout" and hand.order(0).version == 1
    assert hand.state.fleet.capacity == 8
    hand.to_rollout(0)
    routes = [r for r in hand.all(c.Route) if r.engines.get(0)]
    assert routes[-1].engines[0] == c.EngineRoute("http://0", 3, 1)
    assert hand.state.fleet.capacity == 16


def test_a_reason_is_logged_when_it_changes():
    hand = Hand(cells=2, slots=3, batch_groups=4).begin()
    before = len(hand.facts(e.GateReason))
    hand.wait(1)
    hand.wait(1)
    hand.close(0)
    assert len(hand.facts(e.GateReason)) == before
    hand.close(1, 2, 3)
    assert [g.reason for g in hand.facts(e.GateReason)[before:]] == [
        "the 3 slots left would not cover the waterlevel of 6",
    ]


# -- updates ---------------------------------------------------------------------------------------------------------
def test_several_updates_split_the_batch_and_satellites_take_part_in_the_next_one_at_once():
    hand = Hand(cells=2, slots=8, batch_groups=4, updates_per_batch=2, updates=4, standalone=1).begin()
    hand.close(*range(8))
    hand.to_training(0)
    assert [b.groups for b in hand.of(c.BeginUpdate)] == [2]
    hand.open()
    hand.to_training(1)
    hand.join(1, 1)
    hand.take(0, 1)
    hand.step(1)
    assert hand.update == 2 and not hand.all(c.Commit)
    assert [(t.rank, t.update) for t in hand.all(c.Train)] == [(0, 1), (1, 1), (0, 2)]
    hand.open()
    assert [(t.rank, t.update, t.position) for t in hand.of(c.Train)] == [(1, 2, 1)]
    hand.join(1, 1)
    hand.take(2, 3)
    hand.say(e.UpdateDone(2, 2, {}, 1.0))
    commit = hand.of(c.Commit)[0]
    assert (commit.version, commit.update, commit.cursor["trained"]) == (1, 2, [[0, 4]])
    assert not hand.all(c.PublishPolicy)  # commit before publish


def test_the_burst_ends_with_satellites_last_first_and_the_core_last():
    hand = Hand(cells=3, slots=4, batch_groups=2).begin()
    hand.close(*range(4))
    hand.to_training(0)
    hand.open()
    hand.to_training(1)
    hand.join(1, 1)
    hand.to_training(2)
    hand.join(2, 2)
    hand.take(0, 1)
    hand.step(1, 2)
    hand.commit()
    assert [(o.rank, o.target, o.version, o.snapshot) for o in hand.of(c.OrderRole)] == [
        (2, "rollout", 1, 1),
        (1, "rollout", 1, 1),
        (0, "rollout", 1, 1),
    ]
    kinds = [type(x) for x in hand.latest if isinstance(x, c.PublishPolicy | c.Dispatch)]
    assert kinds == [c.PublishPolicy, c.Dispatch]


def test_a_satellite_whose_word_is_late_is_ordered_back_all_the_same():
    hand = Hand(cells=2, slots=4).begin()
    hand.close(*range(4))
    hand.to_training(0)
    hand.open()
    hand.to_training(1)
    hand.join(1, 1)
    hand.take(0, 1)
    hand.step()
    hand.commit()
    assert [o.rank for o in hand.of(c.OrderRole)] == [1, 0]
    hand.ended(1, "done", 1)
    assert hand.latest == []


def test_engines_in_rollout_are_synced_one_at_a_time():
    hand = Hand(cells=1, standalone=3, slots=4).begin()
    hand.close(*range(4))
    hand.to_training(0)
    hand.open()
    hand.take(0, 1)
    hand.step()
    hand.commit()
    assert [s.rank for s in hand.of(c.OrderSync)] == [1]
    hand.reach(1, "ROLLOUT")
    assert [s.rank for s in hand.of(c.OrderSync)] == [2]
    assert hand.of(c.Route)[0].engines[1].policy == 1
    hand.reach(2, "ROLLOUT")
    assert [s.rank for s in hand.of(c.OrderSync)] == [3]


# -- the core stays --------------------------------------------------------------------------------------------------
def stay(**settings):
    hand = Hand(cells=1, standalone=2, slots=4, lookahead=1.0, **settings).begin()
    hand.close(*range(8))
    hand.to_training(0)
    hand.open()
    hand.take(0, 1)
    hand.step()
    hand.commit()
    return hand


def test_the_core_stays_in_training_when_supply_and_capacity_allow_it():
    hand = stay()
    assert not hand.of(c.OrderRole)
    assert [(t.rank, t.update) for t in hand.of(c.Train)] == [(0, 2)]
    assert [b.update for b in hand.of(c.BeginUpdate)] == [2]
    assert "stays in training" in hand.facts(e.GateReason)[-2].decision


def test_the_core_goes_back_when_the_others_would_not_cover_the_next_quota():
    hand = stay(group_size=2, updates=3)
    assert hand.state.level.w == 4  # two groups are ready, two new ones are dispatched
    hand = Hand(cells=1, standalone=1, slots=3, lookahead=1.0).begin()
    hand.close(*range(8))
    hand.to_training(0)
    hand.open()
    hand.take(0, 1)
    hand.step()
    hand.commit()
    assert [(o.rank, o.target) for o in hand.of(c.OrderRole)] == [(0, "rollout")]


def test_the_core_stays_across_batches_in_a_whole_run():
    settings = Settings(2, 4, 4, 2, updates=4, standalone=2, lookahead=1.0, supply_hold=1.0, max_staleness=3)
    world = World(settings, 3, Chances(seconds=(5, 10), micro_seconds=(4, 9))).start().run()
    assert world.ended.how == "completed"
    core = [o.target for o in world.commands(c.OrderRole) if o.rank == 0]
    assert core.count("training") < settings.batches


# -- starvation ------------------------------------------------------------------------------------------------------
def starve(**settings):
    """Group 0 is taken, group 1 fails: the open stream is dry and nothing runs."""
    hand = Hand(cells=2, standalone=1, slots=4, supply_fraction=0.5, **settings).begin()
    hand.close(0, 1)
    hand.to_training(0)
    hand.open()
    hand.to_training(1)
    hand.join(1, 1)
    hand.take(0)
    hand.close(2, 3, usable=False)
    return hand


def test_a_starved_update_is_suspended_topped_up_and_finished():
    hand = starve()
    assert [s.update for s in hand.of(c.SuspendUpdate)] == [1]
    assert len(hand.all(c.Dispatch)) == 1  # not before the sums are with the core
    hand.ended(1, "suspended")
    hand.ended(0, "suspended")
    assert [o.rank for o in hand.of(c.OrderRole)] == [1]  # the core keeps the sum, other engines serve
    assert [[p.n for p in d.executions] for d in hand.of(c.Dispatch)] == [[4, 5]]
    assert hand.state.batch.top_ups == 2
    hand.to_rollout(1)
    hand.close(4, 5)
    assert [type(x) for x in hand.latest if isinstance(x, c.ResumeUpdate | c.Train)] == [c.ResumeUpdate, c.Train]
    hand.open()
    hand.take(2)
    hand.step()
    assert hand.all(c.Commit)[0].cursor["trained"] == [[0, 1], [2, 3]]
    assert hand.all(c.Commit)[0].cursor["dropped"] == [[1, 2]]


def test_the_core_leaves_a_suspended_update_where_it_is_the_only_capacity():
    hand = Hand(cells=1, slots=4, supply_fraction=0.5).begin()
    hand.close(0, 1)
    hand.close(2, 3, usable=False)  # nothing is open: one group is enough to begin with
    hand.to_training(0)
    hand.open()
    hand.take(0)
    hand.ended(0, "suspended")
    assert [(o.rank, o.target) for o in hand.of(c.OrderRole)] == [(0, "rollout")]
    hand.to_rollout(0)
    hand.close(4, 5)
    assert [(o.rank, o.target) for o in hand.of(c.OrderRole)] == [(0, "training")]
    hand.to_training(0)
    assert [r.update for r in hand.of(c.ResumeUpdate)] == [1] and len(hand.all(c.BeginUpdate)) == 1


def test_starvation_before_anything_was_taken_is_topped_up_without_a_suspension():
    hand = Hand(cells=2, slots=4, batch_groups=4, supply_fraction=0.5).begin()
    hand.close(0, 1)
    hand.close(*range(2, 8), usable=False)
    assert not hand.all(c.SuspendUpdate)
    assert dispatched(hand) == [8, 6]
    assert hand.facts(e.QuotaPublished)[-1].reason == "top_up"


def test_past_the_budget_the_batch_closes_short_and_says_so():
    hand = starve(top_ups=0)
    assert [(s.update, s.groups) for s in hand.of(c.CloseShort)] == [(1, 1)]
    assert hand.facts(e.BatchClosedShort) == [e.BatchClosedShort(1, 1, 1)]
    assert not hand.all(c.SuspendUpdate)
    hand.step(1)
    assert hand.all(c.Commit)[0].cursor["trained"] == [[0, 1]]
    hand.commit()
    assert [len(d.executions) for d in hand.of(c.Dispatch)] == [4]


def test_a_suspended_batch_past_its_budget_trains_on_what_is_ready():
    hand = Hand(cells=2, slots=4, batch_groups=8, supply_fraction=0.25, top_ups=1).begin()
    hand.close(0, 1, 2, 3)
    hand.close(*range(4, 16), usable=False)
    hand.to_training(0)
    hand.open()
    hand.take(0, 1)
    assert hand.of(c.SuspendUpdate) or hand.state.fleet.moving == 1
    hand.to_training(1) if hand.state.fleet.moving == 1 else None
    hand.ended(0, "suspended")
    assert dispatched(hand) == [16, 12]
    hand.to_rollout(1)
    hand.close(16, 17)
    hand.close(*range(18, 28), usable=False)
    assert [(s.update, s.groups) for s in hand.all(c.CloseShort)] == [(1, 3)]
    assert hand.state.update.phase is Phase.OPENING  # what is left of the batch suffices now
    hand.open()
    hand.take(8)
    hand.step()
    assert hand.all(c.Commit)


def test_a_batch_without_any_group_ends_the_run():
    hand = Hand(cells=2, slots=4, top_ups=1).begin()
    hand.close(*range(4), usable=False)
    hand.close(*range(4, 8), usable=False)
    assert [x.how for x in hand.of(c.EndRun)] == ["failed"]
    assert "why executions fail" in hand.of(c.EndRun)[0].detail
    assert hand.say(e.Tick()) == []


def test_a_whole_run_with_a_starved_batch():
    world = World(Settings(3, 4, 4, 2, updates=3, supply_hold=1.0), 5)
    world.fate = lambda n: n not in (2, 3, 6, 7)
    world.start().run()
    assert world.ended.how == "completed"
    reasons = [q.reason for q in world.events(e.QuotaPublished)]
    assert "top_up" in reasons
    assert len(world.trained) == 3 * 4


# -- staleness, and the end ------------------------------------------------------------------------------------------
def test_a_stale_group_is_dropped_when_it_is_admitted_and_made_up_for_in_the_next_quota():
    hand = Hand(cells=1, standalone=1, slots=8, lookahead=1.0, max_staleness=0, updates=4).begin()
    hand.close(*range(6))
    hand.to_training(0)
    hand.open()
    hand.take(0, 1)
    hand.step()
    hand.commit()  # group 2 was ready, sampled by policy 0
    assert [d.group for d in hand.of(c.DropGroup)] == [2]
    assert [len(d.executions) for d in hand.of(c.Dispatch)] == [6]  # two groups and the one that was dropped
    hand.close(6, 7, version=0)
    assert [f.group for f in hand.facts(e.GroupDropped)] == [2, 3]
    assert not [f for f in hand.of(c.Feed)]


def test_the_run_ends_with_the_last_commit():
    hand = Hand(cells=1, standalone=1, updates=1).begin()
    hand.close(*range(4))
    hand.to_training(0)
    hand.open()
    hand.take(0, 1)
    hand.step()
    hand.commit()
    assert [type(x) for x in hand.latest if not isinstance(x, c.Log)] == [c.PublishPolicy, c.EndRun]
    assert hand.of(c.EndRun)[0].how == "completed"


# -- what policies are told, and what people are -----------------------------------------------------------------------
def test_who_waits_for_a_host_does_not_wait_for_a_slot():
    """Cells that are given back would serve nobody: slots are free already."""
    hand = Hand(cells=2, host_executions=1).begin()
    assert hand.state.executions.queued and hand.state.executions.engines.free
    assert acts.view(hand.state, hand.now).queued == 0
    hand.state.update.dry_since = hand.now
    hand.state.measures.moved("training", hand.now - 5.0)
    assert hand.state.wake_at() is None
    full = Hand(cells=2, slots=1).begin()
    assert acts.view(full.state, full.now).queued == full.state.executions.queued == 2


def test_two_reasons_that_last_are_said_once_each():
    """The core waits for its batch, and the other cell that trains comes back: neither is news at the next tick."""
    hand = Hand(cells=3, trainers=2, policy=Async()).begin()
    hand.to_training(0)
    hand.to_training(1)
    hand.say(e.RankLost(1, 1, "it was killed"))
    hand.say(e.RankReady(1, 2, "node", "http://1"))
    hand.build()
    hand.wait(0.2)
    said = [fact.reason for fact in hand.facts(e.GateReason)]
    assert {"0 ready groups, 2 are needed", "cell 1 is not back in rollout yet"} <= set(said[-3:])
    for _ in range(5):
        hand.wait(0.2)
    assert len(hand.facts(e.GateReason)) == len(said)

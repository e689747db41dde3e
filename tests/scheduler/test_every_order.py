"""In small worlds, in whatever order things happen, every invariant holds and every state leads to the end.

The way may not count on luck: executions end only where they are served, words that may be late need not come, and
nobody counts on a fault. What a world consists of is in `small_world`. That the search finds what it should is shown by
taking out of the scheduler, one by one, things that it needs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gyre.events import RoleReached
from gyre.scheduler import rules, state
from gyre.scheduler.executions import Executions
from gyre.scheduler.fleet import Fleet
from gyre.scheduler.settings import Settings
from gyre.scheduler.state import SchedulerState
from tests.scheduler.policies import POLICIES
from tests.scheduler.search import Counterexample, Found, search
from tests.scheduler.small_world import KINDS, Small

ALL = frozenset(KINDS)
#: The largest worlds: cells, groups, faults, of which kinds.
FULL = [
    (3, 4, 2, {"for good"}),
    (3, 4, 2, {"unusable", "try failed"}),
    (3, 4, 2, {"part"}),
    (3, 4, 2, {"host"}),
    (3, 4, 2, {"core engine"}),
    (3, 4, 1, ALL),
    (3, 2, 2, {"cell"}),
    (2, 4, 2, ALL),
]


def small(name: str, faults: int = 0, kinds: frozenset[str] = ALL, begun: bool = True, **changes) -> Small:
    """A world of two cells and two groups under a policy, but for the changes."""
    under = POLICIES[name]
    options = {key: changes.pop(key) for key in ("merged", "all_states", "whole_groups") if key in changes}
    numbers = {
        "cells": 2, "slots": 4, "batch_groups": 2, "group_size": 2, "updates": 1, "lookahead": 0.0, "top_ups": 1,
        "supply_fraction": 0.5, "supply_hold": 0.0, "host_executions": 8, **under.settings, **changes,
    }  # fmt: skip
    if under.split:  # nobody is left to serve where the only rollout cell stays dead
        kinds = kinds - {"for good"}
    return Small(Settings(**numbers), faults, kinds, begun=begun, measured=under.measured, **options)


def look(name: str, world: Small) -> Found:
    found = search(world, POLICIES[name].policy)
    print(f"{name}: {found}")
    assert found.ends["completed"]
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_from_the_first_start(name):
    look(name, small(name, begun=False, all_states=True))


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "measured"])
def test_one_fault_of_any_kind(name):
    look(name, small(name, 1))


@pytest.mark.parametrize("name", POLICIES)
def test_three_cells_two_batches(name):
    look(name, small(name, cells=3, updates=2, whole_groups=True))


@pytest.mark.parametrize("name", ["plain", "elastic"])
def test_three_cells_three_groups(name):
    look(name, small(name, cells=3, batch_groups=3))


@pytest.mark.parametrize("name", POLICIES)
def test_two_updates_a_batch(name):
    look(name, small(name, 1, frozenset({"unusable", "part"}), updates=2, updates_per_batch=2, whole_groups=True))


@pytest.mark.parametrize("name", ["plain", "measured"])
def test_the_supply_has_to_last(name):
    look(name, small(name, 1, frozenset({"unusable"}), supply_hold=10.0))


@pytest.mark.parametrize("name", ["plain", "measured"])
def test_groups_that_become_stale_are_replaced(name):
    look(name, small(name, cells=1, updates=2, lookahead=1.0, max_staleness=0, slots=8))


@pytest.mark.parametrize("name", ["elastic", "async-stream"])
def test_a_standalone_engine_and_two_hosts(name):
    kinds = frozenset({"host", "for good", "late", "engine", "core engine"})
    look(name, small(name, 1, kinds, cells=1, standalone=1, hosts=2, slots=8, whole_groups=True))


@pytest.mark.parametrize("kind", sorted(ALL))
def test_joining_events_leaves_out_nothing_that_the_scheduler_could_be_told(kind):
    """Whatever state the scheduler gets into when every word travels by itself, it gets into when they do not."""
    kinds = frozenset({"late", "cell", "host"} if kind == "late" else {kind})
    together = look("elastic", small("elastic", 1, kinds))
    apart = look("elastic", small("elastic", 1, kinds, merged=False))
    assert apart.states > together.states and apart.digests() <= together.digests()


@pytest.mark.full
@pytest.mark.parametrize("cells, groups, faults, kinds", FULL)
def test_the_largest_worlds(cells, groups, faults, kinds):
    slots = 8 if cells == 2 else 4  # so that the others can serve all when the core leaves
    world = small("elastic", faults, frozenset(kinds), cells=cells, slots=slots, batch_groups=groups, whole_groups=True)
    look("elastic", world)


# -- what the search has to find -------------------------------------------------------------------------------------
def without(rule: str):
    def mutate(patch):
        patch.setattr(rules, "RULES", tuple(r for r in rules.RULES if r.__name__ != rule))

    return mutate


def any_epoch(patch):
    """Words of earlier epochs count."""
    reached = Fleet.reached
    patch.setattr(
        Fleet, "reached", lambda self, event: reached(self, replace(event, epoch=self.cells[event.rank].epoch))
    )


def crossed_failures_unheard(patch):
    """A failure under an epoch that was superseded meanwhile is not news."""
    heard = SchedulerState._role_reached

    def mutant(self, event):
        if event.state != "FAILED" or event.epoch == self.fleet.cells[event.rank].epoch:
            heard(self, event)

    patch.setitem(state._HANDLERS, RoleReached, mutant)


def nobody_barred(patch):
    """A member that died is not barred from its update."""
    patch.setattr(SchedulerState, "_leave_update", SchedulerState._part_ended)


def held_for_ever(patch):
    """Executions that lost their engine never get another one."""
    patch.setattr(Executions, "resettle", lambda self: ())


def covered_by_nobody(patch):
    """A cell leaves although the slots left do not cover the waterlevel."""
    patch.setattr(rules, "covered", lambda state, cell, decision: decision)


@pytest.mark.parametrize(
    "mutate, name, faults, what",
    [
        (without("suspend"), "elastic", ["unusable"], "do not lead to the end"),
        (without("suspended"), "elastic", ["unusable"], "invariant 13"),
        (without("top_up"), "plain", ["unusable"], "invariant 13"),
        (without("leave_if_only_capacity"), "plain", ["for good"], "do not lead to the end"),
        (without("headless"), "elastic", ["core engine"], "invariant 5"),
        (any_epoch, "elastic", ["twice", "core engine"], "is routed"),
        (crossed_failures_unheard, "plain", ["core engine"], "do not lead to the end"),
        (nobody_barred, "elastic", ["cell"], "do not lead to the end"),
        (held_for_ever, "plain", ["engine"], "do not lead to the end"),
        (covered_by_nobody, "elastic", ["unusable"], "invariant 4"),
    ],
)
def test_what_is_missing_is_found(monkeypatch, mutate, name, faults, what):
    mutate(monkeypatch)
    world = small(name, len(faults), frozenset(faults), whole_groups=True, begun="twice" not in faults)
    with pytest.raises(Counterexample, match=what):
        search(world, POLICIES[name].policy)

"""Random worlds in time: whatever fails, dies, comes late, twice or never, invariants hold and runs end.

`World` checks all invariants after every event. What goes wrong is drawn event by event, so that a counterexample
shrinks to the few faults that it takes; everything else (delays, durations) comes from a seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre import events as e
from gyre.scheduler.settings import Settings
from gyre.scheduler.state import SchedulerState
from tests.scheduler.policies import POLICIES
from tests.scheduler.world import Chances, World

#: What can go wrong with a rank at a moment.
FAULTS = ("dies", "dies for good", "falls silent", "is called lost", "its engine fails", "its words are late")
#: How executions and words may be: names of `Chances` and their largest values.
UNKIND = {"unusable": 0.6, "try_failed": 0.6, "repeated": 0.3, "part_failed": 0.2, "delay": 20.0}


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong with a rank, some seconds after the one before."""

    after: int
    what: str
    rank: int


class FaultyWorld(World):
    """A world in which certain things go wrong at certain times."""

    def __init__(self, faults: list[Fault], *args) -> None:
        self.faults = faults
        self.late_until = {}
        super().__init__(*args)

    def _plan_faults(self) -> None:
        at = 0.0
        for fault in self.faults:
            at += fault.after
            self.after(at, lambda fault=fault: self._strike(fault.what, fault.rank % (self.settings.engines + 1)))

    def _strike(self, what: str, rank: int) -> None:
        core, host = rank == 0, rank in self.hosts
        alone = host or self.settings.trainers > 0  # nobody could take its place
        match what:
            case "dies" if not core:
                self.kill(rank, back=True)
            case "dies for good" if not core and not alone:
                self.kill(rank, back=False)
            case "falls silent" if not core:  # it goes on for a while, but no word of it is ever heard
                sim = self.rank(rank)
                self.late_until[self._sender(rank)] = float("inf")
                incarnation = sim.incarnation
                self.after(
                    self.random.uniform(1, 60),
                    lambda: self.kill(rank, back=True),
                    lambda: sim.incarnation == incarnation,
                )
            case "is called lost" if not core:
                self.call_lost(rank)
            case "its engine fails" if not host:
                self.fail_engine(rank)
            case "its words are late":
                self.late_until[self._sender(rank)] = self.now + 100.0

    def _sender(self, rank: int) -> tuple[str, int, int]:
        return ("host" if rank in self.hosts else "cell", rank, self.rank(rank).incarnation)

    def send(self, sender, event: e.Event) -> None:
        until = self.late_until.get(sender, 0.0)
        if until == float("inf"):
            return
        self._last_word[sender] = max(self._last_word[sender], until if until > self.now else 0.0)
        super().send(sender, event)


@st.composite
def worlds(draw, name: str) -> FaultyWorld:
    """A world of any shape, with anything going wrong in it."""
    under = POLICIES[name]
    cells = draw(st.integers(2 if under.split else 1, 4))
    updates_per_batch = draw(st.sampled_from([1, 1, 2]))
    numbers = {
        "cells": cells,
        "slots": draw(st.integers(1, 6)),
        "standalone": draw(st.integers(0, 1)),
        "hosts": draw(st.integers(1, 2)),
        "host_executions": draw(st.sampled_from([3, 64])),
        "batch_groups": draw(st.integers(updates_per_batch, 5)),
        "group_size": draw(st.integers(2, 3)),
        "updates": updates_per_batch * draw(st.integers(1, 3)),
        "updates_per_batch": updates_per_batch,
        "lookahead": draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        "supply_fraction": draw(st.sampled_from([0.1, 0.25, 1.0])),
        "supply_hold": draw(st.sampled_from([0.0, 10.0])),
        "top_ups": draw(st.integers(0, 3)),
        "tries": draw(st.integers(1, 3)),
        "max_staleness": draw(st.integers(0, 3)),
        "max_lag": draw(st.integers(1, 2)),
        **under.settings,
    }
    unkind = {key: draw(st.sampled_from([0.0, most / 4, most])) for key, most in UNKIND.items()}
    chances = Chances(**unkind, impatient=draw(st.booleans()))
    chances.seconds = draw(st.sampled_from([(5.0, 60.0), (50.0, 51.0), (0.1, 300.0)]))
    fault = st.builds(Fault, st.integers(0, 120), st.sampled_from(FAULTS), st.integers(0, 5))
    faults = draw(st.lists(fault, max_size=8))
    seed = draw(st.integers(0, 2**16))
    chosen = Settings(**numbers)
    return FaultyWorld(faults, chosen, seed, chances, SchedulerState(chosen, under.policy, lambda group: group % 3))


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_goes_wrong_invariants_hold_and_the_run_ends(name, data):
    ended = data.draw(worlds(name)).start().run(limit=60_000).ended
    # A run may end early only by having used up its top-ups.
    assert ended.how == "completed" or "top-ups" in ended.detail, ended

"""Timelines: the fold agrees with the scheduler's own numbers, and the page is one file that anybody may open."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from gyre import events as e
from gyre.scheduler.state import SchedulerState
from gyre.timeline import Fold
from gyre.timeline_cells import CellState
from tests.scheduler import test_worlds
from tests.scheduler.world import World


class Follower:
    """Folds the log of a world's attempts as rank 0 would write it, and compares after every event."""

    def __init__(self, driven: World) -> None:
        settings = driven.settings
        self.fold = Fold(settings.slots, settings.max_lag)
        self.records: list[dict[str, Any]] = []
        self.logged: set[int] = set()  # executions whose closing is in the log
        self.t = 0.0
        self.attempt = self.compared = 0
        self.follow(driven)

    def follow(self, driven: World) -> None:
        """A world begins: the first one, or one that resumes."""
        settings, self.driven, self.facts, self.began = driven.settings, driven, 0, self.t
        self.attempt += 1
        self.unlogged = {n for n in driven.outcomes if n not in self.logged}
        self.say(e.RunStarted(driven.version, settings.cells, settings.standalone, settings.hosts))
        driven.on_event = self.on_event
        driven.start()
        self.say_facts()
        self.compare()

    def on_event(self, event: e.Event) -> None:
        if not isinstance(event, e.Tick):
            self.say(event)
        if isinstance(event, e.ExecutionClosed):
            self.logged.add(event.n)
        self.say_facts()
        self.compare()

    def say(self, event: e.Event) -> None:
        self.t = self.began + self.driven.now
        record = {"t": self.t, "attempt": self.attempt, **e.encode(event)}
        self.records.append(record)
        self.fold.apply(record)

    def say_facts(self) -> None:
        for _, fact in self.driven.facts[self.facts :]:
            self.say(fact)
            if isinstance(fact, e.GroupReady) or (isinstance(fact, e.GroupDropped) and self.fold._group_size):
                size = self.driven.settings.group_size
                self.logged |= set(range(fact.group * size, (fact.group + 1) * size))
        self.facts = len(self.driven.facts)

    def compare(self) -> None:
        state, fold = self.driven.state, self.fold
        if state.ended:  # nothing is taken in any more, whatever is heard of
            return
        assert fold.ready == set(state.groups.ready)
        assert fold.running == state.level.p - state.level.f
        assert fold.w == state.level.w + len(self.unlogged - self.logged)
        if not state.finishing:  # then engines that are behind keep their routes
            assert fold.capacity == state.fleet.capacity
            self.compare_cells(state)
        self.compared += 1

    def compare_cells(self, state: SchedulerState) -> None:
        for rank, cell in state.fleet.cells.items():
            looks = self.fold._cells._cells[rank].looks()
            assert (looks is CellState.ROLLOUT) == cell.routed
            assert (looks in (CellState.STARTING, CellState.DOWN)) == (not cell.up)
            if cell.up and cell.goal == "training":
                assert (looks is CellState.TO_TRAINING) == (cell.state != "TRAINING")
                joined = rank in state.update.joined and not state.update.stepped
                if not self.driven.chances.repeated:  # a repeated word of a suspended update may be taken for news
                    assert (looks is CellState.IN_UPDATE) == joined


@pytest.mark.parametrize("block", range(4))
def test_the_fold_agrees_with_the_scheduler_after_every_event(block: int) -> None:
    for seed in range(block * 15, (block + 1) * 15):
        driven = test_worlds.world(seed)
        follower = Follower(driven)
        driven.run(limit=30_000)
        assert follower.compared > 30


@pytest.mark.parametrize("seed", range(12))
def test_the_fold_agrees_over_attempts_that_are_killed(seed: int) -> None:
    random = Random(seed)
    driven = test_worlds.world(3 * seed + random.randrange(3))
    follower = Follower(driven)
    for _ in range(3):
        driven.run(until=random.uniform(10, 200), limit=30_000)
        if driven.ended:
            break
        follower.t += 50
        driven = driven.crashed(seed, lost_specs=random.choice([0, 0, 3]))
        follower.follow(driven)
    driven.run(limit=30_000)
    line = follower.fold.timeline()
    assert [a.how for a in line.attempts[:-1]] == ["was killed"] * (len(line.attempts) - 1)
    for row in line.rows:
        assert row[0].start == line.start and row[-1].end == line.end
        assert all(a.end == b.start and a.start < a.end for a, b in zip(row, row[1:], strict=False))
        for attempt, following in zip(line.attempts, line.attempts[1:], strict=False):
            between = (attempt.end + following.start) / 2
            assert next(s for s in row if s.start <= between < s.end).state is CellState.DOWN

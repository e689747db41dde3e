"""The simulated world against a second simulator, against conservation laws, and in cases small enough for a pencil."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.cell.machine import State
from gyre.scheduler import invariants
from gyre.scheduler.settings import Settings
from gyre.scheduler.state import SchedulerState
from gyre.simulate import compare
from gyre.simulate.compare import VARIANTS, Scenario
from gyre.simulate.costs import Costs, GroupWork
from gyre.simulate.ideal import bound
from gyre.simulate.trace import load
from gyre.simulate.workload import shuffled
from gyre.simulate.world import World
from tests.simulate.reference import Colocated, Machine, Outcome, Plain, Split

TRACES = sorted((Path(__file__).resolve().parents[2] / "benchmarks/traces").glob("*.jsonl"))
SHAPES = [(8, 4, 16, 24), (4, 8, 16, 24), (16, 8, 32, 8)]  # cells, slots, groups of a batch, batches


# -- against the reference -------------------------------------------------------------------------------------------
def reference(machine: Machine, groups: list, name: str, split: int | None) -> Outcome:
    if name == "plain":
        return Plain(machine, groups).run()
    if name == "colocate":
        return Colocated(machine, groups).run()
    return Split(machine, groups, split, name == "async-stream").run()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem[15:])
@pytest.mark.parametrize("name", ["plain", "colocate", "async", "async-stream"])
def test_policies_are_as_fast_and_as_stale_as_in_a_second_simulator(name, path, shape):
    trace, (cells, slots, batch_groups, updates) = load(path), shape
    scenario = Scenario(cells, slots, batch_groups, updates, 0.25, 0.5, Costs(8.5, 3.5))
    split = 2 * cells // 3 if VARIANTS[name].split else None
    simulated = compare.simulate(scenario, trace, VARIANTS[name], Random("a"), split)

    groups = shuffled(trace, updates * batch_groups, Random("a"))
    train_s = 0.5 * trace.mean_rollout_s * trace.size / slots
    machine = Machine(cells, slots, batch_groups, updates)
    expected = reference(machine, [(tuple(e.rollout_s for e in g), train_s) for g in groups], name, split)

    assert expected.dispatched == len(groups) == len(simulated.staleness)
    # Micro-steps are a little slower than a fluid: at the end of an update some cells wait for the others.
    assert -0.003 < simulated.makespan_s / expected.makespan_s - 1 < 0.005
    assert sum(simulated.staleness) / len(groups) == pytest.approx(expected.staleness_mean, abs=0.005)
    assert simulated.moves == pytest.approx(expected.moves, rel=0.05)


# -- laws ------------------------------------------------------------------------------------------------------------
class Watched(World):
    """A world that is looked at after everything that happens in it, and whose record is kept."""

    def __init__(self, settings: Settings, work, costs: Costs, policy, seed: int = 0) -> None:
        self.records: list[dict] = []
        self.most = settings.batches * settings.batch_groups * settings.group_size
        state = SchedulerState(settings, policy, lambda number: number % 3)
        super().__init__(settings, work, costs, state, Random(seed), self.records.append)

    def _execute(self, commands) -> None:
        super()._execute(commands)
        if not self.state.ended:
            invariants.check_thoroughly(self.state)
        if not self.costs.random and self.costs.timeout_s is None:
            assert self.state.level.d <= self.most, "more is dispatched than the batches need"
        for rank, engine in self._engines.items():
            cell = self._cells[rank]
            assert len(engine.live) <= self.settings.slots
            assert not engine.live or (cell.alive and cell.state is State.ROLLOUT), "it serves and is not in rollout"
        for rank in self._stream.members:
            assert self._cells[rank].state is State.TRAINING, "it trains and is not in training"
        assert self._where.keys() | self._left.keys() == self._started.keys()
        assert not self._where.keys() & self._left.keys()


def seconds(least: float, most: float):
    """Durations with ties, zeros and long tails."""
    return st.one_of(st.sampled_from([least, 1.0, 10.0, most]), st.floats(max(least, 0.01), most))


@st.composite
def worlds(draw, costs=None) -> Watched:
    variant = VARIANTS[draw(st.sampled_from(sorted(VARIANTS)))]
    cells = draw(st.integers(2 if variant.split else 1, 4))
    split = draw(st.integers(1, cells - 1)) if variant.split else None
    scenario = Scenario(
        cells=cells,
        slots=draw(st.integers(1, 3)),
        batch_groups=draw(st.integers(1, 4)),
        updates=draw(st.integers(1, 4)),
        lookahead=draw(st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])),
        supply_fraction=draw(st.sampled_from([0.1, 0.25, 1.0])),
        supply_hold=draw(st.sampled_from([0.0, 2.0, 10.0])),
    )
    size = draw(st.integers(2, 3))
    given_settings = replace(
        scenario.settings(size, variant, split),
        longest_first=draw(st.booleans()),
        adapt_lookahead=draw(st.booleans()),
        host_executions=draw(st.sampled_from([2, 256])),
        hosts=2,
    )
    given_costs = Costs(
        to_training_s=draw(st.sampled_from([0.0, 8.5, 60.0])),
        to_rollout_s=draw(st.sampled_from([0.0, 3.5, 60.0])),
        micro_steps=draw(st.integers(1, 5)),
        step_s=draw(st.sampled_from([0.0, 1.5])),
        sync_s=draw(st.sampled_from([0.0, 2.0])),
        slowdown=draw(st.sampled_from([0.0, 0.25])),
        **({} if costs is None else draw(costs)),
    )
    groups = draw(
        st.lists(
            st.builds(GroupWork, st.tuples(*[seconds(0.0, 500.0)] * size), seconds(0.0, 200.0)),
            min_size=1,
            max_size=6,
        )
    )
    return Watched(
        given_settings,
        lambda number: groups[number % len(groups)],
        given_costs,
        variant.policy,
        draw(st.integers(0, 9)),
    )


def work_of(world: Watched) -> list[GroupWork]:
    return [world._work(number) for number in range(world.settings.batches * world.settings.batch_groups)]


def close(a: float, b: float) -> bool:
    return a == pytest.approx(b, rel=1e-9, abs=1e-6)


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_all_work_is_done_once_and_by_whoever_may_do_it(world):
    world.run()
    assert world.ended.how == "completed", world.ended
    work, tally, sizes = work_of(world), world.tally, world.settings
    rollout_s, training_s = sum(sum(group.rollout_s) for group in work), sum(group.train_s for group in work)
    makespan = tally.committed_at[-1]
    assert close(tally.rollout_slot_s, rollout_s) and close(tally.training_s, training_s)
    assert tally.updates == sizes.batches == len(tally.committed_at)
    assert world.state.level.d == len(work) * sizes.group_size and len(tally.staleness) == len(work)
    assert makespan >= bound(sizes, work) - 1e-6
    assert makespan >= max(max(group.rollout_s) for group in work) - 1e-6
    if not world.costs.slowdown and not world.costs.sync_s:
        assert close(tally.served_slot_s, rollout_s)
    check_history(world)


def check_history(world: Watched) -> None:
    """What the events say, looked at from the outside: nobody is faster than work and moves allow."""
    sizes, costs = world.settings, world.costs
    granted: dict[int, float] = {}
    ordered: dict[int, tuple[float, str, str]] = {}
    ready: dict[int, float] = {}
    inside: dict[int, float] = {}
    spent = budget = 0.0
    for record in world.records:
        t = record["t"]
        match record["kind"]:
            case "move_started":
                ordered[record["rank"]] = (t, record["source"], record["target"])
            case "execution_granted":
                granted[record["n"]] = t
                at, source, target = ordered[record["engine"]]
                assert target == "rollout"
                assert source != "training" or t >= at + costs.to_rollout_s - 0.002, "a free way back"
            case "execution_closed":
                n = record["n"]
                slot_s = world._work(n // sizes.group_size).rollout_s[n % sizes.group_size]
                assert t - granted[n] >= slot_s - 0.002, "an execution that ran faster than it can"
            case "group_ready":
                ready[record["group"]] = t
            case "group_taken":
                assert inside and ready[record["group"]] <= t, "training before there was anything to train on"
                budget += world._work(record["group"]).train_s
            case "update_opened" | "cell_joined":
                rank = record.get("rank", 0)
                at, _, target = ordered[rank]
                assert target == "training" and t >= at + costs.to_training_s - 0.002, "a free way into training"
                assert rank not in inside
                inside[rank] = t
            case "training_ended":
                spent += t - inside.pop(record["rank"])
    assert spent >= budget - 0.002 * len(world.records), "cells trained for less than the work needs"


@settings(max_examples=25, deadline=None)
@given(worlds(), st.data())
def test_the_same_seed_gives_the_same_record(world, data):
    again = Watched(world.settings, world._work, world.costs, world.state.policy)
    assert world.run().records == again.run().records


FAULTS = st.fixed_dictionaries(
    {
        "failed": st.sampled_from([0.0, 0.2]),
        "try_failed": st.sampled_from([0.0, 0.2]),
        "timeout_s": st.sampled_from([None, 50.0]),
        "cell_failures": st.integers(0, 3),
        "host_failures": st.integers(0, 3),
        "restart_s": st.sampled_from([0.0, 5.0, 120.0]),
        "horizon_s": st.sampled_from([50.0, 500.0]),
    }
)


@settings(max_examples=150, deadline=None)
@given(worlds(FAULTS))
def test_runs_end_whatever_fails(world):
    world.run()
    assert world.ended.how == "completed" or "top-ups" in world.ended.detail, world.ended
    trained = [g for g in range(world.state.groups.dispatched) if g in world.state.groups.trained]
    assert world.tally.training_s >= sum(world._work(group).train_s for group in trained) - 1e-6


# -- small enough for a pencil ---------------------------------------------------------------------------------------
class Fixed(Random):
    """Failures at given times, of the first that can fail."""

    def __init__(self, *times: float) -> None:
        super().__init__(0)
        self.times = list(times)

    def uniform(self, low: float, high: float) -> float:
        return self.times.pop(0)

    def randrange(self, start: int, stop: int) -> int:
        return start


def small(costs: Costs, durations: tuple[float, ...], train_s: float, *failures: float, **sizes) -> Watched:
    """A batch under `colocate`, of a group that costs nothing and of one that does.

    While the first one is there to be taken, all cells can join.
    """
    given_settings = Settings(
        **{
            "cells": 2,
            "slots": 1,
            "batch_groups": 2,
            "group_size": len(durations),
            "updates": 1,
            "lookahead": 0,
            **sizes,
        }
    )
    groups = [GroupWork((0.0,) * len(durations), 0.0), GroupWork(durations, train_s)]
    world = Watched(given_settings, groups, costs, VARIANTS["colocate"].policy)
    world._random = Fixed(*failures)
    return world.run()


def closed(world: Watched) -> list[dict]:
    """How the executions of the second group ended."""
    is_closed = [record for record in world.records if record["kind"] == "execution_closed"]
    return [record for record in is_closed if record["n"] >= world.settings.group_size]


def closed_at(world: Watched) -> list[float]:
    return [record["t"] for record in closed(world)]


def test_a_shared_engine_is_slower():
    world = small(Costs(slowdown=0.25), (10.0, 20.0), 0.0, cells=1, slots=2)
    # Both at 1 / 1.25 of the speed for 12.5 s; the other one then has 10 s left, and the engine to itself.
    assert closed_at(world) == [12.5, 22.5]


def test_three_on_an_engine():
    world = small(Costs(slowdown=0.5), (10.0, 10.0, 30.0), 0.0, cells=1, slots=3)
    assert closed_at(world) == [20.0, 20.0, 40.0]


def test_all_of_colocated_by_hand():
    world = small(Costs(8.5, 3.5), (10.0, 30.0), 64.0)
    assert world.tally.committed_at == [30 + 8.5 + 64 / 2]


def test_an_execution_without_an_engine_stands_still():
    world = small(Costs(cell_failures=1, restart_s=30), (100.0, 100.0), 0.0, 50.0)
    assert closed_at(world) == [100.0, 130.0]
    assert world.tally.served_slot_s == 200.0


def test_what_a_lost_member_did_is_done_again():
    world = small(Costs(cell_failures=1, micro_steps=4), (10.0, 10.0), 80.0, 35.0)
    # From 10 on two members with 20 s each at a time; at 35 one of them is lost, with one done and one begun.
    assert world.tally.committed_at == [10 + 4 * 20]
    assert world.tally.training_s == 80 + 20


def test_a_member_that_is_lost_just_before_the_step():
    world = small(Costs(cell_failures=1, micro_steps=2, step_s=10), (10.0, 10.0), 40.0, 35.0)
    assert world.tally.committed_at == [35 + 20 + 10]


def test_a_host_that_fails_while_it_is_down():
    world = small(Costs(host_failures=2, restart_s=30), (100.0, 100.0), 0.0, 10.0, 20.0)
    assert closed_at(world) == [140.0, 140.0]


def test_executions_that_take_too_long_are_ended():
    world = small(Costs(timeout_s=60), (10.0, 20.0, 100.0), 0.0, cells=3)
    assert closed_at(world) == [10.0, 20.0, 60.0]
    assert closed(world)[-1]["outcome"] == "timed_out"


def test_a_try_that_fails_is_made_again():
    sizes = Settings(cells=1, slots=2, batch_groups=1, group_size=2, updates=1, lookahead=0, tries=3)
    world = Watched(sizes, [GroupWork((10.0, 10.0), 0.0)], Costs(try_failed=0.5), VARIANTS["colocate"].policy)
    draws = iter([0.1, 0.9, 0.9, 0.9, 0.9])  # the first try fails; after that, each is whole, and then usable
    world._random.random = lambda: next(draws)
    world.run()
    assert [r["t"] for r in world.records if r["kind"] == "execution_closed"] == [10.0, 20.0]


def test_a_policy_is_that_of_the_first_token():
    """What is granted in the moment of a publish samples with the policy that its engine loads in that moment."""
    sizes = Settings(
        cells=2, slots=2, batch_groups=1, group_size=2, updates=3, lookahead=0, trainers=1, max_staleness=9, max_lag=9
    )
    work = [GroupWork((10.0, 10.0), 5.0)] * 3
    assert Watched(sizes, work, Costs(), VARIANTS["async"].policy).run().tally.staleness == [0, 0, 0]
    assert Watched(sizes, work, Costs(sync_s=1.0), VARIANTS["async"].policy).run().tally.staleness == [0, 1, 1]


@pytest.mark.parametrize("name", ["elastic", "async"])
def test_cells_fail_all_over_a_run(name):
    trace = load(TRACES[0])
    scenario = Scenario(8, 4, 16, 4, train_ratio=0.5, costs=Costs(8.5, 3.5, cell_failures=20))
    records: list[dict] = []
    split = 5 if VARIANTS[name].split else None
    result = compare.simulate(scenario, trace, VARIANTS[name], Random(1), split, records.append)
    lost = [record["t"] for record in records if record["kind"] == "rank_lost"]
    assert len(lost) > 10 and min(lost) > 0 and max(lost) > result.ideal_s / 2


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem[15:])
def test_the_elastic_policy_takes_no_short_cut_on_real_traces(path):
    trace = load(path)
    scenario = Scenario(8, 4, 16, 6, train_ratio=0.5, costs=Costs(8.5, 3.5))
    work = compare.work_of(scenario, trace, shuffled(trace, 6 * 16, Random("b")))
    variant = VARIANTS["elastic"]
    world = Watched(scenario.settings(trace.size, variant), work, scenario.costs, variant.policy)
    world.run()
    assert close(world.tally.served_slot_s, sum(sum(group.rollout_s) for group in work))
    assert close(world.tally.training_s, sum(group.train_s for group in work))
    check_history(world)

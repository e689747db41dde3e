"""The simulated world against a second simulator, against conservation laws, and in cases small enough for a pencil."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from gyre.simulate import compare
from gyre.simulate.compare import VARIANTS, Scenario
from gyre.simulate.trace import load
from gyre.simulate.workload import shuffled
from gyre.simulate.world import Costs
from tests.simulate.reference import Colocated, Machine, Outcome, Plain, Split

TRACES = sorted((Path(__file__).resolve().parents[2] / "benchmarks/traces").glob("*.jsonl"))
SHAPES = [(8, 4, 16, 24), (4, 8, 16, 24), (16, 8, 32, 8)]  # cells, slots, groups of a batch, batches
    (8, 4, 16, 24),
    (4, 8, 16, 24),
    (16, 8, 32, 8),
]  # the last one's 24 batches take too long to be run every time


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

"""The role machine: the table is complete, and illegal transitions say how they came about."""

from pathlib import Path

import pytest

from gyre.cell.machine import TRANSITIONS, Machine, Signal, State, advance, between, mermaid
from gyre.errors import IllegalTransition

ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_a_whole_round():
    machine = Machine(State.ROLLOUT)
    signals = ["leave", "drained", "released", "return", "restored", "synced"]
    states = [machine.advance(Signal(s)) for s in signals]
    assert states == ["DRAINING", "RELEASING", "TRAINING", "RESTORING", "SYNCING", "ROLLOUT"]


def test_handoff_is_a_detour():
    machine = Machine(State.DRAINING)
    assert machine.advance(Signal.HAND_OFF) is State.HANDOFF
    assert machine.advance(Signal.HANDED_OFF) is State.RELEASING


def test_abandoned_moves():
    assert advance(State.DRAINING, Signal.ABANDON) is State.ROLLOUT
    assert advance(State.RELEASING, Signal.ABANDON) is State.RESTORING


def test_every_state_can_fail_and_come_back():
    for state in State:
        if state is State.FAILED:
            continue
        machine = Machine(state)
        machine.advance(Signal.FAIL)
        path = [machine.advance(s) for s in (Signal.RESTART, Signal.STARTED, Signal.SYNCED)]
        assert path == [State.RESTARTING, State.SYNCING, State.ROLLOUT]


def test_an_engine_without_memory_or_fresh_serves_only_after_a_sync():
    """Every way into ROLLOUT is a verified sync, or an abandoned drain, which gave nothing up."""
    for state, row in TRANSITIONS.items():
        for signal, reached in row.items():
            if reached is State.ROLLOUT:
                assert signal is Signal.SYNCED or (state, signal) == (State.DRAINING, Signal.ABANDON)


def test_every_state_reaches_every_other():
    for start in State:
        seen, queue = {start}, [start]
        while queue:
            for reached in TRANSITIONS[queue.pop()].values():
                if reached not in seen:
                    seen.add(reached)
                    queue.append(reached)
        assert seen == set(State)


def test_illegal_transitions_raise_with_the_history():
    machine = Machine(State.ROLLOUT)
    machine.enter(State.DRAINING)
    machine.enter(State.RELEASING)
    with pytest.raises(IllegalTransition, match="ROLLOUT > DRAINING > RELEASING"):
        machine.advance(Signal.SYNCED)
    with pytest.raises(IllegalTransition, match="from RELEASING to ROLLOUT .*DRAINING > RELEASING"):
        machine.enter(State.ROLLOUT)
    assert machine.state is State.RELEASING
    assert machine.history == (State.ROLLOUT, State.DRAINING, State.RELEASING)


def test_between_is_unambiguous():
    for state, row in TRANSITIONS.items():
        assert len(set(row.values())) == len(row)
        for signal, reached in row.items():
            assert between(state, reached) is signal


def test_the_diagram_has_every_transition():
    lines = mermaid().splitlines()
    for state, row in TRANSITIONS.items():
        for signal, reached in row.items():
            if signal is not Signal.FAIL:
                assert f"    {state} --> {reached}: {signal.value}" in lines


def test_the_documented_diagram_is_this_one():
    assert mermaid() in ARCHITECTURE.read_text()

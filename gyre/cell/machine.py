"""The role machine of a cell: its states, and every transition there is, as data. Pure.

A cell serves (`ROLLOUT`) or trains (`TRAINING`); everything else is on the way. The table is the whole truth: the
supervisor advances through it and reports every state that it enters, and the diagram in docs/architecture.md is
rendered from it. What the table keeps true: device memory is handed over in `RELEASING` and `RESTORING` alone, both of
which lie behind a closed gate (invariant 6), and every way back to `ROLLOUT` after memory was handed over or an engine
was started leads through `SYNCING`, where the current policy is loaded and verified (invariant 15).

A cell that starts is in `RESTARTING`: a first start is not different from a later one.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from gyre.errors import IllegalTransition

#: States that a machine remembers for the message of an illegal transition.
HISTORY = 16


class State(StrEnum):
    """Where a cell is in its role change."""

    ROLLOUT = "ROLLOUT"  # serves requests
    DRAINING = "DRAINING"  # the gate is closed, what is live is cancelled
    HANDOFF = "HANDOFF"  # KV blocks are copied out for the destinations
    RELEASING = "RELEASING"  # engine memory is given up, the trainer's comes back
    TRAINING = "TRAINING"  # the trainer has the device
    RESTORING = "RESTORING"  # trainer memory is parked, the engine's comes back
    SYNCING = "SYNCING"  # the current policy is loaded and verified
    FAILED = "FAILED"  # the engine is gone, or holds weights that it should not
    RESTARTING = "RESTARTING"  # an engine is being started


class Signal(StrEnum):
    """What moves a machine on."""

    LEAVE = "leave"  # the scheduler orders training
    DRAINED = "drained"  # the gate reports zero live requests
    HAND_OFF = "hand off"  # zero live, and KV blocks are pinned for their readers
    HANDED_OFF = "handed off"  # copied out, or not to be had
    RELEASED = "released"  # the device memory has changed hands
    ABANDON = "abandon"  # the scheduler takes the order back
    RETURN = "return"  # the scheduler orders rollout
    RESTORED = "restored"  # the engine has its memory
    SYNCED = "synced"  # the engine holds the ordered version, checksum verified
    FAIL = "fail"
    RESTART = "restart"
    STARTED = "started"  # a fresh engine answers


TRANSITIONS: dict[State, dict[Signal, State]] = {
    State.ROLLOUT: {Signal.LEAVE: State.DRAINING, Signal.SYNCED: State.ROLLOUT},
    State.DRAINING: {
        Signal.DRAINED: State.RELEASING,
        Signal.HAND_OFF: State.HANDOFF,
        Signal.ABANDON: State.ROLLOUT,
    },
    State.HANDOFF: {Signal.HANDED_OFF: State.RELEASING},
    State.RELEASING: {Signal.RELEASED: State.TRAINING, Signal.ABANDON: State.RESTORING},
    State.TRAINING: {Signal.RETURN: State.RESTORING},
    State.RESTORING: {Signal.RESTORED: State.SYNCING},
    State.SYNCING: {Signal.SYNCED: State.ROLLOUT},
    State.FAILED: {Signal.RESTART: State.RESTARTING},
    State.RESTARTING: {Signal.STARTED: State.SYNCING},
}
for _state in State:
    if _state is not State.FAILED:
        TRANSITIONS[_state][Signal.FAIL] = State.FAILED


def advance(state: State, signal: Signal) -> State:
    """The state that a signal leads to.

    Raises:
        IllegalTransition: the table has no such transition.
    """
    try:
        return TRANSITIONS[state][signal]
    except KeyError:
        raise IllegalTransition(f"{signal.value!r} is not for a cell in {state}") from None


def between(state: State, target: State) -> Signal | None:
    """The signal that leads from one state straight to another, or None where none does."""
    return next((signal for signal, reached in TRANSITIONS[state].items() if reached is target), None)


class Machine:
    """One cell's present state and how it came there."""

    def __init__(self, state: State = State.RESTARTING) -> None:
        self.state = state
        self._history: deque[State] = deque([state], maxlen=HISTORY)

    @property
    def history(self) -> tuple[State, ...]:
        """The latest states, the present one last."""
        return tuple(self._history)

    def advance(self, signal: Signal) -> State:
        """Follow a signal; returns the state it led to.

        Raises:
            IllegalTransition: the table has no such transition; the message names the states that led here.
        """
        try:
            reached = advance(self.state, signal)
        except IllegalTransition as error:
            raise IllegalTransition(f"{error} (it came through {self._path()})") from None
        return self._arrive(reached)

    def enter(self, state: State) -> State:
        """Enter a neighbouring state, whatever the signal is called.

        Raises:
            IllegalTransition: no transition leads there; the message names the states that led here.
        """
        if between(self.state, state) is None:
            raise IllegalTransition(f"no transition from {self.state} to {state} (it came through {self._path()})")
        return self._arrive(state)

    def _arrive(self, state: State) -> State:
        self.state = state
        self._history.append(state)
        return state

    def _path(self) -> str:
        return " > ".join(self._history)


def mermaid() -> str:
    """The table as a mermaid state diagram, as docs/architecture.md shows it.

    The way to FAILED, which every other state has, is drawn once.
    """
    lines = ["stateDiagram-v2", f"    [*] --> {State.RESTARTING}"]
    for state, row in TRANSITIONS.items():
        for signal, reached in row.items():
            if signal is not Signal.FAIL:
                lines.append(f"    {state} --> {reached}: {signal.value}")
    lines += [f"    any --> {State.FAILED}: {Signal.FAIL.value}"]
    return "\n".join(lines) + "\n"

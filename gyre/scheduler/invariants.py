"""The invariants that a scheduler's state can check on itself. Pure.

Cheap ones run after every event, also in production; the thorough ones, which look at every cell and execution, run in
tests. Invariants 3, 4 and 12 are checked where they would be broken (`acts.dispatch`, `Fleet.order_training`,
`Groups`); 9 to 11 and 15 are the trainer's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.cell.machine import State
from gyre.errors import InvariantBroken
from gyre.scheduler.burst import Phase
from gyre.scheduler.fleet import TRAINING

if TYPE_CHECKING:
    from gyre.scheduler.state import SchedulerState


def check(state: SchedulerState) -> None:
    """Raise `InvariantBroken` where something that is counted does not add up; O(1)."""
    state.executions.check()  # 1, 2, 4
    state.groups.check()  # 14
    update, batch = state.update, state.batch
    if not 0 <= update.taken <= update.groups or batch.taken > batch.groups:
        raise InvariantBroken(8, f"update {update.number} took {update.taken} of {update.groups} groups")
    if update.running and not state.ended and state.fleet.core.goal != TRAINING:
        raise InvariantBroken(5, f"update {update.number} is {update.phase} without its core")


def check_thoroughly(state: SchedulerState) -> None:
    """Raise `InvariantBroken` where any cell, execution or group is not where it should be; O(all of them)."""
    check(state)
    state.fleet.check()  # 6
    state.executions.check_places()  # 2, 4
    _check_groups(state)
    _check_prefix(state)
    if not state.ended and not awaited(state):
        raise InvariantBroken(13, f"nothing is awaited, and nothing happens: {state.snapshot()}")


def _check_groups(state: SchedulerState) -> None:
    if sum(group.open for group in state.groups.pending.values()) != state.level.w:
        raise InvariantBroken(2, "open executions and the groups they belong to do not agree")
    taken = sum(1 for update in state.groups.taken.values() if update == state.update.number)
    if taken != state.update.taken and not state.finishing:
        raise InvariantBroken(8, "the update's groups are miscounted")


def _check_prefix(state: SchedulerState) -> None:
    """5: the cells in training are a prefix of the living members of the generation."""
    training = state.fleet.training
    if not training:
        return
    if training[0] != 0:
        raise InvariantBroken(5, f"{training} train without the core")
    living = state.generation.living(state.fleet.lives)
    if set(training) != set(living[: len(training)]):
        raise InvariantBroken(5, f"the training set {training} is not a prefix of {living}")
    if state.update.running and state.update.joined != [r for r in living if r in state.update.joined]:
        raise InvariantBroken(5, f"members {state.update.joined} joined out of order")


def awaited(state: SchedulerState) -> list[str]:
    """What has to happen elsewhere before the scheduler can go on (invariant 13: never nothing, while work remains)."""
    fleet, executions, update = state.fleet, state.executions, state.update
    words = []
    if executions.running:
        words.append(f"{executions.running} executions to end")
    if executions.closing:
        words.append(f"{executions.closing} outcomes to be linked")
    if executions.queued and not len(executions.hosts):
        words.append("a harness host")
    for cell in fleet.cells.values():
        if not cell.up:
            words.append(f"cell {cell.rank} to start")
        elif cell.job is not None:
            words.append(f"cell {cell.rank} to end its part in update {cell.job}")
        elif cell.state is not (State.TRAINING if cell.goal == TRAINING else State.ROLLOUT):
            words.append(f"cell {cell.rank} to reach {cell.goal}")
        elif cell.syncing:
            words.append(f"cell {cell.rank} to load policy {fleet.published}")
    if update.stepped and not update.full:
        words.append(f"the feeder to say which groups update {update.number} took")
    if update.phase is Phase.COMMITTING:
        words.append(f"the commit of policy {state.batch.number}")
    if not state.finishing and (unbuilt := state.generation.unbuilt(fleet.lives)):
        words.append(f"prefix groups of cells {unbuilt}")
    if (until := state.wake_at()) is not None and until > state.now:
        words.append(f"the supply to last until {until:g}")
    return words

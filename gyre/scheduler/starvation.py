"""Rules for an update that has run out of groups: suspend it, give cells back, top it up, or close it short. Pure.

The law: partial sums are brought to the core before anybody leaves, and d rises for an update only while it does not
run (invariants 3 and 8).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.cell.machine import State
from gyre.events import BatchClosedShort, UpdateSuspendedFor
from gyre.scheduler.acts import dispatch, end, order_back, say, view
from gyre.scheduler.burst import Phase
from gyre.scheduler.commands import CloseShort, Log, SuspendUpdate
from gyre.scheduler.fleet import TRAINING

if TYPE_CHECKING:
    from gyre.scheduler.state import SchedulerState


def suspend(state: SchedulerState, now: float) -> bool:
    """The open stream is dry, groups are missing, and none can come while all cells train: suspend the update.

    None can come when w is 0, or when no living engine is left to serve what is open and a cell could. Past the top-up
    budget the batch closes short instead.
    """
    update, fleet = state.update, state.fleet
    if update.phase is not Phase.OPEN or update.full or update.stepped or state.groups.ready:
        return False
    if (state.level.w and (fleet.bound or fleet.dedicated(0))) or update.joining is not None:
        return False
    if not state.level.w and not state.batch.top_ups:
        return close_short(state)
    suspend_update(state, "the update is starved", starved=True)
    return True


def suspend_update(state: SchedulerState, reason: str, starved: bool) -> None:
    """Have the members bring their partial sums to the core; who is still on the way turns back."""
    fleet, update = state.fleet, state.update
    for rank in reversed(list(fleet.moving)):
        order_back(state, fleet.cells[rank], reason)
    update.phase = Phase.SUSPENDING
    state.emit(SuspendUpdate(update.number))
    state.emit(Log(UpdateSuspendedFor(update.number, state.batch.remaining, starved)))


def give_back(state: SchedulerState, now: float) -> bool:
    """The stream has run dry while executions wait for slots: suspend the update, and let them have the cells."""
    update = state.update
    if update.dry_since is None or update.stepped or update.joining is not None:
        return False
    decision = state.policy.gives_back(view(state, now))
    if not decision.yes:
        return False
    say(state, 0, decision, ("stays", "goes back"))
    update.given_back = True
    suspend_update(state, decision.reason, starved=False)
    return True


def suspended(state: SchedulerState, now: float) -> bool:
    """All partial sums are with the core: the satellites leave, last first."""
    update, fleet = state.update, state.fleet
    if update.phase is not Phase.SUSPENDING or update.joined or update.joining is not None:
        return False
    update.phase, update.closed = Phase.SUSPENDED, False
    for rank in reversed(fleet.training):
        if rank != 0 and not fleet.dedicated(rank):
            order_back(state, fleet.cells[rank], f"update {update.number} is suspended")
    if update.given_back:
        update.given_back = False
        order_back(state, fleet.core, f"update {update.number} is suspended")
    return True


def leave_if_only_capacity(state: SchedulerState, now: float) -> bool:
    """A suspended update's core goes to rollout where nobody else could serve what is open."""
    core = state.fleet.core
    if state.update.phase is not Phase.SUSPENDED or not state.level.w or state.fleet.bound or state.fleet.dedicated(0):
        return False
    if state.fleet.training != [0] or core.state is not State.TRAINING or core.job is not None:
        return False
    order_back(state, core, "no other engine is left to serve")
    return True


def top_up(state: SchedulerState, now: float) -> bool:
    """Nothing is open, and what is ready does not suffice to begin or to go on: dispatch what is missing."""
    update = state.update
    if state.finishing or state.level.w or state.batch.remaining == 0 or state.supply.suffices:
        return False
    if update.phase is Phase.WAITING and state.fleet.core.goal == TRAINING:
        idle = not state.policy.open(view(state, now)).yes
    else:
        idle = update.phase in (Phase.WAITING, Phase.SUSPENDED)
    if not idle:
        return False
    if not state.batch.top_ups:
        return close_short(state)
    state.batch.top_ups -= 1
    dispatch(state, state.batch.remaining - len(state.groups.ready), "top_up")
    return True


def close_short(state: SchedulerState) -> bool:
    """Past the top-up budget the batch makes do with the groups it has, and says so."""
    batch, update = state.batch, state.update
    wanted = batch.groups
    enough = batch.shorten(update, len(state.groups.ready))
    missing = wanted - batch.groups
    if not enough:
        detail = f"batch {batch.number}: {missing} of {wanted} groups could not be had with {state.settings.top_ups} "
        end(state, "failed", f"{detail} top-ups, which leaves an update without any; see why executions fail")
        return True
    if update.begun:
        state.emit(CloseShort(update.number, update.groups))
    state.emit(Log(BatchClosedShort(batch.number, batch.groups, missing)))
    return True

"""What follows from the state of things: the rules of a burst, applied after every event until nothing changes. Pure.

Events only record what has happened; whatever the scheduler does about it is one of the rules here. They go from the
oldest obligation to the newest decision: end what has ended, suspend or top up what starves, build groups, open the
update, let cells join, move the next cell, bring engines up to date, grant slots. A rule that acts may make another one
apply, so the list is gone through until no rule acts.

The law: what is dispatched is what the batches need. d rises only at the start of a burst, or while its update does not
run because it starves (invariant 3); and while work remains, some rule applies or some word is awaited (13).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from gyre.cell.machine import State
from gyre.errors import InvariantBroken
from gyre.events import GroupDropped, PolicyPublished
from gyre.scheduler import cursor
from gyre.scheduler.acts import begin_batch, dispatch, end, order_back, say, train, view
from gyre.scheduler.burst import Phase
from gyre.scheduler.commands import (
    BeginUpdate,
    BuildGroups,
    Commit,
    DropGroup,
    Log,
    PublishPolicy,
    ResumeUpdate,
)
from gyre.scheduler.fleet import ROLLOUT, TRAINING, Cell
from gyre.scheduler.policy import Decision
from gyre.scheduler.starvation import give_back, leave_if_only_capacity, suspend, suspended, top_up

if TYPE_CHECKING:
    from gyre.scheduler.state import SchedulerState

#: Rounds of rules after one event, beside a few per cell; each rule acts a bounded number of times on each cell, so
#: more mean a fault in the rules.
MAX_ROUNDS = 100


def settle(state: SchedulerState, now: float) -> None:
    """Apply the rules until none acts."""
    for _ in range(MAX_ROUNDS + 4 * state.settings.engines):
        observe(state, now)
        if state.ended or not any(rule(state, now) for rule in RULES):
            break
    else:
        raise InvariantBroken(13, "the rules do not come to rest")
    if not state.ended:
        state.fleet.sync()
        state.fleet.resettle()
        state.executions.grant(now)


def observe(state: SchedulerState, now: float) -> None:
    """Take note of the supply, and of an update that has run out of it."""
    ready, remaining, update = len(state.groups.ready), state.batch.remaining, state.update
    threshold = state.policy.threshold(state.settings.batch_groups, remaining, state.settings.supply_fraction)
    state.supply.observe(ready, remaining, threshold, now)
    if update.phase is not Phase.OPEN or update.full or ready:
        update.dry_since = None
    elif update.dry_since is None:
        # The group that was taken last is still being trained on.
        rest = (state.measures.group_work or 0.0) / len(update.joined) if update.taken and update.joined else 0.0
        update.dry_since = now + rest
    if state.executions.queued or ready or not remaining:
        state.lookahead.observe(now, len(state.fleet.lives), 0.0, 0, None)
    else:
        free = state.executions.engines.free / state.settings.slots
        state.lookahead.observe(now, len(state.fleet.lives), free, len(update.joined), update.dry_since)


# -- rules: each returns whether it acted ----------------------------------------------------------------------------
def headless(state: SchedulerState, now: float) -> bool:
    """The core was lost on its way into training: those that followed it come back."""
    fleet = state.fleet
    if not fleet.training or fleet.training[0] == 0:
        return False
    for rank in reversed(fleet.training):
        order_back(state, fleet.cells[rank], "the core is not in training")
    return True


def abandon_move(state: SchedulerState, now: float) -> bool:
    """A destination died while cells were leaving, and capacity no longer covers w: the last of them comes back."""
    fleet = state.fleet
    if not fleet.moving or fleet.capacity >= state.level.w:
        return False
    cell = fleet.cells[fleet.moving[-1]]
    if fleet.dedicated(cell.rank) or cell.state is State.TRAINING:
        return False
    order_back(state, cell, "an engine was lost, and capacity no longer covers the waterlevel")
    return True


def finish_update(state: SchedulerState, now: float) -> bool:
    """The core has taken the step of an update that has all its groups: the next update, or the commit."""
    update = state.update
    if not (update.stepped and update.full and update.phase is Phase.OPEN):
        return False
    if not state.batch.last(update):
        state.update = state.batch.update(update.number + 1 - state.batch.first_update)
        return True
    update.phase = Phase.COMMITTING
    core = state.fleet.core
    state.emit(Commit(core.incarnation, core.epoch, state.batch.number, update.number, cursor.encode(state)))
    return True


def publish(state: SchedulerState, now: float) -> bool:
    """The commit is durable: announce the version and begin the next burst, or end the run."""
    if state.update.phase is not Phase.COMMITTING or state.committed < state.batch.number:
        return False
    state.groups.commit()
    state.emit(PublishPolicy(state.committed, state.update.number))
    state.emit(Log(PolicyPublished(state.committed)))
    if state.committed == state.settings.batches:
        state.fleet.published = state.committed
        state.finishing = True
        state.update.phase = Phase.WAITING
        state.executions.cancel_all("the run has trained all its batches")
        return True
    state.fleet.publish(state.committed)
    begin_batch(state)
    drop_stale(state)
    begin_burst(state, now)
    return True


def begin_burst(state: SchedulerState, now: float) -> None:
    """The start of a burst: dispatch the quota, and decide which cells stay in training; the others go back."""
    fleet, groups = state.fleet, state.groups
    observe(state, now)
    quota = state.settings.quota(fleet.published, groups.outstanding, state.lookahead.burst())
    seen = view(state, now)
    next_quota = quota * state.settings.group_size
    count, reason = state.policy.keep(replace(seen, w=seen.w + next_quota, queued=seen.queued + next_quota))
    say(state, 0, Decision(not count, f"burst: {reason.code}", reason.reason), ("stays in training", "goes back"))
    dispatch(state, quota, "burst", staying=count)
    for rank in reversed(fleet.training[count:]):
        order_back(state, fleet.cells[rank], reason.reason)


def drop_stale(state: SchedulerState) -> None:
    """Untaken groups that the newest policy makes too stale are not trained on."""
    for number, fault in state.groups.stale(state.committed, state.settings.max_staleness):
        state.groups.drop(number)
        state.emit(DropGroup(number))
        state.emit(Log(GroupDropped(number, fault)))


def end_run(state: SchedulerState, now: float) -> bool:
    """All batches are trained and every execution is closed."""
    if not state.finishing or state.level.w:
        return False
    end(state, "completed", f"policy {state.committed} is committed")
    return True


def build_groups(state: SchedulerState, now: float) -> bool:
    """While no update runs, the living cells become the next generation of prefix groups."""
    generation, fleet = state.generation, state.fleet
    if not generation.dirty or state.update.running or state.finishing or not fleet.complete or not fleet.core.up:
        return False
    wanted = generation.wanted(fleet.lives, fleet.training)
    if generation.is_of(wanted, fleet.lives):
        generation.dirty = False
        return False
    number = generation.renew(wanted, fleet.lives)
    state.emit(BuildGroups(number, tuple(fleet.cells[rank].member for rank in wanted)))
    return True


def open_update(state: SchedulerState, now: float) -> bool:
    """The core is in training and idle: order it into the update, or back into the suspended one."""
    update, core = state.update, state.fleet.core
    if core.goal != TRAINING or core.state is not State.TRAINING or core.job is not None:
        return False
    if update.phase not in (Phase.WAITING, Phase.SUSPENDED) or not state.generation.usable or state.finishing:
        return False
    if update.phase is Phase.WAITING and not (decision := state.policy.open(view(state, now))).yes:
        say(state, 0, decision)
        return False
    if update.phase is Phase.SUSPENDED:
        # A core that stayed waits for supply; one that was moved has been through that gate.
        decision = state.policy.resume(view(state, now))
        if 0 not in state.fleet.moving and not decision.yes:
            say(state, 0, decision)
            return False
        state.emit(ResumeUpdate(update.number))
    elif not update.begun:
        state.emit(BeginUpdate(update.number, update.groups))
    update.phase, update.begun, update.joined = Phase.OPENING, True, []
    train(state, core)
    return True


def join(state: SchedulerState, now: float) -> bool:
    """The next cell of the prefix, if it is in training and idle, is ordered into the open update."""
    update, generation = state.update, state.generation
    position = len(update.joined)
    if not update.joinable or update.joining is not None or position >= generation.usable:
        return False
    cell = state.fleet.cells[generation.ranks[position]]
    if cell.goal != TRAINING or cell.state is not State.TRAINING or cell.job is not None:
        return False
    update.joining = cell.rank
    train(state, cell)
    return True


def move_next(state: SchedulerState, now: float) -> bool:
    """The next cell, core first, then satellites by index, as the policy decides."""
    cell, hindrance = candidate(state)
    if cell is None:
        if hindrance is not None:
            say(state, None, hindrance)
        return False
    decision = hindrance or covered(state, cell, state.policy.move(view(state, now)))
    say(state, cell.rank, decision)
    if decision.yes:
        state.fleet.order_training(cell, decision.reason)
    return decision.yes


def covered(state: SchedulerState, cell: Cell, decision: Decision) -> Decision:
    """A policy's decision to move a cell, unless the slots left would not cover the waterlevel (invariant 4)."""
    if not decision.yes or not cell.routed:
        return decision
    left, w = state.fleet.capacity - state.settings.slots, state.level.w
    if left < w:
        return _no("waterlevel", f"the {left} slots left would not cover the waterlevel of {w}")
    return Decision(True, decision.code, f"{decision.reason}, and the {left} slots left cover the waterlevel of {w}")


def candidate(state: SchedulerState) -> tuple[Cell | None, Decision | None]:
    """The next cell to move, and what hinders it beside the policy; neither where there is nothing to say of it."""
    fleet, update, generation = state.fleet, state.update, state.generation
    if state.finishing:
        return None, _no("finished", "all batches are trained")
    if fleet.moving and not state.policy.at_once:
        return None, _no(f"moving {fleet.moving[-1]}", f"cell {fleet.moving[-1]} is on its way into training")
    if fleet.core.goal == ROLLOUT:
        cell = fleet.core
        if update.phase not in (Phase.WAITING, Phase.SUSPENDED):
            return None, _no(update.phase, f"update {update.number} is {update.phase}")
    elif update.phase is Phase.SUSPENDED and 0 not in fleet.moving:
        return None, None
    elif update.phase in (Phase.SUSPENDING, Phase.COMMITTING):
        return None, _no(update.phase, f"update {update.number} is {update.phase}")
    else:
        following = len(fleet.training)
        if following >= len(generation.ranks):
            return None, _no("all", "every cell trains")
        if following >= generation.intact:
            return None, _no("broken", "a cell was lost; prefix groups are built again when no update runs")
        cell = fleet.cells[generation.ranks[following]]
        if state.settings.trainers and not fleet.dedicated(cell.rank):
            return None, None
    return cell, _hindrance(state, cell)


def _hindrance(state: SchedulerState, cell: Cell) -> Decision | None:
    if not state.fleet.available(cell) and not cell.syncing:
        return _no("unrouted", f"cell {cell.rank} is not back in rollout yet")
    if cell.syncing:
        return _no("syncing", f"cell {cell.rank} is loading policy {state.fleet.published}")
    if state.generation.usable <= len(state.fleet.training):
        return _no("groups", "prefix groups are being built")
    return None


def _no(code: str, reason: str) -> Decision:
    return Decision(False, code, reason)


RULES: tuple[Callable[[SchedulerState, float], bool], ...] = (
    headless,
    abandon_move,
    finish_update,
    publish,
    end_run,
    suspend,
    give_back,
    suspended,
    leave_if_only_capacity,
    top_up,
    build_groups,
    open_update,
    join,
    move_next,
)

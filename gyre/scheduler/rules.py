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
from gyre.events import (
    BatchClosedShort,
    GateReason,
    GroupDropped,
    PolicyPublished,
    QuotaPublished,
    UpdateSuspendedFor,
)
from gyre.scheduler import cursor
from gyre.scheduler.burst import Batch, Phase, split
from gyre.scheduler.commands import (
    BeginUpdate,
    BuildGroups,
    CloseShort,
    Commit,
    Dispatch,
    DropGroup,
    EndRun,
    Log,
    Planned,
    PublishPolicy,
    ResumeUpdate,
    SuspendUpdate,
    Train,
)
from gyre.scheduler.fleet import ROLLOUT, TRAINING, Cell
from gyre.scheduler.policy import Decision, View

if TYPE_CHECKING:
    from gyre.scheduler.state import SchedulerState

#: Rounds of rules after one event; each rule acts a bounded number of times, so more mean a fault in the rules.
MAX_ROUNDS = 100


def settle(state: SchedulerState, now: float) -> None:
    """Apply the rules until none acts."""
    for _ in range(MAX_ROUNDS):
        state.supply.observe(len(state.groups.ready), state.batch.remaining, now)
        if state.ended or not any(rule(state, now) for rule in RULES):
            break
    else:
        raise InvariantBroken(13, "the rules do not come to rest")
    if not state.ended:
        state.fleet.sync()
        state.fleet.resettle()
        state.executions.grant()


# -- dispatching -----------------------------------------------------------------------------------------------------
def dispatch(state: SchedulerState, count: int, reason: str, missing: tuple[int, ...] = ()) -> None:
    """Publish a quota of `count` groups; `missing` are executions of earlier quotas that have no spec on disk."""
    if state.update.phase not in (Phase.WAITING, Phase.SUSPENDED):
        raise InvariantBroken(3, f"a quota while update {state.update.number} is {state.update.phase}")
    size = state.settings.group_size
    groups = state.groups.dispatch(count)
    numbers = range(groups.start * size, groups.stop * size)
    state.executions.dispatch(numbers)
    planned = tuple(Planned(n, n // size, n % size, n // size) for n in (*missing, *numbers))
    if planned or state.level.d:
        state.emit(Dispatch(planned, state.level.d))
    if planned:
        state.emit(Log(QuotaPublished(state.batch.number, planned[0].n, planned[-1].n, reason)))


def begin_batch(state: SchedulerState) -> None:
    """Make the batch after the published policy the present one. Its quota is dispatched separately."""
    settings, version = state.settings, state.fleet.published
    shares = split(settings.batch_groups, settings.updates_per_batch)
    state.batch = Batch(version + 1, shares, settings.top_ups, version * settings.updates_per_batch + 1)
    state.update = state.batch.update(0)


# -- rules: each returns whether it acted ----------------------------------------------------------------------------
def abandon_move(state: SchedulerState, now: float) -> bool:
    """A destination died while a cell was leaving, and capacity no longer covers w: the cell comes back."""
    fleet = state.fleet
    if fleet.moving is None or fleet.capacity >= state.level.w:
        return False
    cell = fleet.cells[fleet.moving]
    if cell.state is State.TRAINING:
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
    """The start of a burst: decide whether the core stays, dispatch the quota, send the other cells back."""
    fleet, groups = state.fleet, state.groups
    state.supply.observe(len(groups.ready), state.batch.remaining, now)
    quota = state.settings.quota(fleet.published, groups.outstanding)
    next_quota = quota * state.settings.group_size
    stay = state.policy.keep_core(replace(view(state, now), next_quota=next_quota, others=fleet.others))
    say(state, 0, Decision(not stay.yes, f"burst: {stay.code}", stay.reason), ("stays in training", "goes back"))
    dispatch(state, quota, "burst")
    for rank in reversed(fleet.training):
        if rank != 0:
            order_back(state, fleet.cells[rank], f"the burst of batch {state.batch.number - 1} is over")
    if not stay.yes:
        order_back(state, fleet.core, stay.reason)


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


def end(state: SchedulerState, how: str, detail: str) -> None:
    """Nothing is decided any more."""
    state.ended = how
    state.emit(EndRun(how, detail))


def suspend(state: SchedulerState, now: float) -> bool:
    """The open stream is dry, groups are missing, and none can come while all cells train: suspend the update.

    None can come when w is 0, or when no living engine is left to serve what is open. Past the top-up budget the batch
    closes short instead.
    """
    update, fleet = state.update, state.fleet
    if update.phase is not Phase.OPEN or update.full or update.stepped or state.groups.ready:
        return False
    if (state.level.w and fleet.bound) or update.joining is not None:
        return False
    if not state.level.w and not state.batch.top_ups:
        return close_short(state)
    if fleet.moving is not None:
        order_back(state, fleet.cells[fleet.moving], "the update is starved")
        if state.level.w:
            return True
    update.phase = Phase.SUSPENDING
    state.emit(SuspendUpdate(update.number))
    state.emit(Log(UpdateSuspendedFor(update.number, state.batch.remaining)))
    return True


def suspended(state: SchedulerState, now: float) -> bool:
    """All partial sums are with the core: the satellites leave, last first."""
    update, fleet = state.update, state.fleet
    if update.phase is not Phase.SUSPENDING or update.joined or update.joining is not None:
        return False
    update.phase, update.closed = Phase.SUSPENDED, False
    for rank in reversed(fleet.training):
        if rank != 0:
            order_back(state, fleet.cells[rank], f"update {update.number} is suspended")
    return True


def leave_if_only_capacity(state: SchedulerState, now: float) -> bool:
    """A suspended update's core goes to rollout where nobody else could serve what is open."""
    core = state.fleet.core
    if state.update.phase is not Phase.SUSPENDED or not state.level.w or state.fleet.bound:
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
    idle = update.phase is Phase.SUSPENDED or (update.phase is Phase.WAITING and state.fleet.core.goal == ROLLOUT)
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
    if update.phase is Phase.SUSPENDED:
        # A core that stayed waits for supply; one that was moved has been through that gate.
        decision = state.policy.resume(view(state, now))
        if state.fleet.moving != 0 and not decision.yes:
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


def train(state: SchedulerState, cell: Cell) -> None:
    """Order a cell in training into the present update."""
    generation, number = state.generation, state.update.number
    cell.job = number
    position = generation.position(cell.rank)
    members = tuple(generation.ranks)
    state.emit(Train(cell.rank, cell.incarnation, cell.epoch, number, position, generation.number, members))


def move_next(state: SchedulerState, now: float) -> bool:
    """One cell at a time, core first, then satellites by index, as the policy decides."""
    cell, hindrance = candidate(state)
    if cell is None:
        if hindrance is not None:
            say(state, None, hindrance)
        return False
    decision = hindrance or state.policy.move(view(state, now, cell))
    say(state, cell.rank, decision)
    if decision.yes:
        state.fleet.order_training(cell, decision.reason)
    return decision.yes


def candidate(state: SchedulerState) -> tuple[Cell | None, Decision | None]:
    """The next cell to move, and what hinders it beside the policy; neither where `open_update` has the say."""
    fleet, update, generation = state.fleet, state.update, state.generation
    if state.finishing:
        return None, _no("finished", "all batches are trained")
    if fleet.moving is not None:
        return None, _no(f"moving {fleet.moving}", f"cell {fleet.moving} is on its way into training")
    if fleet.core.goal == ROLLOUT:
        cell = fleet.core
        if update.phase not in (Phase.WAITING, Phase.SUSPENDED):
            return None, _no(update.phase, f"update {update.number} is {update.phase}")
    elif update.phase is Phase.SUSPENDED:
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
    return cell, _hindrance(state, cell)


def _hindrance(state: SchedulerState, cell: Cell) -> Decision | None:
    if not cell.routed:
        return _no("unrouted", f"cell {cell.rank} is not back in rollout yet")
    if cell.syncing:
        return _no("syncing", f"cell {cell.rank} is loading policy {state.fleet.published}")
    if state.generation.usable <= len(state.fleet.training):
        return _no("groups", "prefix groups are being built")
    return None


def _no(code: str, reason: str) -> Decision:
    return Decision(False, code, reason)


RULES: tuple[Callable[[SchedulerState, float], bool], ...] = (
    abandon_move,
    finish_update,
    publish,
    end_run,
    suspend,
    suspended,
    leave_if_only_capacity,
    top_up,
    build_groups,
    open_update,
    join,
    move_next,
)


# -- what rules share ------------------------------------------------------------------------------------------------
def view(state: SchedulerState, now: float, cell: Cell | None = None) -> View:
    """The numbers that a policy decides by."""
    fleet, supply, update = state.fleet, state.supply, state.update
    return View(
        now=now,
        w=state.level.w,
        capacity=fleet.capacity,
        slots=state.settings.slots if cell is not None else 0,
        training=len(fleet.training),
        supply=supply.amount,
        threshold=supply.threshold,
        supply_since=supply.since,
        supply_hold=state.settings.supply_hold,
        remaining=state.batch.remaining,
        closing=update.begun and update.full and update.phase is Phase.SUSPENDED,
    )


def order_back(state: SchedulerState, cell: Cell, reason: str) -> None:
    """A cell goes back to rollout."""
    state.fleet.order_rollout(cell, reason)
    state.generation.shrink()


def say(
    state: SchedulerState, rank: int | None, decision: Decision, verbs: tuple[str, str] = ("stays", "moves")
) -> None:
    """Keep the reason for the live view, and log it when it is another one. `verbs` are for no and for yes."""
    state.decision = decision
    if (rank, decision.code) != state.said:
        state.said = (rank, decision.code)
        subject = "no cell" if rank is None else f"cell {rank}"
        verb = "moves" if rank is None else verbs[decision.yes]
        state.emit(Log(GateReason(f"{subject} {verb}", decision.reason)))

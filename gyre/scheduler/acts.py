"""What several rules do: acts on the scheduler's state that emit commands, and the view policies have of it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.errors import InvariantBroken
from gyre.events import GateReason, QuotaPublished
from gyre.scheduler.burst import Batch, Phase, split
from gyre.scheduler.commands import Dispatch, EndRun, Log, Planned, Train
from gyre.scheduler.fleet import Cell
from gyre.scheduler.policy import Decision, View, feed

if TYPE_CHECKING:
    from gyre.scheduler.state import SchedulerState


def dispatch(state: SchedulerState, count: int, reason: str, missing: tuple[int, ...] = (), staying: int = 0) -> None:
    """Publish a quota of `count` groups, of which `staying` cells are to be fed meanwhile.

    `missing` are executions of earlier quotas that have no spec on disk.
    """
    if state.update.phase not in (Phase.WAITING, Phase.SUSPENDED):
        raise InvariantBroken(3, f"a quota while update {state.update.number} is {state.update.phase}")
    size = state.settings.group_size
    groups = state.groups.dispatch(count)
    numbers = range(groups.start * size, groups.stop * size)
    state.executions.dispatch(in_order(state, groups, staying))
    planned = tuple(Planned(n, n // size, n % size, n // size) for n in (*missing, *numbers))
    if planned or state.level.d:
        state.emit(Dispatch(planned, state.level.d))
    if planned:
        state.emit(Log(QuotaPublished(state.batch.number, planned[0].n, planned[-1].n, reason)))


def in_order(state: SchedulerState, groups: range, staying: int) -> list[int] | range:
    """The groups of a quota in the order in which they are granted: those that are expected to take longest first.

    A long execution that is started late is what a batch waits for at its end; and the shorter those are that are
    granted last, the sooner a cell's worth of slots becomes free after them. Cells that stay in training are fed in the
    meantime: a few of the shortest groups come before all others.
    """
    expected = state.measures.expected
    if not state.settings.longest_first or state.measures.slot_s is None:
        return groups
    ordered = sorted(groups, key=lambda group: -(expected(group) or 0.0))
    rest = len(ordered) - min(len(ordered) // 2, feed(view(state, state.now), staying))
    return ordered[rest:] + ordered[:rest]


def begin_batch(state: SchedulerState) -> None:
    """Make the batch after the published policy the present one. Its quota is dispatched separately."""
    settings, version = state.settings, state.fleet.published
    shares = split(settings.batch_groups, settings.updates_per_batch)
    state.batch = Batch(version + 1, shares, settings.top_ups, version * settings.updates_per_batch + 1)
    state.update = state.batch.update(0)


def order_back(state: SchedulerState, cell: Cell, reason: str) -> None:
    """A cell goes back to rollout."""
    state.fleet.order_rollout(cell, reason)
    state.generation.shrink()


def train(state: SchedulerState, cell: Cell) -> None:
    """Order a cell in training into the present update."""
    generation, number = state.generation, state.update.number
    cell.job = number
    position = generation.position(cell.rank)
    members = tuple(generation.ranks)
    state.emit(Train(cell.rank, cell.incarnation, cell.epoch, number, position, generation.number, members))


def view(state: SchedulerState, now: float) -> View:
    """The numbers that a policy decides by."""
    fleet, supply, update, settings, measures = state.fleet, state.supply, state.update, state.settings, state.measures
    return View(
        now=now,
        w=state.level.w,
        queued=0 if state.executions.engines.free else state.executions.queued,
        capacity=fleet.capacity,
        slots=settings.slots,
        all_slots=fleet.slots,
        cells=len(fleet.lives),
        training=len(fleet.training),
        batch_groups=settings.batch_groups,
        group_size=settings.group_size,
        supply=supply.amount,
        threshold=supply.threshold,
        supply_since=supply.since,
        supply_hold=settings.supply_hold,
        remaining=state.batch.remaining,
        dry_since=update.dry_since,
        closing=update.begun and update.full and update.phase is Phase.SUSPENDED,
        group_work=measures.group_work,
        execution_s=measures.slot_s,
        to_training_s=measures.to_training_s,
        to_rollout_s=measures.to_rollout_s,
    )


def say(
    state: SchedulerState, rank: int | None, decision: Decision, verbs: tuple[str, str] = ("stays", "moves")
) -> None:
    """Keep the reason for the live view; log it when it is another one of this cell. `verbs` are for no and for yes."""
    state.decision = decision
    if state.said.get(rank) != decision.code:
        state.said[rank] = decision.code
        subject = "no cell" if rank is None else f"cell {rank}"
        verb = "moves" if rank is None else verbs[decision.yes]
        state.emit(Log(GateReason(f"{subject} {verb}", decision.reason)))


def end(state: SchedulerState, how: str, detail: str) -> None:
    """Nothing is decided any more."""
    state.ended = how
    state.emit(EndRun(how, detail))

"""What a commit carries so that the run can go on from it. Pure.

The law: after a resume d counts what was issued, p and f what is closed; every other execution is granted again under
its own n with the next try number; and a group that a committed update has trained on, or that was dropped, is never
fed again (invariant 14). Executions that were issued after the commit are known from their specs on disk, so nothing
that was closed is lost with the scheduler's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gyre.errors import UserError
from gyre.events import ExecutionClosed
from gyre.scheduler.executions import Execution
from gyre.scheduler.groups import Group, Ranges

if TYPE_CHECKING:
    from gyre.scheduler.state import SchedulerState

Cursor = dict[str, Any]


def encode(state: SchedulerState) -> Cursor:
    """The cursor of the commit that follows the present update: what it took counts as trained."""
    groups, level = state.groups, state.level
    trained = Ranges(groups.trained.encode())
    for number in groups.taken:
        trained.add(number)
    return {
        "version": state.batch.number,
        "batch": state.batch.number,
        "update": state.update.number,
        "group_size": groups.size,
        "groups": groups.dispatched,
        "trained": trained.encode(),
        "dropped": groups.dropped.encode(),
        "d": level.d,
        "p": level.p,
        "f": level.f,
    }


def restore(
    state: SchedulerState, cursor: Cursor | None, issued: Mapping[int, int], closed: Iterable[ExecutionClosed]
) -> None:
    """Put a fresh state where `cursor` left off, or at the start of the run without one.

    `issued` maps every execution that has a spec on disk to its highest try number (0: none), `closed` are the outcomes
    on disk. The state feeds what became ready, and dispatches specs that a crash left unwritten, when it starts.

    Raises:
        UserError: the configuration no longer fits what was dispatched.
    """
    groups = state.groups
    cursor = cursor or {"version": 0, "groups": 0, "group_size": groups.size, "trained": [], "dropped": []}
    if cursor["group_size"] != groups.size:
        raise UserError(
            f"scheduler.group_size is {groups.size}, but the run was begun with {cursor['group_size']}; change it back"
        )
    state.committed = state.fleet.published = cursor["version"]
    groups.trained, groups.dropped = Ranges(cursor["trained"]), Ranges(cursor["dropped"])
    groups.dispatched = max(cursor["groups"], max(issued, default=-1) // groups.size + 1)
    for number in range(groups.dispatched):
        if number not in groups.trained and number not in groups.dropped:
            groups.pending[number] = Group(number, groups.size)
    _restore_executions(state, issued, {outcome.n: outcome for outcome in closed})


def _restore_executions(state: SchedulerState, issued: Mapping[int, int], closed: dict[int, ExecutionClosed]) -> None:
    groups, executions = state.groups, state.executions
    missing = []
    for number in list(groups.pending):
        for n in range(number * groups.size, (number + 1) * groups.size):
            if n in closed:
                group = groups.close(closed[n])
                if group is not None:
                    state.restored.append(group)
                continue
            executions.reopen(Execution(n, try_number=issued.get(n, 0)))
            if n not in issued:
                missing.append(n)
    state.missing = tuple(missing)
    level = executions.level
    level.d = groups.dispatched * groups.size
    level.p = level.f = level.d - len(executions.open)

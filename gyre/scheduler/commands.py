"""What the scheduler's state asks its loop to do. Pure.

`SchedulerState.handle` returns these in the order in which they must be carried out; the loop adds nothing and decides
nothing. A command that names a cell or a host carries the incarnation (and, for cells, the epoch) it was decided for,
so that a rank that has been started again in between never obeys it. Ranks are Slurm ranks, versions are policy
versions, snapshots are counted in updates done, executions are numbered n = 0, 1, 2, ... over the life of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gyre.events import Event


@dataclass(frozen=True)
class Command:
    """Base of every command."""


# -- executions ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Planned:
    """One execution of a quota: member `member` of group `group` works on task number `task_index` of the run's order.

    `task_index` counts groups; the loop maps it to a task (shuffled rounds over the task file).
    """

    n: int
    group: int
    member: int
    task_index: int


@dataclass(frozen=True)
class Dispatch(Command):
    """A quota: write the executions' specs (those that are there already stay), then raise the counter d to `d`."""

    executions: tuple[Planned, ...]
    d: int


@dataclass(frozen=True)
class Grant(Command):
    """Execution n may run on a host with its requests on an engine.

    If n has an outcome file already (possible for tries after the first), report it as `ExecutionClosed` instead and
    send nothing. Otherwise send the grant to the host; `p` is not None for the first try of n in this attempt: raise
    the counter p to it.
    """

    n: int
    try_number: int
    host: int
    incarnation: int  # of the host
    engine: int
    p: int | None


@dataclass(frozen=True)
class CancelExecution(Command):
    """End execution n on a host; no answer is waited for. It is closed already, or its outcome will still come."""

    n: int
    host: int
    incarnation: int  # of the host


@dataclass(frozen=True)
class Close(Command):
    """The scheduler closes an execution itself: cancelled, or out of tries.

    Link an outcome file {n, try, outcome, score: null, usable: false, reason}. Whether or not the link succeeds, report
    what the file now says as `ExecutionClosed`: the file is the truth, and f rises only with that event (invariant 2).
    """

    n: int
    try_number: int
    outcome: str
    reason: str


@dataclass(frozen=True)
class Finished(Command):
    """Execution n is closed for good, said once per n: raise the counter p to `p` (it counts an execution that was
    closed in the queue), then the counter f to `f`.

    `engine` served it last (-1: none did); its gate must refuse requests of n from now on (order `closed`).
    """

    n: int
    p: int
    f: int
    engine: int


# -- routes and roles ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class EngineRoute:
    """Where an engine serves, under which epoch, with which policy version, and where it will leave its KV blocks."""

    url: str
    epoch: int
    policy: int
    kv: str | None = None


@dataclass(frozen=True)
class Move:
    """Execution n on `host` has its requests on `engine` from now on; None: they are held until the next move."""

    n: int
    host: int
    engine: int | None


@dataclass(frozen=True)
class Route(Command):
    """A difference to the route table: send it to every living host, or to `host` alone (a new one gets all engines).

    `engines` maps a rank to its route, or to None when it is unrouted. Moves concern the hosts that they name.
    """

    version: int
    engines: dict[int, EngineRoute | None]
    moves: tuple[Move, ...] = ()
    host: int | None = None


@dataclass(frozen=True)
class OrderRole(Command):
    """Order a cell to a role: {"order": "role", epoch, target, version, snapshot}.

    target: "training" or "rollout". For rollout, `version` (its weights are `snapshot`) is to be loaded and verified
    before the cell serves. It may reach the cell in any state: the latest order counts, and one that finds the cell
    still ending its part in an update is obeyed when that has ended. A cell that is in ROLLOUT already loads the
    version where it differs, and reports ROLLOUT again, now under this epoch.
    """

    rank: int
    incarnation: int
    epoch: int
    target: str
    version: int
    snapshot: int


@dataclass(frozen=True)
class OrderSync(Command):
    """Order an engine in rollout to a policy version: {"order": "sync", epoch, version, snapshot}."""

    rank: int
    incarnation: int
    epoch: int
    version: int
    snapshot: int


@dataclass(frozen=True)
class Supersede(Command):
    """An incarnation that counted as lost must not come back: tell it to leave (its restarter starts a new one)."""

    rank: int
    incarnation: int


# -- training --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Member:
    """A cell as a member of a generation of prefix groups."""

    rank: int
    incarnation: int
    epoch: int


@dataclass(frozen=True)
class BuildGroups(Command):
    """Order each member to build the prefix groups of a generation: {"order": "groups", epoch, generation, ranks}.

    Members are in prefix order, the core first. No update runs.
    """

    generation: int
    members: tuple[Member, ...]

    @property
    def ranks(self) -> list[int]:
        """The members' ranks, in prefix order."""
        return [member.rank for member in self.members]


@dataclass(frozen=True)
class BeginUpdate(Command):
    """Feeder, `begin`: from now on claims of this update are answered; it consists of `groups` groups."""

    update: int
    groups: int


@dataclass(frozen=True)
class Train(Command):
    """Order a cell into an update: {"order": "train", epoch, update, position, generation, members}.

    `position` is its index in `members`, which are the ranks of the whole generation in prefix order.
    """

    rank: int
    incarnation: int
    epoch: int
    update: int
    position: int
    generation: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class Feed(Command):
    """Feeder, `feed`: a ready group and its usable executions."""

    group: int
    executions: tuple[int, ...]


@dataclass(frozen=True)
class DropGroup(Command):
    """Feeder, `drop`: forget an untaken group. Only given while no update runs, so it never races with a claim."""

    group: int


@dataclass(frozen=True)
class SuspendUpdate(Command):
    """Feeder, `suspend`: the update is starved; its members reduce what they have into the core and end suspended."""

    update: int


@dataclass(frozen=True)
class ResumeUpdate(Command):
    """Feeder, `resume`: claims of a suspended update are answered again; `Train` for the core follows."""

    update: int


@dataclass(frozen=True)
class CloseShort(Command):
    """Feeder, `close_short`: the update consists of only `groups` groups altogether, all taken or fed by now."""

    update: int
    groups: int


@dataclass(frozen=True)
class BarMember(Command):
    """Feeder, `bar`: all micro-steps of this member of the update go back, and it is barred from the reduce."""

    update: int
    rank: int
    incarnation: int


@dataclass(frozen=True)
class Commit(Command):
    """Order the core to commit: {"order": "commit", epoch, version, update, cursor}; `PolicyCommitted` answers.

    `cursor` is JSON, and what `SchedulerState.resume` wants back.
    """

    incarnation: int
    epoch: int
    version: int
    update: int
    cursor: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class PublishPolicy(Command):
    """A committed version is announced: set the store's word `policy`; tell the feeder (`committed`) its update.

    Engines are brought to it by the `OrderRole` and `OrderSync` commands that follow.
    """

    version: int
    update: int


# -- the run ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Log(Command):
    """Append a fact to the event log."""

    event: Event


@dataclass(frozen=True)
class EndRun(Command):
    """The attempt is over, completed or failed; nothing is handled after it. Every execution is closed if completed."""

    how: str
    detail: str = ""

"""Typed events of a run: what the scheduler is told, and what it says it did. Pure.

Two families, both frozen dataclasses, encoded to flat JSON objects with a `kind`:

* *inputs* are everything the scheduler's state can react to. They arrive over the store's ``reports`` list (or, on
  rank 0, directly), and each one is logged with its time, so that a production log can be replayed.
* *facts* are what the scheduler decided, and what the coordinator says of the attempt (`RunStarted`, `Usage`,
  `RunEnded`). They are logged for people, reports and the live view.

An event in ``events.jsonl`` carries ``t`` (unix seconds) and ``attempt`` beside its own fields.
Times in fields are seconds, versions are policy versions (0 is the initial weights), ranks are Slurm ranks.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

_KINDS: dict[str, type[Event]] = {}


@dataclass(frozen=True)
class Event:
    """Base of every event; `kind` is the class name in snake case."""

    kind: ClassVar[str] = "event"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.kind = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()
        _KINDS[cls.kind] = cls


def encode(event: Event) -> dict[str, Any]:
    """An event as a flat JSON object."""
    return {"kind": event.kind, **asdict(event)}


def decode(data: dict[str, Any]) -> Event:
    """The event of a JSON object; keys that the event does not have (`t`, `attempt`) are dropped.

    Raises:
        KeyError: an unknown kind.
        TypeError: a field is missing.
    """
    cls = _KINDS[data["kind"]]
    names = {f.name for f in fields(cls)}
    return cls(**{key: value for key, value in data.items() if key in names})


# -- inputs: ranks ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RankReady(Event):
    """A cell's engine serves (or could) and its trainer stands by; a host's proxy is up."""

    rank: int
    incarnation: int
    node: str
    url: str = ""  # of the cell's gate; empty for hosts
    checksum: str = ""  # of the weights that the core begins with; empty for all others
    kv: str | None = None  # where its engine leaves KV blocks for others; None where it leaves none


@dataclass(frozen=True)
class RankLost(Event):
    """A rank went silent or left; its children are gone or will be."""

    rank: int
    incarnation: int
    reason: str


@dataclass(frozen=True)
class RoleReached(Event):
    """A cell's machine (`gyre.cell.machine`) entered a state under an epoch."""

    rank: int
    incarnation: int
    epoch: int
    state: str
    seconds: float = 0.0  # spent in the state before
    version: int = -1  # policy version its engine holds, where state is ROLLOUT
    detail: str = ""
    held: dict[str, int] = field(default_factory=dict)  # bytes by holder, after a move: who has the memory now


# -- inputs: executions ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ExecutionClosed(Event):
    """Execution n has its outcome file. Counts cover all tries."""

    n: int
    try_number: int
    outcome: str  # completed, failed, timed_out, cancelled
    score: float | None
    usable: bool  # it has a score and at least one recorded token
    oldest_version: int  # of its sampled tokens; -1 without any
    seconds: float
    tokens: int = 0  # sampled
    requests: int = 0
    rerouted: int = 0
    continued: int = 0
    lost: int = 0
    reason: str = ""
    restarted: int = 0
    spliced: int = 0  # requests that went on from the recorded tokens of an earlier one
    drifted: int = 0  # of these, where encoding the messages anew would have given other tokens
    drift_tokens: int = 0  # how many
    forked: int = 0  # requests that follow on a known one and did not go on from its tokens
    masked: dict[str, int] = field(default_factory=dict)  # tokens that are not to be trained on, by reason


def closed_event(outcome: dict[str, Any]) -> ExecutionClosed:
    """The event of an outcome file."""
    return ExecutionClosed(
        n=outcome["n"],
        try_number=outcome["try"],
        outcome=outcome["outcome"],
        score=outcome["score"],
        usable=outcome["usable"],
        oldest_version=outcome.get("oldest_version", -1),
        seconds=outcome.get("seconds", 0.0),
        tokens=outcome.get("tokens", 0),
        requests=outcome.get("requests", 0),
        rerouted=outcome.get("rerouted", 0),
        continued=outcome.get("continued", 0),
        lost=outcome.get("lost", 0),
        reason=outcome.get("reason", ""),
        **{key: outcome.get(key, 0) for key in ("restarted", "spliced", "drifted", "drift_tokens", "forked")},
        masked=outcome.get("masked", {}),
    )


@dataclass(frozen=True)
class TryFailed(Event):
    """The infrastructure (not the harness) failed a try."""

    n: int
    try_number: int
    reason: str


# -- inputs: training ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class GroupTaken(Event):
    """A group's first micro-step was claimed."""

    group: int
    update: int


@dataclass(frozen=True)
class UpdateOpened(Event):
    """The core opened (or, after a suspension, opened again) the stream of an update."""

    update: int


@dataclass(frozen=True)
class CellJoined(Event):
    """A satellite entered an update as its member number `position`."""

    rank: int
    update: int
    position: int


@dataclass(frozen=True)
class TrainingEnded(Event):
    """A member's part in an update is over.

    how: done (reduced into a step), suspended (its partial sum is with the core), missed (the window had closed, it
    never joined), failed (see detail).
    """

    rank: int
    incarnation: int
    update: int
    how: str
    detail: str = ""


@dataclass(frozen=True)
class UpdateDone(Event):
    """The core took the optimizer step of an update; its snapshot can be pulled.

    seconds: time that the core was in it, without that between a suspension and going on.
    """

    update: int
    members: int
    micro_steps: dict[str, int]  # per rank (as a string: JSON)
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def cell_seconds(self) -> float:
        """Time in which all members together computed its micro-steps; 0 where that was not measured."""
        return self.metrics.get("cell_seconds", 0.0)


@dataclass(frozen=True)
class PolicyCommitted(Event):
    """The core's commit of a policy version is durable."""

    version: int
    checksum: str
    seconds: float


@dataclass(frozen=True)
class GroupsBuilt(Event):
    """A cell has the process groups of a generation: one for every prefix that it is in."""

    rank: int
    incarnation: int
    generation: int


# -- inputs: time ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Tick(Event):
    """Time has passed; nothing else. Not logged."""


# -- facts -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RunStarted(Event):
    """An attempt begins; `version` is what it resumes from (0: from the start)."""

    version: int
    cells: int
    standalone: int
    hosts: int


@dataclass(frozen=True)
class QuotaPublished(Event):
    """A burst began or a starved update was topped up."""

    batch: int
    first: int  # executions first..last are new
    last: int
    reason: str  # burst, top_up, resume


@dataclass(frozen=True)
class ExecutionGranted(Event):
    """Execution n may run on a host with its requests on an engine."""

    n: int
    try_number: int
    host: int
    engine: int


@dataclass(frozen=True)
class GroupReady(Event):
    """All executions of a group are closed; it can be trained on."""

    group: int
    rewards: list[float | None]


@dataclass(frozen=True)
class GroupDropped(Event):
    """A group will not be trained on."""

    group: int
    reason: str


@dataclass(frozen=True)
class SampleRefused(Event):
    """A sample of a ready group has more tokens than the limit; it is not trained on, and not cut either."""

    group: int
    execution: int
    tokens: int  # of the sample
    limit: int


@dataclass(frozen=True)
class StepSkipped(Event):
    """An update was done without a step, since its gradient was not finite; the weights are those before it."""

    update: int


@dataclass(frozen=True)
class MoveStarted(Event):
    """The scheduler ordered a cell to another role."""

    rank: int
    epoch: int
    source: str
    target: str
    reason: str
    rerouted: list[int]  # executions whose requests move


@dataclass(frozen=True)
class GateReason(Event):
    """Why the next cell does, or does not, move; logged when it changes."""

    decision: str
    reason: str


@dataclass(frozen=True)
class UpdateSuspendedFor(Event):
    """An update waits for groups: its cells go back to rollout, and the core keeps the partial sum."""

    update: int
    missing: int
    starved: bool = True  # nothing is open that could bring them; False: its cells are given back to what waits


@dataclass(frozen=True)
class Usage(Event):
    """What cells and standalone engines did so far in this attempt, cumulative; see `gyre.usage`.

    Logged after every update, once a minute, and before the end.
    """

    cell_seconds: float  # cells and standalone engines times seconds
    serving_seconds: float  # with a live request
    training_seconds: float  # computing or reducing
    sampled_tokens: int
    trained_tokens: int
    pss_mb: float  # of all processes of the run, now
    peak_pss_mb: float


@dataclass(frozen=True)
class BatchClosedShort(Event):
    """A batch used up its top-ups and makes do with the groups it has."""

    batch: int
    groups: int  # that it trains on
    missing: int


@dataclass(frozen=True)
class PolicyPublished(Event):
    """All engines in rollout serve a policy version, or will before they serve again."""

    version: int


@dataclass(frozen=True)
class RunEnded(Event):
    """The attempt is over: completed, interrupted or failed."""

    how: str
    detail: str = ""

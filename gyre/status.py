"""What people see of a running run: the JSON of ``status/<rank>`` keys and of ``status.json``. Pure.

Every supervisor puts a `RankStatus` into its ``status/<rank>`` key once a second. Rank 0 gathers them, adds what the
scheduler knows, and replaces ``status.json`` with a `RunStatus` each second. The live view reads that file and
``events.jsonl``, and nothing else.

Nothing is decided by a status: a lost or late one costs a line on a screen. Readers therefore ignore keys they do not
know and take defaults for missing ones, so that one version of Gyre can watch a run of another.
Times are unix seconds, durations seconds, memory MiB (proportional set size), counters cumulative per incarnation.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

RankKind = Literal["core", "satellite", "standalone", "host"]

#: Words of `RunStatus.state`; the last three are final.
RunState = Literal["starting", "running", "ending", "completed", "interrupted", "failed"]
FINAL_STATES = ("completed", "interrupted", "failed")

#: `RankStatus.state` of a rank that has not reported yet, and of a harness host that runs what it is granted.
STATE_STARTING = "STARTING"
STATE_HOSTING = "HOSTING"


@dataclass
class RankStatus:
    """What one rank is doing; a supervisor writes it, rank 0 only fills `tokens_per_second`."""

    rank: int
    kind: RankKind
    incarnation: int = 1
    node: str = ""
    state: str = STATE_STARTING  # a state of `gyre.cell.machine`, STATE_STARTING, or STATE_HOSTING
    since: float = 0.0  # when `state` was entered
    doing: str = ""  # a few words: "engine: loading the model", "update 3: 5 micro-steps done", "serving"
    fraction: float | None = None  # how far a long phase named in `doing` has come, 0..1; None where unknown
    live: int = 0  # cells: requests live in the gate; hosts: executions running
    slots: int = 0  # hosts: room for live executions; that of cells is in the configuration
    version: int = -1  # policy version the engine holds; -1 before the first
    serving_seconds: float = 0.0  # time with at least one live request
    training_seconds: float = 0.0  # time the trainer computed or reduced
    tokens: int = 0  # tokens the engine has sampled
    trained_tokens: int = 0  # tokens the trainer has gone over
    micro_steps: int = 0  # micro-steps of the present update finished by this cell
    pss_mb: float = 0.0  # of the supervisor and all its descendants
    tokens_per_second: float = 0.0  # sampled, of late


@dataclass
class SchedulerStatus:
    """The scheduler's numbers, in the words of docs/architecture.md."""

    d: int = 0
    p: int = 0
    f: int = 0
    capacity: int = 0  # slots of all engines now in rollout
    ready: int = 0  # ready groups not yet taken
    batch_groups: int = 0  # groups of one batch
    taken: int = 0  # groups of the present batch that are taken
    batch: int = 0  # present batch, from 1
    batches: int = 0
    update: int = 0  # present update, from 1
    updates: int = 0
    version: int = 0  # published policy version
    prefix: int = 0  # cells now training
    gate: str = ""  # why the next cell does, or does not, move

    @property
    def w(self) -> int:
        """The waterlevel: executions queued and running."""
        return self.d - self.f


@dataclass
class StreamStatus:
    """Micro-steps of the present update."""

    update: int = 0
    published: int = 0
    claimed: int = 0
    finished: int = 0


@dataclass
class Phase:
    """Something long that is not one rank's, such as waiting until every rank is ready."""

    name: str
    detail: str = ""
    fraction: float | None = None
    since: float = 0.0


@dataclass
class RunStatus:
    """All of status.json."""

    name: str = ""
    time: float = 0.0  # when this was written; a reader takes an old one for a dead run
    started: float = 0.0  # when this attempt began
    attempt: int = 1
    state: RunState = "starting"
    detail: str = ""  # one line: why it ends, what it waits for
    scheduler: SchedulerStatus = field(default_factory=SchedulerStatus)
    stream: StreamStatus = field(default_factory=StreamStatus)
    ranks: list[RankStatus] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    reward: float | None = None  # mean score of the last finished update
    tokens_per_second: float = 0.0  # sampled by all engines, of late
    seconds_left: float | None = None  # estimated from the updates so far; None before the first
    pss_mb: float = 0.0  # of all ranks now

    @property
    def final(self) -> bool:
        """Whether the attempt is over."""
        return self.state in FINAL_STATES


def _known(cls: type, data: Any) -> dict[str, Any]:
    """The entries of a JSON object that a dataclass has fields for."""
    names = {f.name for f in fields(cls)}
    return {key: value for key, value in data.items() if key in names} if isinstance(data, dict) else {}


def encode(status: RunStatus | RankStatus) -> str:
    """A status as one line of JSON."""
    return json.dumps(asdict(status), separators=(",", ":"))


def decode_rank(text: str) -> RankStatus:
    """The status of a rank from its store key.

    Raises:
        ValueError: the text is not JSON, or it names no rank.
    """
    return _rank(json.loads(text))


def _rank(data: Any) -> RankStatus:
    known = _known(RankStatus, data)
    if "rank" not in known or "kind" not in known:
        raise ValueError("a rank's status must have `rank` and `kind`")
    return RankStatus(**known)


def decode(text: str) -> RunStatus:
    """The status of a run from status.json.

    Raises:
        ValueError: the text is not the JSON of a status.
    """
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("status.json must hold an object")
    known = _known(RunStatus, data)
    return RunStatus(
        **{
            **known,
            "scheduler": SchedulerStatus(**_known(SchedulerStatus, known.get("scheduler"))),
            "stream": StreamStatus(**_known(StreamStatus, known.get("stream"))),
            "ranks": [_rank(rank) for rank in known.get("ranks", [])],
            "phases": [Phase(**_known(Phase, p)) for p in known.get("phases", []) if "name" in p],
        }
    )

"""The numbers of a run, added up from its events. Pure: the only clock is the `t` that events carry.

Conservation: the numbers are those of the run, not of an attempt. An attempt starts from a commit, so updates that an
earlier attempt made after that commit never happened: they leave the record when the new attempt's `RunStarted` comes,
and are counted when they are made again. Executions are never run again once closed, so each one counts at its first
`ExecutionClosed` only. What was spent (seconds, tokens the engines sampled, moves) was spent, and stays.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre import figures
from gyre.config import Config

EventData = dict[str, Any]

#: The time left is estimated from this many past updates, at least.
_RECENT_UPDATES = 5
_REQUESTS = ("total", "rerouted", "continued", "restarted", "lost")
_CONVERSATIONS = ("spliced", "drifted", "drift_tokens", "forked")


@dataclass
class UpdateRecord:
    """One optimizer step."""

    update: int
    groups: set[int] = field(default_factory=set)
    joined: set[int] = field(default_factory=set)  # satellites
    suspensions: int = 0
    done: float | None = None  # when, in unix seconds
    began: float | None = None  # when the core opened its stream
    members: int = 0
    micro_steps: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    reward: float | None = None  # mean score of the executions of its groups; None where nothing was scored
    staleness: float | None = None  # mean over its groups of the versions since their oldest token

    @property
    def share(self) -> dict[str, float]:
        """Each member's fraction of its micro-steps, by rank."""
        return figures.shares([self.micro_steps])

    @property
    def flat(self) -> dict[str, Any]:
        """Its line of metrics.jsonl: all its figures, none of them nested but those by rank."""
        known = {"reward": self.reward} if self.reward is not None else {}
        own = {"update": self.update, "t": self.done, "members": self.members, "seconds": round(self.seconds, 3)}
        own |= {"micro_steps": self.micro_steps, "share": self.share, "suspensions": self.suspensions}
        return own | known | {key: value if math.isfinite(value) else None for key, value in self.metrics.items()}


@dataclass
class Attempt:
    """One start of the run."""

    number: int
    started: float
    version: int  # that it resumed from
    cells: int = 0  # with standalone engines
    last: float = 0.0  # time of its last event
    ready: float | None = None  # when the scheduler first acted: every rank was up
    how: str | None = None  # completed, interrupted, failed; None while it runs, or when it was killed
    detail: str = ""
    usage: EventData = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """From its start to its last event."""
        return max(0.0, self.last - self.started)


@dataclass
class _Move:
    epoch: int
    source: str
    target: str
    t: float


class RunMetrics:
    """Everything that summary.json and the live view need; `apply` each event in the order of the log."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.attempts: list[Attempt] = []
        self.updates: dict[int, UpdateRecord] = {}
        self.policy_version = 0
        self.checksums: dict[int, str] = {}
        self.moves: list[dict[str, Any]] = []
        self.abandoned_moves = 0
        self.granted: set[int] = set()
        self.closed: set[int] = set()
        self.by_outcome: Counter[str] = Counter()
        self.requests: Counter[str] = Counter()
        self.tokens = 0
        self.masked: Counter[str] = Counter()  # of these, not to be trained on, by reason
        self.top_ups = 0
        self.dropped_groups: Counter[str] = Counter()
        self.short_batches: dict[int, int] = {}  # groups that were missing, by batch
        self._refused: set[tuple[int, int, int]] = set()  # group, execution, tokens: a set, as attempts refuse again
        self.failed_tries = 0
        self.lost_ranks = 0
        self.dispatched = 0
        self._highest = -1
        self._scores: dict[int, list[float]] = {}  # by group
        self._oldest: dict[int, int] = {}  # policy version of the oldest token, by group
        self._pending: dict[int, _Move] = {}

    # -- what the numbers are ------------------------------------------------------------------------------------------
    @property
    def done(self) -> list[UpdateRecord]:
        """The updates that were made, in order."""
        return [self.updates[u] for u in sorted(self.updates) if self.updates[u].done is not None]

    @property
    def update_count(self) -> int:
        """Updates made so far; those before a commit count even where their events were lost in a crash."""
        committed = self.policy_version * self.config.train.updates_per_batch
        return max([committed, *(r.update for r in self.done)])

    @property
    def seconds(self) -> float:
        """Time spent by all attempts; the time between them does not count."""
        return sum(a.seconds for a in self.attempts)

    @property
    def rewards(self) -> list[float | None]:
        """Mean score of each update made, in order."""
        return [record.reward for record in self.done]

    def usage(self, key: str) -> float:
        """A cumulative number of `gyre.events.Usage`, over all attempts."""
        return sum(a.usage.get(key, 0) for a in self.attempts)

    @property
    def busy_fraction(self) -> float | None:
        """Fraction of all cell-time, start-up included, in which cells served a request or trained."""
        return self._busy(sum(a.cells * a.seconds for a in self.attempts))

    @property
    def busy_fraction_after_start(self) -> float | None:
        """The same, without the time that ranks took to start."""
        return self._busy(sum(a.cells * (a.last - a.ready) for a in self.attempts if a.ready is not None))

    def _busy(self, cell_seconds: float) -> float | None:
        if not any(a.usage for a in self.attempts) or cell_seconds <= 0:
            return None
        return min(1.0, (self.usage("serving_seconds") + self.usage("training_seconds")) / cell_seconds)

    def seconds_left(self, now: float) -> float | None:
        """An estimate from the recent updates of this attempt; None before its first."""
        if not self.attempts:
            return None
        attempt = self.attempts[-1]
        marks = [t for t in [attempt.ready] if t is not None]
        marks += [r.done for r in self.done if r.done is not None and r.done >= attempt.started]
        if len(marks) < 2:
            return None
        marks = marks[-1 - max(_RECENT_UPDATES, 2 * self.config.train.updates_per_batch) :]
        each = (marks[-1] - marks[0]) / (len(marks) - 1)
        missing = self.config.train.updates - self.update_count
        since = min(each, max(0.0, now - marks[-1]))
        return max(0.0, missing * each - since) if missing > 0 else 0.0

    # -- events --------------------------------------------------------------------------------------------------------
    def apply(self, event: EventData) -> None:
        """Take in one line of events.jsonl; kinds that carry no number are ignored."""
        if self.attempts and event.get("attempt") == self.attempts[-1].number:
            self.attempts[-1].last = max(self.attempts[-1].last, event.get("t", 0.0))
        handler = getattr(self, f"_on_{event['kind']}", None)
        if handler is not None:
            handler(event)

    def apply_all(self, events: Iterable[EventData]) -> RunMetrics:
        """Take in many events; returns itself."""
        for event in events:
            self.apply(event)
        return self

    def _record(self, update: int) -> UpdateRecord:
        return self.updates.setdefault(update, UpdateRecord(update))

    def _on_run_started(self, event: EventData) -> None:
        version = event["version"]
        kept = version * self.config.train.updates_per_batch
        self.updates = {u: r for u, r in self.updates.items() if u <= kept}
        self.checksums = {v: c for v, c in self.checksums.items() if v <= version}
        self.short_batches = {b: n for b, n in self.short_batches.items() if b <= version}
        self.policy_version = version
        self._pending.clear()
        cells = event["cells"] + event["standalone"]
        self.attempts.append(Attempt(event["attempt"], event["t"], version, cells, event["t"]))

    def _on_run_ended(self, event: EventData) -> None:
        if self.attempts:
            self.attempts[-1].how, self.attempts[-1].detail = event["how"], event.get("detail", "")

    def _on_usage(self, event: EventData) -> None:
        if self.attempts:
            self.attempts[-1].usage = event

    def _on_rank_lost(self, event: EventData) -> None:
        self.lost_ranks += 1
        self._pending.pop(event["rank"], None)

    # executions
    def _on_quota_published(self, event: EventData) -> None:
        self._begun(event)
        first, last = event["first"], event["last"]
        self.dispatched += max(0, last - max(first - 1, self._highest))
        self._highest = max(self._highest, last)
        self.top_ups += event["reason"] == "top_up"

    def _begun(self, event: EventData) -> None:
        """The scheduler acts, so every rank was ready."""
        if self.attempts and self.attempts[-1].ready is None:
            self.attempts[-1].ready = event["t"]

    def _on_execution_granted(self, event: EventData) -> None:
        self._begun(event)
        self.granted.add(event["n"])

    def _on_try_failed(self, event: EventData) -> None:
        self.failed_tries += 1

    def _on_execution_closed(self, event: EventData) -> None:
        if event["n"] in self.closed:
            return
        self.closed.add(event["n"])
        self.by_outcome[event["outcome"]] += 1
        self.tokens += event.get("tokens", 0)
        self.masked.update(event.get("masked", {}))
        self.requests["total"] += event.get("requests", 0)
        for key in (*_REQUESTS[1:], *_CONVERSATIONS):
            self.requests[key] += event.get(key, 0)
        if event.get("usable"):
            group = event["n"] // self.config.scheduler.group_size
            self._oldest[group] = min(self._oldest.get(group, event["oldest_version"]), event["oldest_version"])

    def _on_group_ready(self, event: EventData) -> None:
        self._scores[event["group"]] = [score for score in event["rewards"] if score is not None]

    def _on_group_dropped(self, event: EventData) -> None:
        self.dropped_groups[re.sub(r"\d+", "N", event["reason"])] += 1  # one entry per kind of reason

    def _on_sample_refused(self, event: EventData) -> None:
        self._refused.add((event["group"], event["execution"], event["tokens"]))

    def _on_batch_closed_short(self, event: EventData) -> None:
        self.short_batches[event["batch"]] = event["missing"]

    # moves
    def _on_move_started(self, event: EventData) -> None:
        self._pending[event["rank"]] = _Move(event["epoch"], event["source"], event["target"], event["t"])

    def _on_role_reached(self, event: EventData) -> None:
        move = self._pending.get(event["rank"])
        if move is None or event["epoch"] < move.epoch:
            return
        state = event["state"].lower()
        if state == move.target.lower():
            del self._pending[event["rank"]]
            self.moves.append(
                {
                    "cell": event["rank"],
                    "from": move.source.lower(),
                    "to": state,
                    "seconds": round(event["t"] - move.t, 3),
                    "attempt": event["attempt"],
                    "t": round(event["t"], 3),
                }
            )
        elif state in (move.source.lower(), "failed"):
            del self._pending[event["rank"]]
            self.abandoned_moves += 1

    # training
    def _on_group_taken(self, event: EventData) -> None:
        record = self._record(event["update"])
        record.groups.add(event["group"])
        if record.done is not None:  # its news came late
            self._score(record)

    def _on_update_opened(self, event: EventData) -> None:
        record = self._record(event["update"])
        record.began = record.began or event["t"]

    def _on_cell_joined(self, event: EventData) -> None:
        if event["position"] > 0:
            self._record(event["update"]).joined.add(event["rank"])

    def _on_update_suspended_for(self, event: EventData) -> None:
        self._record(event["update"]).suspensions += 1

    def _on_update_done(self, event: EventData) -> None:
        record = self._record(event["update"])
        record.done, record.members, record.seconds = event["t"], event["members"], event["seconds"]
        record.micro_steps, record.metrics = event["micro_steps"], event.get("metrics", {})
        self._score(record)

    def _score(self, record: UpdateRecord) -> None:
        record.reward = _mean([score for group in record.groups for score in self._scores.get(group, ())])
        version = (record.update - 1) // self.config.train.updates_per_batch
        record.staleness = _mean([version - self._oldest[group] for group in record.groups if group in self._oldest])

    def _on_policy_committed(self, event: EventData) -> None:
        self.checksums[event["version"]] = event["checksum"]

    def _on_policy_published(self, event: EventData) -> None:
        self.policy_version = max(self.policy_version, event["version"])

    # -- summary -------------------------------------------------------------------------------------------------------
    def summary(self) -> dict[str, Any]:
        """What summary.json holds; lists `reward`, `joins`, `staleness` and `suspensions` have an entry per update."""
        last = self.attempts[-1] if self.attempts else None
        seconds = self.seconds
        return {
            "name": self.config.name,
            "ended": (last.how or "unfinished") if last else "not started",
            "detail": last.detail if last else "",
            "updates": self.update_count,
            "policy_version": self.policy_version,
            "weights_checksum": self.checksums.get(self.policy_version),
            "seconds": round(seconds, 3),
            "executions": {
                "dispatched": self.dispatched,
                "launched": len(self.granted | self.closed),
                "finished": len(self.closed),
                "by_outcome": dict(sorted(self.by_outcome.items())),
                "failed_tries": self.failed_tries,
            },
            "requests": {key: self.requests[key] for key in _REQUESTS},
            "conversations": {key: self.requests[key] for key in _CONVERSATIONS},
            "reward": [_rounded(r) for r in self.rewards],
            "joins": [len(r.joined) for r in self.done],
            "staleness": [_rounded(r.staleness) for r in self.done],
            "suspensions": [r.suspensions for r in self.done],
            "top_ups": self.top_ups,
            "closed_short": len(self.short_batches),
            "groups_dropped": dict(sorted(self.dropped_groups.items())),
            "tokens": self.tokens,
            "masked": dict(sorted(self.masked.items())),
            "refused_samples": self._refused_samples(),
            "skipped_steps": [r.update for r in self.done if r.metrics.get("skipped")],
            "micro_step_share": figures.shares(r.micro_steps for r in self.done),
            "core_seconds": figures.stages([r.metrics for r in self.done]),
            "tokens_per_second": round(self.tokens / seconds, 3) if seconds else 0.0,
            "trained_tokens": int(self.usage("trained_tokens")),
            "gpu_busy_fraction": _rounded(self.busy_fraction),
            "gpu_busy_fraction_after_start": _rounded(self.busy_fraction_after_start),
            "peak_pss_mb": max((a.usage.get("peak_pss_mb", 0.0) for a in self.attempts), default=0.0),
            "lost_ranks": self.lost_ranks,
            "moves": self.moves,
            "abandoned_moves": self.abandoned_moves,
            "per_update": [self._update_summary(r) for r in self.done],
            "attempts": [_attempt_summary(a) for a in self.attempts],
        }

    def _refused_samples(self) -> dict[str, int]:
        lengths = [tokens for _, _, tokens in self._refused]
        return {"samples": len(lengths), "tokens": sum(lengths), "longest": max(lengths, default=0)}

    def _update_summary(self, record: UpdateRecord) -> dict[str, Any]:
        return {
            "update": record.update,
            "groups": len(record.groups),
            "joined": sorted(record.joined),
            "members": record.members,
            "micro_steps": record.micro_steps,
            "share": record.share,
            "seconds": round(record.seconds, 3),
            "metrics": record.metrics,
        }


def _attempt_summary(attempt: Attempt) -> dict[str, Any]:
    return {
        "attempt": attempt.number,
        "from_version": attempt.version,
        "seconds": round(attempt.seconds, 3),
        "ended": attempt.how or "unfinished",
    }


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)

"""A run as timestamped lines, for outputs that are no terminal: a Slurm job's file, a pipe, a CI log.

A day of training must stay readable. What is rare (a lost rank, a suspension, the end) is said at once; what is routine
(role changes, updates, closed groups) is gathered and said together, at a gap that widens as the run gets older; a line
of state comes in between.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from gyre import figures, words
from gyre.config import Config
from gyre.metrics import RunMetrics
from gyre.selftest import doubt
from gyre.status import RunStatus

EventData = dict[str, Any]

_AT_ONCE = {"run_started", "rank_lost", "update_suspended_for", "batch_closed_short", "step_skipped", "run_ended"}
#: A kind that is said at once is gathered instead after this many lines within a gap.
_BURST = 3
#: Seconds between lines about a start that is going on; more when it takes long.
_PHASES_GAP = 6.0
#: Updates that are said one by one within a gap; more are said in one line.
_SINGLE_UPDATES = 3
#: Role changes and bursts are said one by one for this many seconds; later the lines of state tell enough.
_ROLES_SAID = 3600.0


def gap(elapsed: float) -> float:
    """Seconds between routine lines when the attempt is `elapsed` seconds old."""
    return 3.0 if elapsed < 600 else 15.0 if elapsed < _ROLES_SAID else 120.0


def state_gap(elapsed: float) -> float:
    """Seconds between lines of state."""
    return 30.0 if elapsed < _ROLES_SAID else 300.0


class PlainReporter:
    """Turns events and statuses into lines; call `on_status` about once a second, for it is the clock too."""

    def __init__(
        self,
        config: Config,
        write: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.time,
        metrics: RunMetrics | None = None,
    ) -> None:
        """`write` gets each whole line. `metrics` is shared by a caller who applies the events before passing them."""
        self._config = config
        self._write = write or (lambda line: print(line, flush=True))
        self._clock = clock
        self._own_metrics = metrics is None
        self._metrics = metrics or RunMetrics(config)
        self._started = self._said = self._said_state = clock()
        self._said_at_once: Counter[str] = Counter()
        self._ready: set[int] = set()
        self._roles: dict[int, str] = {}
        self._updates: list[EventData] = []
        self._policies: list[int] = []
        self._bursts: list[str] = []
        self._troubles: dict[str, list[str]] = {}
        self._phases = ""
        self._said_phases = 0.0

    def line(self, text: str, t: float | None = None) -> None:
        """Say something with the time in front."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self._clock() if t is None else t))
        self._write(f"{stamp}  {text}")

    def on_event(self, event: EventData) -> None:
        """Take in an event, with its `t` and `attempt`."""
        if self._own_metrics:
            self._metrics.apply(event)
        kind = event["kind"]
        if kind == "run_started":
            self._started = self._said = self._said_state = self._clock()
        if kind == "update_suspended_for" and not event.get("starved", True):
            return  # cells that change roles, no trouble
        if kind in _AT_ONCE and self._said_at_once[kind] < _BURST:
            self.flush()
            self._said_at_once[kind] += 1
            self.line(words.describe(self._config, event) or kind)
        else:
            self._gather(kind, event)

    def _gather(self, kind: str, event: EventData) -> None:
        if kind == "rank_ready":
            self._ready.add(event["rank"])
        elif kind == "role_reached" and event["state"] in ("ROLLOUT", "TRAINING"):
            if self._roles.get(event["rank"]) != event["state"] and event["epoch"] > 0:
                self._roles[event["rank"]] = event["state"]
        elif kind == "update_done":
            self._updates.append(event)
            if text := doubt(self._config, event["update"], event.get("metrics", {})):
                self._troubles.setdefault("doubt", []).append(text)
        elif kind == "policy_published":
            self._policies.append(event["version"])
        elif kind == "quota_published" and event["reason"] == "burst":
            self._bursts.append(words.describe(self._config, event) or "")
        elif kind != "move_started" and (text := words.describe(self._config, event)):
            self._troubles.setdefault(kind, []).append(text)

    def on_status(self, status: RunStatus) -> None:
        """Take in the present status; says what is due."""
        now = self._clock()
        elapsed = now - self._started
        if now - self._said >= gap(elapsed):
            self.flush()
            self._said_at_once.clear()
            if status.state == "starting" and now - self._said_phases >= max(_PHASES_GAP, elapsed / 10):
                self._say_phases(status)
        if status.state == "running" and now - self._said_state >= state_gap(elapsed):
            self.flush()
            self._said_state = now
            self.line(state_line(self._config, status, self._metrics.seconds_left(now)))

    def flush(self) -> None:
        """Say all that was gathered."""
        self._said = self._clock()
        if self._ready:
            self.line(f"ready: {words.rank_names(self._config, self._ready)}")
        if self._said - self._started < _ROLES_SAID:
            self._say_roles()
            for text in self._bursts:
                self.line(text)
        for text in self._update_texts():
            self.line(text)
        if self._policies:
            self.line(f"policy {self._policies[-1]} published")
        for texts in self._troubles.values():
            more = f" (and {len(texts) - 1} more like it)" if len(texts) > 1 else ""
            self.line(texts[0] + more)
        self._ready.clear()
        self._roles.clear()
        self._updates.clear()
        self._policies.clear()
        self._bursts.clear()
        self._troubles.clear()

    def _say_roles(self) -> None:
        for state, word in (("TRAINING", "now training"), ("ROLLOUT", "now in rollout")):
            ranks = [rank for rank, reached in self._roles.items() if reached == state]
            if ranks:
                self.line(f"{word}: {words.rank_names(self._config, ranks)}")

    def _update_texts(self) -> list[str]:
        metrics = self._metrics
        done = [(e, metrics.updates[e["update"]]) for e in self._updates if e["update"] in metrics.updates]
        if len(done) <= _SINGLE_UPDATES:
            return [
                words.update_line(self._config, e, record.reward, record.joined, figures.short(record.metrics))
                for e, record in done
            ]
        rewards = [r for r in (record.reward for _, record in done) if r is not None]
        span = f", reward {rewards[0]:.3f} to {rewards[-1]:.3f}" if rewards else ""
        numbers = words.ranges(e["update"] for e, _ in done)
        return [f"updates {numbers} of {self._config.train.updates} done{span}"]

    def _say_phases(self, status: RunStatus) -> None:
        text = phases_line(self._config, status)
        if text and text != self._phases:
            self._phases, self._said_phases = text, self._clock()
            self.line(text)


def phases_line(config: Config, status: RunStatus) -> str:
    """What a starting run is busy with; the ranks that do the same are named together."""
    parts = []
    for phase in status.phases:
        parts.append(f"{phase.name}{': ' + phase.detail if phase.detail else ''}{_percent(phase.fraction)}")
    doing: dict[str, list[int]] = {}
    for rank in status.ranks:
        if rank.state == "STARTING" and rank.doing:
            doing.setdefault(rank.doing + _percent(rank.fraction), []).append(rank.rank)
    parts += [f"{words.rank_names(config, ranks)}: {what}" for what, ranks in doing.items()]
    return "starting: " + "; ".join(parts) if parts else ""


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f" {fraction:.0%}"


def state_line(config: Config, status: RunStatus, seconds_left: float | None) -> str:
    """The state of a run in one line."""
    s, stream = status.scheduler, status.stream
    reward = "" if status.reward is None else f"; reward {status.reward:.3f}"
    left = "" if seconds_left is None else f"; about {words.duration(seconds_left)} left"
    training = [r.rank for r in status.ranks if r.state == "TRAINING"]
    where = f"; training on {words.rank_names(config, training)}" if training else ""
    steps = f": {stream.finished} of {stream.published} micro-steps" if stream.update == s.update else ""
    return (
        f"update {s.update} of {s.updates}{steps}{where}; "
        f"{s.w} executions outstanding, {s.capacity} slots; "
        f"{s.ready} groups ready, {s.taken} of {s.batch_groups} taken; "
        f"{status.tokens_per_second:.0f} tokens/s{reward}{left}"
    )

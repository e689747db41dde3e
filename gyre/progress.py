"""Watching a run from anywhere that sees its directory: a live view on a terminal, plain lines elsewhere.

Only config.yaml, status.json and events.jsonl are read; the run does not notice. Nothing here decides anything.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gyre import figures, words
from gyre.config import Config, load
from gyre.errors import UserError
from gyre.live_view import ASCII, UNICODE, Picture, event_line, render
from gyre.metrics import RunMetrics
from gyre.plain import PlainReporter
from gyre.report import report
from gyre.run_dir import RunDir
from gyre.status import RunStatus, decode

__all__ = ["PlainReporter", "RunReader", "watch"]

#: A status that is older than this, and does not change while it is watched, is that of a dead run.
DEAD_SECONDS = 15.0
#: A first look believes the age written in a status only after this time, for clocks differ between machines.
_PATIENCE = 3.0
_REFRESH = 0.25
_KEPT_EVENTS = 50


class Tail:
    """The new whole lines of a growing file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[str]:
        """The lines since the last call; none where there is no file. A file that was cut is read from the cut on."""
        try:
            with open(self._path, "rb") as file:
                size = file.seek(0, 2)
                self._offset = min(self._offset, size)
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        end = data.rfind(b"\n") + 1
        self._offset += end
        return data[:end].decode(errors="replace").splitlines()


class RunReader:
    """What a run directory says, kept up to date by `poll`."""

    def __init__(self, run_dir: Path | str, after: int = 0) -> None:
        """Attempts up to number `after` are history: their status is not taken for the present one."""
        self.run = RunDir(run_dir)
        self._after = after
        self.config: Config | None = None
        self.metrics: RunMetrics | None = None
        self.status: RunStatus | None = None
        self.recent: deque[str] = deque(maxlen=_KEPT_EVENTS)
        self._tail = Tail(self.run.events)
        self._text = ""
        self._first_look: float | None = None
        self._changed = 0.0

    def poll(self, now: float, monotonic: float) -> list[dict[str, Any]]:
        """Look again; returns the new events. `now` is in unix seconds, `monotonic` on a clock that never jumps."""
        if self._first_look is None:
            self._first_look = self._changed = monotonic
        if self.config is None:
            if not self.run.config.exists():
                return []
            self.config = load(self.run.config)
            self.metrics = RunMetrics(self.config)
        events = self._read_events()
        try:
            text = self.run.status.read_text()
        except (FileNotFoundError, OSError):
            return events
        if text != self._text:
            try:
                status = decode(text)
            except (ValueError, TypeError):
                return events  # of another version of Gyre; the events still tell the run
            if status.attempt > self._after:
                self.status = status
            self._text, self._changed = text, monotonic
        return events

    def _read_events(self) -> list[dict[str, Any]]:
        assert self.metrics is not None and self.config is not None
        events = [json.loads(line) for line in self._tail.read()]
        for event in events:
            self.metrics.apply(event)
            text = self._text_of(event)
            if text:
                self.recent.append(event_line(event.get("t", 0.0), text))
        return events

    def _text_of(self, event: dict[str, Any]) -> str | None:
        assert self.metrics is not None and self.config is not None
        if event["kind"] != "update_done":
            return words.describe(self.config, event)
        record = self.metrics.updates[event["update"]]
        return words.update_line(self.config, event, record.reward, record.joined, figures.short(record.metrics))

    def silent_seconds(self, now: float, monotonic: float) -> float | None:
        """How long a run that should be alive has given no sign of life; None while there is no reason to worry."""
        if self.status is None or self.status.final or self._first_look is None:
            return None
        unchanged = monotonic - self._changed
        if unchanged > DEAD_SECONDS:
            return max(unchanged, now - self.status.time)
        age = now - self.status.time
        seen_once = self._changed - self._first_look < 0.5
        return age if seen_once and unchanged > _PATIENCE and age > DEAD_SECONDS else None

    def picture(self, now: float, monotonic: float) -> Picture | None:
        """A frame's content; None before the directory holds a configuration."""
        if self.config is None or self.metrics is None:
            return None
        return Picture(
            config=self.config,
            now=self.status.time if self.status and self.status.final else now,
            status=self.status,
            notice=self._notice(now, monotonic),
            rewards=self.metrics.rewards,
            figures=self.metrics.done[-1].metrics if self.metrics.done else {},
            events=tuple(self.recent),
            seconds_left=self.metrics.seconds_left(now),
            updates_done=self.metrics.update_count,
        )

    def _notice(self, now: float, monotonic: float) -> str:
        if self.status is None:
            return "The run has not started yet. (Is its job still queued?)"
        silent = self.silent_seconds(now, monotonic)
        if silent is None:
            return ""
        return (
            f"No sign of life for {words.duration(silent)}: the run is dead or its first rank hangs. "
            f"To go on from the last commit: launch.py resume {self.run.path}"
        )


def watch(
    run_dir: Path | str,
    stop: threading.Event | None = None,
    console: Console | None = None,
    plain: bool | None = None,
    after: int = 0,
) -> str:
    """Show a run until it ends or `stop` is set; returns how its attempt ended, or "stopped".

    Attempts up to number `after` are history; a resume gives the last one's number and waits for the next.

    On a terminal this is a live view, elsewhere (or with `plain`) timestamped lines. When the attempt ends its summary
    is printed. A run that has died is shown as such, until `stop` or an interrupt, since it may be resumed.

    Raises:
        UserError: there is no such directory.
    """
    console = console or Console()
    stop = stop or threading.Event()
    reader = RunReader(run_dir, after)
    if not reader.run.config.is_file():
        raise UserError(f"{reader.run.path} is not a run directory; runs are in logs/")
    lines = not console.is_terminal if plain is None else plain
    ended = _watch_lines(reader, stop, console, after) if lines else _watch_live(reader, stop, console)
    if ended != "stopped":
        console.print(
            Text.from_ansi(report(reader.run.path, width=console.width, colour=console.is_terminal)), soft_wrap=True
        )
    return ended


def _watch_live(reader: RunReader, stop: threading.Event, console: Console) -> str:
    glyphs = ASCII if console.options.ascii_only else UNICODE
    with Live(console=console, auto_refresh=False, screen=False, vertical_overflow="crop") as live:
        while True:
            reader.poll(time.time(), time.monotonic())
            picture = reader.picture(time.time(), time.monotonic())
            width, height = console.size
            if picture is None:
                live.update(Text(f"Waiting for {reader.run.config} ..."), refresh=True)
            else:
                live.update(render(picture, width, height - 1, glyphs), refresh=True)
            if reader.status is not None and reader.status.final:
                return reader.status.state
            if stop.wait(_REFRESH):
                return "stopped"


def _watch_lines(reader: RunReader, stop: threading.Event, console: Console, after: int) -> str:
    """The lines of attempts after number `after`; those before are told already, or history."""
    reporter: PlainReporter | None = None
    silent = False
    while True:
        events = reader.poll(time.time(), time.monotonic())
        if reporter is None and reader.config is not None:
            reporter = PlainReporter(
                reader.config, lambda text: console.out(text, highlight=False), metrics=reader.metrics
            )
        if reporter is not None:
            for event in events:
                if event.get("attempt", 1) > after:
                    reporter.on_event(event)
            if reader.status is not None:
                reporter.on_status(reader.status)
        is_silent = reader.silent_seconds(time.time(), time.monotonic()) is not None
        if is_silent and not silent and reporter is not None:
            reporter.line(reader._notice(time.time(), time.monotonic()))
        silent = is_silent
        if reader.status is not None and reader.status.final:
            if reporter is not None:
                reporter.flush()
            return reader.status.state
        if stop.wait(1.0):
            return "stopped"

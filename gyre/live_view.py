"""How the live view looks: one function from a status, numbers and a size to something rich prints. Does no I/O."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gyre import figures, words
from gyre.config import Config
from gyre.status import RankStatus, RunStatus, StreamStatus


@dataclass(frozen=True)
class Glyphs:
    """Characters of bars and curves."""

    full: str
    half: str
    empty: str
    edge: str
    spark: str
    dot: str


UNICODE = Glyphs("█", "▓", "░", "┃", "▁▂▃▄▅▆▇█", "·")
ASCII = Glyphs("#", "+", ".", "|", "_.-=+*#@", "-")

_STATE_STYLE = {
    "ROLLOUT": "green",
    "TRAINING": "magenta",
    "HOSTING": "cyan",
    "STARTING": "dim",
    "FAILED": "bold red",
    "RESTARTING": "red",
}
_RUN_STYLE = {"running": "bold green", "completed": "bold green", "failed": "bold red", "interrupted": "bold yellow"}


@dataclass
class Picture:
    """All that one frame shows."""

    config: Config
    now: float  # unix seconds
    status: RunStatus | None = None  # None: rank 0 has not written one yet
    notice: str = ""  # a line in place of the state: not started, no sign of life
    rewards: Sequence[float | None] = ()
    figures: Mapping[str, float] = field(default_factory=dict)  # of the last update
    events: Sequence[str] = field(default_factory=tuple)  # newest last
    seconds_left: float | None = None
    updates_done: int = 0


def sparkline(values: Sequence[float | None], width: int, glyphs: Glyphs = UNICODE) -> str:
    """The last `width` values as a curve; the scale is 0 to 1 where they lie in it, else their own range."""
    known = [v for v in values if v is not None][-width:]
    if not known:
        return ""
    low, high = min(0.0, *known), max(1.0, *known)
    if low < 0 or high > 1:
        low, high = min(known), max(known)
    steps = len(glyphs.spark) - 1
    return "".join(glyphs.spark[round((v - low) / (high - low or 1) * steps)] for v in known)


def bar(parts: Sequence[tuple[int, str, str]], total: int, width: int, glyphs: Glyphs = UNICODE) -> Text:
    """A bar of `width` characters for `total`: parts are (amount, character, style), the rest is empty."""
    text, used, seen = Text(), 0, 0
    for amount, character, style in parts:
        seen += max(0, amount)
        end = min(width, round(width * seen / max(1, total)))
        if amount > 0 and end == used < width and seen <= total:
            end += 1  # what is there must be seen
        text.append(character * (end - used), style)
        used = max(used, end)
    text.append(glyphs.empty * (width - used), "bright_black")
    return text


def waterlevel(status: RunStatus, width: int, glyphs: Glyphs) -> Text:
    """Running and queued executions against capacity; queued ones beyond it lie behind the edge."""
    s = status.scheduler
    running, queued = max(0, s.p - s.f), max(0, s.d - s.p)
    total = max(s.capacity, s.w, 1)
    text = bar([(running, glyphs.full, "green"), (queued, glyphs.half, "yellow")], total, width, glyphs)
    if s.w > s.capacity:
        at = min(width - 1, round(width * s.capacity / total))
        plain = text.plain
        text = Text.assemble(text[:at], (glyphs.edge, "bold red"), text[at + 1 :]) if plain else text
    return text


def render(picture: Picture, width: int, height: int, glyphs: Glyphs = UNICODE) -> RenderableType:
    """One frame of at most `height` lines of `width` characters."""
    lines: list[RenderableType] = [_title(picture, width)]
    if picture.notice:
        lines.append(Text(picture.notice, "yellow", overflow="fold"))
    status = picture.status
    if status is None:
        return _fit([*lines, *_events(picture, width, height - 4)], height)
    if status.final:  # the summary follows
        return _fit(lines, height)
    room = height - len(lines) - (len(picture.notice) // max(1, width) if picture.notice else 0)
    if status.state != "starting" and room > 2:
        numbers = _numbers(picture, status, width, glyphs)[: max(1, room - 1)]
        lines += numbers
        room -= len(numbers)
    for phase in status.phases[: max(0, room)]:
        lines.append(_phase(phase.name, phase.detail, phase.fraction, picture.now - phase.since, width, glyphs))
        room -= 1
    if room > 3:
        if room > len(status.ranks) + 4:
            lines.append(Text())
            room -= 1
        shown = _events(picture, width, max(0, min(8, room - len(status.ranks) - 2, room // 2)))
        lines.append(_ranks(status, picture, width, room - 1 - len(shown), glyphs))
        if shown and room - 2 > len(shown) + len(status.ranks):
            lines.append(Text())
        lines += shown
    return _fit(lines, height)


def _fit(lines: list[RenderableType], height: int) -> Group:
    return Group(*lines[: max(1, height)])


def _title(picture: Picture, width: int) -> Text:
    status = picture.status
    if status is None:
        return Text(f"{picture.config.name}  waiting", "bold", no_wrap=True, overflow="ellipsis")
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(status.name or picture.config.name, "bold")
    text.append(f"  {status.state}", _RUN_STYLE.get(status.state, "bold"))
    text.append(f" {_age(status.time - status.started)}")
    if status.attempt > 1:
        text.append(f"  attempt {status.attempt}", "yellow")
    s = status.scheduler
    if status.state != "starting":
        text.append(f"  update {s.update} of {s.updates}  policy {s.version}")
        if picture.seconds_left is not None and not status.final:
            text.append(f"  about {_age(picture.seconds_left)} left")
    if status.detail:
        text.append(f"  {status.detail}", "dim")
    return text


def _numbers(picture: Picture, status: RunStatus, width: int, glyphs: Glyphs) -> list[RenderableType]:
    s = status.scheduler
    stream = status.stream if status.stream.update == s.update else StreamStatus()  # not that of the update before
    room = max(8, min(40, width - 56))
    reward = "-" if status.reward is None else f"{status.reward:.3f}"
    curve = sparkline(picture.rewards, room, glyphs)
    learnt = Text(figures.line(picture.figures), no_wrap=True, overflow="ellipsis")
    return [
        _row(
            "updates",
            bar([(picture.updates_done, glyphs.full, "blue")], s.updates, room, glyphs),
            f"{picture.updates_done} of {s.updates} made; batch {s.batch} of {s.batches}",
        ),
        _row(
            "waterlevel",
            waterlevel(status, room, glyphs),
            f"{s.w} of {s.capacity} slots; {s.p - s.f} running, {s.d - s.p} queued",
        ),
        _row(
            "groups",
            bar([(s.taken, glyphs.full, "magenta"), (s.ready, glyphs.half, "green")], s.batch_groups, room, glyphs),
            f"{s.ready} ready, {s.taken} taken of a batch of {s.batch_groups}",
        ),
        _row(
            "micro-steps",
            bar(
                [(stream.finished, glyphs.full, "magenta"), (stream.claimed - stream.finished, glyphs.half, "magenta")],
                stream.published,
                room,
                glyphs,
            ),
            f"{stream.finished} finished, {stream.claimed} claimed, {stream.published} published",
        ),
        _row(
            "mean reward",
            Text(curve.ljust(room), "cyan"),
            f"{reward}; {status.tokens_per_second:.0f} tokens/s; {status.pss_mb / 1024:.1f} GiB",
        ),
        *([_row("last update", learnt, "")] if learnt else []),
        _row("next move", Text(s.gate or "-", no_wrap=True, overflow="ellipsis"), ""),
    ]


def _row(name: str, graph: Text, text: str) -> Text:
    return Text.assemble((f"{name:<12} ", "dim"), graph, f"  {text}" if text else "", no_wrap=True, overflow="ellipsis")


def _phase(name: str, detail: str, fraction: float | None, seconds: float, width: int, glyphs: Glyphs) -> Text:
    graph = _progress(fraction, max(8, min(30, width - 60)), glyphs)
    return _row(name[:12], graph, f"{detail}  {_age(seconds)}")


def _progress(fraction: float | None, width: int, glyphs: Glyphs) -> Text:
    if fraction is None:
        return Text(glyphs.dot * width, "bright_black")
    return bar([(round(1000 * min(1.0, fraction)), glyphs.full, "blue")], 1000, width, glyphs)


def _order(rank: RankStatus) -> tuple[int, int]:
    """What to show first where not every rank has room: trouble, moves, training, then the rest by rank."""
    known = {"FAILED": 0, "RESTARTING": 0, "TRAINING": 2, "STARTING": 3, "ROLLOUT": 4, "HOSTING": 5}
    return known.get(rank.state, 1), rank.rank


def _ranks(status: RunStatus, picture: Picture, width: int, height: int, glyphs: Glyphs) -> RenderableType:
    """One line per rank; where they do not fit, the interesting ones, and a line that counts the others."""
    wide = width >= 72
    grid = Table(box=None, pad_edge=False, header_style="dim", expand=False, width=width)
    grid.add_column("cell", no_wrap=True, width=9)
    grid.add_column("role", no_wrap=True, width=10)
    grid.add_column("slots", no_wrap=True, width=14 if wide else 6)
    grid.add_column("doing", no_wrap=True, overflow="ellipsis", ratio=1)
    if wide:
        grid.add_column("tokens/s", no_wrap=True, justify="right", width=8)
        grid.add_column("for", no_wrap=True, justify="right", width=7)
    rows = max(1, height - 1)
    ranks = list(status.ranks)
    hidden: list[RankStatus] = []
    if len(ranks) > rows:
        ordered = sorted(ranks, key=_order)
        ranks, hidden = sorted(ordered[: rows - 1], key=lambda r: r.rank), ordered[rows - 1 :]
    for rank in ranks:
        grid.add_row(*_rank_cells(picture, rank, wide, glyphs))
    if hidden:
        cells = [rank for rank in hidden if rank.kind != "host"]
        grid.add_row(
            f"+ {len(hidden)}", "", _slots(cells, picture.config, False, glyphs), _counted(hidden), style="dim"
        )
    return grid


def _counted(ranks: Sequence[RankStatus]) -> str:
    states = sorted({rank.state for rank in ranks})
    return ", ".join(f"{sum(r.state == s for r in ranks)} {s}" for s in states)


def _slots(ranks: Sequence[RankStatus], config: Config, wide: bool, glyphs: Glyphs) -> Text:
    """Live requests or executions against room for them; a cell has room in rollout only."""
    live = sum(r.live for r in ranks)
    slots = sum(r.slots if r.kind == "host" else config.cells.slots * (r.state == "ROLLOUT") for r in ranks)
    if not slots:
        return Text(str(live) if live else "-", "default" if live else "bright_black")
    text = bar([(live, glyphs.full, "green")], slots, 6, glyphs) if wide else Text()
    return text.append(f" {live}/{slots}" if wide else f"{live}/{slots}")


def _rank_cells(picture: Picture, rank: RankStatus, wide: bool, glyphs: Glyphs) -> list[RenderableType]:
    name = {"core": f"{rank.rank} core", "standalone": f"{rank.rank} engine", "host": f"{rank.rank} host"}
    doing = Text(rank.doing, no_wrap=True, overflow="ellipsis")
    if rank.fraction is not None:
        doing = Text.assemble(_progress(rank.fraction, 10, glyphs), f" {rank.fraction:.0%} ", doing)
    if rank.incarnation > 1:
        doing.append(f"  (start {rank.incarnation})", "yellow")
    cells: list[RenderableType] = [
        Text(name.get(rank.kind, str(rank.rank))),
        Text(rank.state, _STATE_STYLE.get(rank.state, "yellow")),
        _slots([rank], picture.config, wide, glyphs),
        doing,
    ]
    if wide:
        rate = f"{rank.tokens_per_second:.0f}" if rank.kind != "host" and rank.tokens_per_second else "-"
        cells += [rate, _age(picture.now - rank.since) if rank.since else "-"]
    return cells


def _age(seconds: float) -> str:
    """A duration without a fraction that would flicker."""
    return f"{max(0, int(seconds))}s" if seconds < 10 else words.duration(seconds)


def _events(picture: Picture, width: int, height: int) -> list[RenderableType]:
    lines = list(picture.events)[-height:] if height > 0 else []
    return [Text(line, "dim", no_wrap=True, overflow="ellipsis") for line in lines]


def event_line(t: float, text: str) -> str:
    """An event as the view shows it."""
    return f"{time.strftime('%H:%M:%S', time.localtime(t))}  {text}"

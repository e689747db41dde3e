"""One HTML file that shows timelines: no network, no other file, whatever the size of the run.

The numbers lie in the page as JSON (`_packed`), and `timeline.js` draws them on a canvas. Per run:

* `rows`: per cell a flat list of pairs: length of a segment, and its state plus 8 times the index of its reason;
* `curves`: per step curve a flat list of pairs: time since the point before, and the value from then on;
* `published` and `attempts`: [time, version] and [time, number, version, how].

Times are tenths of a second since the beginning of the run, rounded; lengths are differences of rounded times, so that
rounding never adds up, and segments that vanish in it are left out.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gyre import words
from gyre.config import load
from gyre.report import summarise
from gyre.run_dir import RunDir, read_events
from gyre.scheduler.settings import Settings
from gyre.timeline import Steps, Timeline, fold
from gyre.timeline_cells import CellState

Run = tuple[str, Timeline, dict[str, str]]

#: Points of a curve in the page, at the most.
MAX_POINTS = 4_000
#: Reasons of moves that a run keeps word for word; further ones lose their numbers, which makes many of them the same.
MAX_REASONS = 3_000

_STATES = {
    CellState.ROLLOUT: "in rollout",
    CellState.TO_TRAINING: "moving to training",
    CellState.IN_UPDATE: "in an update",
    CellState.WAITING: "waiting in training",
    CellState.TO_ROLLOUT: "moving to rollout",
    CellState.STARTING: "starting",
    CellState.DOWN: "down",
}
_CURVES = {"capacity": "slots in rollout", "water": "waterlevel", "running": "running", "ready": "groups ready"}


def page(title: str, runs: Sequence[Run]) -> str:
    """The page.

    Args:
        title: of the page.
        runs: name, timeline and figures of each run; with several there is a list to pick from, and a table that
            compares their figures.
    """
    data = {"states": [_STATES[state] for state in CellState], "runs": [_packed(*run[:2]) for run in runs]}
    return _PAGE.format(
        title=html.escape(title),
        style=_asset("timeline.css"),
        figures=_figures(runs),
        pick=_pick(runs),
        legend=_legend(),
        data=_embedded(data),
        script=_asset("timeline.js"),
    )


def run_page(run: RunDir) -> str:
    """The page of a real run, from its directory; it may be running, over, or dead.

    Raises:
        UserError: the directory has no readable config.yaml.
    """
    config = load(run.config)
    settings = Settings.of(config)
    timeline = fold(read_events(run.events), settings.slots, settings.max_lag, settings.trainers)
    return page(f"{run.name}", [(run.name, timeline, run_figures(summarise(run)))])


def run_figures(summary: dict[str, Any]) -> dict[str, str]:
    """What the head of a run's page says, from its summary."""
    executions, staleness = summary["executions"], [s for s in summary["staleness"] if s is not None]
    rewards = [r for r in summary["reward"] if r is not None]
    busy, after = summary["gpu_busy_fraction"], summary["gpu_busy_fraction_after_start"]
    figures = {
        "ended": summary["ended"],
        "time": words.duration(summary["seconds"]),
        "updates": str(summary["updates"]),
        "policy": str(summary["policy_version"]),
        "executions": f"{executions['finished']:,} of {executions['dispatched']:,} finished",
        "tokens a second": f"{summary['tokens_per_second']:,.1f}",
        "moves": f"{len(summary['moves'])}, {summary['abandoned_moves']} taken back",
        "suspensions": str(sum(summary["suspensions"])),
    }
    if rewards:
        figures["reward"] = f"{rewards[0]:.3f} at first, {rewards[-1]:.3f} at last"
    if staleness:
        figures["staleness"] = f"{sum(staleness) / len(staleness):.2f} in the mean, {max(staleness):.2f} at most"
    if busy is not None:
        figures["cells busy"] = f"{busy:.0%}" + ("" if after is None else f", {after:.0%} once started")
    if len(summary["attempts"]) > 1:
        figures["attempts"] = str(len(summary["attempts"]))
    return figures


# -- numbers ---------------------------------------------------------------------------------------------------------
def _packed(name: str, line: Timeline) -> dict[str, Any]:
    reasons = _Reasons()

    def tenths(t: float) -> int:
        return round((t - line.start) * 10)

    return {
        "name": name,
        "cells": line.cells,
        "start": round(line.start, 1),
        "unix": line.start > 1e9,  # simulated time begins at 0
        "length": tenths(line.end),
        "rows": [list(_packed_row(row, tenths, reasons)) for row in line.rows],
        "reasons": reasons.texts,
        "curves": {
            curve: _packed_steps(thinned(getattr(line, curve), MAX_POINTS), tenths)
            for curve in ("capacity", "waterlevel", "running", "ready")
        },
        "published": [[tenths(t), version] for t, version in line.published],
        "attempts": [[tenths(a.start), a.number, a.version, a.how] for a in line.attempts],
    }


class _Reasons:
    """Reasons of moves, each once; 0 is none."""

    def __init__(self) -> None:
        self.texts = [""]
        self._index = {"": 0}

    def index(self, text: str) -> int:
        if text not in self._index and len(self.texts) >= MAX_REASONS:
            text = re.sub(r"\d+", "N", text)
        if text not in self._index:
            self._index[text] = len(self.texts)
            self.texts.append(text)
        return self._index[text]


def _packed_row(row: Sequence[Any], tenths: Any, reasons: _Reasons) -> Iterator[int]:
    for segment in row:
        length = tenths(segment.end) - tenths(segment.start)
        if length > 0:
            yield length
            yield segment.state + 8 * reasons.index(segment.reason)


def _packed_steps(steps: Steps, tenths: Any) -> list[int]:
    packed, before = [], 0
    for t, value in zip(steps.times, steps.values, strict=True):
        packed += [tenths(t) - before, value]
        before = tenths(t)
    return packed


def thinned(steps: Steps, points: int) -> Steps:
    """A step curve with at most `points` points that looks the same: no extreme of it is lost.

    Its time is cut into equal parts; of each part the first and last points stay, and the lowest and highest.
    """
    if len(steps.times) <= points:
        return steps
    parts = points // 4
    start, width = steps.times[0], (steps.times[-1] - steps.times[0]) / parts
    of_part: dict[int, list[int]] = {}
    for i, t in enumerate(steps.times):
        of_part.setdefault(min(parts - 1, int((t - start) / width)), []).append(i)
    kept: list[int] = []
    for some in of_part.values():
        kept += sorted(
            {some[0], some[-1], min(some, key=steps.values.__getitem__), max(some, key=steps.values.__getitem__)}
        )
    return Steps([steps.times[i] for i in kept], [steps.values[i] for i in kept])


# -- text ------------------------------------------------------------------------------------------------------------
def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _embedded(data: Any) -> str:
    """JSON that nothing in it can end the element that it stands in."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _pick(runs: Sequence[Run]) -> str:
    if len(runs) < 2:
        return ""
    options = "".join(f'<option value="{i}">{html.escape(name)}</option>' for i, (name, _, _) in enumerate(runs))
    return f'<label>run <select id="pick">{options}</select></label>'


def _figures(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        parts = (f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in runs[0][2].items())
        return f"<dl>{''.join(parts)}</dl>"
    keys = list(dict.fromkeys(key for _, _, figures in runs for key in figures))
    head = "".join(f'<th scope="col" data-run="{i}">{html.escape(name)}</th>' for i, (name, _, _) in enumerate(runs))
    rows = (
        f'<tr><th scope="row">{html.escape(key)}</th>'
        + "".join(f'<td data-run="{i}">{html.escape(f.get(key, "-"))}</td>' for i, (_, _, f) in enumerate(runs))
        + "</tr>"
        for key in keys
    )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _legend() -> str:
    states = [f'<span><i style="background:var(--s{s})"></i>{_STATES[s]}</span>' for s in CellState]
    curves = [f'<span><i class="curve" style="background:var(--{c})"></i>{text}</span>' for c, text in _CURVES.items()]
    return "".join(states + curves)


# The policy forbids the page to load anything at all, so that a slip above cannot make it depend on a network.
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<h1>{title}</h1>
{figures}
<div class="bar">{pick}<button id="in" title="zoom in">+</button><button id="out" title="zoom out">&minus;</button>
<button id="all">whole run</button>
<label><input type="checkbox" id="stack"> cells stacked by state</label></div>
<div class="bar">{legend}</div>
<p id="empty" hidden>Nothing has happened yet.</p>
<div id="chart"><canvas id="base"></canvas>
<canvas id="over" tabindex="0" role="img"
aria-label="cells over time by state, waterlevel against capacity, ready groups"></canvas>
<div id="tip" hidden></div></div>
<p class="hint">Drag to zoom in, double-click for the whole run; keys + &minus; 0 and arrows, or Ctrl and Shift with the
wheel. Dashed lines: policies published. Solid lines: attempts.</p>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""

"""Draws docs/live-view.svg with the code of the live view, from the recorded moment of a run in docs/sample-run/.

    python docs/make_pictures.py                    draw again (after a change of the view)
    python docs/make_pictures.py --record RUN_DIR   wait for a good moment of a run that is going on, record it, draw

What is recorded is config.yaml, status.json and the events that the view needs, without paths and node names.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from pathlib import Path

import yaml
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from gyre.live_view import render
from gyre.progress import RunReader
from gyre.run_dir import RunDir, read_events
from gyre.status import RunStatus, encode

DOCS = Path(__file__).resolve().parent
SAMPLE = DOCS / "sample-run"
PICTURE = DOCS / "live-view.svg"
WIDTH, HEIGHT = 108, 24

#: Events of these kinds are only worth keeping where they are recent.
_NOISE = {"execution_granted", "execution_closed", "group_built", "rank_ready", "usage", "gate_reason", "role_reached"}

_COLOURS = ((60, 64, 72), (224, 92, 92), (126, 191, 110), (222, 184, 92), (96, 150, 224), (178, 132, 214))
_DARK = TerminalTheme((24, 26, 31), (216, 219, 226), [*_COLOURS, (92, 184, 192), (216, 219, 226)])

#: rich's own template loads a font from the network; this one takes what the reader has.
_SVG = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def draw() -> str:
    """The picture as SVG; the same on every machine."""
    os.environ["TZ"] = "UTC"
    time.tzset()
    reader = RunReader(SAMPLE)
    reader.poll(0.0, 0.0)
    assert reader.status is not None
    now = reader.status.time
    picture = reader.picture(now, 0.0)
    assert picture is not None
    console = Console(
        file=io.StringIO(), record=True, width=WIDTH, height=HEIGHT, force_terminal=True, color_system="truecolor",
        legacy_windows=False, _environ={},
    )  # fmt: skip
    console.print(render(picture, WIDTH, HEIGHT))
    svg = console.export_svg(title=f"launch.py watch logs/{reader.status.name}", theme=_DARK, code_format=_SVG)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def _is_good(status: RunStatus, update: int) -> bool:
    """Whether the view shows what is special: in one moment, cells that train, and one that serves running agents."""
    cells = [rank for rank in status.ranks if rank.kind in ("core", "satellite")]
    training = sum(rank.state == "TRAINING" for rank in cells)
    serving = any(rank.state == "ROLLOUT" and rank.live for rank in cells)
    stream = status.stream
    current = status.scheduler.update == stream.update >= update and stream.claimed > 0
    return current and training > 0 and serving


def record(run_dir: Path, update: int, name: str | None = None) -> None:
    """Wait for a good moment from update `update` on, and keep it, with `name` for the run's."""
    run = RunDir(run_dir)
    reader = RunReader(run.path)
    while True:
        reader.poll(time.time(), time.monotonic())
        status = reader.status
        if status is not None and _is_good(status, update):
            break
        if status is not None and status.final:
            sys.exit(f"{run.path} ended before a good moment came")
        time.sleep(0.2)
    SAMPLE.mkdir(exist_ok=True)
    config = yaml.safe_load(run.config.read_text())
    config["root"] = "/"
    config["name"] = status.name = name or status.name
    (SAMPLE / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    for rank in status.ranks:
        rank.node = "node"
    (SAMPLE / "status.json").write_text(encode(status) + "\n")
    events = [e for e in read_events(run.events) if e["t"] <= status.time]
    kept = [e for e in events if e["kind"] not in _NOISE]
    for event in kept:
        event.update({key: "node" for key in ("node", "url") if key in event})
    (SAMPLE / "events.jsonl").write_text("".join(json.dumps(e, separators=(",", ":")) + "\n" for e in kept))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--record", type=Path, metavar="RUN_DIR", help="a run that is going on")
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    parser.add_argument("--update", type=int, default=4, help="the earliest update to record (default 4)")
    parser.add_argument("--name", help="how the picture calls the run; its own name by default")
    arguments = parser.parse_args()
    if arguments.record is not None:
        record(arguments.record, arguments.update, arguments.name)
    if arguments.check:
        sys.exit(0 if PICTURE.read_text() == draw() else f"{PICTURE} is not current; run python {__file__}")
    PICTURE.write_text(draw())
    print(f"drew {PICTURE}")


if __name__ == "__main__":
    main()

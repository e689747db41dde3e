"""Where the proxy's processor time goes: `python benchmarks/_samples.py OUT` is the proxy, sampled.

A timer of the process's own processor time goes off 500 times a second, and the line the proxy is at is counted then,
under a stage. Written to OUT as JSON when the process is told to end.
"""

from __future__ import annotations

import json
import linecache
import os
import re
import runpy
import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

INTERVAL_S = 0.002
_ROOT = str(Path(__file__).resolve().parents[1])
#: The first that fits the line counts, from the innermost frame outwards.
_CALLS = (
    ("JSON decode", re.compile(r"\bloads\(|[dD]ecode(r\.decode)?\(|_decode\w*\(")),
    ("JSON encode", re.compile(r"\bdumps\(|[eE]ncode(r\.encode)?\(|json_response\(")),
    ("write to sockets", re.compile(r"\.write\(|\.writelines\(|\.write_eof\(|\.send\(")),
)
_ROOMS = (
    ("HTTP with clients", re.compile(r"aiohttp/(web|http_writer|abc)|gyre/proxy/http")),
    ("HTTP with engines", re.compile(r"aiohttp/|/yarl/|/multidict/|gyre/proxy/(upstream|connection)")),
    ("record", re.compile(r"gyre/(proxy/recorder|trajectories/)")),
    ("check and rebuild the answer", re.compile(r"gyre/proxy/(sound|chat|answer|history|dialects)")),
    ("relay", re.compile(r"gyre/proxy/(relay|legs|executions|routing)")),
    ("serve", re.compile(r"gyre/proxy/")),
)


def stage(frame: FrameType | None) -> str:
    """What is being done at a frame."""
    innermost = True
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_ROOT) or "site-packages" in path:
            line = linecache.getline(path, frame.f_lineno)
            if path.startswith(_ROOT) or innermost:
                for name, call in _CALLS:
                    if call.search(line):
                        return name
            for name, room in _ROOMS:
                if room.search(path):
                    return name
            innermost = False
        frame = frame.f_back
    return "event loop"


class Sampler:
    """Counts where the process is."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._stages: Counter[str] = Counter()
        self._lines: Counter[str] = Counter()

    def start(self) -> None:
        """Count from now on, and write it all down at the end."""
        signal.signal(signal.SIGPROF, self._sample)
        signal.signal(signal.SIGTERM, self._end)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        self._stages[stage(frame)] += 1
        if frame is not None:
            path = "/".join(frame.f_code.co_filename.split("/")[-2:])
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self._lines[f"{path}:{frame.f_lineno} {frame.f_code.co_name}: {text}"] += 1

    def _end(self, number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        figures: dict[str, Any] = {"stages": self._stages.most_common(), "lines": self._lines.most_common(40)}
        Path(self._out).write_text(json.dumps(figures))
        os._exit(0)


if __name__ == "__main__":
    Sampler(sys.argv[1]).start()
    runpy.run_module("gyre.proxy.server", run_name="__main__")

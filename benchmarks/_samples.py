"""Where the proxy's processor time goes: `python benchmarks/_samples.py OUT` is the proxy, sampled.

A timer of the process's own processor time goes off 500 times a second, and the line the proxy is at is counted then,
under a stage. It runs from one SIGUSR1 to the next, and then what was counted is in OUT, as JSON.
"""

from __future__ import annotations

import json
import linecache
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
_DEPTH = 16
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


#: Frames of one moment, from the innermost outwards: file and line.
Stack = tuple[tuple[str, int], ...]


def stage(stack: Stack) -> str:
    """What is being done at a moment."""
    innermost = True
    for path, number in stack:
        if path.startswith(_ROOT) or "site-packages" in path:
            if innermost or path.startswith(_ROOT):
                line = linecache.getline(path, number)
                for name, call in _CALLS:
                    if call.search(line):
                        return name
            for name, room in _ROOMS:
                if room.search(path):
                    return name
            innermost = False
    return "event loop"


class Sampler:
    """Counts where the process is."""

    def __init__(self, out: str) -> None:
        self._out = out
        self._stacks: Counter[Stack] = Counter()
        self._counting = False
        signal.signal(signal.SIGPROF, self._sample)
        signal.signal(signal.SIGUSR1, self._turn)

    def _turn(self, number: int, frame: FrameType | None) -> None:
        """Begin to count, or end it and write down what was counted."""
        self._counting = not self._counting
        interval = INTERVAL_S if self._counting else 0.0
        signal.setitimer(signal.ITIMER_PROF, interval, interval)
        if not self._counting:
            stages: Counter[str] = Counter()
            lines: Counter[str] = Counter()
            for stack, count in self._stacks.items():
                stages[stage(stack)] += count
                path, number = stack[0]
                lines[f"{'/'.join(path.split('/')[-2:])}:{number} {linecache.getline(path, number).strip()}"] += count
            figures: dict[str, Any] = {"stages": stages.most_common(), "lines": lines.most_common(60)}
            part = Path(self._out + ".part")
            part.write_text(json.dumps(figures))
            part.rename(self._out)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        stack = []
        while frame is not None and len(stack) < _DEPTH:
            stack.append((frame.f_code.co_filename, frame.f_lineno or 0))
            frame = frame.f_back
        if stack:
            self._stacks[tuple(stack)] += 1


if __name__ == "__main__":
    Sampler(sys.argv[1])
    runpy.run_module("gyre.proxy.server", run_name="__main__")

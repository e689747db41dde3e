"""What the scheduler and its simulator cost at 1,000 cells, and how the cost grows from 125 cells on.

    python benchmarks/scale.py                                      all of it, a few minutes
    python benchmarks/scale.py --policies elastic --cells 125,1000  less
    python benchmarks/scale.py --quick                              up to 250 cells, once

1,000 cells of 16 slots, 10 batches of 20,000 executions in groups of 4, which take as long as those of a trace of
real agents. Fewer cells get as much less to do, so the reference is the smallest number of cells: an event there should
cost what it costs at 1,000. Every simulation is a process of its own, of one thread; each is done once as it is, for
its time and memory, and once with a clock around every event and every question to the policy. What is compared is
time of the processor, so that what else the machine does is left out; Python's garbage collector is in.

One event can lead to many decisions: a commit ends a burst, and with it the stay of all cells in training, and
dispatches the next batch. So beside the time of a whole event stands its time for each decision made in it: an
execution dispatched, granted, moved or closed, a cell ordered somewhere; none is counted as one.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from _common import COSTS, TRACES, keep, parser
from rich.console import Console
from rich.table import Table

from gyre.events import Event
from gyre.scheduler import acts, rules, starvation
from gyre.scheduler import commands as c
from gyre.scheduler.policy import Policy
from gyre.scheduler.state import SchedulerState
from gyre.simulate.compare import VARIANTS, Scenario, work_of
from gyre.simulate.trace import load, shuffled
from gyre.simulate.world import World

TRACE = TRACES[0]
SLOTS, GROUP_SIZE, BATCHES, LOOKAHEAD = 16, 4, 10, 0.25
EXECUTIONS_A_CELL = 20  # of a batch
POLICIES = ("elastic", "async-stream", "colocate")
PROCESSOR_S, MEMORY_MB, DECISION_US = 60.0, 1000.0, 1000.0
QUANTILES = {"p50": 0.5, "p99": 0.99, "p99.9": 0.999}

Figures = dict[str, Any]


# -- one simulation ----------------------------------------------------------------------------------------------------
def one(policy: str, cells: int, timed: bool) -> Figures:
    """Simulate, in this process; with clocks if `timed`."""
    trace, variant = load(TRACE), VARIANTS[policy]
    trace = replace(trace, groups=tuple(group[:GROUP_SIZE] for group in trace.groups))
    batch = cells * EXECUTIONS_A_CELL // GROUP_SIZE
    scenario = Scenario(cells, SLOTS, batch, BATCHES, LOOKAHEAD, 0.5, COSTS)
    settings = scenario.settings(GROUP_SIZE, variant, round(cells / 1.5) if variant.split else None)
    groups = shuffled(trace, BATCHES * batch, random.Random(0))
    work = work_of(scenario, trace, groups)
    clocks = Clocks() if timed else None
    asked = clocks.around(variant.policy) if clocks else variant.policy
    state = SchedulerState(settings, asked, lambda number: id(groups[number]))
    if clocks:
        state.handle = clocks.handle(state.handle)  # type: ignore[method-assign]
    began, began_cpu = time.perf_counter(), time.process_time()
    world = World(settings, work, COSTS, state).run()
    seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    return {
        "executions": state.level.f,
        "events": world.decisions,
        "moves": world.tally.moves,
        "simulated_s": world.now,
        "wall_s": seconds,
        "cpu_s": cpu,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        **(clocks.figures() if clocks else {}),
    }


class Clocks:
    """Processor time of every event handled, and of every question to the policy."""

    def __init__(self) -> None:
        self._events: list[int] = []  # nanoseconds
        self._decisions: list[float] = []
        self._questions: list[int] = []
        self._longest: tuple[int, str, list[c.Command]] = (0, "", [])
        self._asked_at = 0

    def handle(self, call: Callable[[Event, float], list[c.Command]]) -> Callable[[Event, float], list[c.Command]]:
        """`SchedulerState.handle` with a clock."""

        def handle(event: Event, now: float) -> list[c.Command]:
            began = time.thread_time_ns()
            commands = call(event, now)
            took = time.thread_time_ns() - began
            self._events.append(took)
            self._decisions.append(took / max(1, sum(decisions(commands).values())))
            if took > self._longest[0]:
                self._longest = (took, event.kind, commands)
            return commands

        return handle

    def around(self, policy: Policy) -> Policy:
        """The policy with a clock that runs from when its numbers are gathered until it has answered."""
        gather, clocks = acts.view, self

        def view(state: SchedulerState, now: float) -> Any:
            self._asked_at = time.thread_time_ns()
            return gather(state, now)

        for module in (acts, rules, starvation):  # all that ask
            module.view = view

        class Timed:
            def __getattr__(self, name: str) -> Any:
                answer = getattr(policy, name)
                return timed(answer) if callable(answer) and name != "threshold" else answer

        def timed(answer: Callable[..., Any]) -> Callable[..., Any]:
            def ask(*arguments: Any) -> Any:
                answered = answer(*arguments)
                clocks._questions.append(time.thread_time_ns() - clocks._asked_at)
                return answered

            return ask

        return Timed()  # type: ignore[return-value]

    def figures(self) -> Figures:
        """Distributions in microseconds, and the longest event."""
        took, kind, commands = self._longest
        made = ", ".join(f"{count:,} {what}" for what, count in decisions(commands).items())
        return {
            "event_us": distribution(self._events),
            "decision_us": distribution(self._decisions),
            "question_us": distribution(self._questions),
            "over": sum(1 for ns in self._events if ns > 1000 * DECISION_US),
            "longest": f"{took / 1e6:.1f} ms for {kind}: {made or 'nothing'}",
        }


def decisions(commands: list[c.Command]) -> Counter[str]:
    """What was decided, by kind."""
    made: Counter[str] = Counter()
    for command in commands:
        match command:
            case c.Dispatch():
                made["dispatched"] += len(command.executions)
            case c.Grant():
                made["granted"] += 1
            case c.Finished() | c.Close():
                made["closed"] += 1
            case c.Route():
                made["executions moved"] += len(command.moves)
            case c.OrderRole() | c.OrderSync() | c.Train():
                made["orders to cells"] += 1
    return +made


def distribution(nanoseconds: list[Any]) -> dict[str, float]:
    """Mean, quantiles and maximum, in microseconds."""
    ordered = sorted(nanoseconds)
    figures = {"mean": sum(ordered) / len(ordered)}
    figures |= {name: ordered[int(share * (len(ordered) - 1))] for name, share in QUANTILES.items()}
    figures["max"] = ordered[-1]
    return {name: value / 1000 for name, value in figures.items()} | {"count": len(ordered)}


# -- all of them -------------------------------------------------------------------------------------------------------
def fresh(policy: str, cells: int, timed: bool) -> Figures:
    """The figures of a simulation in a process of its own."""
    options = ["--one", policy, "--cells", str(cells), *(["--timed"] if timed else [])]
    done = subprocess.run([sys.executable, __file__, *options], stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)


def measured(policy: str, cells: int, repeats: int) -> Figures:
    """The fastest of a few runs."""
    return min(
        (fresh(policy, cells, False) for _ in range(repeats)), key=lambda figures: figures["cpu_s"]
    )  # the one least disturbed


def growth(console: Console, policy: str, sizes: list[int], repeats: int) -> list[Figures]:
    """Measure and print a policy at every number of cells."""
    columns = ("cells", "executions", "events", "moves", "wall", "processor", "events/s", "us an event", "x", "peak")
    table = Table(*columns, title=policy, title_justify="left", box=None)
    rows = [{"policy": policy, "cells": cells, **measured(policy, cells, repeats)} for cells in sizes]
    for row in rows:
        row["event_cost_us"] = 1e6 * row["cpu_s"] / row["events"]
        row["times_smallest"] = row["event_cost_us"] / rows[0]["event_cost_us"]
        table.add_row(
            f"{row['cells']:,}",
            f"{row['executions']:,}",
            f"{row['events']:,}",
            f"{row['moves']:,}",
            f"{row['wall_s']:.1f} s",
            f"{row['cpu_s']:.1f} s",
            f"{row['events'] / row['wall_s']:,.0f}",
            f"{row['event_cost_us']:.1f}",
            f"{row['times_smallest']:.2f}",
            f"{row['peak_mb']:.0f} MB",
        )
    console.print(table)
    return rows


def decided(console: Console, policy: str, cells: int) -> Figures:
    """Measure and print how long events, decisions and questions take."""
    figures = fresh(policy, cells, True)
    table = Table("us of processor time", title=f"{policy}, {cells:,} cells", title_justify="left", box=None)
    for name in ("count", "mean", *QUANTILES, "max"):
        table.add_column(name, justify="right")
    for what, key in (
        ("a question to the policy", "question_us"),
        ("an event, for each decision", "decision_us"),
        ("an event", "event_us"),
    ):
        values = figures[key]
        table.add_row(what, f"{values['count']:,}", *(f"{values[n]:,.1f}" for n in ("mean", *QUANTILES, "max")))
    console.print(table)
    console.print(
        f"  {figures['over']:,} events took more than {DECISION_US / 1000:g} ms; the longest: {figures['longest']}\n"
    )
    return figures


def judge(console: Console, largest: list[Figures]) -> None:
    """Print what was used of what is allowed at 1,000 cells."""
    for what, worst, limit, unit in (
        ("processor time of a simulation", max(row["cpu_s"] for row in largest), PROCESSOR_S, "s"),
        ("memory", max(row["peak_mb"] for row in largest), MEMORY_MB, "MB"),
        ("a decision, 99.9 in 100", max(row["decision_us"]["p99.9"] for row in largest), DECISION_US, "us"),
    ):
        console.print(f"{what}: {worst:,.1f} {unit}, which is {worst / limit:.3f} of the {limit:g} {unit} allowed")


def main() -> None:
    """Measure, print, and keep what was measured."""
    asked = parser(__doc__)
    asked.add_argument("--policies", default=",".join(POLICIES))
    asked.add_argument("--cells", default="125,250,500,1000", help="the first is the reference")
    asked.add_argument("--repeats", type=int, default=2, help="of every simulation; the fastest counts")
    asked.add_argument("--one", metavar="POLICY", help=argparse.SUPPRESS)
    asked.add_argument("--timed", action="store_true", help=argparse.SUPPRESS)
    options = asked.parse_args()
    sizes = [int(cells) for cells in options.cells.split(",")]
    if options.one:
        json.dump(one(options.one, sizes[0], options.timed), sys.stdout)
        return
    repeats = options.repeats
    if options.quick:
        sizes, repeats = [cells for cells in sizes if cells <= 250] or sizes[:1], 1
    console, kept = Console(highlight=False, width=120), []
    for policy in options.policies.split(","):
        rows = growth(console, policy, sizes, repeats)
        timed = decided(console, policy, sizes[-1])
        rows[-1] |= {key: timed[key] for key in ("event_us", "decision_us", "question_us", "over", "longest")}
        kept += rows
    keep(options.json, kept)
    if not options.quick:
        judge(console, [row for row in kept if row["cells"] == sizes[-1]])


if __name__ == "__main__":
    main()

"""Elastic against the other policies in real time: one scaled-down trace, timed cells, everything else as in any run.

    python benchmarks/elastic.py                                   all policies, about 18 minutes
    python benchmarks/elastic.py --policies elastic,colocate --seconds 120 --json out.json
    python benchmarks/elastic.py --quick                           elastic and colocated, three batches, two minutes

All policies run the same executions in the same order (no task comes twice, so that none is known to be long); the
reference is elastic, in the same go. Of the fixed splits the one that the simulator finds best is run. A policy's
makespan is the time from the first grant to the last commit. Beside the measured ratio stands the one that
`gyre.simulate.compare` gives for the same settings, with the costs as they were in the run: what a move, an update's
end and an execution's start took. A table says what each of those costs is worth, by simulating without it and with it.

It exits with 1 where an aim is missed: elastic at least 1.25 times as fast as colocated, and every measured ratio
within 10 % of the simulated one. The runs of --quick are too short for that, and are not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import yaml
from _common import ROOT, TRACES, keep, parser

from gyre import config as configuration
from gyre.config import Config
from gyre.errors import UserError
from gyre.run_dir import RunDir, read_events
from gyre.scheduler.policy import Elastic, policy_of
from gyre.scheduler.settings import Settings
from gyre.simulate.compare import VARIANTS, Scenario, Variant, splits
from gyre.simulate.compare import simulate as simulated
from gyre.simulate.costs import Costs
from gyre.simulate.trace import load
from gyre.simulate.workload import Entry, Trace

TRACE = TRACES[0]
CELLS, SLOTS, BATCH_GROUPS, TRAIN_RATIO = 4, 4, 8, 0.5
SWITCH = (8.5, 3.5)  # seconds of the trace that a move to training and one back take
SUPPLY, HOLD = 0.25, 10.0  # of a batch, and seconds of the trace that it must have held
RATE = 20.0  # tokens a second
ELASTIC_AIM, RATIO_AIM = 1.25, 0.10  # x colocated at least; how far measured ratios may be from simulated ones
LATE_SECONDS = 1.0  # a cell in training that joins nothing for so long had nothing to join

WHOLE = {"seconds": 170.0, "batches": 6, "policies": "elastic,colocate,async-stream,async"}
QUICK = {"seconds": 30.0, "batches": 3, "policies": "elastic,colocate"}

Record = dict[str, Any]


# -- what is run -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plan:
    """One trace made shorter: `scale` seconds of a run for one of the trace; a training batch is `BATCH_GROUPS`."""

    trace: Path
    scale: float
    batches: int
    size: int  # executions of a group
    mean_s: float  # of an execution of the trace, scaled
    lookahead: float
    seed: int

    @classmethod
    def of(cls, asked: argparse.Namespace) -> Plan:
        """Scale the trace so that all work together takes the asked time when every slot is always busy."""
        trace = load(asked.trace)
        executions = asked.batches * BATCH_GROUPS * trace.size
        mean_s = asked.seconds * CELLS * SLOTS / (1 + TRAIN_RATIO) / executions
        scale = mean_s / trace.mean_rollout_s
        return cls(Path(asked.trace), scale, asked.batches, trace.size, mean_s, asked.lookahead, asked.seed)

    @property
    def row_seconds(self) -> float:
        """Cell-seconds of training for each execution."""
        return TRAIN_RATIO * self.mean_s / SLOTS

    def write_tasks(self, path: Path) -> list[list[int]]:
        """Write the tasks of all batches; returns the tokens of each group's executions."""
        program = [sys.executable, str(ROOT / "examples/timed/make_tasks.py"), str(self.trace)]
        numbers = {"scale": self.scale, "groups": self.batches * BATCH_GROUPS, "tokens-per-second": RATE}
        numbers["seed"] = self.seed
        flags = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
        made = subprocess.run([*program, *flags], capture_output=True, text=True, check=True).stdout
        path.write_text(made)
        return [json.loads(line)["tokens"] for line in made.splitlines()]

    def scenario(self, costs: Costs) -> Scenario:
        """What the simulator is told."""
        return Scenario(
            cells=CELLS,
            slots=SLOTS,
            batch_groups=BATCH_GROUPS,
            updates=self.batches,
            lookahead=self.lookahead,
            costs=costs,
            supply_fraction=SUPPLY,
            supply_hold=HOLD * self.scale,
            in_order=True,
        )

    def expected_costs(self) -> Costs:
        """Before a run: what is configured."""
        to_training, to_rollout = SWITCH
        return Costs(to_training * self.scale, to_rollout * self.scale, micro_steps=self.size)

    def config(self, tasks: Path, variant: Variant, rollout_cells: int | None) -> dict[str, Any]:
        """The configuration of a run."""
        data = yaml.safe_load((ROOT / "configs/timed.yaml").read_text())
        to_training, to_rollout = SWITCH
        data["tasks"] |= {"path": str(tasks)}
        data["cells"] |= {"count": CELLS, "slots": SLOTS}
        data["engine"]["timed"] = {
            "tokens_per_second": RATE,
            "sleep_seconds": to_training * self.scale,
            "wake_seconds": to_rollout * self.scale,
        }
        data["scheduler"] = {
            "batch_groups": BATCH_GROUPS,
            "group_size": self.size,
            "lookahead": self.lookahead,
            "supply_fraction": SUPPLY,
            "supply_hold": HOLD * self.scale,
            "policy": variant.policy.name,
            **({} if rollout_cells is None else {"rollout_cells": rollout_cells}),
            **switches(variant),
        }
        staleness = max(2, int(self.lookahead) + 2)
        timed = {"seconds_per_row": self.row_seconds}
        data["train"] |= {"updates": self.batches, "timed": timed, "max_staleness": staleness}
        return data | {"root": str(ROOT)}


def switches(variant: Variant) -> dict[str, Any]:
    """The configuration of an elastic policy's switches."""
    policy = variant.policy
    if not isinstance(policy, Elastic):
        return {}
    switched = {"gain": policy.gain, "stay": policy.stay, "give_back": policy.give_back}
    switched |= {"at_once": policy.at_once, "longest_first": variant.longest_first}
    return {"elastic": switched | {"adapt_lookahead": variant.adapt_lookahead}}


def run(data: dict[str, Any], name: str) -> RunDir:
    """Run a configuration to its end.

    Raises:
        UserError: the run did not complete.
    """
    place = ROOT / "logs" / f"{name}.yaml"
    place.write_text(yaml.safe_dump(data))
    try:
        command = [sys.executable, str(ROOT / "launch.py"), "run", str(place), "--name", name]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    finally:
        place.unlink()
    if done.returncode:
        raise UserError(f"the run {name} ended with {done.returncode}; see logs/{name}\n{done.stdout[-2000:]}")
    return RunDir(ROOT / "logs" / name)


# -- what was measured -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Measured:
    """Seconds of one run, from its events; medians, but for the makespan."""

    makespan: float
    to_training: float  # from the order of a move until the cell can claim
    to_rollout: float  # from the order until its engine serves
    step: float  # from an update's last micro-step to its published policy: reduce, step, snapshot, commit
    start: float  # of an execution's slot time, what its tokens do not take: start, scorer, news
    rerouted: float  # the same of an execution whose requests moved, beyond `start`
    micro_step: float  # that a micro-step took beyond what it was to take
    sync: float  # an engine in rollout loads a policy
    moves: int
    executions_rerouted: int


class Reading:
    """The events of a run, by kind."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._by_kind: dict[str, list[Record]] = {}
        for record in records:
            self._by_kind.setdefault(record["kind"], []).append(record)

    def of(self, kind: str) -> list[Record]:
        """Events of a kind, in their order."""
        return self._by_kind.get(kind, [])

    def following(self, event: Record, *kinds: str, **wanted: Any) -> float | None:
        """Seconds until the next event of some kinds with these values."""
        later = (
            other["t"] - event["t"]
            for kind in kinds
            for other in self.of(kind)
            if other["t"] >= event["t"] and all(other.get(key) == value for key, value in wanted.items())
        )
        return min(later, default=None)

    @property
    def makespan(self) -> float:
        """Seconds from the first grant to the last commit."""
        return self.of("policy_committed")[-1]["t"] - self.of("execution_granted")[0]["t"]


def _median(values: Iterable[float | None]) -> float:
    known = [value for value in values if value is not None]
    return median(known) if known else 0.0


def _ends(events: Reading) -> Iterator[float | None]:
    """What the ends of updates took."""
    for done in events.of("update_done"):
        published = events.following(done, "policy_published")
        if published is not None:
            stages = (done["metrics"].get(f"seconds_{stage}", 0.0) for stage in ("reduce", "step", "snapshot"))
            yield published + sum(stages)


def _moves(events: Reading, target: str) -> Iterator[float | None]:
    """What the moves to a role took."""
    for move in events.of("move_started"):
        rank = move["rank"]
        if move["target"] != target:
            continue
        if target == "rollout":
            yield events.following(move, "role_reached", rank=rank, state="ROLLOUT")
        else:
            reached = events.following(move, "role_reached", rank=rank, state="TRAINING")
            if rank:
                joined = events.following(move, "cell_joined", rank=rank)
            else:
                joined = events.following(move, "update_opened")
            # a cell that trains before there is anything to train on joins when there is
            late = joined is None or reached is None or joined - reached > LATE_SECONDS
            yield reached if late else joined


def _syncs(events: Reading) -> Iterator[float]:
    """What engines in rollout took for a new policy, one after the other."""
    synced = [event["t"] for event in events.of("role_reached") if event.get("detail") == "synced"]
    published = [event["t"] for event in events.of("policy_published")]
    for t in synced:
        if before := [other for other in (*synced, *published) if other < t]:
            yield t - max(before)


def measure(records: Iterable[Record], tokens: list[list[int]], row_seconds: float) -> Measured:
    """What a run's events say; `tokens` are those of each group's executions."""
    events = Reading(records)
    granted = {event["n"]: event["t"] for event in events.of("execution_granted")}
    nominal = [count / RATE for group in tokens for count in group]
    over: dict[bool, list[float]] = {True: [], False: []}
    for event in events.of("execution_closed"):
        over[event["rerouted"] > 0].append(event["t"] - granted[event["n"]] - nominal[event["n"]])
    start = _median(over[False])
    excess = (
        done["metrics"].get("seconds_compute", 0.0) / done["micro_steps"]["0"] - row_seconds
        for done in events.of("update_done")
        if done["micro_steps"].get("0")
    )
    return Measured(
        makespan=events.makespan,
        to_training=_median(_moves(events, "training")),
        to_rollout=_median(_moves(events, "rollout")),
        step=_median(_ends(events)),
        start=start,
        rerouted=(mean(over[True]) - start) if over[True] else 0.0,
        micro_step=_median(excess),
        sync=_median(_syncs(events)),
        moves=sum(move["target"] == "training" for move in events.of("move_started")),
        executions_rerouted=len(over[True]),
    )


# -- what is simulated -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """A policy, with the split that it is run with."""

    variant: Variant
    rollout_cells: int | None

    @property
    def name(self) -> str:
        """For tables."""
        return self.variant.name if self.rollout_cells is None else f"{self.variant.name} R={self.rollout_cells}"

    @classmethod
    def best(cls, variant: Variant, plan: Plan, tokens: list[list[int]]) -> Case:
        """The split with the shortest makespan, as simulated with the costs that are configured."""
        trace, scenario = as_trace(plan, tokens), plan.scenario(plan.expected_costs())
        found = {split: simulated(scenario, trace, variant, Random(0), split) for split in splits(scenario, variant)}
        return cls(variant, min(found, key=lambda split: found[split].makespan_s))

    def agree(self, plan: Plan, config: Config) -> None:
        """Raise where the run and its simulation would not decide alike."""
        here, there = Settings.of(config), plan.scenario(Costs()).settings(plan.size, self.variant, self.rollout_cells)
        kept = {
            name: getattr(there, name) for name in ("hosts", "host_executions", "max_staleness", "max_lag", "tries")
        }
        if replace(here, **kept) != there or policy_of(config) != self.variant.policy:
            raise UserError(f"{self.name}: configured {here}, {policy_of(config)}; simulated {there}")


def as_trace(plan: Plan, tokens: list[list[int]], start: float = 0.0, micro_step: float = 0.0) -> Trace:
    """The executions of a run, which begin `start` seconds late; so does each micro-step."""
    entries = [
        tuple(Entry(count / RATE + start, train_s=plan.row_seconds + micro_step) for count in group) for group in tokens
    ]
    return Trace(plan.trace.stem, tuple(entries))


def simulate(plan: Plan, case: Case, tokens: list[list[int]], seen: Measured) -> float:
    """The makespan of the same run in virtual time, with the costs of a measured one."""
    costs = Costs(
        to_training_s=seen.to_training,
        to_rollout_s=seen.to_rollout,
        step_s=seen.step,
        sync_s=seen.sync,
        micro_steps=plan.size,
    )
    trace = as_trace(plan, tokens, seen.start, seen.micro_step)
    return simulated(plan.scenario(costs), trace, case.variant, Random(0), case.rollout_cells).makespan_s


#: Costs, in the order in which the table adds them.
PARTS = {
    "moves": ("to_training", "to_rollout"),
    "ends of updates": ("step", "sync"),
    "starts of executions": ("start",),
    "micro-steps": ("micro_step",),
}


def explain(plan: Plan, case: Case, tokens: list[list[int]], seen: Measured) -> dict[str, float]:
    """Simulated makespans: without any cost, and as one cost after the other is added."""
    names = [name for parts in PARTS.values() for name in parts]
    known = replace(seen, **dict.fromkeys(names, 0.0))
    found = {"no costs": simulate(plan, case, tokens, known)}
    for title, parts in PARTS.items():
        known = replace(known, **{name: getattr(seen, name) for name in parts})
        found[f"+ {title}"] = simulate(plan, case, tokens, known)
    return found


# -- the table ---------------------------------------------------------------------------------------------------------
def show(results: dict[str, Record]) -> None:
    """Print what was found."""
    print(f"\n{'':18}{'measured':>10}{'simulated':>11}{'x elastic':>11}{'simulated':>11}{'off by':>9}")
    for name, one in results.items():
        measured, simulated = one["measured"]["makespan"], one["simulated"]
        line = f"{name:18}{measured:9.1f}s{simulated:10.1f}s"
        if "ratio" in one:
            line += f"{one['ratio']:11.3f}{one['ratio_simulated']:11.3f}{one['off']:9.1%}"
        print(line)
    print("\nwhat was measured, median seconds")
    keys = {
        "to_training": "to training",
        "to_rollout": "to rollout",
        "step": "update end",
        "sync": "sync",
        "start": "start",
        "rerouted": "if moved",
        "micro_step": "micro-step",
        "moves": "moves",
        "executions_rerouted": "moved",
    }
    print(f"{'':18}" + "".join(f"{title:>12}" for title in keys.values()))
    for name, one in results.items():
        print(f"{name:18}" + "".join(f"{one['measured'][key]:12.4g}" for key in keys))
    print("\nload of the machine over the last minute of each: ", end="")
    print(", ".join(f"{name} {one['load']:.1f}" for name, one in results.items()))
    print("\nmakespans simulated as costs are added, seconds; 'measured' last")
    for name, one in results.items():
        parts = ", ".join(f"{title} {value:.1f}" for title, value in one["parts"].items())
        print(f"{name:18}{parts}; measured {one['measured']['makespan']:.1f}")


def main() -> int:
    """Run every policy, compare, print."""
    options = parser(__doc__)
    options.add_argument("--trace", default=str(TRACE), help="JSON lines, an execution each: group, rollout_s")
    options.add_argument("--seconds", type=float, help="that all work takes on slots that never wait (170; quick: 30)")
    options.add_argument("--batches", type=int, help="training batches, of 8 groups (6; quick: 3)")
    options.add_argument("--policies", help="which to run (all; quick: elastic,colocate)")
    options.add_argument("--lookahead", type=float, default=0.25)
    options.add_argument("--seed", type=int, default=0)
    asked = options.parse_args()
    for name, value in (QUICK if asked.quick else WHOLE).items():
        if getattr(asked, name) is None:
            setattr(asked, name, value)
    plan = Plan.of(asked)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    print(
        f"{plan.trace.name}: {plan.batches} batches of {BATCH_GROUPS} groups of {plan.size}, {plan.scale:.4f} of their"
    )
    print(f"time ({plan.mean_s:.1f} s an execution on average), {CELLS} cells with {SLOTS} slots, seed {plan.seed}")
    tasks = ROOT / "logs" / f"elastic-{stamp}-tasks.jsonl"
    tokens = plan.write_tasks(tasks)
    results: dict[str, Record] = {}
    try:
        for variant in (VARIANTS[name] for name in asked.policies.split(",")):
            case = Case.best(variant, plan, tokens)
            data = plan.config(tasks, variant, case.rollout_cells)
            case.agree(plan, configuration.build(data))
            print(f"running {case.name} ...", end=" ", flush=True)
            done = run(data, f"elastic-{stamp}-{case.name.replace(' ', '-').replace('=', '')}")
            seen = measure(read_events(done.events), tokens, plan.row_seconds)
            parts = explain(plan, case, tokens, seen)
            result = {"measured": asdict(seen), "simulated": list(parts.values())[-1], "parts": parts}
            results[case.name] = result | {"load": os.getloadavg()[0]}
            print(f"{seen.makespan:.1f} s, simulated {result['simulated']:.1f} s ({done.path.name})", flush=True)
    finally:
        tasks.unlink()
    compare(results)
    show(results)
    keep(asked.json, {"plan": {**asdict(plan), "trace": plan.trace.name}, **results})
    missed = [] if asked.quick else list(aims_missed(results))
    for line in missed:
        print(f"MISSED: {line}")
    return bool(missed)


def aims_missed(results: dict[str, Record]) -> Iterator[str]:
    """What the figures fall short of, a line each."""
    ratio = results.get("colocate", {}).get("ratio")
    if ratio is not None and ratio < ELASTIC_AIM:
        yield f"elastic is {ratio:.3f} times as fast as colocate, not {ELASTIC_AIM:g}"
    for name, one in results.items():
        if abs(one.get("off", 0.0)) > RATIO_AIM:
            yield f"{name}: the measured ratio is {one['off']:+.1%} off the simulated one, more than {RATIO_AIM:.0%}"


def compare(results: dict[str, Record]) -> None:
    """Add to every other policy its ratio to elastic, measured and simulated."""
    if (elastic := results.get("elastic")) is None:
        return
    for name, one in results.items():
        if name != "elastic":
            one["ratio"] = one["measured"]["makespan"] / elastic["measured"]["makespan"]
            one["ratio_simulated"] = one["simulated"] / elastic["simulated"]
            one["off"] = one["ratio"] / one["ratio_simulated"] - 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"elastic: {error}", file=sys.stderr)
        sys.exit(2)

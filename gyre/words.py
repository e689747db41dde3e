"""How numbers, ranks and events read to people. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gyre.config import Config

#: Names of cells that are longer than this are counted instead.
_LONG = 12


def duration(seconds: float) -> str:
    """Seconds as 8.4s, 42s, 3m 07s, 5h 12m or 2d 04h."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes_left = divmod(minutes, 60)
    days, hours_left = divmod(hours, 24)
    if days:
        return f"{days}d {hours_left:02d}h"
    if hours:
        return f"{hours}h {minutes_left:02d}m"
    return f"{minutes}m {rest:02d}s" if minutes else f"{rest}s"


def amount(value: float) -> str:
    """A count as 950, 12.3k or 4.5M."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.1f}{unit}"
    return f"{value:.0f}"


def count(number: int, noun: str) -> str:
    """1 group, 2 groups."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 as 0-2, 5."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" if b > a + 1 else f"{a}, {b}" for a, b in runs)


def rank_kind(config: Config, rank: int) -> str:
    """core, satellite, standalone or host."""
    if rank == 0:
        return "core"
    cells = config.cells
    if rank < cells.count:
        return "satellite"
    return "standalone" if rank < cells.count + cells.standalone else "host"


_NOUN = {"core": "cell", "satellite": "cell", "standalone": "engine", "host": "host"}


def rank_name(config: Config, rank: int) -> str:
    """cell 2, engine 3 or host 4; ranks keep their Slurm number."""
    return f"{_NOUN[rank_kind(config, rank)]} {rank}"


def rank_names(config: Config, ranks: Iterable[int]) -> str:
    """cells 0-2, host 3."""
    sorts: dict[str, list[int]] = {}
    for rank in sorted(set(ranks)):
        sorts.setdefault(_NOUN[rank_kind(config, rank)], []).append(rank)
    return ", ".join(f"{noun}{'s' if len(some) > 1 else ''} {ranges(some)}" for noun, some in sorts.items())


def update_line(
    config: Config, event: dict[str, Any], reward: float | None, joined: Iterable[int], figures: Sequence[str] = ()
) -> str:
    """What an `UpdateDone` says; `figures` are those of `gyre.figures.short`."""
    cells = [0, *joined]
    names = rank_names(config, cells)
    who = names if len(names) <= _LONG else count(len(cells), "cell")
    learnt = ", ".join([*([] if reward is None else [f"reward {reward:.3f}"]), *figures])
    done = f"{who}, {duration(event['seconds'])}"
    return f"update {event['update']} of {config.train.updates}: {learnt}{'; ' if learnt else ''}{done}"


def describe(config: Config, event: dict[str, Any]) -> str | None:
    """One line for an event that people want to know of by itself; None for the others.

    `UpdateDone` is the business of `update_line`, since its reward is not in the event.
    """
    kind = event["kind"]
    if kind == "run_started":
        return f"attempt {event.get('attempt', 1)} " + (
            f"resumes from policy {event['version']}" if event["version"] else "starts"
        )
    if kind == "rank_lost":
        return f"{rank_name(config, event['rank'])} lost: {event['reason']}"
    if kind == "try_failed":
        return f"try {event['try_number']} of execution {event['n']} failed: {event['reason']}"
    if kind == "execution_closed" and event["outcome"] != "completed":
        why = f": {event['reason']}" if event.get("reason") else ""
        return f"execution {event['n']} {event['outcome'].replace('_', ' ')}{why}"
    if kind == "quota_published":
        executions = count(event["last"] - event["first"] + 1, "execution")
        word = {"top_up": "topped up with", "resume": "takes up"}.get(event["reason"], "dispatches")
        return f"batch {event['batch']} {word} {executions}"
    if kind == "group_dropped":
        return f"group {event['group']} dropped: {event['reason']}"
    if kind == "sample_refused":
        return (
            f"group {event['group']}: a sample of {event['tokens']:,} tokens is over the limit of {event['limit']:,} "
            "(train.sample_limit) and is not trained on"
        )
    if kind == "step_skipped":
        return f"update {event['update']} took no step: its gradient is not finite"
    if kind == "move_started":
        moved = f", {count(len(event['rerouted']), 'execution')} rerouted" if event["rerouted"] else ""
        return f"{rank_name(config, event['rank'])} to {event['target'].lower()}: {event['reason']}{moved}"
    if kind == "role_reached" and event["state"] in ("FAILED", "RESTARTING"):
        detail = f": {event['detail']}" if event.get("detail") else ""
        return f"{rank_name(config, event['rank'])} {event['state'].lower()}{detail}"
    if kind == "update_suspended_for":
        if event.get("starved", True):
            return f"update {event['update']} suspended: {count(event['missing'], 'group')} missing"
        return f"update {event['update']} waits for {count(event['missing'], 'group')}; its cells serve meanwhile"
    if kind == "batch_closed_short":
        return f"batch {event['batch']} closed short: {event['groups']} groups, {event['missing']} could not be had"
    if kind == "policy_published":
        return f"policy {event['version']} published"
    if kind == "run_ended":
        return f"attempt {event['how']}" + (f": {event['detail']}" if event.get("detail") else "")
    return None

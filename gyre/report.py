"""The summary of a run, made from its directory: summary.json, and the table that is printed at the end."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from gyre import words
from gyre.config import load
from gyre.metrics import RunMetrics
from gyre.run_dir import RunDir, read_events, read_json, write_atomic


def summarise(run: RunDir) -> dict[str, Any]:
    """The numbers of a run as its directory has them now; it may be running, over, or dead.

    Raises:
        UserError: the directory has no readable config.yaml.
    """
    metrics = RunMetrics(load(run.config)).apply_all(read_events(run.events))
    _add_unlogged(run, metrics)
    summary = metrics.summary()
    summary["name"] = run.name
    if summary["weights_checksum"] is None:  # the crash came between the commit and its event
        record = read_json(run.checkpoint(metrics.policy_version) / "COMMIT")
        summary["weights_checksum"] = record.get("checksum") if isinstance(record, dict) else None
    return summary


def _add_unlogged(run: RunDir, metrics: RunMetrics) -> None:
    """Count executions that are closed on disk, but whose event died with rank 0: the files are the truth."""
    for n in sorted(metrics.granted - metrics.closed):
        outcome = read_json(run.outcome(n))
        if isinstance(outcome, dict) and "outcome" in outcome:
            metrics.apply({**outcome, "kind": "execution_closed", "n": n, "attempt": None})


def write_summary(run: RunDir) -> dict[str, Any]:
    """Replace summary.json with the present numbers, and return them."""
    summary = summarise(run)
    write_atomic(run.summary, json.dumps(summary, indent=2) + "\n")
    return summary


def report(run_dir: Path | str, width: int = 100, colour: bool = False) -> str:
    """The end of a run as a table of text."""
    run = RunDir(run_dir)
    console = Console(file=io.StringIO(), width=width, force_terminal=colour, no_color=not colour, highlight=False)
    console.print(table(run, summarise(run)))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def table(run: RunDir, summary: dict[str, Any]) -> Group:
    """The summary as rich renders it."""
    return Group(_headline(summary), _updates(summary), _totals(summary), Text(f"Everything is in {run.path}", "dim"))


def _headline(summary: dict[str, Any]) -> Text:
    style = {"completed": "bold green", "interrupted": "bold yellow"}.get(summary["ended"], "bold red")
    text = Text(f"{summary['name']} {summary['ended']}", style)
    detail = f" ({summary['detail']})" if summary["detail"] else ""
    text.append(
        f"{detail} after {words.duration(summary['seconds'])}: {words.count(summary['updates'], 'update')}, "
        f"policy {summary['policy_version']}, weights {(summary['weights_checksum'] or 'not committed')[:16]}",
        "default",
    )
    return text


#: Updates that the table shows at the most, the first and the last ones.
_SHOWN_UPDATES = 16


def _updates(summary: dict[str, Any]) -> Table | Text:
    columns = ("per_update", "reward", "staleness", "suspensions")
    rows = list(zip(*(summary[name] for name in columns), strict=True))
    if not rows:
        return Text("No update was made.")
    grid = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("update", "reward", "groups", "joined", "micro-steps", "staleness", "suspended", "seconds"):
        grid.add_column(name, justify="right")
    skipped = range(_SHOWN_UPDATES // 2, len(rows) - _SHOWN_UPDATES // 2) if len(rows) > _SHOWN_UPDATES else range(0)
    for i, (row, reward, staleness, suspensions) in enumerate(rows):
        if i in skipped:
            if i == skipped.start:
                grid.add_row("...")
            continue
        grid.add_row(
            str(row["update"]),
            "-" if reward is None else f"{reward:.3f}",
            str(row["groups"]),
            words.ranges(row["joined"]) or "-",
            str(sum(row["micro_steps"].values())),
            "-" if staleness is None else f"{staleness:.2f}",
            str(suspensions or "-"),
            f"{row['seconds']:.1f}",
        )
    return grid


def _totals(summary: dict[str, Any]) -> Table:
    executions, requests = summary["executions"], summary["requests"]
    outcomes = ", ".join(f"{n} {how.replace('_', ' ')}" for how, n in executions["by_outcome"].items())
    busy, after = summary["gpu_busy_fraction"], summary["gpu_busy_fraction_after_start"]
    grid = Table(box=None, pad_edge=False, show_header=False)
    grid.add_column(style="dim")
    grid.add_column()
    grid.add_row("executions", f"{executions['dispatched']} dispatched, {executions['finished']} finished: {outcomes}")
    grid.add_row(
        "requests",
        f"{requests['total']}, of them {requests['rerouted']} rerouted, {requests['continued']} continued, "
        f"{requests['restarted']} restarted, {requests['lost']} lost",
    )
    if line := _conversations(summary["conversations"]):
        grid.add_row("conversations", line)
    grid.add_row("tokens", f"{summary['tokens']:,} sampled, {summary['tokens_per_second']:.1f} a second")
    if line := _masked(summary["masked"], summary["tokens"]):
        grid.add_row("masked", line)
    grid.add_row("moves", _moves(summary["moves"]))
    if busy is not None:
        started = "" if after is None else f" ({after:.0%} once everything had started)"
        grid.add_row("cells busy", f"{busy:.0%} of their time{started}")
    grid.add_row("peak memory", f"{summary['peak_pss_mb'] / 1024:.1f} GiB, all processes together")
    if len(summary["attempts"]) > 1:
        how = ", ".join(f"{a['attempt']} {a['ended']}" for a in summary["attempts"])
        grid.add_row("attempts", how)
    return grid


def _conversations(counts: dict[str, int]) -> str:
    """How often a request went on from the tokens of an earlier one; nothing where none followed on one."""
    spliced, forked = counts["spliced"], counts["forked"]
    if not spliced + forked:
        return ""
    line = f"{words.count(spliced, 'request')} of {spliced + forked} went on from the tokens that were sampled"
    if drifted := counts["drifted"]:
        share = f"{drifted:,} of which ({drifted / spliced:.0%})"
        line += f", {share} would have been encoded otherwise ({counts['drift_tokens']:,} tokens)"
    return line + (f"; {forked} forked ({forked / (spliced + forked):.0%})" if forked else "")


def _masked(masked: dict[str, int], tokens: int) -> Text | None:
    """How many tokens are not to be trained on, and why; None where none are. A warning where it is most of them."""
    if not (total := sum(masked.values())):
        return None
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(masked.items(), key=lambda item: -item[1]))
    text = Text(f"{total:,} tokens ({total / tokens:.0%}) not to be trained on: {reasons}")
    if 2 * total > tokens:
        text.append(
            "\nMost tokens teach nothing: ask for temperature 1, no top-p, penalties or grammars (docs/your-agent.md).",
            "bold yellow",
        )
    return text


def _moves(moves: list[dict[str, Any]]) -> str:
    parts = []
    for target in ("training", "rollout"):
        seconds = sorted(m["seconds"] for m in moves if m["to"] == target)
        if seconds:
            parts.append(f"{len(seconds)} to {target} (median {words.duration(seconds[len(seconds) // 2])})")
    return ", ".join(parts) or "none"

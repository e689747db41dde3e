"""The summary of a run, made from its directory: summary.json, and the table that is printed at the end."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from gyre import figures, words
from gyre.config import load
from gyre.metrics import RunMetrics
from gyre.run_dir import RunDir, read_events, read_json, write_atomic
from gyre.selftest import doubt


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
    console.print(table(run, summarise(run), width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def table(run: RunDir, summary: dict[str, Any], width: int) -> Group:
    """The summary as rich renders it, in so many columns of text."""
    config = load(run.config)
    doubts = [text for row in summary["per_update"] if (text := doubt(config, row["update"], row["metrics"]))]
    warnings = [Text(text, "bold yellow") for text in doubts[:1]]
    rest = [_totals(summary), *warnings, Text(f"Everything is in {run.path}", "dim")]
    return Group(_headline(summary), *_updates(summary, width), *rest)


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


#: Updates that the tables show at the most, the first and the last ones.
_SHOWN_UPDATES = 16
_Column = Callable[[dict[str, Any]], str]


def _figure(key: str, often: bool = True) -> _Column:
    """A column of a figure; one that is seldom anything but 0 has nothing in it then."""
    return lambda row: figures.shown(row["metrics"], key) if often or row["metrics"].get(key) else ""


def _staleness(row: dict[str, Any]) -> str:
    """Over trained tokens; a log that does not have that has it over groups."""
    by_group = "" if row["staleness"] is None else f"{row['staleness']:.2f}"
    return figures.shown(row["metrics"], "staleness_mean") or by_group


def _micro_steps(row: dict[str, Any]) -> str:
    """How many, and by the core and each satellite where they are few."""
    counts = [row["micro_steps"][rank] for rank in sorted(row["micro_steps"], key=int)]
    each = f" ({'+'.join(map(str, counts))})" if 1 < len(counts) <= _SHOWN_SHARES else ""
    return f"{sum(counts)}{each}"


#: Cells whose shares of an update have room in a column.
_SHOWN_SHARES = 4
#: What an update taught, and what it was made of; a column is left out where no update has anything in it.
_LEARNT: dict[str, _Column] = {
    "update": lambda row: str(row["update"]),
    "reward": lambda row: "" if row["reward"] is None else f"{row['reward']:.3f}",
    "loss": _figure("loss"),
    "entropy": _figure("entropy"),
    "kl": _figure("kl"),
    "kl ref.": _figure("kl_reference", often=False),
    "clipped": _figure("clip_fraction"),
    "trunc.": _figure("truncated_fraction", often=False),
    "mismatch": _figure("mismatch_mean"),
    "norm": _figure("grad_norm"),
    "lr": _figure("lr"),
}
_MADE: dict[str, _Column] = {
    "update": lambda row: str(row["update"]),
    "groups": lambda row: str(row["groups"]),
    "joined": lambda row: words.ranges(row["joined"]),
    "micro-steps": _micro_steps,
    "tokens": _figure("tokens"),
    "fill": _figure("fill"),
    "staleness": _staleness,
    "suspended": lambda row: str(row["suspensions"] or ""),
    "seconds": lambda row: f"{row['seconds']:.1f}",
    "compute": _figure("seconds_compute"),
    "wait": _figure("seconds_wait"),
}


def _updates(summary: dict[str, Any], width: int) -> list[RenderableType]:
    columns = ("reward", "staleness", "suspensions")
    values = zip(*(summary[name] for name in columns), strict=True)
    rows = [
        row | dict(zip(columns, value, strict=True)) for row, value in zip(summary["per_update"], values, strict=True)
    ]
    if not rows:
        return [Text("No update was made.")]
    return [_grid(rows, _LEARNT, width), Text(), _grid(rows, _MADE, width), Text()]


def _grid(rows: list[dict[str, Any]], columns: dict[str, _Column], width: int) -> Table:
    """A table without the columns that have nothing in them, and without the last ones where it is too wide."""
    half = _SHOWN_UPDATES // 2
    first, last = (rows[:half], rows[-half:]) if len(rows) > _SHOWN_UPDATES else (rows, [])
    cells = {name: [column(row) for row in (*first, *last)] for name, column in columns.items()}
    cells = {name: texts for name, texts in cells.items() if any(texts)}
    while sum(2 + max(map(len, (name, *texts))) for name, texts in cells.items()) - 2 > width:
        cells.popitem()
    grid = Table(box=None, pad_edge=False, header_style="dim")
    for name in cells:
        grid.add_column(name, justify="right", no_wrap=True)
    for i, texts in enumerate(zip(*cells.values(), strict=True)):
        if last and i == half:
            grid.add_row("...")
        grid.add_row(*(text or "-" for text in texts))
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
    if refused := summary["refused_samples"]["samples"]:
        grid.add_row("refused", _refused(refused, summary["refused_samples"]))
    if skipped := summary["skipped_steps"]:
        grid.add_row("skipped", _skipped(skipped))
    if line := _shares(summary["micro_step_share"]):
        grid.add_row("micro-steps", line)
    if seconds := sum(summary["core_seconds"].values()):
        parts = (f"{value / seconds:.0%} {name}" for name, value in summary["core_seconds"].items())
        grid.add_row("core in updates", ", ".join(parts))
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


def _refused(count: int, refused: dict[str, int]) -> Text:
    """Samples that are not trained on for their length: the setting is to be looked at."""
    return Text(
        f"{words.count(count, 'sample')} over the limit, the longest of {refused['longest']:,} tokens, not trained on; "
        "see train.sample_limit",
        "bold yellow",
    )


def _skipped(updates: list[int]) -> Text:
    """Updates without a step: something computes what is no number."""
    return Text(
        f"{words.count(len(updates), 'update')} without a step, as the gradient was not finite "
        f"({words.ranges(updates)}); see docs/training.md",
        "bold yellow",
    )


def _shares(shares: dict[str, float]) -> str:
    """Who finished how much of all micro-steps; nothing where the core made them alone."""
    if len(shares) < 2:
        return ""
    if len(shares) <= 2 * _SHOWN_SHARES:
        return ", ".join(f"cell {rank} {share:.0%}" for rank, share in shares.items())
    others = [share for rank, share in shares.items() if rank != "0"]
    core = f"cell 0 {shares.get('0', 0.0):.0%}"
    return f"{core}, {len(others)} satellites {min(others):.1%} to {max(others):.1%} each"


def _moves(moves: list[dict[str, Any]]) -> str:
    parts = []
    for target in ("training", "rollout"):
        seconds = sorted(m["seconds"] for m in moves if m["to"] == target)
        if seconds:
            parts.append(f"{len(seconds)} to {target} (median {words.duration(seconds[len(seconds) // 2])})")
    return ", ".join(parts) or "none"

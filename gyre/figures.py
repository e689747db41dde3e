"""The figures of an update: how they read to people, and as one flat line to programs. Pure.

They are the `metrics` of `gyre.events.UpdateDone`, whose keys are explained in docs/what-you-see.md. None of them is
sure to be there: a log of an earlier version has fewer, a timed trainer has hardly any. What is missing is not shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gyre import words

Metrics = Mapping[str, float]

#: What the core's seconds in an update are called, by the key in its metrics.
STAGES = {
    "seconds_compute": "computing",
    "seconds_wait": "waiting",
    "seconds_reduce": "reducing",
    "seconds_step": "stepping",
    "seconds_snapshot": "writing",
}
_FRACTIONS = {"clip_fraction", "truncated_fraction", "fill"}
_COUNTS = {"tokens", "sequence_tokens"}
#: Figures whose scale is known, and the decimals that tell something on it.
_DECIMALS = {"reward": 3, "entropy": 2, "staleness_mean": 2, "staleness_max": 0}
#: Figures with two significant digits; the others have three.
_COARSE = {"kl", "kl_reference", "lr", "mismatch_mean", "mismatch_max"}


def significant(value: float, digits: int = 2) -> str:
    """A number with so many significant digits, without an exponent where that is short: 0.010, 2.4, 137, 3.1e-05."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e5:
        return f"{value:.{digits - 1}e}"
    text = f"{value:#.{digits}g}"
    return (f"{value:.0f}" if "e" in text else text).rstrip(".")


def figure(key: str, value: float) -> str:
    """One figure as text; `key` is its name in the metrics of an update."""
    if key in _FRACTIONS:
        return f"{value:.1%}" if value < 0.0995 else f"{value:.0%}"
    if key in _COUNTS:
        return words.amount(value)
    if key in _DECIMALS:
        return f"{value:.{_DECIMALS[key]}f}"
    return f"{value:.1f}" if key in STAGES else significant(value, 2 if key in _COARSE else 3)


def shown(metrics: Metrics, key: str) -> str:
    """A figure as text, with the largest beside the mean where it is one: "0.33 (1)"; nothing where it is missing."""
    if key not in metrics:
        return ""
    text, most = figure(key, metrics[key]), key.replace("_mean", "_max")
    return f"{text} ({figure(most, metrics[most])})" if most != key and most in metrics else text


def _named(metrics: Metrics, names: Mapping[str, str]) -> list[str]:
    return [f"{name} {shown(metrics, key)}" for name, key in names.items() if key in metrics]


def short(metrics: Metrics) -> list[str]:
    """What a line about an update has room for beside its reward."""
    if metrics.get("tokens") == 0:
        return ["no token to train on"]
    norm = [f"norm {significant(metrics['grad_norm'])}"] if "grad_norm" in metrics else []
    return _named(metrics, {"entropy": "entropy", "kl": "kl"}) + norm


def line(metrics: Metrics) -> str:
    """What the live view says of the last update beside its reward."""
    names = {"loss": "loss", "entropy": "entropy", "kl": "kl", "clipped": "clip_fraction", "norm": "grad_norm"}
    return "  ".join(_named(metrics, {**names, "stale": "staleness_mean", "fill": "fill"}))


def shares(micro_steps: Iterable[Mapping[str, int]]) -> dict[str, float]:
    """Each cell's fraction of some updates' micro-steps, by rank (as a string: JSON)."""
    counts: dict[str, int] = {}
    for update in micro_steps:
        for rank, count in update.items():
            counts[rank] = counts.get(rank, 0) + count
    total = sum(counts.values())
    return {rank: round(counts[rank] / total, 4) for rank in sorted(counts, key=int)} if total else {}


def stages(metrics: Sequence[Metrics]) -> dict[str, float]:
    """Seconds that the core spent in some updates, by what it did; without those that were not measured."""
    named = {name: [m[key] for m in metrics if key in m] for key, name in STAGES.items()}
    return {name: round(sum(seconds), 3) for name, seconds in named.items() if seconds}

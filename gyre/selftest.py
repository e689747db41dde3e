"""Whether engine and trainer agree on the log-probability of what was sampled: the judgement on a self-test. Pure.

A self-test is a run of one update with learning rate 0 on a few groups, in which every sampled token counts whatever
its execution scored. The policy that sampled the tokens is the one that goes over them, so that all their importance
ratios would be 1 if both computed alike; what they differ by is the mismatch. `gyre.launch.selftest` starts the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gyre.config import Config
from gyre.errors import UserError
from gyre.figures import significant

EventData = Mapping[str, Any]

#: Groups that are enough to compare; more only where they are asked for.
GROUPS = 4
#: What a self-test is: set over whatever the configuration says, and refused as an override.
_FORCED = {
    "train.updates": "1",
    "train.updates_per_batch": "1",
    "train.lr": "0",
    "train.schedule": "{kind: constant, warmup: 0}",
    "train.advantages": "ones",
    "scheduler.lookahead": "0",
    "checkpoint.keep": "1",
}


@dataclass(frozen=True)
class Limits:
    """What a log-probability may differ by, in nats: over all compared tokens on average, and at the most."""

    mean: float
    most: float


#: By `model.dtype`. Measured on small models: in float32 at most 5e-5; with a bfloat16 side .006 to .012 on average and
#: .16 to .36 at the most. A deep model rounds more often, and the largest of a million tokens is larger than that of a
#: thousand, so the limits on the largest are wide. Those on the mean are what finds faults, which touch most tokens.
LIMITS = {"float32": Limits(1e-4, 2e-3), "bfloat16": Limits(0.03, 1.5)}
#: A mean above this is that of another distribution altogether.
_ANOTHER_MODEL = 0.5
#: A mean below this, in float32, is what bfloat16 on one side makes.
_ANOTHER_TYPE = 0.05


@dataclass(frozen=True)
class Measured:
    """What the run of a self-test has left; figures that it has not are None."""

    tokens: int
    mean: float | None  # of |log-probability of the trainer - that of the sampler|
    most: float | None
    ratio_min: float | None
    ratio_max: float | None
    kl: float | None  # of the sampler from the trainer, estimated from the same ratios
    before: str | None  # checksums of the core's weights: as it began, and as it committed them
    after: str | None


@dataclass(frozen=True)
class Verdict:
    """What is wrong, a line a fault, and where to look for its cause; nothing where all is well."""

    faults: Sequence[str]
    hints: Sequence[str]

    @property
    def passed(self) -> bool:
        """Whether engine and trainer agree."""
        return not self.faults


def overrides(config: Config, given: Sequence[str]) -> list[str]:
    """The `key=value` words that make a self-test of a configuration, after the user's own.

    Raises:
        UserError: nothing is sampled by a policy in it, or `given` sets what the self-test has to.
    """
    if config.engine.kind != "vllm" or config.train.kind != "deepspeed":
        raise UserError(
            f"selftest compares log-probabilities of engine and trainer; engine.kind {config.engine.kind} with "
            f"train.kind {config.train.kind} computes none: set engine.kind=vllm and train.kind=deepspeed"
        )
    keys = {word.partition("=")[0] for word in given}
    for key in sorted(keys):
        if any(key == forced or key.startswith(f"{forced}.") for forced in _FORCED):
            raise UserError(f"{key} is what selftest sets itself; remove it from the command line")
    own = [f"{key}={value}" for key, value in _FORCED.items()]
    if "scheduler.batch_groups" not in keys:
        own.append(f"scheduler.batch_groups={min(GROUPS, config.scheduler.batch_groups)}")
    if "name" not in keys:
        own.append(f"name={config.name}-selftest")
    return [*given, *own]


def measure(events: Iterable[EventData]) -> Measured:
    """The figures of the only update in a self-test's event log."""
    metrics: Mapping[str, float] = {}
    before = after = None
    for event in events:
        match event["kind"]:
            case "rank_ready" if event["rank"] == 0:
                before = event.get("checksum") or before
            case "update_done":
                metrics = event.get("metrics", {})
            case "policy_committed":
                after = event["checksum"]
    names = ("mismatch_mean", "mismatch_max", "ratio_min", "ratio_max", "kl")
    mean, most, low, high, kl = (metrics.get(name) for name in names)
    return Measured(int(metrics.get("tokens", 0)), mean, most, low, high, kl, before, after)


def judge(measured: Measured, dtype: str) -> Verdict:
    """Hold the figures against the limits of a type of weights."""
    limits, faults, hints = LIMITS[dtype], [], []
    if measured.before != measured.after or not measured.after:
        faults.append(
            f"the weights changed at learning rate 0: checksum {_checksum(measured.before)} before, "
            f"{_checksum(measured.after)} after"
        )
        hints.append(
            "the core's fp32 weights do not round to those it was given: see model.dtype and the trainer's log"
        )
    if not measured.tokens:
        faults.append("no token was compared")
        hints.append(
            "every sampled token was masked, or no execution had a score: `launch.py report` of the run says which. "
            "Agents must sample with temperature and no top-p, top-k, penalties or grammar (docs/your-agent.md)"
        )
        return Verdict(faults, hints)
    if measured.mean is None or measured.most is None:
        return Verdict([*faults, "the trainer has measured no difference"], hints)
    off = []  # compared so that a figure that is no number is over its limit
    if not measured.mean <= limits.mean:
        off.append(f"the mean difference {significant(measured.mean)} is over the limit of {limits.mean:g}")
    if not measured.most <= limits.most:
        off.append(f"the largest difference {significant(measured.most)} is over the limit of {limits.most:g}")
    return Verdict([*faults, *off], [*hints, *(_causes(measured, limits, dtype) if off else [])])


def _causes(measured: Measured, limits: Limits, dtype: str) -> list[str]:
    """What makes a mismatch of this size, the likeliest first."""
    assert measured.mean is not None
    kind = "dtype: engine.args (dtype, quantization, kv-cache-dtype) must be those of model.dtype, on both sides"
    weights = "weights: both must have those of model.path; the checksums above and the engine's log say what they have"
    tokens = "tokenizer and chat template: they must be those of the model, not of its base or another revision"
    sampling = (
        "temperature: the trainer divides logits by the one that the agent asked for; engine.args must leave "
        "logprobs-mode and override-generation-config as they are"
    )
    positions = (
        "architecture: rope scaling, sliding windows and norms of config.json must mean the same to both; see "
        "engine.args.hf-overrides"
    )
    if measured.mean <= limits.mean:
        return [
            "a few tokens alone differ: very improbable ones, long contexts, or a sequence that attends to its "
            "neighbour; train.micro_tokens=32 packs nothing, and shows whether packing is the cause",
            kind,
        ]
    if dtype == "float32" and measured.mean <= _ANOTHER_TYPE:
        return [kind, sampling, positions]
    if not measured.mean < _ANOTHER_MODEL:
        return [weights, tokens, sampling]
    return [sampling, kind, positions, weights]


def doubt(config: Config, update: int, metrics: Mapping[str, float]) -> str | None:
    """What is to be said of an ordinary update whose engine and trainer cannot have computed alike; mostly None.

    Only the first update of a batch without a stale token tells: elsewhere weights moved in between, as they should.
    """
    first = (update - 1) % config.train.updates_per_batch == 0
    mean, limit = metrics.get("mismatch_mean"), LIMITS[config.model.dtype].mean
    if not first or metrics.get("staleness_max", 1) > 0 or mean is None or mean <= limit:  # no number is more
        return None
    return (
        f"update {update}: log-probabilities of engine and trainer differ by {significant(mean)} on average, more than "
        f"{limit:g}; see launch.py selftest"
    )


def _checksum(value: str | None) -> str:
    return (value or "unknown")[:16]


def figures(measured: Measured, dtype: str) -> dict[str, Any]:
    """All of it for programs."""
    limits, verdict = LIMITS[dtype], judge(measured, dtype)
    return {
        "passed": verdict.passed,
        "dtype": dtype,
        "tokens": measured.tokens,
        "mismatch_mean": measured.mean,
        "mismatch_max": measured.most,
        "limit_mean": limits.mean,
        "limit_max": limits.most,
        "ratio_min": measured.ratio_min,
        "ratio_max": measured.ratio_max,
        "kl": measured.kl,
        "checksum_before": measured.before,
        "checksum_after": measured.after,
        "faults": list(verdict.faults),
        "hints": list(verdict.hints),
    }


def text(measured: Measured, dtype: str) -> str:
    """All of it for people, a line a figure."""
    limits, verdict = LIMITS[dtype], judge(measured, dtype)
    rows = [("tokens compared", f"{measured.tokens:,}, weights in {dtype}")]
    if measured.mean is not None and measured.most is not None:
        rows.append(("|difference of log-probabilities|", _against(measured.mean, limits.mean, "on average")))
        rows.append(("", _against(measured.most, limits.most, "at the most")))
    if measured.ratio_min is not None and measured.ratio_max is not None:
        rows.append(("importance ratio", f"{measured.ratio_min:.6f} to {measured.ratio_max:.6f}"))
    if measured.kl is not None:
        rows.append(("KL of sampler from trainer", significant(measured.kl)))
    same = bool(measured.after) and measured.before == measured.after
    checksum = _checksum(measured.after)
    rows.append(("weights after the update", f"{'as before' if same else 'not as before'}, checksum {checksum}"))
    width = max(len(name) for name, _ in rows) + 2
    lines = [f"self-test {'passed' if verdict.passed else 'failed'}"]
    lines += [f"  {name:<{width}}{value}" for name, value in rows]
    lines += [f"  fault: {fault}" for fault in verdict.faults]
    lines += [f"  look at: {hint}" for hint in verdict.hints]
    return "\n".join(lines)


def _against(value: float, limit: float, where: str) -> str:
    return f"{significant(value)} {where} (limit {limit:g})"

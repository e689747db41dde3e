"""Every objective against its paper's formula, written once more without tensors, and its gradient in closed form."""

import math
from statistics import fmean, mean, pstdev, stdev

import numpy as np
import pytest
import torch

from gyre.config_train import TrainConfig
from gyre.training.batch import Batch
from gyre.training.objectives import Objective, gradient_scale, objective_loss
from gyre.training.packing import lay_out
from gyre.training.rows import advantages_of, weighted
from gyre.training.statistics import Statistics
from tests.training.cells import make_sample

NAMES = ("grpo", "dapo", "dr_grpo", "gspo", "cispo", "rloo", "reinforce++")
CONSTANT = 64.0
SCORES = [[0.0, 1.0, 0.25, 1.0], [0.5, 0.0, 0.0, 1.0], [0.9, 0.1, 0.2, 0.0]]  # of three groups


def chosen(**train) -> Objective:
    return Objective.of(TrainConfig(updates=1, **train))


# -- the papers, token by token ----------------------------------------------------------------------------------------
def pushed(ratio, advantage, low, high, most):
    """PPO's token: the value, what multiplies the gradient of the log ratio, and whether clipped, truncated."""
    if advantage > 0 and ratio > high:
        return high * advantage, 0.0, True, False
    if advantage < 0 and ratio < low:
        return low * advantage, 0.0, True, False
    return min(ratio, most) * advantage, min(ratio, most) * advantage, False, ratio > most


BOUNDS = {
    "grpo": (0.8, 1.2),
    "dapo": (0.8, 1.28),
    "dr_grpo": (0.8, 1.2),
    "gspo": (1 - 3e-4, 1 + 4e-4),
    "reinforce++": (0.8, 1.2),
    "cispo": (0.0, math.inf),
    "rloo": (0.0, math.inf),
}


def by_hand(name, current, recorded, advantages, bounds, most=2.0):
    """Of one sample: each token's value of the objective, and its gradient with respect to each log-probability.

    Returns (values [n], coefficients [n], clipped [n], truncated [n]); the gradient of values[t] is coefficients[t]
    times that of log p_t, or for GSPO times that of the mean of all log p.
    """
    ratios = [math.exp(p - q) for p, q in zip(current, recorded, strict=True)]
    if name == "gspo":
        ratios = [math.prod(ratios) ** (1 / len(ratios))] * len(ratios)
    low, high = bounds
    if name in ("cispo", "rloo"):
        kept = [min(max(ratio, low), high) for ratio in ratios]
        weights = [min(ratio, most) for ratio in kept]
        return (
            [w * a * p for w, a, p in zip(weights, advantages, current, strict=True)],
            [w * a for w, a in zip(weights, advantages, strict=True)],
            [ratio != own for ratio, own in zip(kept, ratios, strict=True)],
            [ratio > most for ratio in kept],
        )
    return tuple(zip(*(pushed(r, a, low, high, most) for r, a in zip(ratios, advantages, strict=True)), strict=True))


# -- a micro-step of random tokens -------------------------------------------------------------------------------------
def step_of(seed: int, spread: float):
    """A batch of five samples, its log-probabilities now, entropies, and a reference's log-probabilities."""
    random = np.random.default_rng(seed)
    rows = []
    for n in range(5):
        rows += weighted(chosen(), [make_sample(10 * seed + n, 0)], float(random.normal()), CONSTANT)
    batch = Batch.of(lay_out(1, rows), "cpu")
    current = batch.logprobs.double() + torch.from_numpy(random.normal(0, spread, len(batch.place)))
    current = current.clamp(max=-1e-3).requires_grad_()
    reference = current.detach() + torch.from_numpy(random.normal(0, 0.3, len(current)))
    return batch, current, torch.from_numpy(random.random(len(current))), reference


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "options", [{}, {"truncation": None}, {"truncation": 1.1}, {"bounds": (0.05, 0.1)}, {"kl": 0.3}]
)
def test_loss_and_gradient_are_the_formulas(name, options):
    if name == "rloo" and "bounds" in options or name == "reinforce++" and "kl" in options:
        return  # the configuration refuses it
    train, (low, high) = {"objective": name, **options}, BOUNDS[name]
    if "bounds" in options:
        below, above = train.pop("bounds")
        train |= {"clip_ratio": below, "clip_ratio_high": above}
        low, high = 1 - below, 1 + above
    if name == "cispo" and train.get("truncation", 2.0) is None:
        train["clip_ratio_high"], high = 3.0, 4.0
    most = train.get("truncation", 2.0) or math.inf
    kl = train.get("kl", 0.0)
    seen = Statistics()
    for seed, spread in ((1, 0.05), (2, 0.5), (3, 1.5)):
        batch, current, entropy, reference = step_of(seed, spread)
        loss, statistics = objective_loss(chosen(**train), current, entropy, batch, reference)
        loss.backward()
        now, segment = current.detach(), batch.segment.tolist()
        expected, gradient = 0.0, np.zeros(len(segment))
        clipped = truncated = 0
        for sample in set(segment):
            own = [i for i, s in enumerate(segment) if s == sample]
            at = [[float(array[i]) for i in own] for array in (now, batch.logprobs, batch.advantages)]
            values, coefficients, cut, bound = by_hand(name, *at, (low, high), most)
            clipped, truncated = clipped + sum(cut), truncated + sum(bound)
            for i, value, coefficient in zip(own, values, coefficients, strict=True):
                weight, gap = float(batch.weights[i]), float(reference[i] - now[i])
                expected -= weight * (value - kl * (math.exp(gap) - gap - 1))
                gradient[i] += weight * kl * (1 - math.exp(gap))
                for j in own if name == "gspo" else [i]:
                    gradient[j] -= weight * coefficient / (len(own) if name == "gspo" else 1)
        assert loss.item() == pytest.approx(expected, rel=1e-6, abs=1e-7)
        assert current.grad.numpy() == pytest.approx(gradient, rel=1e-6, abs=1e-8)
        assert (statistics.clipped, statistics.truncated) == (clipped, truncated)
        assert statistics.loss == pytest.approx(expected, rel=1e-6, abs=1e-7)
        seen.add(statistics)
    if name not in ("rloo", "cispo"):
        assert 0 < seen.clipped < seen.tokens
    if most == 1.1 or (most < 3 and name != "gspo" and (name != "cispo" or high > most)):
        assert 0 < seen.truncated < seen.tokens


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_finite_differences(name):
    """Of the objective itself where nothing is held fixed, of importance weight x log p where the weight is."""
    free = {} if name == "rloo" else {"clip_ratio_high": 0.28}
    objective = chosen(objective=name, truncation=None, **free)
    batch, current, entropy, _ = step_of(4, 0.3)
    objective_loss(objective, current, entropy, batch)[0].backward()

    def value(at: torch.Tensor) -> float:
        if name not in ("rloo", "cispo"):
            return objective_loss(objective, at, entropy, batch)[0].item()
        ratio = (current.detach() - batch.logprobs).exp().clamp(max=objective.high or math.inf)
        return -(batch.weights * ratio * batch.advantages * at).sum().item()

    width = 1e-6
    for index in range(0, len(current), 7):
        move = torch.zeros_like(current)
        move[index] = width
        slope = (value(current.detach() + move) - value(current.detach() - move)) / (2 * width)
        assert current.grad[index].item() == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_the_worked_example_of_grpo():
    ratio = torch.tensor([0.5, 0.9, 1.1, 1.5, 0.5, 1.5, 4.0])
    current, batch = ratio.log().requires_grad_(), step_of(1, 0.1)[0]
    advantages, weights = torch.tensor([1.0, 1, 1, 1, -1, -2, -1]), torch.tensor([1.0, 1, 2, 1, 1, 1, 1])
    own = {"logprobs": torch.zeros(7), "advantages": advantages, "weights": weights}
    batch = Batch(**{**vars(batch), "segment": torch.zeros(7).long(), **own})
    loss, statistics = objective_loss(chosen(), current, torch.full((7,), 0.5), batch)
    assert loss.item() == pytest.approx(-(0.5 + 0.9 + 2 * 1.1 + 1.2 - 0.8 - 2 * 1.5 - 2.0))
    loss.backward()
    # no gradient where clipping makes the objective flat: 1.5 with a good, 0.5 with a bad advantage; and 4 counts as 2
    assert torch.allclose(current.grad, torch.tensor([-0.5, -0.9, -2.2, 0.0, 0.0, 3.0, 2.0]))
    metrics = statistics.metrics()
    assert (metrics["tokens"], metrics["weight"], metrics["entropy"]) == (7, 8, 0.5)
    assert (metrics["clip_fraction"], metrics["truncated_fraction"]) == (pytest.approx(2 / 7), pytest.approx(1 / 7))
    logs = [math.log(r) for r in ratio.tolist()]
    assert metrics["kl"] == pytest.approx(fmean(math.exp(x) - 1 - x for x in logs), rel=1e-6)
    assert metrics["mismatch_mean"] == pytest.approx(fmean(map(abs, logs)), rel=1e-6)
    assert metrics["mismatch_max"] == pytest.approx(math.log(4), rel=1e-6)
    extremes = metrics["ratio_min"], metrics["ratio_mean"], metrics["ratio_max"]
    assert extremes == pytest.approx((0.5, fmean(ratio.tolist()), 4.0), rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_wild_ratio_stays_finite_and_keeps_its_direction(name):
    batch, current, entropy, _ = step_of(1, 0.1)
    batch = Batch(**{**vars(batch), "logprobs": batch.logprobs - 500, "advantages": -batch.advantages.abs()})
    loss, statistics = objective_loss(chosen(objective=name), current, entropy, batch)
    loss.backward()
    assert math.isfinite(loss.item()) and all(map(math.isfinite, statistics.metrics().values()))
    assert (current.grad > 0).all() and current.grad.max() < 2 * batch.advantages.abs().max() + 1e-6


# -- whole updates -----------------------------------------------------------------------------------------------------
def executions(name: str, groups: list[list[float]], **train):
    """Executions of some groups, one sample each, as (score, group, advantage, rows, noise)."""
    objective = chosen(objective=name, **train)
    made, n = [], 0
    for group, scores in enumerate(groups):
        for score, advantage in zip(scores, advantages_of(objective, scores), strict=True):
            sample = make_sample(n, group)
            noise = np.random.default_rng(n).normal(0, 0.4, int(sample.trained.sum()))
            made.append((score, group, weighted(objective, [sample], advantage, CONSTANT), noise))
            n += 1
    return objective, made


def streamed(objective, made, splits):
    """The update's gradient, by execution, as it comes out of micro-steps that hold executions like this."""
    total, gradients = Statistics(), {}
    for split in splits:
        batch = Batch.of(lay_out(1, [row for n in split for row in made[n][2]]), "cpu")
        noise = torch.from_numpy(np.concatenate([made[n][3] for n in split]))
        current = (batch.logprobs.double() + noise).requires_grad_()
        loss, statistics = objective_loss(objective, current, torch.zeros(len(noise)), batch)
        loss.backward()
        total.add(statistics)
        for n, part in zip(split, current.grad.split([len(made[n][3]) for n in split]), strict=True):
            gradients[n] = part.numpy()
    scale = gradient_scale(objective, total)
    return [scale * gradients[n] for n in range(len(made))], total


def papers(name, made):
    """The same from the paper's definition over all of the update's executions, at once."""
    scores = {g: [s for s, group, *_ in made if group == g] for _, g, *_ in made}
    centred = [score - mean(scores[group]) for score, group, *_ in made]
    lengths = [len(noise) for *_, noise in made]
    found = []
    for i, (score, group, rows, noise) in enumerate(made):
        advantage = centred[i]
        if name in ("grpo", "dapo", "gspo", "cispo"):
            advantage = centred[i] / (stdev(scores[group]) + 1e-4)
        elif name == "reinforce++":
            advantage = (centred[i] - mean(centred)) / pstdev(centred)
        elif name == "rloo":
            advantage = score - (sum(scores[group]) - score) / (len(scores[group]) - 1)
        logprobs = rows[0].sample.logprobs[rows[0].sample.trained].astype(float)
        _, coefficients, *_ = by_hand(name, logprobs + noise, logprobs, [advantage] * lengths[i], BOUNDS[name])
        if name == "gspo":
            coefficients = [mean(coefficients)] * lengths[i]
        divisor = {
            "dapo": sum(lengths),
            "cispo": sum(lengths),
            "rloo": sum(lengths),  # in the paper the number of executions: common to all tokens
            "dr_grpo": len(made) * CONSTANT,
        }.get(name, len(made) * lengths[i])
        found.append(-np.array(coefficients) / divisor)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_an_update_in_micro_steps_is_the_papers(name):
    objective, made = executions(name, SCORES)
    whole, _ = streamed(objective, made, [list(range(12))])
    parts, _ = streamed(objective, made, [[7, 2], [0], [11, 1, 3, 5], [4, 6, 8], [9, 10]])
    for own, split, expected in zip(whole, parts, papers(name, made), strict=True):
        assert own == pytest.approx(split, rel=1e-9)
        assert own == pytest.approx(expected, rel=1e-4, abs=1e-9)  # advantages and weights travel as float32


def test_the_deviation_of_an_update_is_divided_out_at_its_end():
    objective, made = executions("reinforce++", SCORES)
    _, total = streamed(objective, made, [list(range(6)), list(range(6, 12))])
    centred = [score - mean(scores) for scores in SCORES for score in scores]
    assert total.weight == pytest.approx(12) and total.advantage_squares / 12 == pytest.approx(pstdev(centred) ** 2)
    assert gradient_scale(objective, total) == pytest.approx(1 / (12 * pstdev(centred)))
    assert gradient_scale(chosen(), total) == pytest.approx(1 / 12)
    assert gradient_scale(objective, Statistics()) == 0.0
    assert Statistics().metrics() == {"tokens": 0.0, "weight": 0.0}, "a mean of nothing would look measured"


def test_statistics_of_parts_are_those_of_the_whole():
    objective, made = executions("grpo", SCORES)
    _, whole = streamed(objective, made, [list(range(12))])
    _, parts = streamed(objective, made, [[n] for n in range(12)])
    for name, value in vars(whole).items():
        assert getattr(parts, name) == pytest.approx(value), name
    assert parts.ratio_max < 10 < 12 * parts.ratio_max  # the larger one, not the sum


def test_a_reference_is_asked_for_where_it_is_needed():
    batch, current, entropy, reference = step_of(1, 0.1)
    with pytest.raises(ValueError, match="train.kl"):
        objective_loss(chosen(kl=0.1), current, entropy, batch)
    _, statistics = objective_loss(chosen(kl=0.1), current, entropy, batch, reference)
    gaps = (reference - current).tolist()
    expected = fmean(math.exp(gap) - gap - 1 for gap in gaps)
    assert statistics.metrics()["kl_reference"] == pytest.approx(expected, rel=1e-6)
    assert objective_loss(chosen(), current, entropy, batch, reference)[1].kl_reference == 0


def test_what_is_configured_wins_over_the_objectives_own():
    assert (chosen(objective="dapo").low, chosen(objective="dapo").high) == (0.8, 1.28)
    narrow = chosen(objective="dapo", clip_ratio=0.1)
    assert (narrow.low, narrow.high) == (0.9, 1.1)
    wide = chosen(objective="gspo", clip_ratio_high=0.5, averaging="token", truncation=None, kl=0.2)
    assert (wide.low, wide.high) == (1 - 3e-4, 1.5)
    assert (wide.averaging, wide.truncation, wide.kl) == ("token", None, 0.2)

"""The same batch through TRL's GRPO loss: the same loss and gradient where the definitions coincide.

`trl_results.json` holds what TRL gave: losses, and of each parameter's gradient the norm and the product with a random
direction. The test marked `full` asks TRL itself, compares every element, and looks whether the file still says the
same; `python -m tests.training.test_trl` writes the file anew.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gyre.config_train import TrainConfig
from gyre.training.batch import Batch
from gyre.training.objectives import Objective, gradient_scale, objective_loss
from gyre.training.packing import lay_out
from gyre.training.rows import weighted
from gyre.training.scorer import Scorer
from gyre.training.statistics import Statistics
from gyre.trajectories.sample import Sample
from tests.training.trl_cases import CASES, CONSTANT, SHAPE, TEMPERATURE, Case, samples, weights

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).with_name("trl_results.json")
PROGRAM = Path(__file__).with_name("trl_program.py")
EXACT = 1e-5
Gradient = dict[str, np.ndarray]


@functools.cache
def scorer() -> Scorer:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    own = weights({name: tuple(parameter.shape) for name, parameter in model.named_parameters()})
    model.load_state_dict({name: torch.from_numpy(array) for name, array in own.items()})
    made = Scorer(model.train())
    made.check()
    return made


def ours(case: Case) -> tuple[float, Gradient]:
    """Our loss and gradient: the samples in two micro-steps, summed, and scaled at the end."""
    objective, model = Objective.of(TrainConfig(updates=1, **case.train)), scorer().model
    rows, references = [], []
    for n, given in enumerate(samples()):
        temperatures = np.where(given.trained, TEMPERATURE, 1).astype(np.float32)
        versions = np.where(given.trained, 0, -1).astype(np.int32)
        tokens = given.tokens.astype(np.int32)
        sample = Sample(n, 0, tokens, given.trained, np.minimum(given.logprobs, 0), versions, temperatures)
        rows += weighted(objective, [sample], given.advantage, CONSTANT)
        references.append(given.reference[given.trained])
    model.zero_grad()
    total = Statistics()
    for part in ([5, 0, 2], [7, 1, 6, 3, 4]):
        batch = Batch.of(lay_out(1, [rows[n] for n in part]), "cpu")
        reference = torch.from_numpy(np.concatenate([references[n] for n in part]))
        loss, statistics = objective_loss(objective, *scorer()(batch), batch, reference)
        loss.backward()
        total.add(statistics)
    scale = gradient_scale(objective, total)
    return total.loss * scale, {name: p.grad.numpy() * scale for name, p in model.named_parameters()}


def summary(gradient: Gradient) -> dict[str, list[float]]:
    """Of each parameter: the norm, and the product with a random direction of norm 1."""
    random, found = np.random.default_rng(7), {}
    for name, array in sorted(gradient.items()):
        direction = random.normal(size=array.shape)
        along = float((array.astype(float) * direction).sum() / np.linalg.norm(direction))
        found[name] = [float(np.linalg.norm(array.astype(float))), along]
    return found


def agree(case: Case, loss: float, gradient: dict[str, np.ndarray], theirs: tuple[float, Gradient]) -> None:
    """What agrees is what is said to agree, no more and no less."""
    assert (loss == pytest.approx(theirs[0], rel=EXACT, abs=EXACT)) == ("loss" in case.agree)
    size = np.sqrt(sum((np.asarray(array) ** 2).sum() for array in theirs[1].values()))
    gaps = [np.abs(np.asarray(gradient[name]) - array).max() for name, array in theirs[1].items()]
    assert (max(gaps) < EXACT * size) == ("gradient" in case.agree), (max(gaps), size)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_trl(name):
    frozen = json.loads(RESULTS.read_text())["cases"]
    loss, gradient = ours(CASES[name])
    theirs = {parameter: np.array(numbers) for parameter, numbers in frozen[name]["gradient"].items()}
    assert theirs.keys() == gradient.keys()
    agree(CASES[name], loss, summary(gradient), (frozen[name]["loss"], theirs))


def test_both_signs_and_all_kinds_of_tokens_are_compared():
    """Otherwise agreement would say little."""
    signs = {np.sign(sample.advantage) for sample in samples()}
    assert signs == {-1.0, 1.0} and any(not sample.trained[sample.prompt :].all() for sample in samples())
    for name, least in (("grpo", 0.1), ("gspo", 0.1), ("gspo with wide bounds and kl", 0.1), ("cispo", 0.1)):
        objective = Objective.of(TrainConfig(updates=1, **CASES[name].train))
        rows = []
        for n, given in enumerate(samples()):
            ones = np.ones(len(given.tokens), np.float32)
            own = Sample(n, 0, given.tokens.astype(np.int32), given.trained, np.minimum(given.logprobs, 0), ones, ones)
            rows += weighted(objective, [own], given.advantage, CONSTANT)
        zeros = torch.zeros(sum(int(given.trained.sum()) for given in samples()))
        batch = Batch.of(lay_out(1, rows), "cpu")
        _, statistics = objective_loss(objective, *scorer()(batch), batch, zeros)
        assert least < statistics.metrics()["clip_fraction"] < 1 - least, name


def live(directory: Path) -> dict[str, tuple[float, Gradient]]:
    """Have TRL compute all cases; its environment is made where it is missing."""
    made = subprocess.run(["make", "trl"], cwd=ROOT, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"TRL cannot be installed here: {made.stdout[-300:]}")
    out = directory / "trl.npz"
    done = subprocess.run(
        [str(ROOT / ".venv-trl/bin/python"), "-W", "ignore", str(PROGRAM), str(out)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(out) as data:
        found = {"version": (str(data["version"]), {})}
        for name in CASES:
            prefix = f"{name}/gradient/"
            gradient = {key.removeprefix(prefix): data[key] for key in data if key.startswith(prefix)}
            found[name] = (float(data[f"{name}/loss"]), gradient)
    return found


@pytest.mark.full
def test_trl_itself_says_what_is_on_file(tmp_path):
    found, frozen = live(tmp_path), json.loads(RESULTS.read_text())
    assert found.pop("version")[0] == frozen["version"]
    for name, theirs in found.items():
        agree(CASES[name], *ours(CASES[name]), theirs)
        kept = frozen["cases"][name]
        assert kept["loss"] == pytest.approx(theirs[0], rel=1e-6)
        for parameter, numbers in summary(theirs[1]).items():
            assert kept["gradient"][parameter] == pytest.approx(numbers, rel=1e-4, abs=1e-7)


def main() -> None:
    """Write the file anew."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        found = live(Path(directory))
    version = found.pop("version")[0]
    cases = {
        name: {"loss": loss, "gradient": {p: [float(f"{x:.9g}") for x in two] for p, two in summary(gradient).items()}}
        for name, (loss, gradient) in found.items()
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    RESULTS.write_text(f'{{"version": {json.dumps(version)}, "cases": {{\n{lines}\n}}}}\n')
    print(f"TRL {version}: {len(cases)} cases", file=sys.stderr)


if __name__ == "__main__":
    main()

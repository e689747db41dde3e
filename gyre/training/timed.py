"""Models that compute nothing: a micro-step takes a configured time and adds its own number to every gradient.

They take the places of the core's model and a satellite's where `train.kind` is timed; claims, ledgers, prefix groups,
reduces, snapshots and commits around them are the real ones. The weights are those of `model.path`, so moving them is
real too. What an update did can be checked to the last bit: each element of the reduced gradient is the sum of the
numbers of all its micro-steps, and so is the update's loss, which travels another way (`Statistics`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from gyre.config import Config
from gyre.config_train import TimedTrainConfig
from gyre.errors import InvariantBroken, UserError
from gyre.training.accumulators import Accumulators, square_sum
from gyre.training.model import DTYPES, held
from gyre.training.packing import MicroStep
from gyre.training.pulling import Source
from gyre.training.slots import Spec
from gyre.training.statistics import Statistics

_STATE = "state.pt"
_MOMENTUM = 0.9


def seconds(step: MicroStep, config: TimedTrainConfig) -> float:
    """The time that a micro-step takes."""
    each = config.seconds_per_row * (len(step.starts) - 1) + config.seconds_per_token * len(step.tokens)
    return config.seconds_per_micro_step + each


def read(directory: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights of a model's directory, in its files' order.

    Raises:
        UserError: there are none.
    """
    found: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= {name: opened.get_tensor(name).to(dtype) for name in opened.keys()}
    if not found:
        raise UserError(f"model.path: {directory} has no weights in .safetensors files")
    return found


class TimedModel:
    """What the timed core and a timed satellite have in common."""

    def __init__(self, weights: dict[str, torch.Tensor], config: Config) -> None:
        self._weights = weights
        self._times = config.train.times
        self.specs = [Spec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]
        shapes = [torch.empty(spec.shape, device="meta") for spec in self.specs]
        self.accumulators = Accumulators(shapes, "cpu")  # type: ignore[arg-type]

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights."""
        return iter(self._weights.items())

    def memory(self) -> dict[str, int]:
        """Bytes held for weights, gradients (there are none), accumulators and optimizer state."""
        weights = held(iter(self._weights.values()))
        return {"weights": weights, "gradients": 0, "accumulators": self.accumulators.flat.held, "optimizer": 0}

    def compute(self, step: MicroStep) -> Statistics:
        """Take a micro-step's time, and add its number to every element of the accumulators."""
        due = time.monotonic() + seconds(step, self._times)
        self.accumulators.flat.data.add_(step.id)
        statistics = Statistics(loss=step.id, tokens=len(step.place), weight=float(step.weights.sum(dtype="float64")))
        statistics.ratio = statistics.tokens
        time.sleep(max(0.0, due - time.monotonic()))
        return statistics


class TimedSatellite(TimedModel):
    """Weights for an update, given back when parked."""

    def __init__(self, directory: Path, config: Config) -> None:
        super().__init__(read(directory, DTYPES[config.model.dtype]), config)
        self.park()

    def load(self, source: Source) -> None:
        """Take the weights of a snapshot, each verified as it is copied.

        Raises:
            WeightsMismatch: they are not the weights that were announced, or not of this model.
        """
        self._weights = {spec.name: torch.empty(spec.shape, dtype=spec.dtype) for spec in self.specs}
        source.copy_into(self._weights)

    def park(self) -> None:
        """Give weights and accumulators back."""
        self._weights = {}
        self.accumulators.flat.release()


class TimedCore(TimedModel):
    """The authoritative weights, in fp32 beside those that are served, and momentum as the optimizer's state."""

    def __init__(self, directory: Path, config: Config) -> None:
        masters = read(directory, torch.float32)
        dtype = DTYPES[config.model.dtype]
        super().__init__({name: tensor.to(dtype, copy=True) for name, tensor in masters.items()}, config)
        self._masters = masters
        self._momentum = {name: torch.zeros_like(tensor) for name, tensor in masters.items()}

    def square_sum(self) -> float:
        """Sum of the squares of the gradients' sum.

        Raises:
            InvariantBroken: an element of the sum has missed a micro-step that another one has.
        """
        gradient = self.accumulators.flat.data
        if gradient.numel() and bool((gradient != gradient[0]).any()):
            raise InvariantBroken(11, "the elements of a timed gradient differ, though each micro-step adds to all")
        return square_sum(gradient)

    @torch.no_grad()
    def step(self, scale: float, lr: float) -> None:
        """Move the weights by the gradients' sum times `scale`; not at all with 0."""
        if scale > 0:
            self.accumulators.flat.data.mul_(scale)
            for (name, master), (_, gradient) in zip(self._masters.items(), self.accumulators.gather(), strict=True):
                momentum = self._momentum[name].mul_(_MOMENTUM).add_(gradient)
                self._weights[name].copy_(master.sub_(momentum, alpha=lr))
        self.accumulators.flat.release()

    def memory(self) -> dict[str, int]:
        """Bytes held; master weights count as optimizer."""
        return super().memory() | {"optimizer": held(iter([*self._masters.values(), *self._momentum.values()]))}

    def save(self, directory: Path, tag: str) -> None:
        """Write weights and optimizer state under a tag."""
        place = directory / tag
        place.mkdir(parents=True, exist_ok=True)
        torch.save({"masters": self._masters, "momentum": self._momentum}, place / _STATE)

    def restore(self, directory: Path, tag: str) -> None:
        """Load weights and optimizer state of a tag."""
        state = torch.load(directory / tag / _STATE, weights_only=True)
        self._masters, self._momentum = state["masters"], state["momentum"]
        for name, master in self._masters.items():
            self._weights[name].copy_(master)

    def park(self, keep_sum: bool) -> None:
        """Give the accumulators back, except for a suspended update's sum."""
        if not keep_sum:
            self.accumulators.flat.release()

    def wake(self) -> None:
        """Nothing was moved."""

"""A cell's copy of the model: made from its directory, computing gradient sums, giving its memory back when parked."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from gyre.checksum import checksum as checksum_of
from gyre.config import Config
from gyre.training.batch import Batch
from gyre.training.gradients import Accumulators, Flat
from gyre.training.objectives import Objective, objective_loss
from gyre.training.packing import MicroStep
from gyre.training.pulling import Source
from gyre.training.slots import Spec
from gyre.training.stages import EMBEDDING, Stage, load_stage
from gyre.training.statistics import Statistics

_TRIM_SECONDS = 20.0
_trimmed_at = 0.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def trim_heap() -> None:
    """Have the C library give freed memory back to the system."""
    global _trimmed_at
    _trimmed_at = time.monotonic()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def trimmed() -> Iterator[None]:
    """Trim the heap after heavy work: activations of ever other shapes would leave it full of holes.

    Only now and then: what comes back page by page would cost a small model a third of its time.
    """
    yield
    if time.monotonic() - _trimmed_at > _TRIM_SECONDS:
        trim_heap()


def held(tensors: Iterator[torch.Tensor]) -> int:
    """Bytes behind some tensors, each storage counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


class CellModel:
    """What the core's model and a satellite's have in common: one worker's stage, its sums, the loss."""

    def __init__(self, stage: Stage, config: Config, device: torch.device) -> None:
        self.scorer = stage
        self.device = device
        self.objective = Objective.of(config.train)
        self.names = [name for name, _ in stage.weights()]
        self.parameters = [parameter for _, parameter in stage.weights()]
        self.specs = [Spec(name, p.dtype, tuple(p.shape)) for name, p in stage.weights()]
        embedding = dict(stage.weights()).get(EMBEDDING)
        self.shared = stage.tied if stage.tied is not None else embedding
        summed = [*self.parameters, *([] if stage.tied is None else [stage.tied])]
        self.accumulators = Accumulators(summed, device, config.shards, [] if self.shared is None else [self.shared])
        self.snapshot = -1  # the one whose weights these are; -1 for none
        self.reference: Stage | None = None  # whose policy the KL divergence is from, where there is one
        self._run: torch.nn.Module = stage  # the stage, or an engine around it

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names, tied ones once."""
        return zip(self.names, (parameter.data for parameter in self.parameters), strict=True)

    def forward(self, batch: Batch, received: torch.Tensor | None = None) -> tuple[torch.Tensor, Statistics | None]:
        """What this stage makes of a micro-step: hidden states [L, T, H], or at the last stage the loss sum.

        L is 1, or 2 where the reference's hidden states go along. `received` is what the stage before made.
        """
        out = self._run(batch, None if received is None else received[0])
        other = None
        if self.reference is not None:
            with torch.no_grad():
                other = self.reference(batch, None if received is None else received[1])
        if not self.scorer.last:
            return torch.stack([out] if other is None else [out, other]), None
        return objective_loss(self.objective, *out, batch, None if other is None else other[0])

    def backward(self, output: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Add the gradients of what `forward` made to the sums; `gradient` is the next stage's, of this output."""
        torch.autograd.backward(output, gradient)
        self.accumulators.flush()

    def compute(self, step: MicroStep) -> Statistics:
        """Add one micro-step's gradient sum to the accumulators, where there is one stage."""
        with trimmed():
            loss, statistics = self.forward(Batch.of(step, self.device))
            self.backward(loss)
            del loss
        assert statistics is not None
        return statistics

    def checksum(self) -> str:
        """Checksum of the weights held now."""
        return checksum_of(self.named())

    def memory(self) -> dict[str, int]:
        """Bytes held for weights, gradients, accumulators and optimizer state."""
        gradients = (p.grad for p in self.parameters if p.grad is not None)
        weights = [parameter.data for parameter in self.parameters]
        if self.scorer.tied is not None:
            weights.append(self.scorer.tied.data)
        if self.reference is not None:
            weights.extend(parameter.data for _, parameter in self.reference.weights())
        return {
            "weights": held(iter(weights)),
            "gradients": held(gradients),
            "accumulators": self.accumulators.flat.held,
            "optimizer": 0,
        }


class SatelliteModel(CellModel):
    """Weights and accumulators in one buffer each, taken for an update and given back when parked (invariant 10)."""

    def __init__(self, directory: Path, config: Config, device: torch.device, number: int = 0) -> None:
        """Make stage `number` of the model of `directory`, without weights."""
        train, dtype = config.train, DTYPES[config.model.dtype]
        own = (number, train.stages, train.checkpoint_activations)
        stage = load_stage(directory, dtype, torch.device("cpu"), False, *own)
        for module in stage.modules():  # buffers, such as rotary frequencies, are not part of a snapshot
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        super().__init__(stage, config, device)
        held_here = [*self.parameters, *([] if stage.tied is None else [stage.tied])]
        self._weights = Flat([parameter.shape for parameter in held_here], dtype, device)
        self._weights.release()
        for parameter, view in zip(held_here, self._weights.views, strict=True):
            parameter.data = view
        self.accumulators.hook()
        self._checked = not (stage.first and stage.last)  # a model that can be cut is known to be packable

    def load(self, source: Source) -> None:
        """Take the weights of a snapshot, each verified as it is copied.

        Raises:
            WeightsMismatch: they are not the weights that were announced, or not of this model.
        """
        self.snapshot = -1
        self._weights.restore()
        source.copy_into(dict(self.named()))
        if self.scorer.tied is not None:
            source.copy_into({EMBEDDING: self.scorer.tied.data})
        if not self._checked:
            self.scorer.check()
            self._checked = True
        self.snapshot = source.snapshot

    def park(self) -> None:
        """Give weights, gradients and accumulators back."""
        self.snapshot = -1
        for parameter in self.parameters:
            parameter.grad = None
        self._weights.release()
        self.accumulators.flat.release()
        if self.device.type != "cpu":
            torch.cuda.empty_cache()
        trim_heap()

"""A cell's copy of the model: made from its directory, computing gradient sums, giving its memory back when parked."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from gyre.checksum import checksum as checksum_of
from gyre.config import TrainConfig
from gyre.training.batch import Batch
from gyre.training.gradients import Accumulators, Flat
from gyre.training.loss import micro_step_loss
from gyre.training.objectives import Objective
from gyre.training.packing import MicroStep
from gyre.training.pulling import Source
from gyre.training.scorer import Scorer
from gyre.training.slots import Spec
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


def load(directory: Path, dtype: torch.dtype, device: torch.device, weights: bool) -> torch.nn.Module:
    """The causal language model of a directory, for training; without `weights` its parameters are undefined."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.utils import logging

    logging.disable_progress_bar()
    options = {"dtype": dtype, "attn_implementation": "sdpa"}
    if weights:
        model = AutoModelForCausalLM.from_pretrained(directory, **options)
    else:
        config = AutoConfig.from_pretrained(directory)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()
    model.train()
    return model.to(device)


class CellModel:
    """What the core's model and a satellite's have in common: names, accumulators, the loss."""

    def __init__(self, model: torch.nn.Module, config: TrainConfig, device: torch.device) -> None:
        self.model = model
        self.scorer = Scorer(model, config.checkpoint_activations)
        self.device = device
        self.objective = Objective.of(config)
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = [parameter for _, parameter in model.named_parameters()]
        self.specs = [Spec(name, p.dtype, tuple(p.shape)) for name, p in model.named_parameters()]
        self.accumulators = Accumulators(self.parameters, device)
        self.snapshot = -1  # the one whose weights these are; -1 for none

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names, tied ones once."""
        return zip(self.names, (parameter.data for parameter in self.parameters), strict=True)

    def checksum(self) -> str:
        """Checksum of the weights held now."""
        return checksum_of(self.named())

    def memory(self) -> dict[str, int]:
        """Bytes held for weights, gradients, accumulators and optimizer state."""
        gradients = (p.grad for p in self.parameters if p.grad is not None)
        return {
            "weights": held(parameter.data for parameter in self.parameters),
            "gradients": held(gradients),
            "accumulators": self.accumulators.flat.held,
            "optimizer": 0,
        }


class SatelliteModel(CellModel):
    """Weights and accumulators in one buffer each, taken for an update and given back when parked (invariant 10)."""

    def __init__(self, directory: Path, dtype: torch.dtype, config: TrainConfig, device: torch.device) -> None:
        model = load(directory, dtype, torch.device("cpu"), weights=False)
        for module in model.modules():  # buffers, such as rotary frequencies, are not part of a snapshot
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        super().__init__(model, config, device)
        self._weights = Flat([parameter.shape for parameter in self.parameters], dtype, device)
        self._weights.release()
        for parameter, view in zip(self.parameters, self._weights.views, strict=True):
            parameter.data = view
        self.accumulators.hook()
        self._checked = False

    def load(self, source: Source) -> None:
        """Take the weights of a snapshot, each verified as it is copied.

        Raises:
            WeightsMismatch: they are not the weights that were announced, or not of this model.
        """
        self.snapshot = -1
        self._weights.restore()
        source.copy_into(dict(self.named()))
        if not self._checked:
            self.scorer.check()
            self._checked = True
        self.snapshot = source.snapshot

    def compute(self, step: MicroStep) -> Statistics:
        """Add one micro-step's gradient sum to the accumulators."""
        with trimmed():
            loss, statistics = micro_step_loss(self.scorer, Batch.of(step, self.device), self.objective)
            loss.backward()
            del loss
        return statistics

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

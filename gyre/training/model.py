"""A cell's copy of the model: made from its directory, computing gradient sums, giving its memory back when parked."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from gyre.config import Config
from gyre.training.accumulators import Accumulators
from gyre.training.batch import Batch
from gyre.training.objectives import Objective, objective_loss
from gyre.training.packing import MicroStep
from gyre.training.parking import Parked
from gyre.training.pieces import Pieces, Whole
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

    def __init__(self, stage: Stage, config: Config, device: torch.device, reference: Stage | None) -> None:
        self.scorer = stage
        self.device = device
        self.objective = Objective.of(config.train)
        self.names = [name for name, _ in stage.weights()]
        self.parameters = [parameter for _, parameter in stage.weights()]
        self.specs = [Spec(name, p.dtype, tuple(p.shape)) for name, p in stage.weights()]
        tied = [] if stage.tied is None else [stage.tied]
        embedding = dict(stage.weights()).get(EMBEDDING)
        #: Where embeddings are tied and on two stages, each has its own: this one's, whose sums belong together.
        self.shared = stage.tied if tied or stage.last else embedding
        self._group = dist.new_group() if config.shards > 1 else None  # of its own: collectives come in any order
        alone = [] if self.shared is None else [self.shared]
        self.accumulators = Accumulators(self.parameters, device, self._group, alone, aside=tied)
        self._reference = reference
        self._run: torch.nn.Module = stage  # the stage, or an engine around it

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names, tied ones once. All shards of the stage must do it together."""
        return zip(self.names, (parameter.data for parameter in self.parameters), strict=True)

    # -- micro-steps -------------------------------------------------------------------------------------------------
    def forward(self, batch: Batch, received: torch.Tensor | None = None) -> tuple[torch.Tensor, Statistics | None]:
        """What this stage makes of a micro-step: hidden states [L, T, H], or at the last stage the loss sum.

        L is 1, or 2 where the reference's hidden states go along. `received` is what the stage before made; where it
        requires a gradient, `backward` puts it into `received.grad`.
        """
        out = self._run(batch, None if received is None else received[0])
        other = None
        if self._reference is not None:
            with torch.no_grad():
                other = self._reference(batch, None if received is None else received[1])
        if not self.scorer.last:
            return torch.stack([out] if other is None else [out, other]), None
        return objective_loss(self.objective, *out, batch, None if other is None else other[0])

    def backward(self, output: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Add the gradients of what `forward` made to the sums; `gradient` is the next stage's, of this output.

        Micro-steps may be in flight between the two; with several shards all do both in the same order.
        """
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

    # -- memory ------------------------------------------------------------------------------------------------------
    def memory(self) -> dict[str, int]:
        """Bytes held for weights (a reference's too), gradients, accumulators and optimizer state."""
        weights = [parameter.data for parameter in self.parameters]
        if self.scorer.tied is not None:
            weights.append(self.scorer.tied.data)
        if self._reference is not None:
            weights += [parameter.data for _, parameter in self._reference.weights()]
        return {
            "weights": held(iter(weights)),
            "gradients": held(p.grad for p in self.parameters if p.grad is not None),
            "accumulators": self.accumulators.held,
            "optimizer": 0,
        }


def reference_of(directory: Path | None, config: Config, device: torch.device, number: int) -> Stage | None:
    """Stage `number` of the model that the objective keeps to, frozen; None where it keeps to none."""
    train = config.train
    if not train.kl:
        return None
    if directory is None:
        raise ValueError("train.kl is above 0 and there is no reference")
    reference = load_stage(directory, DTYPES[config.model.dtype], device, True, number, train.stages)
    reference.requires_grad_(False)
    if reference.tied is not None:
        reference.tied.requires_grad_(False)
    if train.stages == 1:
        reference.check()
    return reference


class SatelliteModel(CellModel):
    """Weights and accumulators in buffers that are taken for an update and given back when parked (invariant 10).

    With ZeRO-3 each of several shards holds a piece of the weights.
    """

    def __init__(self, directory: Path, config: Config, device: torch.device, number: int = 0) -> None:
        """Make stage `number` of the model of `directory`, without weights; shards of a stage do so together."""
        train, dtype = config.train, DTYPES[config.model.dtype]
        own = (number, train.stages, train.checkpoint_activations)
        stage = load_stage(directory, dtype, torch.device("cpu"), False, *own)
        for module in stage.modules():  # buffers, such as rotary frequencies, are not part of a snapshot
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        super().__init__(stage, config, device, reference_of(directory, config, device, number))
        wanted: dict[str, torch.Tensor] = dict(stage.weights())
        if stage.tied is not None:
            wanted[EMBEDDING] = stage.tied
        self._weights: Pieces | Whole
        if train.zero_stage == 3 and config.shards > 1:
            layers = getattr(stage.model.get_decoder(), "layers", ())
            self._weights = Pieces(wanted, layers, dist.new_group(), dtype, device)
        else:
            self._weights = Whole(wanted, dtype, device)
        self.accumulators.hook()
        self._in_flight = 0
        self._checked = train.stages > 1  # a model that can be cut is known to be packable
        self._parked: Parked | None = None

    def load(self, source: Source) -> None:
        """Take the weights of a snapshot, each verified as it is copied.

        Raises:
            WeightsMismatch: they are not the weights that were announced, or not of this model.
        """
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
        for part in self._weights.filled():
            source.copy_into(part)
        if not self._checked:
            with self._weights.used():
                self.scorer.check()
            self._checked = True

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under their Hugging Face names, tied ones once. All shards of the stage must do it together."""
        own = set(self.names)
        return ((name, tensor) for name, tensor in self._weights.named() if name in own)

    def forward(self, batch: Batch, received: torch.Tensor | None = None) -> tuple[torch.Tensor, Statistics | None]:
        """What this stage makes of a micro-step; see `CellModel.forward`."""
        self._weights.use()
        self._in_flight += 1
        return super().forward(batch, received)

    def backward(self, output: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Add the gradients of what `forward` made to the sums; see `CellModel.backward`."""
        super().backward(output, gradient)
        self._in_flight -= 1
        if not self._in_flight:
            self._weights.rest()

    def memory(self) -> dict[str, int]:
        """Bytes held."""
        sizes = super().memory()
        reference = [] if self._reference is None else [p.data for _, p in self._reference.weights()]
        return sizes | {"weights": self._weights.held + held(iter(reference))}

    def park(self) -> None:
        """Give weights, gradients and accumulators back; on a GPU the reference goes to CPU memory."""
        self._in_flight = 0
        for parameter in self.parameters:
            parameter.grad = None
        self._weights.drop()
        self.accumulators.release()
        if self.device.type != "cpu":
            if self._reference is not None and self._parked is None:
                self._parked = Parked(self.device.type, self._reference)
            torch.cuda.empty_cache()
        trim_heap()

"""The pipeline of a cell: micro-steps go forward through its stages and backward again, with pauses wherever one likes.

Each stage carries the same words out in the same order: *feed* takes a micro-step in, *drain* has all that are in
flight come back. That is one forward, one backward (1F1B) without knowing how many micro-steps will come: a stage keeps
as many in flight as it takes to have the stages after it busy, and sends the oldest back when there are more. As every
stage knows what the others have been told, tensors go without any header, and their shapes follow from the
micro-steps. Nothing is in flight after a drain: a consistent point, at which weights may change.

Words need not come at once: between any two of them a stage holds what it has and waits as long as it likes, and the
others get as far as their own words and its tensors let them. `going_back` is the whole of the scheduling.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from gyre.training.batch import Batch
from gyre.training.links import Links, Transfer
from gyre.training.statistics import Statistics


class Runner(Protocol):
    """What computes a stage (`gyre.training.model.CellModel`)."""

    def forward(self, batch: Batch, received: torch.Tensor | None = None) -> tuple[torch.Tensor, Statistics | None]:
        """Hidden states for the next stage, or at the last one the loss sum and its statistics."""

    def backward(self, output: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
        """Add the gradients of what `forward` made to the sums; `received.grad` is there when it returns."""


class Done(NamedTuple):
    """A micro-step that is in this stage's sums; its statistics are known at the last stage alone."""

    id: int
    statistics: Statistics | None


def going_back(in_flight: int, stage: int, stages: int, draining: bool) -> int:
    """How many of the oldest micro-steps in flight go back now, after a feed or while draining.

    The stages after this one hold stages - stage - 1 at the most before they return one.
    """
    return in_flight if draining else max(0, in_flight - (stages - stage - 1))


@dataclass(eq=False)
class _Flying:
    id: int
    output: torch.Tensor
    received: torch.Tensor | None
    statistics: Statistics | None
    gradient: torch.Tensor | None  # of the output, where a stage comes after this one
    posted: Transfer | None = None  # its receive


@dataclass(frozen=True)
class Shape:
    """What passes between stages: [lanes, T, hidden] of a type; gradients come back for the first lane alone."""

    hidden: int
    dtype: torch.dtype
    lanes: int = 1  # 2 where a reference model's hidden states go along


class Pipeline:
    """One stage's part of it."""

    def __init__(
        self, runner: Runner, stage: int, stages: int, links: Links, shape: Shape, device: torch.device | str
    ) -> None:
        self._runner = runner
        self._stage, self._stages = stage, stages
        self._links = links
        self._shape = shape
        self._device = torch.device(device)
        self._flying: deque[_Flying] = deque()
        self._folded = True  # nothing was fed since the last fold

    @property
    def in_flight(self) -> int:
        """Micro-steps that this stage has not sent back."""
        return len(self._flying)

    def feed(self, id: int, batch: Batch) -> list[Done]:
        """Take a micro-step in; returns those that are in this stage's sums now, oldest first.

        Raises:
            LinkFailed: a neighbour is gone, or the wait for it was called off; the pipeline is of no use any more.
        """
        self._folded = False
        self._flying.append(self._forward(id, batch))
        return self._back(going_back(len(self._flying), self._stage, self._stages, draining=False))

    def drain(self) -> list[Done]:
        """Have all that is in flight come back.

        Raises:
            LinkFailed: a neighbour is gone, or the wait for it was called off; the pipeline is of no use any more.
        """
        done = self._back(going_back(len(self._flying), self._stage, self._stages, draining=True))
        for neighbour in (self._links.before, self._links.after):
            if neighbour is not None:
                neighbour.to.settle()
        return done

    def _forward(self, id: int, batch: Batch) -> _Flying:
        before, after, shape = self._links.before, self._links.after, self._shape
        received = None
        if before is not None:
            size = (shape.lanes, len(batch.tokens), shape.hidden)
            buffer = torch.empty(size, dtype=shape.dtype, device=self._device)
            received = before.back.take(before.back.post(buffer)).requires_grad_()
        output, statistics = self._runner.forward(batch, received)
        flying = _Flying(id, output, received, statistics, None)
        if after is not None:
            after.to.send(output.detach())
            flying.gradient = torch.zeros_like(output, requires_grad=False)
            if not output.is_cuda:  # a receive of NCCL would spin on the GPU until the gradient comes
                self._post(flying)
        return flying

    def _post(self, flying: _Flying) -> None:
        assert self._links.after is not None and flying.gradient is not None
        flying.posted = self._links.after.back.post(flying.gradient[:1])

    def _back(self, count: int) -> list[Done]:
        done = []
        for _ in range(count):
            flying = self._flying.popleft()
            if self._links.after is not None:
                if flying.posted is None:
                    self._post(flying)
                self._links.after.back.take(flying.posted)
            self._runner.backward(flying.output, flying.gradient)
            if self._links.before is not None:
                self._links.before.to.send(flying.received.grad[:1].contiguous())
            done.append(Done(flying.id, flying.statistics))
        return done

    def fold(self, share: torch.Tensor) -> None:
        """Move the last stage's sum of a tied matrix's gradients into the first stage's; both must do it, drained.

        `share` is this worker's part of that sum, flat; the last stage's is zero afterwards. Where nothing was
        fed since the last time, there is nothing to do.

        Raises:
            LinkFailed: the other one is gone, or the wait for it was called off.
        """
        if self._folded or self._links.ends is None:
            return
        self._folded = True
        if self._stage == 0:
            self._links.ends.back.add_pieces(share)
        else:
            self._links.ends.to.send_pieces(share)
            share.zero_()

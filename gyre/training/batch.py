"""A micro-step as tensors on a trainer's device. Torch only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gyre.training.packing import MicroStep


@dataclass(frozen=True)
class Batch:
    """T tokens of k samples, one sample after the other, with m trained tokens among them."""

    tokens: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T], from 0 in each sample
    starts: torch.Tensor  # int32 [k + 1], from 0 to T
    longest: int  # tokens of the longest sample
    place: torch.Tensor  # int64 [m]: where the trained tokens are; each is predicted from the place before
    segment: torch.Tensor  # int64 [m]: the samples that they are of
    logprobs: torch.Tensor  # float32 [m], as are the following
    advantages: torch.Tensor
    weights: torch.Tensor
    temperatures: torch.Tensor

    @classmethod
    def of(cls, step: MicroStep, device: torch.device | str) -> Batch:
        """Put a micro-step on a device."""
        starts = step.starts.astype(np.int64)
        lengths = np.diff(starts)
        positions = np.arange(len(step.tokens)) - np.repeat(starts[:-1], lengths)
        segment = np.searchsorted(starts, step.place, side="right") - 1
        whole = (step.tokens.astype(np.int64), positions, starts.astype(np.int32))
        trained = (step.place.astype(np.int64), segment)
        floats = (step.logprobs, step.advantages, step.weights, step.temperatures)
        numbers = (np.array(array, np.float32) for array in floats)

        def put(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        return cls(*map(put, whole), int(lengths.max()), *map(put, trained), *map(put, numbers))

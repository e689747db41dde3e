"""A satellite's weights: whole on each shard, or in pieces that are put together where they are used (ZeRO-3).

For pieces a stage's parameters are cut into *units*: each layer, and the rest (embeddings, the last norm, what makes
logits). A unit's weights lie in one buffer, which has memory only while it is used. It is put together before the unit
runs forward and again before it runs backward; views of the buffer that autograd keeps meanwhile find the weights where
they were. Shards do this in the same order, since they run the same layers. DeepSpeed does as much at the core, where
it is bound to the optimizer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gyre.training.accumulators import Flat, all_gather


class Whole:
    """All weights of a stage in one buffer."""

    def __init__(self, named: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        """Take the weights' memory over: they have none until `filled`."""
        self._flat = Flat([tensor.shape for tensor in named.values()], dtype, device)
        self._flat.release()
        self._named = dict(zip(named, self._flat.views, strict=True))
        for tensor, view in zip(named.values(), self._flat.views, strict=True):
            tensor.data = view

    def filled(self) -> Iterator[dict[str, torch.Tensor]]:
        """The weights, to be filled."""
        self._flat.restore()
        yield self._named

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights."""
        return iter(self._named.items())

    def use(self) -> None:
        """They are there."""

    def rest(self) -> None:
        """They stay."""

    def used(self) -> contextlib.AbstractContextManager[None]:
        """They are there."""
        return contextlib.nullcontext()

    @property
    def held(self) -> int:
        """Bytes held now."""
        return self._flat.held

    def drop(self) -> None:
        """Give all memory back; the weights are gone."""
        self._flat.release()


class _Unit:
    """Parameters that are put together at once."""

    def __init__(
        self, named: dict[str, torch.Tensor], group: dist.ProcessGroup, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._group = group
        shapes = [tensor.shape for tensor in named.values()]
        size = sum(shape.numel() for shape in shapes)
        padding = -size % group.size()
        self._whole = Flat([*shapes, torch.Size([padding])], dtype, device)
        self._piece = Flat([torch.Size([(size + padding) // group.size()])], dtype, device)
        self.named = dict(zip(named, self._whole.views, strict=False))
        for tensor, view in zip(named.values(), self._whole.views, strict=False):
            tensor.data = view
        self.whole = True
        self.keep = False  # it runs backward, or is used by all
        self.release()
        self._piece.release()

    @property
    def held(self) -> int:
        """Bytes held now."""
        return self._whole.held + self._piece.held

    def take(self) -> None:
        """Have memory for all of the weights, to be filled."""
        self._piece.restore()
        self._whole.restore()
        self._whole.data.zero_()
        self.whole = True

    def cut(self) -> None:
        """Keep this shard's piece of what the whole holds now."""
        pieces = self._whole.data.view(self._group.size(), -1)
        self._piece.data.copy_(pieces[self._group.rank()])
        self.release()

    @torch.no_grad()
    def gather(self) -> None:
        """Put the weights together, where they are not."""
        if not self.whole:
            self._whole.restore()
            all_gather(self._group, self._whole.data, self._piece.data)
            self.whole = True

    def release(self) -> None:
        """Give the memory of the whole back."""
        self._whole.release()
        self.whole = self.keep = False

    def drop(self) -> None:
        """Give all memory back; the weights are gone."""
        self.release()
        self._piece.release()


class Pieces:
    """The weights of a stage, of which this shard holds a piece."""

    def __init__(
        self,
        named: dict[str, torch.Tensor],
        layers: nn.ModuleList,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Take the weights' memory over: the parameters `named` lose theirs, and have it while they are used.

        Args:
            named: all weights of the stage by their names.
            layers: modules among whose parameters are some of them, and which run one after the other.
            group: the shards, in their order; no other collective is on it.
            dtype: of the weights.
            device: where they are.
        """
        rest = dict(named)
        self._units: list[_Unit] = []
        for layer in layers:
            own = {id(parameter) for parameter in layer.parameters()}
            mine = {name: rest.pop(name) for name, tensor in named.items() if id(tensor) in own}
            unit = _Unit(mine, group, dtype, device)
            self._units.append(unit)
            self._hook(layer, unit, len(mine))
        self._rest = _Unit(rest, group, dtype, device)
        self._units.append(self._rest)

    def _hook(self, layer: nn.Module, unit: _Unit, count: int) -> None:
        left = count

        def before(*_: Any) -> None:
            unit.gather()

        def after(*_: Any) -> None:
            if not unit.keep:  # layers that are computed again for gradients run forward within backward
                unit.release()

        def before_backward(*_: Any) -> None:
            nonlocal left
            unit.gather()
            unit.keep, left = True, count

        def after_gradient(_: torch.Tensor) -> None:
            nonlocal left
            left -= 1
            if not left:
                unit.release()

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)
        layer.register_full_backward_pre_hook(before_backward)
        for parameter in layer.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(after_gradient)

    def use(self) -> None:
        """Put together what is used outside of layers; until `rest`."""
        self._rest.gather()

    def rest(self) -> None:
        """Nothing is computed now: only pieces are held."""
        for unit in self._units:
            unit.release()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """What is used outside of layers is there meanwhile."""
        self.use()
        try:
            yield
        finally:
            self.rest()

    def filled(self) -> Iterator[dict[str, torch.Tensor]]:
        """The weights to be filled, unit by unit; when the next one is asked for, this shard's piece is kept."""
        for unit in self._units:
            unit.take()
            yield unit.named
            unit.cut()

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights, each there until the next one is asked for, unit by unit. All shards must do it."""
        for unit in self._units:
            whole = unit.whole
            unit.gather()
            yield from unit.named.items()
            if not whole:
                unit.release()

    @property
    def held(self) -> int:
        """Bytes held now."""
        return sum(unit.held for unit in self._units)

    def drop(self) -> None:
        """Give all memory back; the weights are gone."""
        for unit in self._units:
            unit.drop()

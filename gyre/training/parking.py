"""Give device memory back and take it again without anybody noticing: storages move to CPU memory and return.

Whoever holds tensors keeps them: a storage is shrunk to nothing and grown again in place, so every view of it stays
what it was. The contents wait in CPU memory meanwhile. It works on whatever DeepSpeed keeps, whatever its ZeRO stage,
since it follows references instead of names.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_LEAVES = (str, bytes, int, float, bool, type(None), type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def reachable(*roots: Any) -> Iterator[torch.Tensor]:
    """Every tensor that can be reached from `roots` through attributes and the common containers."""
    seen: set[int] = set()
    waiting = list(roots)
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, _LEAVES) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            yield thing
            if thing.grad is not None:
                waiting.append(thing.grad)
        if isinstance(thing, dict):
            waiting.extend(thing.keys())
            waiting.extend(thing.values())
        elif isinstance(thing, (list, tuple, set, frozenset)):
            waiting.extend(thing)
        waiting.extend(getattr(thing, "__dict__", {}).values())


class Parked:
    """Storages that were on a device, now in CPU memory."""

    def __init__(self, device_type: str, *roots: Any) -> None:
        """Move every storage on devices of this type that `roots` reach."""
        self._waiting: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        moved: set[int] = set()
        for tensor in reachable(*roots):
            if tensor.device.type != device_type or tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage._cdata not in moved:
                moved.add(storage._cdata)
                flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8)
                copy.copy_(flat)
                self._waiting.append((storage, copy))
        for storage, _ in self._waiting:
            storage.resize_(0)

    @property
    def held(self) -> int:
        """Bytes waiting in CPU memory."""
        return sum(copy.numel() for _, copy in self._waiting)

    def restore(self) -> None:
        """Put everything back."""
        while self._waiting:
            storage, copy = self._waiting.pop()
            storage.resize_(copy.numel())
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            flat.copy_(copy)

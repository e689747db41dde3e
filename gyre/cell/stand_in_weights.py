"""Weights of engines that compute nothing: they are loaded, verified, released and moved like any others."""

from __future__ import annotations

import asyncio
import json
import mmap
import time
from pathlib import Path
from typing import Any, Protocol

import numpy

from gyre.checksum_groups import MASK, Sums, accumulate, combine, group_of
from gyre.errors import GyreError, UserError, WeightsMismatch

Message = dict[str, Any]

_INTEGERS = {1: numpy.int8, 2: numpy.int16, 4: numpy.int32, 8: numpy.int32}
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2}


def array_sums(bits: numpy.ndarray) -> tuple[int, int]:
    """What `gyre.checksum` adds up over one tensor, from its elements' bits as integers; exact, as there."""
    plain = mixed = 0
    for part in numpy.array_split(bits, max(1, bits.size >> 20)):
        m = part.astype(numpy.int32)
        plain += int(m.sum(dtype=numpy.int64))
        m *= numpy.int32(-1640531527)
        m ^= m >> 15
        m *= numpy.int32(-2048144777)
        mixed += int(m.sum(dtype=numpy.int64))
    return plain & MASK, mixed & MASK


def read_weights(path: Path) -> dict[str, numpy.ndarray]:
    """A copy of the tensors of a safetensors file, as the integers that their bits are."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        length = int.from_bytes(data[:8], "little")
        table, found = json.loads(data[8 : 8 + length]), {}
        for name, entry in table.items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                found[name] = numpy.frombuffer(data[begin:end], _INTEGERS[_BYTES[entry["dtype"]]])
        return found


def _load(path: Path) -> tuple[dict[str, numpy.ndarray], Sums]:
    weights: dict[str, numpy.ndarray] = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        weights |= read_weights(file)
    sums: Sums = {}
    for name, bits in weights.items():
        accumulate(sums, group_of(name), array_sums(bits))
    return weights, sums


class Work(Protocol):
    """Answers under way, and what they have come to."""

    tokens: int

    @property
    def live(self) -> int:
        """Answers that are not whole."""


class StandInControl:
    """What the gate asks of an engine that computes nothing (`gyre.cell.gate.Control`)."""

    def __init__(self, work: Work, settings: Any) -> None:
        self._work = work
        self._settings = settings
        self._weights: dict[str, numpy.ndarray] | None = {}  # None while its memory is released
        self._kv: bytearray | None = bytearray(settings.slots * settings.max_context)  # a byte for a token
        self._loaded = False

    async def drain(self) -> None:
        """Wait for the last of what the gate has cancelled."""
        for _ in range(200):
            if not self._work.live:
                return
            await asyncio.sleep(0.01)
        raise GyreError(f"{self._work.live} requests are unfinished after a cancel")

    async def resume(self) -> None:
        """Allow requests."""
        if not self._loaded or self._kv is None:
            raise GyreError("the engine cannot serve: weights or KV memory are missing")

    async def sleep(self) -> Message:
        """Release weights and KV memory; it takes the configured time."""
        await asyncio.sleep(self._settings.timed["sleep_seconds"])
        self._weights = self._kv = None
        self._loaded = False
        return await self.memory()

    async def wake(self, tags: list[str]) -> Message:
        """Take memory back; that of the weights takes the configured time."""
        if unknown := set(tags) - {"weights", "kv_cache"}:
            raise UserError(f"unknown tags {sorted(unknown)}; use weights and kv_cache")
        if "weights" in tags and self._weights is None:
            await asyncio.sleep(self._settings.timed["wake_seconds"])
            self._weights = {}
        if "kv_cache" in tags and self._kv is None:
            self._kv = bytearray(self._settings.slots * self._settings.max_context)
        return await self.memory()

    async def load(self, path: str, checksum: str | None, snapshot: int | None) -> Message:
        """Copy a snapshot, and compare what was copied with what was announced."""
        if self._weights is None:
            raise GyreError("the weights' memory is released; wake it before a load")
        begun, self._loaded = time.monotonic(), False
        self._weights, sums = await asyncio.to_thread(_load, Path(path))
        actual = combine(sums)
        if checksum is not None and actual != checksum:
            raise WeightsMismatch(f"snapshot {snapshot} at {path} has checksum {actual}, announced was {checksum}")
        self._loaded = True
        return {"checksum": actual, "snapshot": snapshot, "seconds": time.monotonic() - begun}

    async def memory(self) -> Message:
        """Bytes held."""
        held = {"weights": sum(one.nbytes for one in (self._weights or {}).values()), "kv": len(self._kv or b"")}
        return {"bytes": held}

    def tokens(self) -> int:
        """Tokens sampled since the start."""
        return self._work.tokens

    def unfinished(self) -> int:
        """Answers under way."""
        return self._work.live

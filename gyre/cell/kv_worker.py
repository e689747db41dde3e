"""The worker's side of a KV handoff: blocks out of and into vLLM's caches, whole ones, whatever their inner layout."""

from __future__ import annotations

import logging
import mmap
import os
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import torch

from gyre.cell.kv_segment import INDEX_AT, Header, Plan, Unavailable, check, data_offset, mapped, pack_entries, reserve

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

log = logging.getLogger("gyre.engine.kv")


@dataclass
class Load:
    """Blocks that a worker is to copy in: each pair is a block of this engine and a slot of the shard."""

    generation: int
    policy: int
    tag: bytes  # of the shards
    shards: tuple[str, ...]
    pairs: list[tuple[int, int]]


class WorkerSide:
    """The side that has the blocks."""

    def __init__(self, config: VllmConfig, kv: KVCacheConfig) -> None:
        self._rank = config.parallel_config.rank
        self._blocks = kv.num_blocks
        self._rows: list[torch.Tensor] = []  # per layer, or half of one: a row of bytes for each block
        self._layout = b""
        self._failed: set[int] = set()

    def register(self, caches: dict[str, torch.Tensor]) -> None:
        """Take over the caches of all layers.

        Raises:
            ValueError: they have a layout whose blocks cannot be told apart.
        """
        seen: set[int] = set()
        words: list[Any] = []
        self._rows = []
        for name in sorted(caches):
            cache = caches[name]
            if cache.data_ptr() in seen:
                continue
            seen.add(cache.data_ptr())
            words.append((tuple(cache.shape), tuple(cache.stride()), str(cache.dtype)))
            self._rows += _rows(name, cache, self._blocks)
        self._layout = blake2b(repr([w[2:] + (w[0][1:], w[1]) for w in words]).encode(), digest_size=16).digest()

    @property
    def _block_bytes(self) -> int:
        return sum(rows.shape[1] for rows in self._rows)

    def load(self, loads: list[Load]) -> None:
        """Copy blocks in; those that could not be had are among the `failed`."""
        for load in loads:
            try:
                self._load(load)
            except (Unavailable, OSError) as error:
                log.warning("%d blocks are computed instead of loaded: %s", len(load.pairs), error)
                self._failed.update(block for block, _ in load.pairs)

    def _load(self, load: Load) -> None:
        if self._rank >= len(load.shards):
            raise Unavailable("the source has fewer workers")
        with mapped(load.shards[self._rank]) as memory:
            header = check(memory, load.generation, load.policy, None, self._layout, load.tag)
            if header.block_bytes != self._block_bytes or any(slot >= header.slots for _, slot in load.pairs):
                raise Unavailable("blocks in another layout")
            blocks, slots = (torch.tensor(each) for each in zip(*load.pairs, strict=True))
            source = _matrix(memory, header)
            at = 0
            for rows in self._rows:
                piece = source[:, at : at + rows.shape[1]].index_select(0, slots)
                rows.index_copy_(0, blocks.to(rows.device), piece.to(rows.device))
                at += rows.shape[1]
            del source, piece
            check(memory, load.generation, load.policy, None, self._layout, load.tag)
            for _, slot in load.pairs:
                memory[header.taken_at + slot] = 1

    def failed(self) -> set[int]:
        """Blocks that were not loaded since this was last asked."""
        failed, self._failed = self._failed, set()
        return failed

    def export(self, plan_path: str, shards: list[str], generation: int, policy: int) -> None:
        """Copy the planned blocks to this worker's shard; its header comes last."""
        with open(plan_path, "rb") as file:
            plan = Plan.unpack(file.read())
        count = len(plan.chosen)
        header = Header(
            generation,
            policy,
            plan.model,
            self._layout,
            plan.tag,
            self._block_bytes,
            plan.tokens,
            count,
            data_offset(count, plan.tokens),
        )
        descriptor = os.open(shards[self._rank], os.O_RDWR | os.O_CLOEXEC)
        try:
            reserve(descriptor, header.size)
            with mmap.mmap(descriptor, 0) as memory:
                target = _matrix(memory, header)
                blocks = torch.tensor([each.block for each in plan.chosen])
                at = 0
                for rows in self._rows:
                    target[:, at : at + rows.shape[1]] = rows.index_select(0, blocks.to(rows.device)).cpu()
                    at += rows.shape[1]
                del target
                memory[INDEX_AT : header.taken_at] = pack_entries([each.entry for each in plan.chosen], plan.tokens)
                memory[:INDEX_AT] = header.pack()
        finally:
            os.close(descriptor)


def _rows(name: str, cache: torch.Tensor, blocks: int) -> list[torch.Tensor]:
    """A cache as tensors with one row of bytes for each block; they share its memory."""
    halves = [cache] if cache.shape[0] == blocks else list(cache) if cache.shape[1] == blocks else []
    if not halves or not all(half.is_contiguous() for half in halves):
        raise ValueError(
            f"serving.kv_handoff: the KV cache of {name} has shape {tuple(cache.shape)} and strides {cache.stride()}, "
            f"in which {blocks} blocks cannot be told apart; set serving.kv_handoff=false"
        )
    return [half.view(torch.uint8).view(blocks, -1) for half in halves]


def _matrix(memory: mmap.mmap, header: Header) -> torch.Tensor:
    """A shard's blocks, a row of bytes each."""
    count = header.slots * header.block_bytes
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=count, offset=header.data)
    return flat.view(header.slots, header.block_bytes)

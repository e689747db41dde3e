"""What the gate and a KV handoff ask of vLLM's engine. It is called from the engine program alone, inside it."""

from __future__ import annotations

import asyncio
from typing import Any

from gyre.errors import GyreError, UserError

Message = dict[str, Any]

_TAGS = {"weights": "weights", "kv": "kv_cache"}  # kinds of memory, and what vLLM calls them


class VllmControl:
    """What the gate asks of vLLM (`gyre.cell.gate.Control`)."""

    def __init__(self, engine: Any, settings: Any) -> None:
        self._engine = engine
        self._settings = settings
        self._missing: set[str] = set()  # memory or contents without which the engine cannot work

    async def drain(self) -> None:
        """Abort what vLLM's core has; it answers once it has no work left."""
        await self._engine.pause_generation(mode="abort", clear_cache=False)
        for _ in range(200):
            if not self._engine.get_num_unfinished_requests():
                return
            await asyncio.sleep(0.01)
        raise GyreError(f"{self._engine.get_num_unfinished_requests()} requests are unfinished after an abort")

    async def resume(self) -> None:
        """Schedule requests again."""
        if self._missing:
            raise GyreError(f"the engine cannot serve: {', '.join(sorted(self._missing))} missing since it slept")
        await self._engine.resume_generation()

    async def sleep(self) -> Message:
        """Release weights and KV memory on every worker."""
        await self._engine.sleep(level=2, mode="abort")
        self._missing = {"weights", "kv_cache", "weights' contents"}
        return await self.memory()

    async def wake(self, tags: list[str]) -> Message:
        """Bring memory back."""
        if unknown := set(tags) - {"weights", "kv_cache"}:
            raise UserError(f"unknown tags {sorted(unknown)}; use weights and kv_cache")
        wanted = [tag for tag in tags if tag in self._missing]
        if wanted:
            await self._engine.wake_up(wanted)
            self._missing -= set(wanted)
        return await self.memory()

    async def load(self, path: str, checksum: str | None, snapshot: int | None) -> Message:
        """Load a snapshot on every worker and compare what they now hold with what was announced."""
        from gyre.checksum import add, combine
        from gyre.errors import WeightsMismatch

        if "weights" in self._missing:
            raise GyreError("the weights' memory is released; wake it before a load")
        self._missing.add("weights' contents")
        results = await self._engine.collective_rpc("gyre_load", args=(path,))
        held: dict[str, tuple[int, int]] = {}
        for result in results:
            held = add(held, {group: (int(pair[0]), int(pair[1])) for group, pair in result["sums"].items()})
        if not await self._engine.reset_prefix_cache():
            raise GyreError("the prefix cache could not be emptied")
        actual = combine(held)
        if checksum is not None and actual != checksum:
            raise WeightsMismatch(await asyncio.to_thread(self._explain, held, path, checksum, snapshot))
        self._missing.discard("weights' contents")
        seconds = max(result["seconds"] for result in results)
        return {"checksum": actual, "snapshot": snapshot, "seconds": seconds}

    def _explain(self, held: dict[str, tuple[int, int]], path: str, checksum: str, snapshot: int | None) -> str:
        """Who is at fault: the file, which is not what was announced, or the engine, which does not hold the file."""
        import torch

        from gyre.cell.engine_worker import snapshot_tensors
        from gyre.checksum import combine, differing, sums

        dtype = getattr(torch, self._settings.dtype)
        names = {name for name, _ in snapshot_tensors(path)}
        tied = {"lm_head.weight"} if self._engine.model_config.hf_config.tie_word_embeddings else set()
        in_file = sums((n, t.to(dtype)) for n, t in snapshot_tensors(path) if n not in tied or len(names) == 1)
        say = f"snapshot {snapshot} at {path}: announced with checksum {checksum}, but "
        if wrong := differing(in_file, held):
            return f"{say}the engine holds {combine(held)}; it differs from the file in {', '.join(wrong[:5])}"
        return f"{say}the file has {combine(in_file)}: it was altered, or is another snapshot"

    async def memory(self) -> Message:
        """Bytes of storages on all workers. It is asked in every move, so that it does not walk through pages."""
        workers = await self._engine.collective_rpc("gyre_memory")
        sizes = {kind: sum(worker[kind] for worker in workers) for kind in ("weights", "kv")}
        if self._settings.gpus:  # there, tensors keep their size in sleep, and only their memory goes
            sizes = {kind: 0 if tag in self._missing else sizes[kind] for kind, tag in _TAGS.items()}
        return {"bytes": sizes}

    def tokens(self) -> int:
        """Tokens sampled since the start, from vLLM's own counter."""
        from prometheus_client import REGISTRY

        labels = {"model_name": self._settings.served_name, "engine": "0"}
        return int(REGISTRY.get_sample_value("vllm:generation_tokens_total", labels) or 0)

    def unfinished(self) -> int:
        """Requests that vLLM has not ended."""
        return self._engine.get_num_unfinished_requests()


class KvCore:
    """What a KV handoff asks of vLLM (`gyre.cell.kv_source.Core`)."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.shards: int = engine.vllm_config.parallel_config.world_size

    async def plan(self) -> None:
        """Reach the connector's scheduler side: a reset of its cache is the one call that vLLM passes on to it."""
        await self._engine.reset_prefix_cache(reset_connector=True)

    async def export(self, plan: str, shards: list[str], generation: int, policy: int) -> None:
        """Have the workers copy blocks out."""
        await self._engine.collective_rpc("gyre_kv_export", args=(plan, shards, generation, policy))

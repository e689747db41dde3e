"""Shards of one stage as processes, which do what a test says together."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

PROGRAM = Path(__file__).with_name("shards_program.py")


class Shards:
    """Processes that do everything together."""

    def __init__(self, nest, directory: Path, count: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._children = []
        for shard in range(count):
            words = [sys.executable, str(PROGRAM)]
            spawned = nest.spawn("shard", words, directory / f"shard-{shard}.log", env={"OMP_NUM_THREADS": "1"})
            self._children.append(self._loop.run_until_complete(spawned))
        self.do("start", each=[{"shard": shard} for shard in range(count)], shards=count, store=f"{directory}/store")

    def do(self, operation: str, each=None, **arguments) -> list[dict]:
        """Have all do something; what they answer, by shard."""
        each = each or [{}] * len(self._children)
        calls = [c.call(operation, 120, **arguments, **own) for c, own in zip(self._children, each, strict=True)]

        async def all_of_them() -> list[dict]:
            return await asyncio.gather(*calls)

        return self._loop.run_until_complete(all_of_them())

    def close(self) -> None:
        async def stop() -> None:
            await asyncio.gather(*(child.stop() for child in self._children))

        self._loop.run_until_complete(stop())
        self._loop.close()

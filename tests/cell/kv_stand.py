"""Two real engines that hand KV to each other, and what tests and the benchmark of handoffs do with them."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from gyre.cell.engine_client import EngineProcess, EngineSettings

SECRET = "handoff-test"


@dataclass
class Moved:
    """A request that was cut off: its prompt, what was sampled of it, and where its engine left the KV."""

    prompt: list[int]
    sampled: list[int]
    kv: dict[str, Any]


@dataclass
class Answer:
    """Sampled ids with their log-probabilities, and the tokens of the prompt that were not computed."""

    tokens: list[int]
    logprobs: list[float]
    cached: int


class Engine:
    """An engine behind its gate; `open` it before it is asked."""

    def __init__(self, process: EngineProcess, session: aiohttp.ClientSession) -> None:
        self.process = process
        self.session = session
        self.epoch = 0
        self.policy = 0
        self.asleep = False
        self.exported: dict[str, Any] = {}

    @classmethod
    async def start(cls, model: Path, log: Path, rank: int, **changes: Any) -> Engine:
        """Start an engine with a small model."""
        kv = {"transport": "auto", "limit": 1 << 30, "timeout": 30.0} | changes.pop("kv", {})
        fields = {"dtype": "float32", "max_context": 1024, "slots": 4, "args": {"kv-cache-memory-bytes": "32M"}}
        settings = EngineSettings(model=str(model), secret=SECRET, rank=rank, **{**fields, "kv": kv, **changes})
        process = await EngineProcess.start(settings, log)
        session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {SECRET}"})
        return cls(process, session)

    async def ready(self) -> None:
        """Wait until it can be reached."""
        await self.process.ready(300)

    async def sleep(self) -> dict[str, Any]:
        """Give the memory up; returns what is still held."""
        self.asleep = True
        return await self.process.sleep()

    async def wake(self) -> None:
        """Be as before the sleep, if there was one."""
        if self.asleep:
            await self.process.wake(["weights"])
            await self.process.load(self.process.settings.model)
            await self.process.wake(["kv_cache"])
            self.asleep = False

    async def open(self, policy: int = 0, epoch: int | None = None) -> None:
        """Serve, under the next epoch."""
        self.epoch, self.policy = self.epoch + 1 if epoch is None else epoch, policy
        await self.process.open(self.epoch, policy)

    def kv(self, **changes: Any) -> dict[str, Any]:
        """What a proxy says of an execution whose requests were here."""
        return {"address": self.process.kv, "epoch": self.epoch, "policy": self.policy} | changes

    def body(self, prompt: list[int], kv: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        """A completion's body; greedy unless said otherwise."""
        body = {"model": "gyre", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        body |= {"logprobs": 0, "return_token_ids": True, **more}
        return body if kv is None else body | {"kv_transfer_params": {"gyre": kv}}

    async def complete(self, prompt: list[int], kv: dict[str, Any] | None = None, **more: Any) -> Answer:
        """One whole answer."""
        headers = {"X-Gyre-Execution": "1", "X-Gyre-Epoch": str(self.epoch)}
        url = f"{self.process.url}/v1/completions"
        async with self.session.post(url, json=self.body(prompt, kv, **more), headers=headers) as response:
            answer = await response.json()
            assert response.status == 200, answer
        choice = answer["choices"][0]
        details = answer["usage"].get("prompt_tokens_details") or {}
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], details.get("cached_tokens") or 0)

    async def begin(self, prompt: list[int], tokens: int, **more: Any) -> tuple[asyncio.Task[Moved], asyncio.Event]:
        """Begin a stream that goes on until it is cut off; the event is set after `tokens` tokens."""
        enough = asyncio.Event()
        body = self.body(prompt, **{"max_tokens": 900 - len(prompt), "stream": True, **more})
        headers = {"X-Gyre-Execution": "1", "X-Gyre-Epoch": str(self.epoch)}
        kv = self.kv()

        async def follow() -> Moved:
            sampled: list[int] = []
            url = f"{self.process.url}/v1/completions"
            async with self.session.post(url, json=body, headers=headers) as response:
                async for line in response.content:
                    if line.startswith(b"data: {") and b"choices" in line:
                        sampled += json.loads(line[6:])["choices"][0].get("token_ids") or []
                    if len(sampled) >= tokens:
                        enough.set()
            enough.set()
            return Moved(prompt, sampled, kv)

        return asyncio.create_task(follow()), enough

    async def cut_off(self, *prompts: list[int], tokens: int = 40, export: bool = True) -> list[Moved]:
        """Have requests sample some tokens each, and leave rollout while they run."""
        begun = [await self.begin(prompt, tokens) for prompt in prompts]
        await asyncio.gather(*(enough.wait() for _, enough in begun))
        assert await self.process.close() == 0
        if export:
            self.exported = await self.process.export()
        return list(await asyncio.gather(*(task for task, _ in begun)))

    async def stop(self) -> None:
        """End it."""
        await self.session.close()
        await self.process.stop()

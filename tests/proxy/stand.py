"""A proxy in this process before fake engines, with one client per execution."""

from __future__ import annotations

import contextlib
import json

import aiohttp

from gyre.proxy.recorder import read_records
from gyre.proxy.server import Proxy
from tests.proxy.fake_engine import SECRET, FakeEngine


class Stand:
    """What a test of the proxy needs."""

    def __init__(self, tmp_path, engines: list[FakeEngine]) -> None:
        self.tmp_path = tmp_path
        self.engines = {engine.rank: engine for engine in engines}
        self.proxy = Proxy()
        self.version = 0

    async def routes(self, engines: dict[int, FakeEngine | None] | None = None, moves=None) -> None:
        """Publish engines (all of them by default) and moves."""
        self.version += 1
        given = self.engines if engines is None else engines
        table = {str(rank): engine.entry() if engine else None for rank, engine in given.items()}
        await self.proxy.routes(self.version, table, {str(n): rank for n, rank in (moves or {}).items()})

    async def register(self, n: int = 1, engine: int = 0) -> None:
        """Accept execution n."""
        await self.proxy.register(n, 1, f"token-{n}", engine, str(self.tmp_path / f"{n}.records"))

    def records(self, n: int = 1):
        """What was recorded of execution n."""
        return read_records(self.tmp_path / f"{n}.records")

    def post(self, body, n: int = 1, path: str = "/v1/chat/completions", **kwargs):
        """A request of execution n."""
        headers = {"Authorization": f"Bearer token-{n}"}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.client.post(self.url + path, data=data, headers=headers, **kwargs)

    async def ask(self, body, n: int = 1):
        """A plain request's status and answer."""
        async with self.post(body, n) as response:
            return response.status, await response.json()

    async def ask_stream(self, body, n: int = 1):
        """A streaming request's events, and its comments."""
        events, comments = [], 0
        async with self.post({**body, "stream": True}, n) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                comments += line.startswith(b":")
                if line.startswith(b"data: "):
                    events.append(line[6:].strip())
        assert events.pop() == b"[DONE]"
        return [json.loads(event) for event in events], comments


@contextlib.asynccontextmanager
async def stand(tmp_path, *engines: FakeEngine, **settings):
    """Start engines and a proxy; execution 1 is registered on the first engine."""
    it = Stand(tmp_path, list(engines))
    for engine in engines:
        await engine.start()
    settings = {"secret": SECRET, "max_context": 4096, **settings}
    started = await it.proxy.start(**settings)
    it.url = f"http://127.0.0.1:{started['port']}"
    await it.routes()
    await it.register(engine=engines[0].rank)
    try:
        async with aiohttp.ClientSession() as it.client:
            yield it
    finally:
        await it.proxy.stop()
        for engine in engines:
            await engine.stop()


def text_of(events) -> str:
    """All content of a streamed answer."""
    return "".join(c["delta"].get("content") or "" for event in events for c in event["choices"])


def finish_of(events):
    """Its finish reasons."""
    return [c["finish_reason"] for event in events for c in event["choices"] if c.get("finish_reason")]


def joined(events):
    """The message of a stream, put together as clients do, and the ids of its calls."""
    message, calls, finish = {"reasoning": "", "content": ""}, [], []
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            for key in message:
                message[key] += delta.get(key) or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(calls):
                    calls.append([call["id"], call["function"]["name"], ""])
                else:
                    assert "id" not in call and "name" not in call["function"]
                calls[call["index"]][2] += call["function"].get("arguments") or ""
            finish += [choice["finish_reason"]] if choice.get("finish_reason") else []
    return message["reasoning"], message["content"], [tuple(call[1:]) for call in calls], finish, [c[0] for c in calls]

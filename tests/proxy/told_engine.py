"""An engine that answers chats with the messages it is told to: reasoning, text, calls of tools, in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.proxy.fake_engine import FakeEngine


def call(name: str, arguments: Any, identity: str = "call_1") -> dict:
    """A call of a tool, as engines say it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": text}}


def halves(text: str) -> list[str]:
    """A text in two parts, or in one where it is short."""
    middle = len(text) // 2
    return [part for part in (text[:middle], text[middle:]) if part]


def deltas(message: dict) -> Iterator[dict]:
    """A message in pieces."""
    for key in ("reasoning", "content"):
        for part in halves(message.get(key) or ""):
            yield {key: part}
    for index, one in enumerate(message.get("tool_calls") or ()):
        yield {"tool_calls": [{**one, "index": index, "function": {"name": one["function"]["name"], "arguments": ""}}]}
        for part in halves(one["function"]["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": part}}]}


@dataclass
class ToldEngine(FakeEngine):
    """Answers the next chat with the next of `messages`, or with what `tell` makes of its body."""

    messages: list[dict] = field(default_factory=list)
    tell: Callable[[dict], dict] | None = None
    finish: str = ""
    stopped_by: Any = None  # a stop string
    refusal: tuple[int, dict] | None = None
    rendered: list[dict] = field(default_factory=list)

    async def start(self) -> ToldEngine:
        """Listen on a free port."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.chat)
        app.router.add_post("/v1/chat/completions/render", self.render)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = self._runner.addresses[0][1]
        self.gate.set()
        return self

    async def render(self, request: web.Request) -> web.Response:
        """The prompt's ids, one for each message."""
        self.rendered.append(body := await request.json())
        if self.refusal:
            return web.json_response(self.refusal[1], status=self.refusal[0])
        return web.json_response({"token_ids": list(range(10, 10 + len(body["messages"])))})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """A streamed chat completion."""
        self.bodies.append(body := await request.json())
        if self.refusal:
            return web.json_response(self.refusal[1], status=self.refusal[0])
        message = self.tell(body) if self.tell else self.messages.pop(0)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Gyre-Policy": "0"})
        await response.prepare(request)
        pieces = list(deltas(message)) or [{}]
        reason = self.finish or ("tool_calls" if message.get("tool_calls") else "stop")
        prompt = list(range(10, 15))
        for at, delta in enumerate(pieces):
            last = at == len(pieces) - 1
            entry = {"token": "t", "logprob": -0.5, "bytes": [116], "top_logprobs": []}
            choice = {"index": 0, "token_ids": [at + 1], "finish_reason": reason if last else None}
            if last and self.stopped_by is not None:
                choice["stop_reason"] = self.stopped_by
            if "messages" in body:
                choice |= {"delta": delta, "logprobs": {"content": [entry]}}
            else:
                values = {"tokens": ["t"], "token_logprobs": [-0.5], "top_logprobs": [{"t": -0.5}]}
                choice |= {"text": delta.get("content", ""), "logprobs": values}
            event: dict[str, Any] = {"id": "x", "created": 1, "model": "m", "choices": [choice]}
            if at == 0:
                (event if "messages" in body else choice)["prompt_token_ids"] = prompt
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

"""A small real engine behind the gate's interface: tokens are bytes, and answers are a function of the prompt's ids.

The answer to a prompt is fixed text, drawn by a checksum of the prompt, with characters of one to four bytes, so that
an answer cut anywhere and continued elsewhere can be compared exactly. It speaks the extension of `gyre.splice`, and
parses reasoning and calls of tools out of its text, as engines do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web

from gyre.splice import ARGUMENT, HEADER, Extension, resolve
from tests.proxy.fake_text import END, START, Detokenizer, decode, delta, parsed, render, segmented

__all__ = ["END", "SECRET", "START", "UNSOUND", "FakeEngine", "Fault", "answer", "logprob", "render"]
SECRET = "run-key"


def answer(prompt: list[int], length: int) -> list[int]:
    """All tokens of the answer to a prompt, the end token included."""
    draw = random.Random(zlib.crc32(repr(prompt).encode()))
    text = "".join(draw.choice("abcdefgh ,.éß€漢😀") for _ in range(length))
    return [*text.encode(), END]


def logprob(position: int, token: int) -> float:
    """The log-probability of an answer's token."""
    return -0.001 * position - 0.01 * (token % 7)


#: Words that are no answer, as an engine may send them after an answer's beginning.
UNSOUND = {
    "no json": b"{",
    "a list": b"[]",
    "no choice": b'{"choices": [{"index": 7, "delta": {"content": "x"}, "token_ids": []}]}',
    "no pieces": b'{"choices": "none"}',
    "no numbers": b'{"choices": [{"index": 0, "delta": {}, "token_ids": ["x"], '
    b'"logprobs": {"content": [{"logprob": -1.0}], "token_logprobs": [-1.0]}}]}',
    "a huge token": b'{"choices": [{"index": 0, "delta": {}, "token_ids": [4294967296], '
    b'"logprobs": {"content": [{"logprob": -1.0}], "token_logprobs": [-1.0]}}]}',
    "no logprobs": b'{"choices": [{"index": 0, "delta": {"content": "x"}, "text": "x", "token_ids": [5]}]}',
    "no logprob": b'{"choices": [{"index": 0, "delta": {}, "token_ids": [5], "logprobs": {"content": [{}]}}]}',
    "a word as logprob": b'{"choices": [{"index": 0, "delta": {}, "token_ids": [5], '
    b'"logprobs": {"content": [{"logprob": "x"}], "token_logprobs": ["x"]}}]}',
    "no call": b'{"choices": [{"index": 0, "delta": {"tool_calls": [5]}, "token_ids": [5], '
    b'"logprobs": {"content": [{"logprob": -1.0}], "token_logprobs": [-1.0]}}]}',
    "a number as text": b'{"choices": [{"index": 0, "delta": {"content": 5}, "text": 5, "token_ids": [5], '
    b'"logprobs": {"content": [{"logprob": -1.0}], "token_logprobs": [-1.0]}}]}',
    "another prompt": b'{"prompt_token_ids": [1], "choices": []}',
    "no tokens": b'{"choices": [{"index": 0, "delta": {"content": "x"}, "text": "x", "finish_reason": "stop"}]}',
    "aborted": b'{"choices": [{"index": 0, "delta": {}, "finish_reason": "abort"}]}',
    "an error": b'{"error": "so it is"}',
    "the end": b"[DONE]",
    "nothing": b"",
}


@dataclass
class Fault:
    """What happens to the next request: after `tokens` tokens, `how` (moved, drop, error, stall, nan: a token whose
    log-probability is no number, or one of `UNSOUND`), or at once (refused, closed, 500, 400)."""

    how: str
    tokens: int = 0


@dataclass
class FakeEngine:
    """One engine and its gate."""

    rank: int
    policy: int = 0
    epoch: int = 1
    length: int = 20  # characters of an answer
    delay: float = 0.0  # seconds a token takes
    per_chunk: int = 1
    faults: list[Fault] = field(default_factory=list)
    bodies: list[dict] = field(default_factory=list)
    live: int = 0
    peak: int = 0
    cancelled: int = 0
    port: int = 0
    says: Callable[[str], str] | None = None  # the answer to a prompt's text, where it is not to be drawn
    pairs: bool = False  # sample pairs of characters, which encoding the text again would not give
    parses: bool = False  # parse reasoning and calls of tools
    extends: bool = True  # speak the extension
    replay: int = 3  # tokens in a piece of those that it only repeats
    constrained: bool | None = None  # what it says of how it samples
    kv: str = ""
    slots: int = 0
    gate: asyncio.Event = field(default_factory=asyncio.Event)  # set: admit
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> FakeEngine:
        """Listen on a free port."""
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completion)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.gate.set()
        return self

    async def stop(self) -> None:
        """Go away, as a killed process does."""
        await self._runner.cleanup()

    def close(self) -> None:
        """Close the gate and cancel what is live, as before a cell leaves."""
        self.closing.set()

    def open(self, epoch: int) -> None:
        """Serve again."""
        self.epoch, self.closing = epoch, asyncio.Event()

    def entry(self) -> dict:
        """This engine in a route table."""
        entry = {"url": f"http://127.0.0.1:{self.port}", "epoch": self.epoch, "policy": self.policy}
        return {**entry, "kv": self.kv, "slots": self.slots}

    def answer(self, prompt: list[int], index: int = 0) -> list[int]:
        """All tokens of the answer to a prompt, the end token included."""
        if self.says is None:
            return answer([*prompt, *([index] if index else [])], self.length)
        text = self.says(decode(prompt))
        draw = random.Random(zlib.crc32(repr(prompt).encode()))
        return [*(segmented(text, draw) if self.pairs else text.encode()), END]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        drop = (body.get("chat_template_kwargs") or {}).get("drop_thinking", False)
        return await self.serve(request, body, render(body["messages"], body.get("tools"), drop), chat=True)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        given = body["prompt"]
        return await self.serve(request, body, [*given.encode()] if isinstance(given, str) else given, chat=False)

    async def serve(self, request, body, rendered, chat) -> web.StreamResponse:
        self.bodies.append(body)
        assert request.headers["Authorization"] == f"Bearer {SECRET}"
        assert body["stream"] is True and body["return_token_ids"] is True
        fault = self.faults.pop(0) if self.faults else Fault("none")
        if self.closing.is_set() or int(request.headers["X-Gyre-Epoch"]) != self.epoch or fault.how == "refused":
            return web.json_response({"error": {"type": "gyre_moved", "message": ""}}, status=409)
        if fault.how == "closed":
            return web.json_response({"error": {"type": "gyre_execution_closed", "message": ""}}, status=409)
        if fault.how in ("500", "400"):
            return web.json_response({"error": {"message": "so it is", "type": "Bad"}}, status=int(fault.how))
        await self.gate.wait()
        self.live += 1
        self.peak = max(self.peak, self.live)
        try:
            return await self.stream(request, body, rendered, chat, fault)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.live -= 1

    async def stream(self, request, body, rendered, chat, fault) -> web.StreamResponse:
        extension = Extension.decode((body.get("vllm_xargs") or {}).get(ARGUMENT, "{}"))
        if not self.extends:
            assert extension == Extension()
        prompt, note = resolve(rendered, extension, {END}, decode)
        note = dataclasses.replace(note, constrained=self.constrained)
        prompt, kept = prompt.tolist(), extension.kept.tolist()
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "X-Gyre-Policy": str(self.policy),
                "X-Gyre-Engine": str(self.rank),
                HEADER: note.encode(),
            }
        )
        await response.prepare(request)

        async def send(choice, **rest):
            event = {"id": "x", "created": 1, "model": "m", "choices": [choice], **rest}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        for index in range(body.get("n") or 1):
            if chat:
                first = {"index": index, "delta": {"role": "assistant", "content": ""}}
                await send(first, prompt_token_ids=prompt)
            words = _Words(self, send, body, chat, index, prompt)
            if not await self.choice(request, response, words, kept, fault):
                return response
        await response.write(b"data: [DONE]\n\n")
        return response

    async def choice(self, request, response, words, kept, fault) -> bool:
        """Send one answer; False where it came to no end."""
        tokens, at = self.answer(words.prompt, words.index), 0
        assert tokens[: len(kept)] == kept
        while True:
            if at >= len(kept) and (self.closing.is_set() or (fault.how != "none" and at - len(kept) >= fault.tokens)):
                await self.fail(request, response, words, tokens[at : at + 1], fault)
                return False
            size = min(self.replay, len(kept) - at) if at < len(kept) else self.per_chunk
            if await words.add(tokens[at : at + size], at < len(kept)):
                return True
            at += size
            if at > len(kept):
                await asyncio.sleep(self.delay)

    async def fail(self, request, response, words, token, fault) -> None:
        """What the engine does in place of its next token."""
        how = "moved" if self.closing.is_set() else fault.how
        if how == "drop":
            request.transport.abort()
        elif how == "stall":
            await asyncio.sleep(3600)
        elif how in UNSOUND:
            await response.write(b"data: " + UNSOUND[how] + b"\n\n")
        elif how == "nan":
            await words.piece(token, [None], {"content": "?"}, None, None)
        elif how == "moved":
            await response.write(b'event: gyre\ndata: {"moved": true}\n\n')
        else:
            await response.write(b'data: {"error": {"message": "died", "code": 500}}\n\n')


class _Words:
    """One answer as it is sent."""

    def __init__(self, engine, send, body, chat, index, prompt) -> None:
        stops = body.get("stop") or []
        self.engine, self.send, self.body, self.chat, self.index, self.prompt = engine, send, body, chat, index, prompt
        self.limit = body.get("max_tokens") or body.get("max_completion_tokens") or 1 << 20
        self.text = Detokenizer([stops] if isinstance(stops, str) else stops)
        self.shown: dict = {}
        self.count = 0
        self.calls = itertools.count()

    async def add(self, tokens, known: bool) -> bool:
        """Send the next tokens; True where they end the answer."""
        taken, reason, stop = [], None, None
        for token in tokens:
            taken.append(token)
            self.count += 1
            stop = None if token == END else self.text.push(token)
            if stop is not None or token == END:
                reason = "stop"
            elif self.count >= self.limit:
                reason = "length"
            if reason:
                break
        message = self.message(reason is not None)
        more = delta(self.shown, message, lambda: f"call-{self.engine.rank}-{next(self.calls)}")
        self.shown = message
        if reason == "stop" and message.get("tool_calls"):
            reason = "tool_calls"
        start = self.count - len(taken)
        values = [0.0 if known else logprob(start + i, token) for i, token in enumerate(taken)]
        await self.piece(taken, values, more, reason, stop)
        return reason is not None

    def message(self, final: bool) -> dict:
        text = self.text.visible(final)
        if self.engine.parses and self.chat:
            return parsed(text, final, bool(self.body.get("tools")))
        return {"content": text} if text else {}

    async def piece(self, tokens, values, more, reason, stop) -> None:
        names = [decode([token]) for token in tokens]
        choice = {"index": self.index, "finish_reason": reason, "token_ids": tokens, "stop_reason": stop}
        if self.chat:
            entries = [
                {"token": name, "logprob": value, "bytes": [], "top_logprobs": []}
                for name, value in zip(names, values, strict=True)
            ]
            await self.send({**choice, "delta": more, "logprobs": {"content": entries}})
            return
        logprobs = {
            "tokens": names,
            "token_logprobs": values,
            "top_logprobs": [{n: v} for n, v in zip(names, values, strict=True)],
            "text_offset": [0] * len(names),
        }
        if self.count == len(tokens):
            choice["prompt_token_ids"] = self.prompt
        await self.send({**choice, "text": more.get("content", ""), "logprobs": logprobs})

"""A small real engine behind the gate's interface: tokens are bytes, and answers are a function of the prompt's ids.

The answer to a prompt is fixed text, drawn by a checksum of the prompt, with characters of one to four bytes, so that
an answer cut anywhere and continued elsewhere can be compared exactly.
"""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gyre.proxy.text import TextStream

EOT, START, END = 256, 257, 258
SECRET = "run-key"


def byte_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in kept}
    for offset, byte in enumerate(b for b in range(256) if b not in names):
        names[byte] = chr(256 + offset)
    assert sorted(names.values()) == alphabet
    tokenizer = Tokenizer(models.BPE(vocab={name: byte for byte, name in names.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


TOKENIZER = byte_tokenizer()


def render(messages) -> list[int]:
    """The prompt's ids, as ChatML."""
    ids: list[int] = []
    for message in [*messages, None]:
        role = "assistant" if message is None else message["role"]
        ids += [START, *f"{role}\n".encode()]
        if message is not None:
            ids += [*(message.get("content") or "").encode(), END, *b"\n"]
    return ids


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
        return {"url": f"http://127.0.0.1:{self.port}", "epoch": self.epoch, "policy": self.policy}

    def answer(self, prompt: list[int]) -> list[int]:
        """All tokens of the answer to a prompt."""
        if self.says is None:
            return answer(prompt, self.length)
        return [*self.says(TOKENIZER.decode(prompt, skip_special_tokens=False)).encode(), END]

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = render(body["messages"])
        return await self.serve(request, body, prompt, self.answer(prompt), chat=True)

    async def completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        given = body["prompt"]
        start = len(given) - given[::-1].index(START) + len("assistant\n")
        rest = self.answer(given[:start])[len(given) - start :]
        return await self.serve(request, body, given, rest, chat=False, done=len(given) - start)

    async def serve(self, request, body, prompt, tokens, chat, done=0) -> web.StreamResponse:
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
            return await self.stream(request, body, prompt, tokens, chat, done, fault)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.live -= 1

    async def stream(self, request, body, prompt, tokens, chat, done, fault) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "X-Gyre-Policy": str(self.policy),
                "X-Gyre-Engine": str(self.rank),
            }
        )
        await response.prepare(request)

        async def send(choice, **rest):
            event = {"id": "x", "created": 1, "model": "m", "choices": [choice], **rest}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        if chat:
            await send({"index": 0, "delta": {"role": "assistant", "content": ""}}, prompt_token_ids=prompt)
        limit = body.get("max_tokens") or body.get("max_completion_tokens") or 1 << 20
        stops = body.get("stop") or []
        text = TextStream(TOKENIZER, prompt, [stops] if isinstance(stops, str) else stops)
        for at in range(0, len(tokens), self.per_chunk):
            if self.closing.is_set() or (fault.how != "none" and at >= fault.tokens):
                how = "moved" if self.closing.is_set() else fault.how
                if how == "drop":
                    request.transport.abort()
                    return response
                if how == "stall":
                    await asyncio.sleep(3600)
                if how in UNSOUND:
                    await response.write(b"data: " + UNSOUND[how] + b"\n\n")
                    return response
                if how == "nan":
                    await self.piece(send, body, chat, tokens[at : at + 1], None, "?", None, None)
                    return response
                data = b'data: {"error": {"message": "died", "code": 500}}\n\n'
                if how == "moved":
                    data = b'event: gyre\ndata: {"moved": true}\n\n'
                await response.write(data)
                return response
            ids, reason, stop = tokens[at : at + self.per_chunk][: limit - at], None, None
            for position, token in enumerate(ids):
                stop = text.push(token, silent=token == END)
                if stop is not None or token == END:
                    ids, reason = ids[: position + 1], "stop"
                    break
            if reason is None and at + len(ids) >= limit:
                reason = "length"
            await self.piece(send, body, chat, ids, done + at, text.delta(reason is not None), reason, stop)
            if reason is not None:
                break
            await asyncio.sleep(self.delay)
        await response.write(b"data: [DONE]\n\n")
        return response

    async def piece(self, send, body, chat, ids, at, text, reason, stop) -> None:
        values = [None if at is None else logprob(at + i, token) for i, token in enumerate(ids)]
        names = [TOKENIZER.decode([token], skip_special_tokens=False) for token in ids]
        choice = {"index": 0, "finish_reason": reason, "token_ids": ids, "stop_reason": stop}
        if chat:
            entries = [
                {"token": name, "logprob": value, "bytes": [], "top_logprobs": []}
                for name, value in zip(names, values, strict=True)
            ]
            await send({**choice, "delta": {"content": text}, "logprobs": {"content": entries}})
        else:
            logprobs = {
                "tokens": names,
                "token_logprobs": values,
                "top_logprobs": [{n: v} for n, v in zip(names, values, strict=True)],
            }
            await send({**choice, "text": text, "logprobs": logprobs})

"""A stand-in for an engine that costs next to nothing, so that what stands in front of it is what is measured.

    python benchmarks/_stand_in.py PROMPT_TOKENS          prints its port, and serves until its input closes

It speaks as much of an engine's HTTP as a proxy needs: chat completions, plain and streaming, with the ids of prompt
and tokens and their log-probabilities where they are asked for, in the shape vLLM gives them. What it says is prepared;
only the time is put in: the text of a token is the moment at which it was written, in nanoseconds between two @.

Like an engine it works in steps, and a step gives every answer under way its next token, so tokens of many streams come
at once. `POST /pace {"tokens_per_second": 25}` sets the rate of every stream; at 0 a step takes as long as it takes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import sys
import time
from array import array
from typing import Any

import msgspec
import uvloop

MARK = b"@"
_DIGITS = 20
_ANSWERS = 64  # different tokens


class Asked(msgspec.Struct):
    """What of a request changes the answer."""

    stream: bool = False
    return_token_ids: bool = False
    logprobs: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    tokens_per_second: float = 0.0  # of /pace


_decode = msgspec.json.Decoder(Asked).decode


def _http_chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Words:
    """Everything it ever says, as templates of HTTP chunks with room for the moment."""

    def __init__(self, prompt_tokens: int) -> None:
        draw = random.Random(0)
        self.prompt = [draw.randrange(1000, 100_000) for _ in range(prompt_tokens)]
        digest = hashlib.blake2b(array("i", self.prompt).tobytes(), digest_size=16).hexdigest()
        note = json.dumps({"rendered": [prompt_tokens, digest], "spliced": False, "drift": 0})
        shared = b"HTTP/1.1 200 OK\r\nx-gyre-policy: 0\r\nx-gyre-engine: 0\r\nx-gyre-prompt: " + note.encode() + b"\r\n"
        self.stream_head = (
            shared + b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        self.plain_head = shared + b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.entries: list[dict[str, Any]] = []
        for _ in range(_ANSWERS):
            word = " " + "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randrange(2, 7)))
            logprob = draw.uniform(-4.0, 0.0)
            self.entries.append({"token": word, "logprob": logprob, "bytes": list(word.encode()), "top_logprobs": []})
        self.ids = [draw.randrange(1000, 100_000) for _ in range(_ANSWERS)]
        # By whether ids and log-probabilities are wanted, and whether the token is the last.
        self.begin = {rich: self._event({"role": "assistant", "content": ""}, None, rich) for rich in (False, True)}
        self.tokens = {
            (rich, last): [self._event(None, at, rich, "length" if last else None) for at in range(_ANSWERS)]
            for rich in (False, True)
            for last in (False, True)
        }
        self.end = _http_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"

    def _event(self, delta: Any, at: int | None, rich: bool, finish: str | None = None) -> bytes:
        moment = "@" + "9" * _DIGITS + "@"
        choice: dict[str, Any] = {"index": 0, "delta": delta or {"content": moment}, "logprobs": None}
        choice["finish_reason"] = finish
        event = {"id": "chatcmpl-0123456789abcdef", "object": "chat.completion.chunk", "created": 1, "model": "policy"}
        event["choices"] = [choice]
        if rich and at is None:
            event["prompt_token_ids"] = self.prompt
        if at is not None and rich:
            choice |= {"logprobs": {"content": [self.entries[at]]}, "token_ids": [self.ids[at]]}
        data = _http_chunk(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")
        return data.replace(b"%", b"%%").replace(b"9" * _DIGITS, b"%%0%dd" % _DIGITS) if at is not None else data

    def plain(self, tokens: int) -> bytes:
        """A plain answer without ids."""
        message = {"role": "assistant", "content": "".join(self.entries[i % _ANSWERS]["token"] for i in range(tokens))}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
        usage = {"prompt_tokens": len(self.prompt), "completion_tokens": tokens}
        answer = {"id": "chatcmpl-0", "object": "chat.completion", "created": 1, "model": "policy", "choices": [choice]}
        return json.dumps({**answer, "usage": usage | {"total_tokens": len(self.prompt) + tokens}}).encode()


class Engine:
    """The answers under way, and the steps that go on with them."""

    def __init__(self, words: Words) -> None:
        self.words = words
        self.interval = 0.0  # seconds of a step
        self.live: dict[Connection, None] = {}
        self._stepping: asyncio.Handle | None = None
        self._at = 0

    def pace(self, tokens_per_second: float) -> None:
        """Set the rate of every stream; 0 is as fast as it goes."""
        self.interval = 1.0 / tokens_per_second if tokens_per_second else 0.0

    def add(self, connection: Connection) -> None:
        """Another answer is under way."""
        self.live[connection] = None
        if self._stepping is None:
            self._next(asyncio.get_running_loop().time())

    def _next(self, begun: float) -> None:
        loop = asyncio.get_running_loop()
        if self.interval:
            self._stepping = loop.call_at(max(begun + self.interval, loop.time()), self._step)
        else:
            self._stepping = loop.call_soon(self._step)

    def _step(self) -> None:
        begun = asyncio.get_running_loop().time()
        self._stepping = None
        self._at = (self._at + 1) % _ANSWERS
        for connection in list(self.live):
            connection.token(self._at)
        if self.live:
            self._next(begun)


class Connection(asyncio.Protocol):
    """One HTTP connection."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffer = b""
        self._transport: Any = None
        self._asked = Asked()
        self._left = 0
        self._rich = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.live.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (split := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:split].lower()
            length, at = 0, head.find(b"content-length:")
            if at >= 0:
                length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            if len(self._buffer) < split + 4 + length:
                return
            body = self._buffer[split + 4 : split + 4 + length]
            self._buffer = self._buffer[split + 4 + length :]
            self._request(head.split(b" ", 2)[1], body)

    def _request(self, path: bytes, body: bytes) -> None:
        words = self._engine.words
        if path == b"/v1/chat/completions":
            self._asked = asked = _decode(body)
            self._left = asked.max_tokens or asked.max_completion_tokens or 16
            self._rich = asked.return_token_ids and bool(asked.logprobs)
            if asked.stream:
                self._transport.write(words.stream_head + words.begin[self._rich])
            self.token(0)
            if self._left:
                self._engine.add(self)
            return
        if path == b"/pace":
            self._engine.pace(_decode(body).tokens_per_second)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "vllm", "max_model_len": 1 << 20}
        self._whole(json.dumps({"object": "list", "data": [model]}).encode())  # health and what routers ask are alike

    def _whole(self, body: bytes) -> None:
        self._transport.write(self._engine.words.plain_head % len(body) + body)

    def token(self, at: int) -> None:
        """Give the answer its next token."""
        self._left -= 1
        last = self._left <= 0
        if self._asked.stream:
            template = self._engine.words.tokens[self._rich, last][at]
            event = template % time.monotonic_ns()
            self._transport.write(event + self._engine.words.end if last else event)
        elif last:
            self._whole(self._engine.words.plain(self._asked.max_tokens or 16))
        if last:
            self._engine.live.pop(self, None)


async def serve(prompt_tokens: int) -> None:
    """Serve until the input closes."""
    loop, engine = asyncio.get_running_loop(), Engine(Words(prompt_tokens))
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))

"""Clients in the chaos: conversations over HTTP, and what they were told, piece by piece."""

import json
import random
from dataclasses import dataclass, field

import aiohttp

from tests.whole.chaos_model import LOOK, words


@dataclass
class Told:
    """What a client was told of one choice of one answer."""

    body: dict
    prompt: list[int] | None = None  # where it was told
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    calls: list[dict] = field(default_factory=list)
    finish: str | None = None
    stop_reason: str | int | None = None
    usage: dict | None = None

    @property
    def greedy(self) -> bool:
        """Whether another run must give the same."""
        return self.body["temperature"] == 0 and "presence_penalty" not in self.body

    def messages(self, rewrite: bool) -> list[dict]:
        """The assistant's message as a client keeps it, and the results of its calls; some clients write JSON anew.

        Nothing at all where a call is not well formed: then a client begins anew.
        """
        calls, results = [], []
        for call in self.calls:
            arguments = call["arguments"]
            try:
                written = json.dumps(json.loads(arguments), indent=1)
            except ValueError:
                return []
            arguments = written if rewrite else arguments
            function = {"name": call["name"], "arguments": arguments}
            calls.append({"id": call["id"], "type": "function", "function": function})
            results.append({"role": "tool", "tool_call_id": call["id"], "content": call["arguments"][8:14]})
        kept = {"role": "assistant", "content": self.text or None, "tool_calls": calls} if calls else {}
        return [kept or {"role": "assistant", "content": self.text}, *results]


def question(rng: random.Random, last: str) -> dict:
    """The options of one request, at random; `last` is the text of the answer before."""
    body = {"max_tokens": rng.randint(32, 144), "temperature": 0, "stream": rng.random() < 0.75}
    body |= {"return_token_ids": True, "logprobs": True, "top_logprobs": rng.choice([0, 2])}
    if rng.random() < 0.8:
        body["ignore_eos"] = True
    if rng.random() < 0.4:
        body |= {"temperature": rng.choice([1.0, 0.7]), "seed": rng.randrange(1 << 30)}
    if body["stream"] and rng.random() < 0.5:
        body["stream_options"] = {"include_usage": True}
    letters = [letter for letter in last if letter.isascii() and letter.isprintable()]
    if letters and rng.random() < 0.2:
        body |= {"stop": [rng.choice(letters)], "include_stop_str_in_output": rng.random() < 0.5}
    kind = rng.random()
    if kind < 0.04:
        body["presence_penalty"] = 0.5
    elif kind < 0.08:
        body |= {"n": 2, "temperature": 1.0}
    return body


class Client:
    """One execution's client."""

    def __init__(self, session: aiohttp.ClientSession, url: str, token: str, rng: random.Random) -> None:
        self._session = session
        self._url = url + "/v1/chat/completions"
        self._headers = {"Authorization": f"Bearer {token}"}
        self._rng = rng
        self._messages: list[dict] = []
        self._last = ""
        self._tools = {"tools": [LOOK]} if rng.random() < 0.5 else {}
        self._rewrite = rng.random() < 0.5

    async def turn(self) -> list[Told]:
        """Say something; returns the whole answer, a `Told` for each choice."""
        rng = self._rng
        if not self._messages or self._messages[-1]["role"] != "tool":
            self._messages.append({"role": "user", "content": words(rng)})
        body = question(rng, self._last) | {"messages": self._messages, "model": "tiny"} | self._tools
        if self._tools and rng.random() < 0.8:  # let it end after its calls
            body.pop("ignore_eos", None)
            body["max_tokens"] = 160
        told = [Told(body) for _ in range(body.get("n", 1))]
        async with self._session.post(self._url, json=body, headers=self._headers) as response:
            assert response.status == 200, (response.status, await response.text())
            if body["stream"]:
                await self._stream(response, told)
            else:
                self._plain(await response.json(), told)
        assert all(one.finish for one in told), "an answer without an end"
        kept = told[0].messages(self._rewrite)
        self._messages = [*self._messages, *kept] if kept else []
        self._last = told[0].text
        return told

    async def _stream(self, response: aiohttp.ClientResponse, told: list[Told]) -> None:
        done, buffer = False, b""
        async for data in response.content.iter_any():
            *blocks, buffer = (buffer + data).split(b"\n\n")
            for block in blocks:
                if block.startswith(b":"):
                    continue
                assert not done, f"after [DONE] came {block!r}"
                assert block.startswith(b"data: "), block
                if block == b"data: [DONE]":
                    done = True
                else:
                    self._chunk(json.loads(block[6:]), told)
        assert done and not buffer, "the stream ended without [DONE]"

    def _chunk(self, chunk: dict, told: list[Told]) -> None:
        assert "error" not in chunk, chunk
        if chunk.get("usage"):
            told[0].usage = chunk["usage"]
        for choice in chunk["choices"]:
            one, delta = told[choice["index"]], choice["delta"]
            assert one.finish is None, f"a finished answer went on: {choice}"
            one.prompt = chunk.get("prompt_token_ids") or one.prompt
            one.text += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(one.calls):
                    one.calls.append({"id": call["id"], "name": "", "arguments": ""})
                function = call.get("function") or {}
                one.calls[call["index"]]["name"] += function.get("name") or ""
                one.calls[call["index"]]["arguments"] += function.get("arguments") or ""
            self._sampled(choice, one)

    def _plain(self, answer: dict, told: list[Told]) -> None:
        assert len(answer["choices"]) == len(told)
        for choice, one in zip(answer["choices"], told, strict=True):
            message = choice["message"]
            one.text, one.prompt, one.usage = message.get("content") or "", answer["prompt_token_ids"], answer["usage"]
            one.calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls") or []]
            self._sampled(choice, one)

    @staticmethod
    def _sampled(choice: dict, one: Told) -> None:
        one.tokens += choice.get("token_ids") or []
        one.logprobs += [entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or []]
        one.finish, one.stop_reason = choice.get("finish_reason"), choice.get("stop_reason")

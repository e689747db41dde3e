"""What a timed engine is asked and what it answers: prompts as token ids, tokens as the JSON of OpenAI's dialects."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from typing import Any

from gyre.cell.pace import Stint

Message = dict[str, Any]

_FIRST, _LETTERS = ord("a"), 26
_LOGPROB = -3.258097  # of one of 26 letters
_SPECIAL_START, _SPECIAL_END = 257, 258  # <|im_start|>, <|im_end|> of the byte tokenizers that Gyre makes


def render(messages: list[Message]) -> list[int]:
    """Token ids of a conversation, as the chat template of `gyre:tiny` makes them; only text counts."""
    ids: list[int] = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text") or "" for part in content)
        ids += [_SPECIAL_START, *f"{message['role']}\n{content}".encode(), _SPECIAL_END, 10]
    return [*ids, _SPECIAL_START, *b"assistant\n"]


def token(place: int) -> int:
    """The token at a place of a sequence."""
    return _FIRST + place % _LETTERS


_ENTRIES = [json.dumps({"token": chr(_FIRST + i), "logprob": _LOGPROB, "bytes": [_FIRST + i]}) for i in range(_LETTERS)]


class Answer:
    """One live request: what was asked, and the tokens that it has."""

    def __init__(self, body: Message, chat: bool, max_context: int) -> None:
        """Read a request.

        Raises:
            ValueError: it is not one that this engine can answer.
        """
        self.chat = chat
        self.stream = bool(body.get("stream"))
        self.choices = int(body.get("n") or 1)
        self.ids = bool(body.get("return_token_ids"))
        self.logprobs = body.get("logprobs") is not None and (not chat or body["logprobs"])  # completions: 0 is yes
        self.prompt = self._prompt(body)
        asked = body.get("max_completion_tokens", body.get("max_tokens"))
        room = max_context - len(self.prompt)
        if room < 1:
            raise ValueError(f"the prompt has {len(self.prompt)} tokens, and the context {max_context}")
        if asked is not None and int(asked) < 1:
            raise ValueError("max_tokens must be at least 1")
        self.length = room if asked is None else min(int(asked), room)
        self.shown = 0
        self.stint: Stint | None = None
        self.more = asyncio.Event()
        name = "chatcmpl" if chat else "cmpl"
        kind = "chat.completion" if chat else "text_completion"
        self.head = {"id": f"{name}-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.get("model") or ""}
        self.head["object"] = kind + (".chunk" if self.stream and chat else "")

    def _prompt(self, body: Message) -> list[int]:
        if self.chat:
            return render(body["messages"])
        prompt = body["prompt"]
        return list(prompt.encode()) if isinstance(prompt, str) else [int(one) for one in prompt]

    def choice(self, index: int, begin: int, end: int) -> str:
        """The tokens from `begin` to `end` of the answer as one choice, in JSON."""
        places = range(len(self.prompt) + begin, len(self.prompt) + end)
        text = "".join(chr(token(place)) for place in places)
        parts = [f'"index": {index}', f'"finish_reason": {"null" if end < self.length else json.dumps("length")}']
        if self.ids:
            parts.append(f'"token_ids": {[token(place) for place in places]}')
            if begin == 0 and not self.chat:
                parts.append(f'"prompt_token_ids": {self.prompt}')
        if self.chat:
            message = {"role": "assistant", "content": text} if begin == 0 else {"content": text}
            parts.append(f'"{"delta" if self.stream else "message"}": {json.dumps(message)}')
            if self.logprobs:
                entries = ", ".join(_ENTRIES[place % _LETTERS] for place in places)
                parts.append(f'"logprobs": {{"content": [{entries}]}}')
        else:
            parts.append(f'"text": {json.dumps(text)}')
            if self.logprobs:
                named = json.dumps({"tokens": list(text), "token_logprobs": [_LOGPROB] * len(text)})
                parts.append(f'"logprobs": {named}')
        return "{" + ", ".join(parts) + "}"

    def piece(self, begin: int, end: int) -> bytes:
        """The tokens from `begin` to `end` as a whole answer or chunk."""
        head = dict(self.head)
        if self.ids and self.chat and begin == 0:
            head["prompt_token_ids"] = self.prompt
        if not self.stream:
            sampled = self.length * self.choices
            head["usage"] = {"prompt_tokens": len(self.prompt), "completion_tokens": sampled}
            head["usage"]["total_tokens"] = len(self.prompt) + sampled
        choices = ", ".join(self.choice(index, begin, end) for index in range(self.choices))
        return f'{json.dumps(head)[:-1]}, "choices": [{choices}]}}'.encode()

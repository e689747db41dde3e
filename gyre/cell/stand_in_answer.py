"""What engines without a model answer: tokens as the JSON of OpenAI's dialects, whole or in pieces."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from gyre.cell.stand_in_request import Asked
from gyre.cell.stand_in_text import decode

Message = dict[str, Any]

_TOKENS = range(259)
#: A token's log-probability is its own, so that one beside the wrong token is seen; exact in any float.
LOGPROBS = [-(1 + token % 64) / 128 for token in _TOKENS]
_TEXTS = [decode([token]) for token in _TOKENS]
_ENTRIES = [
    {"token": _TEXTS[token], "logprob": LOGPROBS[token], "bytes": [token] if token < 256 else []} for token in _TOKENS
]
_ENTRY_TEXTS = [json.dumps(entry) for entry in _ENTRIES]


def _entry(token: int, top: int) -> str:
    return json.dumps({**_ENTRIES[token], "top_logprobs": [_ENTRIES[token]]}) if top else _ENTRY_TEXTS[token]


class Answer:
    """One answer, of `length` tokens. Its kinds say which tokens those are, and what a client sees of them."""

    piece_tokens = 1 << 30  # the most that a streamed piece has
    finish_reason = "length"
    stop_reason: str | None = None

    def __init__(self, asked: Asked, length: int) -> None:
        self.asked = asked
        self.length = length
        name = "chatcmpl" if asked.chat else "cmpl"
        kind = "chat.completion" if asked.chat else "text_completion"
        self._head = {"id": f"{name}-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}
        self._head["object"] = kind + (".chunk" if asked.stream and asked.chat else "")

    def tokens(self, begin: int, end: int) -> list[int]:
        """The ids of the tokens from `begin` to `end`."""
        raise NotImplementedError

    def delta(self, begin: int, end: int) -> Message:
        """What these tokens add to the message of a chat: content, reasoning, tool_calls."""
        raise NotImplementedError

    def text(self, begin: int, end: int) -> str:
        """What these tokens add to the text of a plain completion."""
        raise NotImplementedError

    # -- as JSON -----------------------------------------------------------------------------------------------------
    def _choice(self, index: int, begin: int, end: int) -> str:
        asked, tokens = self.asked, self.tokens(begin, end)
        last = end >= self.length
        parts = [f'"index": {index}', f'"finish_reason": {json.dumps(self.finish_reason) if last else "null"}']
        if last and self.stop_reason is not None:
            parts.append(f'"stop_reason": {json.dumps(self.stop_reason)}')
        if asked.ids:
            parts.append(f'"token_ids": {tokens}')
            if begin == 0 and not asked.chat:
                parts.append(f'"prompt_token_ids": {asked.prompt.tolist()}')
        if asked.chat:
            parts.append(self._message(begin, end))
            if asked.logprobs:
                entries = ", ".join(_entry(token, asked.top_logprobs) for token in tokens)
                parts.append(f'"logprobs": {{"content": [{entries}]}}')
        else:
            parts.append(f'"text": {json.dumps(self.text(begin, end))}')
            if asked.logprobs:
                values = [LOGPROBS[token] for token in tokens]
                names = [_TEXTS[token] for token in tokens]
                top = [{name: value} for name, value in zip(names, values, strict=True)] if asked.top_logprobs else None
                named = {"tokens": names, "token_logprobs": values, "top_logprobs": top}
                parts.append(f'"logprobs": {json.dumps(named)}')
        return "{" + ", ".join(parts) + "}"

    def _message(self, begin: int, end: int) -> str:
        delta = self.delta(begin, end)
        if self.asked.stream:
            return f'"delta": {json.dumps({"role": "assistant", **delta} if begin == 0 else delta)}'
        message = {"role": "assistant", "content": None, **delta}
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in calls]
        elif message["content"] is None:
            message["content"] = ""
        return f'"message": {json.dumps(message)}'

    @property
    def _usage(self) -> Message:
        prompt, sampled = len(self.asked.prompt), self.length * self.asked.choices
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def piece(self, begin: int, end: int) -> bytes:
        """The tokens from `begin` to `end` as a chunk, or, where none was asked for, all of them as the answer."""
        head: Message = dict(self._head)
        if self.asked.ids and self.asked.chat and begin == 0:
            head["prompt_token_ids"] = self.asked.prompt.tolist()
        if not self.asked.stream:
            head["usage"] = self._usage
        choices = ", ".join(self._choice(index, begin, end) for index in range(self.asked.choices))
        return f'{json.dumps(head)[:-1]}, "choices": [{choices}]}}'.encode()

    def pieces(self, begin: int, end: int) -> list[bytes]:
        """The same in chunks of at most `piece_tokens`, the counts after the last where they were asked for."""
        steps = range(begin, end, self.piece_tokens)
        found = [self.piece(first, min(end, first + self.piece_tokens)) for first in steps]
        if end >= self.length and self.asked.include_usage:
            found.append(json.dumps({**self._head, "choices": [], "usage": self._usage}).encode())
        return found

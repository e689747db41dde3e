"""The fake engine's tokenizer, chat template and parsers: small, and with every trap of real ones.

Ids 0..255 are bytes, three are special, and from `PAIRS` on there is one for every two ASCII characters. Texts are
encoded as bytes; an answer may be sampled with pairs in it, so encoding its text again gives other ids.
"""

from __future__ import annotations

import codecs
import json
import random
import re

EOT, START, END = 256, 257, 258
PAIRS = 1000
_SPECIAL = {EOT: "<|endoftext|>", START: "<|im_start|>", END: "<|im_end|>"}


def token_bytes(token: int) -> bytes:
    """What a token stands for; nothing for special ones."""
    if token >= PAIRS:
        return bytes(divmod(token - PAIRS, 128))
    return bytes([token]) if token < 256 else b""


def decode(ids) -> str:
    """Text of ids, special tokens by their names."""
    return b"".join(_SPECIAL[t].encode() if t in _SPECIAL else token_bytes(t) for t in ids).decode("utf-8", "replace")


def segmented(text: str, draw: random.Random) -> list[int]:
    """A text's ids with some of its characters in pairs."""
    data, ids, at = text.encode(), [], 0
    while at < len(data):
        if at + 1 < len(data) and max(data[at : at + 2]) < 128 and draw.random() < 0.4:
            ids.append(PAIRS + 128 * data[at] + data[at + 1])
            at += 2
        else:
            ids.append(data[at])
            at += 1
    return ids


def _text(content) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content or ())


def _turn(message, keep_reasoning: bool) -> str:
    """An assistant's turn; arguments are written anew, as templates do."""
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    text = f"<think>{reasoning}</think>" if reasoning and keep_reasoning else ""
    text += _text(message.get("content"))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = json.dumps(json.loads(function["arguments"]), ensure_ascii=False)
        text += f'<tool_call>{{"name": "{function["name"]}", "arguments": {arguments}}}</tool_call>'
    return text


def render(messages, tools=None, drop_thinking: bool = False) -> list[int]:
    """The prompt's ids, as ChatML."""
    ids: list[int] = []
    if tools:
        ids += [START, *f"tools\n{json.dumps(tools)}".encode(), END, *b"\n"]
    for message in [*messages, None]:
        role = "assistant" if message is None else message["role"]
        ids += [START, *f"{role}\n".encode()]
        if message is not None:
            text = _turn(message, not drop_thinking) if role == "assistant" else _text(message.get("content"))
            ids += [*text.encode(), END, *b"\n"]
    return ids


class Detokenizer:
    """Text of tokens as they come; a stop string ends it, and what may become one is held back."""

    def __init__(self, stops: list[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stops = stops
        self._held = max(map(len, stops), default=1) - 1
        self.text = ""

    def push(self, token: int) -> str | None:
        """Add a token; returns the stop string it completed."""
        before = len(self.text)
        self.text += self._decoder.decode(token_bytes(token))
        found = [
            (at + len(s), at, s) for s in self._stops if (at := self.text.find(s, max(0, before - len(s) + 1))) >= 0
        ]
        if not found:
            return None
        _, at, stop = min(found)
        self.text = self.text[:at]
        return stop

    def visible(self, final: bool) -> str:
        """What can be said for sure."""
        return self.text if final else self.text[: max(0, len(self.text) - self._held)]


def _sure(text: str, tag: str, final: bool) -> str:
    """`text` without an end that may become `tag`."""
    if not final:
        for size in range(min(len(tag) - 1, len(text)), 0, -1):
            if text.endswith(tag[:size]):
                return text[:-size]
    return text


def parsed(text: str, final: bool, tools: bool) -> dict:
    """The message that a text is, as far as it is sure: reasoning, content, calls of tools."""
    reasoning, rest = "", text
    if not final and len(text) < 7 and "<think>".startswith(text):
        return {}
    if text.startswith("<think>"):
        reasoning, closed, rest = text[7:].partition("</think>")
        if not closed:
            reasoning = _sure(reasoning, "</think>", final)
    message = {"reasoning": reasoning} if reasoning else {}
    if not tools:
        return message | ({"content": rest} if rest else {})
    content, *bodies = rest.split("<tool_call>")
    if content := content if bodies else _sure(content, "<tool_call>", final):
        message["content"] = content
    calls = [call for body in bodies if (call := _call(body))]
    return message | ({"tool_calls": calls} if calls else {})


def _call(body: str) -> dict | None:
    body, closed, _ = body.partition("</tool_call>")
    found = re.match(r'\{"name": "([^"]*)", "arguments": ', body)
    if not found:
        return None
    arguments = _sure(body[found.end() :], "</tool_call>", bool(closed))
    return {"name": found[1], "arguments": arguments.removesuffix("}")}


def delta(before: dict, now: dict, identity) -> dict:
    """What one parsed message has beyond an earlier one; `identity` makes ids of calls."""
    more = {
        key: now[key][len(before.get(key, "")) :]
        for key in ("reasoning", "content")
        if len(now.get(key, "")) > len(before.get(key, ""))
    }
    known, calls = before.get("tool_calls", []), []
    for index, call in enumerate(now.get("tool_calls", [])):
        if index >= len(known):
            calls.append({"index": index, "id": identity(), "type": "function", "function": dict(call)})
        elif rest := call["arguments"][len(known[index]["arguments"]) :]:
            calls.append({"index": index, "function": {"arguments": rest}})
    return more | ({"tool_calls": calls} if calls else {})

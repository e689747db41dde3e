"""Text and token ids of the engines that have no model. Pure.

A token is a byte: ids 0..255 are the bytes, as in the tokenizers that Gyre makes, and every text comes back as it was.
Conversations are rendered as ChatML, tools and calls of them as the Hermes templates write them. As such templates do,
the rendering writes the arguments of a call anew from what they parse to, so a call need not get the tokens back that
it was sampled with.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

Message = dict[str, Any]

START, END = 257, 258  # <|im_start|>, <|im_end|>
ENDS = frozenset({END})
_SPECIAL = {256: b"<|endoftext|>", START: b"<|im_start|>", END: b"<|im_end|>"}
_THINK, _THOUGHT = "<think>\n", "\n</think>\n\n"
_CALL, _CALLED = "<tool_call>\n", "\n</tool_call>"
_TOOLS = (
    "# Tools\n\nYou may call one or more functions. Their signatures:\n<tools>\n{}\n</tools>\n\nFor each call, answer "
    'with\n<tool_call>\n{{"name": <name>, "arguments": <object>}}\n</tool_call>'
)


def encode(text: str) -> list[int]:
    """Ids of a text; what cannot be encoded, half of a surrogate pair, becomes a question mark."""
    return list(text.encode("utf-8", "replace"))


def decode(ids: Iterable[int]) -> str:
    """Text of ids, special tokens by their names; bytes that are no text are replaced."""
    return b"".join(_SPECIAL.get(one) or bytes((one & 255,)) for one in ids).decode("utf-8", "replace")


def plain(content: Any) -> str:
    """The text of a message's content: its own, or that of its parts."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    if content is not None and not isinstance(content, str):
        raise ValueError(f"content must be a text or a list of parts, not {type(content).__name__}")
    return content or ""


def turn(reasoning: str, content: str, calls: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """What a turn of the assistant is made of, one after the other, as (what, text); `calls` are names and arguments.

    What: "reasoning", "content", "call <index>" (the arguments of a call), or "" for what a client does not see.
    """
    if reasoning:
        yield from (("", _THINK), ("reasoning", reasoning), ("", _THOUGHT))
    if content:
        yield "content", content
    for index, (name, arguments) in enumerate(calls):
        gap = "\n" if index or content else ""
        yield "", f'{gap}{_CALL}{{"name": {json.dumps(name)}, "arguments": '
        yield f"call {index}", arguments
        yield "", "}" + _CALLED


def written(arguments: Any) -> str:
    """The arguments of a call as a template writes them: parsed, and written anew."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _assistant(message: Message) -> str:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [(function["name"], written(function.get("arguments") or "{}")) for function in functions]
    reasoning = plain(message.get("reasoning") or message.get("reasoning_content"))
    return "".join(text for _, text in turn(reasoning, plain(message.get("content")), calls))


def render(messages: list[Message], tools: Sequence[Message] | None = None) -> list[int]:
    """Ids of a conversation, up to where the next answer begins; of content, text alone counts.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is no conversation.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list with at least one message")
    ids: list[int] = []
    if tools:
        described = _TOOLS.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if messages[0].get("role") == "system":
            messages = [
                {**messages[0], "content": f"{plain(messages[0].get('content'))}\n\n{described}"},
                *messages[1:],
            ]
        else:
            messages = [{"role": "system", "content": described}, *messages]
    for message in messages:
        role = message["role"]
        text = _assistant(message) if role == "assistant" else plain(message.get("content"))
        ids += [START, *encode(f"{role}\n{text}"), END, 10]
    return [*ids, START, *b"assistant\n"]

"""What engines without a model are asked: requests in OpenAI's dialects, and the ids of their prompts. Pure."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

from gyre.cell.stand_in_text import ENDS, decode, encode, render
from gyre.splice import ARGUMENT, Extension, PromptNote, resolve

Message = dict[str, Any]

#: What a body that is no such request raises where it is read.
WRONG = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class Asked:
    """One request for an answer: a chat completion, or a plain one."""

    def __init__(self, body: Message, chat: bool, max_context: int, execution: int = 0) -> None:
        """Read a request.

        Raises:
            one of `WRONG`: it is not one that can be answered.
        """
        self.chat = chat
        self.execution = execution
        self.messages: list[Message] = body["messages"] if chat else []
        self.model = str(body.get("model") or "")
        self.stream = bool(body.get("stream"))
        self.include_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self.choices = int(body.get("n") or 1)
        self.ids = bool(body.get("return_token_ids"))
        self.logprobs = body.get("logprobs") is not None and (not chat or body["logprobs"])  # completions: 0 is yes
        self.top_logprobs = int((body.get("top_logprobs") if chat else body.get("logprobs")) or 0)
        stop = body.get("stop") or []
        self.stop = [stop] if isinstance(stop, str) else [str(one) for one in stop if one]
        self.keep_stop = bool(body.get("include_stop_str_in_output"))
        extension = Extension.decode((body.get("vllm_xargs") or {}).get(ARGUMENT) or "{}")
        if extension.kept and self.choices > 1:
            raise ValueError("an answer with several choices cannot be continued")
        self.kept = extension.kept
        self.prompt: array[int]
        self.note: PromptNote
        self.prompt, note = resolve(rendered(body, chat), extension, ENDS, decode)
        self.note = dataclasses.replace(note, constrained=False)  # it knows no grammar
        self.length = self._length(body, max_context)

    def _length(self, body: Message, max_context: int) -> int:
        """The most tokens that the answer may have, of those that are kept the first ones."""
        asked = body.get("max_completion_tokens")
        asked = body.get("max_tokens") if asked is None else asked
        room = max_context - len(self.prompt)
        if room < 1:
            raise ValueError(
                f"This model's maximum context length is {max_context} tokens. However, your prompt contains "
                f"{len(self.prompt)} input tokens, which exceeds this limit even without any output tokens. "
                "Please reduce the length of the input prompt."
            )
        if asked is not None and int(asked) < 1:
            raise ValueError("max_tokens must be at least 1")
        length = room if asked is None else min(int(asked), room)
        if len(self.kept) > length:
            raise ValueError(f"{len(self.kept)} tokens are kept of an answer of at most {length}")
        return length

    @property
    def turns(self) -> int:
        """Answers that the conversation has before this one."""
        return sum(message["role"] == "assistant" for message in self.messages)


def rendered(body: Message, chat: bool) -> list[int]:
    """Ids of a request's prompt as its template gives them. Raises one of `WRONG` where it has none."""
    if chat:
        return render(body["messages"], body.get("tools") if body.get("tool_choice") != "none" else None)
    prompt = body["prompt"]
    return encode(prompt) if isinstance(prompt, str) else [int(one) for one in prompt]

"""OpenAI's own dialect, in which engines are asked: chat completions and completions pass through. Pure."""

from __future__ import annotations

from typing import Any

from gyre.proxy.dialects import errors
from gyre.proxy.dialects.calls import Event
from gyre.proxy.dialects.errors import ApiError, Invalid, Json
from gyre.proxy.dialects.reading import demand, objects, optional, path, required

#: What the proxy alone says to an engine.
_RESERVED = ("kv_transfer_params", "ec_transfer_params", "request_id")
#: Beyond these, logits that are multiplied with it stop being numbers.
_PENALTIES = (0.01, 100.0)
#: Kinds of the options that are read on the way to the engine, which checks the others.
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"), float),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), float),
    **dict.fromkeys(("top_k", "seed", "min_tokens", "max_tokens", "max_completion_tokens", "n", "priority"), int),
    **dict.fromkeys(("stream", "ignore_eos", "skip_special_tokens", "include_stop_str_in_output"), bool),
    **dict.fromkeys(("return_token_ids", "echo", "include_reasoning", "parallel_tool_calls", "use_beam_search"), bool),
    **dict.fromkeys(("add_generation_prompt", "continue_final_message", "add_special_tokens"), bool),
    **dict.fromkeys(("stream_options", "response_format", "structured_outputs", "logit_bias", "metadata"), dict),
    **dict.fromkeys(("chat_template_kwargs", "mm_processor_kwargs", "vllm_xargs"), dict),
    **dict.fromkeys(("tools", "stop_token_ids", "allowed_token_ids", "bad_words", "documents"), list),
    **dict.fromkeys(("model", "user", "reasoning_effort", "chat_template", "suffix", "service_tier"), str),
    "stop": (str, list),
    "tool_choice": (str, dict),
}


class OpenAiCall:
    """One request that passes through as it is; `completion` for one without messages."""

    def __init__(self, body: Json, completion: bool = False) -> None:
        self.chat = _checked(body, completion)
        self.stream = bool(body.get("stream"))
        self.completion = completion
        self.last = b"data: [DONE]\n\n"

    def answer(self, given: Json) -> Json:
        """The answer as it is."""
        return given

    def events(self, chunk: Json) -> list[Event]:
        """The chunk as it is."""
        return [(None, chunk)]

    def end(self) -> list[Event]:
        """Nothing more."""
        return []

    def failed(self, error: ApiError, request_id: str) -> list[Event]:
        """The error, as data."""
        return [(None, errors.openai(error))]

    def idle(self) -> Event | None:
        """Only comments."""
        return None


def _checked(body: Json, completion: bool) -> Json:
    for key in _RESERVED:
        if body.get(key) is not None:
            raise Invalid("is not for clients", key)
    for key in body:
        if (kinds := _KINDS.get(key)) is not None:
            optional(body, key, kinds)
    for index, tool in enumerate(objects(body.get("tools") or [], "tools")):
        optional(tool, "function", dict, path("tools", index))
    if not _PENALTIES[0] <= (body.get("repetition_penalty") or 1.0) <= _PENALTIES[1]:
        raise Invalid(f"must be between {_PENALTIES[0]} and {_PENALTIES[1]}", "repetition_penalty")
    for key in ("stop_token_ids", "allowed_token_ids"):
        for index, token in enumerate(body.get(key) or ()):
            demand(token, int, path(key, index))
    if completion:
        return body
    messages = objects(required(body, "messages", list), "messages")
    return {**body, "messages": [_message(message, path("messages", i)) for i, message in enumerate(messages)]}


def _message(message: Json, where: str) -> Json:
    required(message, "role", str, where)
    content = optional(message, "content", (str, list), where)
    if isinstance(content, list):
        place = path(where, "content")
        for index, part in enumerate(objects(content, place)):
            if required(part, "type", str, path(place, index)) == "text":
                required(part, "text", str, path(place, index))
    place = path(where, "tool_calls")
    for index, call in enumerate(objects(optional(message, "tool_calls", list, where, default=[]), place)):
        optional(call, "id", str, path(place, index))
        function = required(call, "function", dict, path(place, index))
        for key in ("name", "arguments"):
            required(function, key, str, path(path(place, index), "function"))
    for key in ("tool_call_id", "name", "reasoning", "reasoning_content"):
        optional(message, key, str, where)
    if (thought := message.get("reasoning_content")) and not message.get("reasoning"):
        return {**message, "reasoning": thought}  # the only name that engines know
    return message

"""OpenAI responses as chat completions: the request. Pure."""

from __future__ import annotations

from typing import Any

from gyre.proxy.dialects import hidden
from gyre.proxy.dialects.errors import Invalid, Json
from gyre.proxy.dialects.reading import demand, objects, optional, path, positive, required
from gyre.proxy.dialects.responses_store import Store

#: Options that need what no engine here has, refused where they ask for something.
_REFUSED = ("background", "conversation", "prompt", "moderation")
_ROLES = ("user", "assistant", "system", "developer")
MAX_TOP_LOGPROBS = 20


def to_chat(body: Json, max_context: int, store: Store) -> tuple[Json, list[Json]]:
    """The chat completion that a request stands for, and those of its messages that are new in the conversation.

    Raises:
        Invalid: it is no such request, or asks for what is not offered here.
    """
    for key in _REFUSED:
        if body.get(key):
            raise Invalid("is not offered here", key)
    new = _input(body, store)
    before: list[Json] = []
    if (previous := optional(body, "previous_response_id", str)) is not None:
        before = store.conversation(previous)
    messages = [*before, *new]
    if not messages:
        raise Invalid("is missing", "input")
    if instructions := optional(body, "instructions", str, default=""):
        messages.insert(0, {"role": "system", "content": instructions})
    chat: Json = {"model": optional(body, "model", str, default=""), "messages": joined(messages)}
    return chat | _options(body, max_context) | _tools(body) | _format(body), new


def _options(body: Json, max_context: int) -> Json:
    chat: Json = {}
    if (most := positive(body, "max_output_tokens")) is not None:
        chat["max_tokens"] = min(most, max_context)
    for key in ("temperature", "top_p"):
        if (value := optional(body, key, float)) is not None:
            chat[key] = value
    if (top := optional(body, "top_logprobs", int, default=0)) or wants_logprobs(body):
        if not 0 <= top <= MAX_TOP_LOGPROBS:
            raise Invalid(f"must be between 0 and {MAX_TOP_LOGPROBS}", "top_logprobs")
        chat |= {"logprobs": True, "top_logprobs": top}
    reasoning = optional(body, "reasoning", dict, default={})
    if (effort := optional(reasoning, "effort", str, "reasoning")) is not None:
        chat["reasoning_effort"] = effort
    if optional(body, "stream", bool, default=False):
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    for key in ("metadata", "stream_options"):
        optional(body, key, dict)
    optional(body, "store", bool)
    if (extra := optional(body, "chat_template_kwargs", dict)) is not None:
        chat["chat_template_kwargs"] = extra
    return chat


def wants(body: Json, what: str) -> bool:
    """Whether the request's `include` names it."""
    return what in (optional(body, "include", list, default=[]))


def wants_logprobs(body: Json) -> bool:
    """Whether the answer is to have log-probabilities."""
    return wants(body, "message.output_text.logprobs")


def _format(body: Json) -> Json:
    text = optional(body, "text", dict, default={})
    form = optional(text, "format", dict, "text", default={"type": "text"})
    match required(form, "type", str, "text.format"):
        case "text":
            return {}
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            schema = {"name": required(form, "name", str, "text.format")}
            schema["schema"] = required(form, "schema", dict, "text.format")
            if (strict := optional(form, "strict", bool, "text.format")) is not None:
                schema["strict"] = strict
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
    raise Invalid("must be text, json_object or json_schema", "text.format.type")


# -- tools -------------------------------------------------------------------------------------------------------------
def _tools(body: Json) -> Json:
    given = objects(optional(body, "tools", list, default=[]), "tools")
    tools = [_tool(tool, f"tools.{index}") for index, tool in enumerate(given)]
    choice = optional(body, "tool_choice", (str, dict))
    parallel = optional(body, "parallel_tool_calls", bool)
    optional(body, "max_tool_calls", int)
    chat: Json = {"tools": tools} if tools else {}
    if choice is not None and (tools or choice not in ("auto", "none")):
        chat["tool_choice"] = _choice(choice, {tool["function"]["name"] for tool in tools})
    if tools and parallel is not None:
        chat["parallel_tool_calls"] = parallel
    return chat


def _choice(choice: Any, names: set[str]) -> Any:
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise Invalid("must be auto, none, required or a function", "tool_choice")
        if not names:
            raise Invalid("there are no tools to use", "tool_choice")
        return choice
    if choice.get("type") != "function":
        raise Invalid("only functions can be chosen here", "tool_choice.type")
    if (name := required(choice, "name", str, "tool_choice")) not in names:
        raise Invalid("names a function that is not among tools", "tool_choice.name")
    return {"type": "function", "function": {"name": name}}


def _tool(tool: Json, where: str) -> Json:
    kind = required(tool, "type", str, where)
    if kind != "function":
        raise Invalid(f"the built-in tool {kind[:80]} is not offered here; tools are functions of the client", where)
    function = {"name": required(tool, "name", str, where)}
    for key, kinds in (("description", str), ("parameters", dict)):
        if (value := optional(tool, key, kinds, where)) is not None:
            function[key] = value
    if optional(tool, "strict", bool, where):
        function["strict"] = True
    return {"type": "function", "function": function}


# -- items -------------------------------------------------------------------------------------------------------------
def _input(body: Json, store: Store) -> list[Json]:
    given = optional(body, "input", (str, list), default=[])
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Json] = []
    for index, item in enumerate(objects(given, "input")):
        messages += _item(item, f"input.{index}", store)
    return messages


def _item(item: Json, where: str, store: Store) -> list[Json]:
    match optional(item, "type", str, where, default="message"):
        case "message":
            return _message(item, where)
        case "function_call":
            return [{"role": "assistant", "content": None, "tool_calls": [_call(item, where)]}]
        case "function_call_output":
            return _output(item, where)
        case "reasoning":
            thought = _thought(item, where)
            return [{"role": "assistant", "content": None, "reasoning": thought}] if thought else []
        case "item_reference":
            known = store.item(required(item, "id", str, where))
            return [] if known is None else _item(known, where, store)
        case kind:
            raise Invalid(f"items of type {kind[:80]} are not offered here", where)


def _message(item: Json, where: str) -> list[Json]:
    role = required(item, "role", str, where)
    if role not in _ROLES:
        raise Invalid(f"must be one of {', '.join(_ROLES)}", path(where, "role"))
    content = required(item, "content", (str, list), where)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    place = path(where, "content")
    parts = [_part(part, path(place, index)) for index, part in enumerate(objects(content, place))]
    if all(part["type"] == "text" for part in parts):
        glue = "" if role == "assistant" else "\n"
        return [{"role": role, "content": glue.join(part["text"] for part in parts)}]
    return [{"role": role, "content": parts}]


def _part(part: Json, where: str) -> Json:
    match required(part, "type", str, where):
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": required(part, "text", str, where)}
        case "refusal":
            return {"type": "text", "text": required(part, "refusal", str, where)}
        case "input_image":
            return {"type": "image_url", "image_url": {"url": required(part, "image_url", str, where)}}
        case kind:
            raise Invalid(f"content of type {kind[:80]} is not offered here", where)


def _call(item: Json, where: str) -> Json:
    function = {"name": required(item, "name", str, where)}
    function["arguments"] = optional(item, "arguments", str, where, default="{}")
    return {"id": required(item, "call_id", str, where), "type": "function", "function": function}


def _output(item: Json, where: str) -> list[Json]:
    output, images = required(item, "output", (str, list), where), []
    if isinstance(output, list):
        place = path(where, "output")
        parts = [_part(part, path(place, index)) for index, part in enumerate(objects(output, place))]
        images = [part for part in parts if part["type"] != "text"]
        output = "\n".join(part["text"] for part in parts if part["type"] == "text")
    result = {"role": "tool", "tool_call_id": required(item, "call_id", str, where), "content": output}
    return [result, *([{"role": "user", "content": images}] if images else [])]


def _thought(item: Json, where: str) -> str:
    for key in ("content", "summary"):
        place = path(where, key)
        parts = objects(optional(item, key, list, where, default=[]), place)
        texts = [demand(part.get("text"), str, path(path(place, i), "text")) for i, part in enumerate(parts)]
        if text := "".join(texts):
            return text
    return hidden.unseal(optional(item, "encrypted_content", str, where, default=""))


def joined(messages: list[Json]) -> list[Json]:
    """Messages with what one turn of the assistant was made of, reasoning, text and calls, in one message."""
    found: list[Json] = []
    for message in messages:
        last = found[-1] if found else {}
        if message["role"] == "assistant" == last.get("role") and _mergeable(last, message):
            found[-1] = _merged(last, message)
        else:
            found.append(message)
    return [_complete(message) for message in found]


def _complete(message: Json) -> Json:
    silent = message["content"] is None and "tool_calls" not in message
    return {**message, "content": ""} if silent else message


def _mergeable(first: Json, second: Json) -> bool:
    """Two texts, or reasoning after what followed it, are two turns."""
    texts = isinstance(first["content"], str | None) and isinstance(second["content"], str | None)
    began = first["content"] is not None or "tool_calls" in first
    return texts and not (began and (second["content"] is not None or "reasoning" in second))


def _merged(first: Json, second: Json) -> Json:
    both = {**first, **{key: value for key, value in second.items() if value is not None}}
    if "tool_calls" in first and "tool_calls" in second:
        both["tool_calls"] = [*first["tool_calls"], *second["tool_calls"]]
    if "reasoning" in first and "reasoning" in second:
        both["reasoning"] = first["reasoning"] + second["reasoning"]
    return both

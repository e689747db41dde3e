"""OpenAI responses as chat completions: the request. Pure."""

from __future__ import annotations

import msgspec

from gyre.proxy.dialects import hidden
from gyre.proxy.dialects.errors import Invalid, Json
from gyre.proxy.dialects.intake import Intake
from gyre.proxy.dialects.reading import demand, objects, optional, path, positive, refuse, required
from gyre.proxy.dialects.responses_store import Store
from gyre.proxy.dialects.responses_tools import SEARCH, chat_name, custom_arguments, searched, tools_of

#: Options that need what no engine here has, refused where they ask for something.
_REFUSED = ("background", "conversation", "prompt", "moderation")
_ROLES = ("user", "assistant", "system", "developer")
MAX_TOP_LOGPROBS = 20


def to_chat(body: Json, max_context: int, store: Store, intake: Intake | None = None) -> tuple[Json, list[Json]]:
    """The chat completion that a request stands for, and those of its messages that are new in the conversation.

    Raises:
        Invalid: it is no such request, or asks for what is not offered here.
    """
    refuse(body, _REFUSED)
    intake = intake or Intake()
    new = _input(body, store, intake)
    before: list[Json] = []
    if (previous := optional(body, "previous_response_id", str)) is not None:
        before = store.conversation(previous, intake)
    messages = [*before, *new]
    if not messages:
        raise Invalid("is missing", "input")
    if instructions := optional(body, "instructions", str, default=""):
        messages.insert(0, {"role": "system", "content": instructions})
    chat: Json = {"model": optional(body, "model", str, default=""), "messages": joined(messages)}
    return chat | _options(body, max_context) | tools_of(body, intake) | _format(body), new


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


# -- items -------------------------------------------------------------------------------------------------------------
def _input(body: Json, store: Store, intake: Intake) -> list[Json]:
    given = optional(body, "input", (str, list), default=[])
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[Json] = []
    for index, item in enumerate(objects(given, "input")):
        messages += _item(item, f"input.{index}", store, intake)
    return messages


def _item(item: Json, where: str, store: Store, intake: Intake) -> list[Json]:
    match optional(item, "type", str, where, default="message"):
        case "message":
            return _message(item, where, intake)
        case "function_call" | "custom_tool_call" | "local_shell_call" | "tool_search_call":
            return [{"role": "assistant", "content": None, "tool_calls": [call_of(item, where)]}]
        case "function_call_output" | "custom_tool_call_output" | "local_shell_call_output":
            return _output(item, where, intake)
        case "tool_search_output":
            identity = optional(item, "call_id", str, where, default="")
            return [{"role": "tool", "tool_call_id": identity, "content": searched(item, where)}]
        case "additional_tools":  # they are told as all are
            return []
        case "reasoning":
            thought = _thought(item, where, intake)
            return [{"role": "assistant", "content": None, "reasoning": thought}] if thought else []
        case "item_reference":
            known = store.item(required(item, "id", str, where))
            intake.charge(known)
            return _item(known, where, store, intake)
        case kind:  # of a model's own, or for one: an agent that keeps it could never ask again if it were refused
            intake.leave_out(kind)
            return []


def _message(item: Json, where: str, intake: Intake) -> list[Json]:
    role = required(item, "role", str, where)
    if role not in _ROLES:
        raise Invalid(f"must be one of {', '.join(_ROLES)}", path(where, "role"))
    content = required(item, "content", (str, list), where)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    place = path(where, "content")
    parts = [_part(part, path(place, index), intake) for index, part in enumerate(objects(content, place))]
    if all(part["type"] == "text" for part in parts):
        glue = "" if role == "assistant" else "\n"
        return [{"role": role, "content": glue.join(part["text"] for part in parts)}]
    return [{"role": role, "content": parts}]


def _part(part: Json, where: str, intake: Intake) -> Json:
    match required(part, "type", str, where):
        case "input_text" | "output_text" | "text":
            return {"type": "text", "text": required(part, "text", str, where)}
        case "refusal":
            return {"type": "text", "text": required(part, "refusal", str, where)}
        case "input_image" if part.get("image_url") is not None:
            return {"type": "image_url", "image_url": {"url": required(part, "image_url", str, where)}}
        case kind:
            name = part["filename"] if isinstance(part.get("filename"), str) else ""
            return {"type": "text", "text": intake.note(kind, name)}


def call_of(item: Json, where: str = "") -> Json:
    """An item that is a call, as messages have it."""
    if item.get("type") == "local_shell_call":
        arguments = msgspec.json.encode(required(item, "action", dict, where)).decode()
        function = {"name": "local_shell", "arguments": arguments}
    elif item.get("type") == "tool_search_call":
        function = {"name": SEARCH, "arguments": msgspec.json.encode(item.get("arguments") or {}).decode()}
    else:
        function = {"name": chat_name(item, where)}
        if item.get("type") == "custom_tool_call":
            function["arguments"] = custom_arguments(required(item, "input", str, where))
        else:
            function["arguments"] = optional(item, "arguments", str, where, default="{}")
    identity = optional(item, "call_id", str, where) or required(item, "id", str, where)
    return {"id": identity, "type": "function", "function": function}


def _output(item: Json, where: str, intake: Intake) -> list[Json]:
    output, images = required(item, "output", (str, list), where), []
    if isinstance(output, list):
        place = path(where, "output")
        parts = [_part(part, path(place, index), intake) for index, part in enumerate(objects(output, place))]
        images = [part for part in parts if part["type"] != "text"]
        output = "\n".join(part["text"] for part in parts if part["type"] == "text")
    identity = optional(item, "call_id", str, where) or required(item, "id", str, where)
    result = {"role": "tool", "tool_call_id": identity, "content": output}
    return [result, *([{"role": "user", "content": images}] if images else [])]


def _thought(item: Json, where: str, intake: Intake) -> str:
    for key in ("content", "summary"):
        place = path(where, key)
        parts = objects(optional(item, key, list, where, default=[]), place)
        texts = [demand(part.get("text"), str, path(path(place, i), "text")) for i, part in enumerate(parts)]
        if text := "".join(texts):
            return text
    return hidden.unseal(optional(item, "encrypted_content", str, where, default=""), intake)


def joined(messages: list[Json]) -> list[Json]:
    """Messages with what one turn of the assistant was made of, reasoning, text and calls, in one message."""
    turns: list[list[Json]] = []
    begun = False  # the newest turn has more than reasoning
    for message in messages:
        if turns and _goes_on(turns[-1][-1], begun, message):
            turns[-1].append(message)
        else:
            turns.append([message])
            begun = False
        begun = begun or message["content"] is not None or "tool_calls" in message
    return [_merged(turn) for turn in turns]


def _goes_on(last: Json, begun: bool, message: Json) -> bool:
    """Two texts, or reasoning after what followed it, are two turns."""
    texts = isinstance(last["content"], str | None) and isinstance(message["content"], str | None)
    again = begun and (message["content"] is not None or "reasoning" in message)
    return message["role"] == "assistant" == last["role"] and texts and not again


def _merged(turn: list[Json]) -> Json:
    """All at once: joined one after the other, many small ones would take hours."""
    message: Json = {"role": turn[0]["role"], "content": None}
    for one in turn:
        message |= {key: value for key, value in one.items() if value is not None}
    if thoughts := [one["reasoning"] for one in turn if "reasoning" in one]:
        message["reasoning"] = "".join(thoughts)
    if calls := [call for one in turn for call in one.get("tool_calls", ())]:
        message["tool_calls"] = calls
    elif message["content"] is None:
        message["content"] = ""
    return message

"""Anthropic messages as chat completions: the request. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from gyre.proxy.dialects import hidden
from gyre.proxy.dialects.errors import Invalid, Json
from gyre.proxy.dialects.intake import Intake
from gyre.proxy.dialects.reading import objects, optional, path, positive, refuse, required, texts

#: The member of a tool's input that holds arguments which are no JSON object; Anthropic's advice for such a case.
BROKEN = "INVALID_JSON"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
#: What templates are told whose models think only when asked to.
_THINKING = dict.fromkeys(("enabled", "omitted"), {"enable_thinking": True, "thinking": True})
#: Options that only Anthropic's own servers can serve, refused where they ask for something.
_REFUSED = ("mcp_servers", "container")


def to_chat(body: Json, max_context: int, intake: Intake | None = None, counting: bool = False) -> Json:
    """The chat completion that a request for a message stands for; `counting` for one that only counts its tokens.

    Raises:
        Invalid: it is no such request, or asks for what is not offered here.
    """
    refuse(body, _REFUSED)
    intake = intake or Intake()
    messages = _system(body)
    given = objects(required(body, "messages", list), "messages")
    if not given:
        raise Invalid("at least one message is required", "messages")
    for index, message in enumerate(given):
        messages += _message(message, f"messages.{index}", intake)
    chat: Json = {"model": optional(body, "model", str, default=""), "messages": messages}
    if _is_begun(messages[-1] if messages else {}):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    chat |= _tools(body, intake) | _thinking(body)
    if extra := _THINKING.get(thinking_is(body), {}) | optional(body, "chat_template_kwargs", dict, default={}):
        chat["chat_template_kwargs"] = extra
    return chat if counting else chat | _sampling(body, max_context)


def _is_begun(message: Json) -> bool:
    """Whether the client wrote the beginning of the answer itself."""
    return message.get("role") == "assistant" and isinstance(message["content"], str) and "tool_calls" not in message


def _sampling(body: Json, max_context: int) -> Json:
    if body.get("max_tokens") is None:
        raise Invalid("is missing", "max_tokens")
    # More than the context holds is never sampled, and no reason to refuse: clients ask for a fixed large number.
    chat: Json = {"max_tokens": min(positive(body, "max_tokens") or 1, max_context)}
    if stops := texts(body, "stop_sequences"):
        chat["stop"] = stops
    for key, kind in (("temperature", float), ("top_p", float), ("top_k", int), ("seed", int)):
        if (value := optional(body, key, kind)) is not None:
            chat[key] = value
    optional(body, "metadata", dict)
    if optional(body, "stream", bool, default=False):
        # The prompt's ids come with the first piece: its length is the first thing that a client is told.
        chat |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    return chat


def _thinking(body: Json) -> Json:
    chat: Json = {}
    output = optional(body, "output_config", dict, default={})
    if (effort := optional(output, "effort", str, "output_config")) is not None:
        if effort not in _EFFORTS:
            raise Invalid(f"must be one of {', '.join(_EFFORTS)}", "output_config.effort")
        chat["reasoning_effort"] = effort
    form = optional(output, "format", dict, "output_config", default=optional(body, "output_format", dict))
    if form is not None:
        if form.get("type") != "json_schema":
            raise Invalid("must be json_schema", "output_config.format.type")
        schema = required(form, "schema", dict, "output_config.format")
        chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    if thinking_is(body) == "disabled":
        chat["reasoning_effort"] = "none"
    return chat


def thinking_is(body: Json) -> str:
    """What the request says of thinking: its type, or ``omitted`` where it is to happen unseen; empty by default."""
    config = optional(body, "thinking", dict, default={})
    optional(config, "budget_tokens", int, "thinking")
    kind = optional(config, "type", str, "thinking", default="")
    return "omitted" if kind != "disabled" and config.get("display") == "omitted" else kind


# -- tools -------------------------------------------------------------------------------------------------------------
def _tools(body: Json, intake: Intake) -> Json:
    given = objects(optional(body, "tools", list, default=[]), "tools")
    tools, theirs = [], []
    for index, tool in enumerate(given):
        if _is_theirs(tool, f"tools.{index}"):
            theirs.append(tool.get("name"))
            intake.leave_out(tool["type"])
        else:
            tools.append(_tool(tool, f"tools.{index}"))
    choice = optional(body, "tool_choice", dict)
    chat: Json = {"tools": tools} if tools else {}
    if choice is None:
        return chat
    kind = required(choice, "type", str, "tool_choice")
    single = optional(choice, "disable_parallel_tool_use", bool, "tool_choice", default=False)
    if kind == "tool":
        name = required(choice, "name", str, "tool_choice")
        if name in {tool["function"]["name"] for tool in tools}:
            chat["tool_choice"] = {"type": "function", "function": {"name": name}}
        elif name not in theirs:
            raise Invalid("names a tool that is not among tools", "tool_choice.name")
    elif kind not in _CHOICES:
        raise Invalid("must be auto, any, tool or none", "tool_choice.type")
    elif kind == "any" and not given:
        raise Invalid("there are no tools to use", "tool_choice")
    elif tools:
        chat["tool_choice"] = _CHOICES[kind]
    if tools and single:
        chat["parallel_tool_calls"] = False
    return chat


def _is_theirs(tool: Json, where: str) -> bool:
    """Whether a tool is one of Anthropic's, which only their models know: it comes without a schema."""
    return optional(tool, "type", str, where, default="custom") != "custom" and "input_schema" not in tool


def _tool(tool: Json, where: str) -> Json:
    function = {"name": required(tool, "name", str, where), "parameters": required(tool, "input_schema", dict, where)}
    if (description := optional(tool, "description", str, where)) is not None:
        function["description"] = description
    if optional(tool, "strict", bool, where):
        function["strict"] = True
    return {"type": "function", "function": function}


# -- messages ----------------------------------------------------------------------------------------------------------
def _system(body: Json) -> list[Json]:
    system = optional(body, "system", (str, list), default="")
    text = system if isinstance(system, str) else _only_text(system, "system")
    return [{"role": "system", "content": text}] if text else []


def _only_text(blocks: list[Any], where: str) -> str:
    parts = []
    for index, block in enumerate(objects(blocks, where)):
        if block.get("type") != "text":
            raise Invalid("must be a text block", path(where, index))
        parts.append(required(block, "text", str, path(where, index)))
    return "\n".join(part for part in parts if part)


def _message(message: Json, where: str, intake: Intake) -> list[Json]:
    role = required(message, "role", str, where)
    content = required(message, "content", (str, list), where)
    if role not in ("user", "assistant", "system"):
        raise Invalid("must be user, assistant or system", path(where, "role"))
    where = path(where, "content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if role == "system":
        return [{"role": role, "content": _only_text(content, where)}]
    blocks = [(block, path(where, index)) for index, block in enumerate(objects(content, where))]
    return _assistant(blocks, intake) if role == "assistant" else _user(blocks, intake)


def _assistant(blocks: list[tuple[Json, str]], intake: Intake) -> list[Json]:
    said, thought, calls = "", "", []
    for block, where in blocks:
        match required(block, "type", str, where):
            case "text":
                said += required(block, "text", str, where)
            case "thinking":
                signature = optional(block, "signature", str, where, default="")
                thought += required(block, "thinking", str, where) or hidden.unseal(signature, intake)
            case "redacted_thinking":
                thought += hidden.unseal(optional(block, "data", str, where, default=""), intake)
            case "tool_use":
                calls.append(_call(block, where))
            case kind:
                intake.leave_out(kind)
    message: Json = {"role": "assistant", "content": said or None if calls else said}
    if thought:
        message["reasoning"] = thought
    if calls:
        message["tool_calls"] = calls
    return [message]


def _call(block: Json, where: str) -> Json:
    given = optional(block, "input", dict, where, default={})
    if given.keys() == {BROKEN} and isinstance(given[BROKEN], str):
        arguments = given[BROKEN]  # as the model wrote it
    else:
        arguments = msgspec.json.encode(given).decode()
    function = {"name": required(block, "name", str, where), "arguments": arguments}
    return {"id": required(block, "id", str, where), "type": "function", "function": function}


def _user(blocks: list[tuple[Json, str]], intake: Intake) -> list[Json]:
    """Results of tools are messages of their own, in the order in which they were given."""
    messages: list[Json] = []
    parts: list[Json] = []
    for block, where in blocks:
        if required(block, "type", str, where) == "tool_result":
            messages += _said(parts)
            result, parts = _result(block, where, intake)
            messages.append(result)
        else:
            parts.append(_part(block, where, intake))
    return messages + _said(parts) if messages or parts else [{"role": "user", "content": ""}]


def _said(parts: list[Json]) -> list[Json]:
    if not parts:
        return []
    if all(part["type"] == "text" for part in parts):
        return [{"role": "user", "content": "\n".join(part["text"] for part in parts if part["text"])}]
    return [{"role": "user", "content": parts}]


def _result(block: Json, where: str, intake: Intake) -> tuple[Json, list[Json]]:
    """The message of a tool's result, and the images in it, which only a user's message can have."""
    content = optional(block, "content", (str, list), where, default="")
    optional(block, "is_error", bool, where)
    images: list[Json] = []
    if isinstance(content, list):
        place = path(where, "content")
        parts = [_part(part, path(place, index), intake) for index, part in enumerate(objects(content, place))]
        images = [part for part in parts if part["type"] != "text"]
        content = "\n".join(part["text"] for part in parts if part["type"] == "text")
    identity = required(block, "tool_use_id", str, where)
    return {"role": "tool", "tool_call_id": identity, "content": content}, images


def _part(block: Json, where: str, intake: Intake) -> Json:
    """A part of a user's message, or a word on it where the model cannot be shown it: no agent could take it back."""
    kind = required(block, "type", str, where)
    if kind == "text":
        return {"type": "text", "text": required(block, "text", str, where)}
    if kind == "image" and (url := _image(block, where)):
        return {"type": "image_url", "image_url": {"url": url}}
    text = _document(block, where) if kind == "document" else None
    if kind == "search_result":
        text = _texts(required(block, "content", list, where), path(where, "content"))
    name = [block[key] for key in ("title", "tool_name") if isinstance(block.get(key), str)]
    return {"type": "text", "text": intake.note(kind, *name[:1]) if text is None else text}


def _image(block: Json, where: str) -> str:
    """An image's address; empty where only Anthropic has it."""
    source, where = required(block, "source", dict, where), path(where, "source")
    match source.get("type"):
        case "url":
            return required(source, "url", str, where)
        case "base64":
            kind, data = required(source, "media_type", str, where), required(source, "data", str, where)
            return f"data:{kind};base64,{data}"
    return ""


def _document(block: Json, where: str) -> str | None:
    """The text of a document; None where it is none."""
    source, where = required(block, "source", dict, where), path(where, "source")
    match source.get("type"):
        case "text":
            return required(source, "data", str, where)
        case "content":
            content = required(source, "content", (str, list), where)
            return content if isinstance(content, str) else _texts(content, path(where, "content"))
    return None


def _texts(blocks: list[Any], where: str) -> str:
    """What is text among blocks."""
    found = [(block, path(where, i)) for i, block in enumerate(objects(blocks, where)) if block.get("type") == "text"]
    return "\n".join(required(block, "text", str, place) for block, place in found)

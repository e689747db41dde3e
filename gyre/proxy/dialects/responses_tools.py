"""Tools of a response: those that a chat completion has, under what names, and how their calls are told. Pure.

Chat completions know functions alone. A custom tool, which takes a text, becomes a function with one string; functions
of a namespace carry it in their names; a client's search for tools is a function too; tools that only OpenAI runs, or
only its models know, are left out. Some tools come as items of the input: those found by a search, or all of them.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from gyre.proxy.dialects.errors import Invalid, Json
from gyre.proxy.dialects.intake import Intake
from gyre.proxy.dialects.reading import objects, optional, path, required

#: Items of the input that bring tools.
BRINGING = ("additional_tools", "tool_search_output")
SEARCH = "tool_search"
_INPUT = "input"
_BEGIN = re.compile(rf'\s*\{{\s*"{_INPUT}"\s*:\s*"')
#: What is whole of a JSON string: characters, and escapes, of which two may be one character.
_CHARACTERS = re.compile(
    r"""(?:[^"\\]|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"""
    r"""|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))*"""
)
#: A tool, where it stands, and its namespace.
_Placed = tuple[Json, str, str]
_PARAMETERS = {
    "type": "object",
    "properties": {_INPUT: {"type": "string", "description": "The whole text that the tool is given"}},
    "required": [_INPUT],
    "additionalProperties": False,
}


def tools_of(body: Json, intake: Intake) -> Json:
    """What a chat completion is to be told of a request's tools.

    Raises:
        Invalid: they, or the choice among them, make no sense.
    """
    given = _given(body)
    tools = []
    for tool, where, space in given:
        if _is_ours(tool):
            tools.append(_tool(tool, where, space))
        else:
            intake.leave_out(tool["type"])
    choice = optional(body, "tool_choice", (str, dict))
    parallel = optional(body, "parallel_tool_calls", bool)
    optional(body, "max_tool_calls", int)
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(tools, choice)
    chat: Json = {"tools": tools} if tools else {}
    if choice is not None and (made := _choice(choice, tools, given)) is not None:
        chat["tool_choice"] = made
    if tools and parallel is not None:
        chat["parallel_tool_calls"] = parallel
    return chat


def _given(body: Json) -> list[_Placed]:
    """All tools that there are, each once."""
    found = _flat(objects(optional(body, "tools", list, default=[]), "tools"), "tools")
    given = body.get("input")
    for index, item in enumerate(given if isinstance(given, list) else ()):
        if item.get("type") in BRINGING:
            where = f"input.{index}.tools"
            found += _flat(objects(optional(item, "tools", list, where[:-6], default=[]), where), where)
    once = {(tool["type"], space, str(tool.get("name"))): (tool, where, space) for tool, where, space in found[::-1]}
    return list(once.values())[::-1]


def _flat(tools: list[Json], where: str) -> list[_Placed]:
    found = []
    for index, tool in enumerate(tools):
        place = path(where, index)
        if required(tool, "type", str, place) == "namespace":
            space, inner = required(tool, "name", str, place), path(place, "tools")
            inside = objects(required(tool, "tools", list, place), inner)
            for i, one in enumerate(inside):
                required(one, "type", str, path(inner, i))
                found.append((one, path(inner, i), space))
        else:
            found.append((tool, place, ""))
    return found


def _is_ours(tool: Json) -> bool:
    """Whether a tool is one that any model could use."""
    return tool["type"] in ("function", "custom") or (tool["type"] == SEARCH and tool.get("execution") == "client")


def _tool(tool: Json, where: str, space: str) -> Json:
    function = {"name": SEARCH if tool["type"] == SEARCH else _joined(space, required(tool, "name", str, where))}
    if (description := optional(tool, "description", str, where)) is not None:
        function["description"] = description
    if tool["type"] == "custom":
        form = optional(tool, "format", dict, where, default={})
        if grammar := optional(form, "definition", str, path(where, "format")):
            syntax = optional(form, "syntax", str, path(where, "format"), default="following")
            words = f"The text has to follow this {syntax} grammar:\n{grammar}"
            function["description"] = f"{description}\n\n{words}" if description else words
        return {"type": "function", "function": {**function, "parameters": _PARAMETERS}}
    if (parameters := optional(tool, "parameters", dict, where)) is not None:
        function["parameters"] = parameters
    if optional(tool, "strict", bool, where):
        function["strict"] = True
    return {"type": "function", "function": function}


def _allowed(tools: list[Json], choice: Json) -> tuple[list[Json], str]:
    """The tools that may be used of those that there are, and whether one has to be."""
    mode = optional(choice, "mode", str, "tool_choice", default="auto")
    if mode not in ("auto", "required"):
        raise Invalid("must be auto or required", "tool_choice.mode")
    where, names = "tool_choice.tools", set()
    for index, one in enumerate(objects(required(choice, "tools", list, "tool_choice"), where)):
        if one.get("type") in ("function", "custom"):
            names.add(chat_name(one, path(where, index)))
    allowed = [tool for tool in tools if tool["function"]["name"] in names]
    return allowed, mode if allowed else "auto"


def _choice(choice: Any, tools: list[Json], given: list[_Placed]) -> Any:
    """The choice as a chat completion has it; None for none, which is how it is without tools."""
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise Invalid("must be auto, none, required or a function", "tool_choice")
        if choice == "required" and not given:
            raise Invalid("there are no tools to use", "tool_choice")
        return choice if tools else None
    kind = required(choice, "type", str, "tool_choice")
    if kind not in ("function", "custom"):
        if kind not in [tool["type"] for tool, _, _ in given]:
            raise Invalid("is none of a tool that is among tools", "tool_choice.type")
        return None  # it was left out
    if (name := chat_name(choice, "tool_choice")) not in {tool["function"]["name"] for tool in tools}:
        raise Invalid("names a function that is not among tools", "tool_choice.name")
    return {"type": "function", "function": {"name": name}}


# -- names and calls ---------------------------------------------------------------------------------------------------
def _joined(space: str, name: str) -> str:
    return f"{space}{'' if space.endswith('__') else '__'}{name}" if space else name


def chat_name(item: Json, where: str) -> str:
    """The name under which a chat completion has the tool of a call or a choice."""
    return _joined(optional(item, "namespace", str, where, default=""), required(item, "name", str, where))


def called(body: Json) -> dict[str, Json]:
    """The first words of the item for a call of each tool of a request that was read, by its name in the chat."""
    found = {}
    for tool, _, space in _given(body):
        if tool["type"] == SEARCH:
            found[SEARCH] = {"type": "tool_search_call", "execution": "client"}
        elif _is_ours(tool):
            kind = "function_call" if tool["type"] == "function" else "custom_tool_call"
            words = {"type": kind, "name": tool["name"], **({"namespace": space} if space else {})}
            found[_joined(space, tool["name"])] = words
    return found


def custom_arguments(text: str) -> str:
    """The arguments of a function that stands for a custom tool."""
    return msgspec.json.encode({_INPUT: text}).decode()


class CustomInput:
    """The text that a custom tool is given, out of its function's arguments as they come."""

    def __init__(self) -> None:
        self._arguments = ""
        self._at = 0  # where the text goes on, once it has begun
        self.text = ""

    def feed(self, piece: str) -> str:
        """What the next piece of the arguments adds to the text."""
        self._arguments += piece
        if not (self._at or (begun := _BEGIN.match(self._arguments))):
            return ""
        found = _CHARACTERS.match(self._arguments, self._at or begun.end())
        assert found is not None
        text = json.loads(f'"{found.group()}"', strict=False)  # models write lines as they are
        self._at = found.end()
        self.text += text
        return text

    def end(self) -> str:
        """What is still to be added; arguments of another shape are the text themselves."""
        try:
            value = msgspec.json.decode(self._arguments)
        except (msgspec.DecodeError, RecursionError, ValueError):
            value = None
        found = value.get(_INPUT) if isinstance(value, dict) else value
        whole = found if isinstance(found, str) else self._arguments
        if self.text and not whole.startswith(self.text):  # it was cut off, or goes on as no JSON does
            return ""
        rest = whole[len(self.text) :]
        self.text = whole
        return rest


def searched(item: Json, where: str) -> str:
    """What a search for tools found, as a text; the tools themselves are told as all are."""
    found = _flat(objects(optional(item, "tools", list, where, default=[]), path(where, "tools")), path(where, "tools"))
    names = [_joined(space, tool["name"]) for tool, _, space in found if isinstance(tool.get("name"), str)]
    return f"found: {', '.join(names)}" if names else "nothing was found"


def search_words(arguments: str) -> Any:
    """The arguments of a search, which are an object where the model wrote one."""
    try:
        return msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError, ValueError):
        return {"query": arguments}

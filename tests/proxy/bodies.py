"""Bodies of every dialect in which something is not as it should be, for tests that send them."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from tests.proxy.told_engine import call

TOOL = {"name": "run", "description": "runs", "input_schema": {"type": "object", "properties": {"cmd": {}}}}
FUNCTION: dict[str, Any] = {"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": None}
SPACES = [
    {"type": "namespace", "name": "n", "tools": [FUNCTION]},
    {"type": "tool_search", "execution": "client", "parameters": {}},
]

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
leaves = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | texts
nothing_special = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
RESULT = [
    {"type": "document", "title": "t", "source": {"type": "content", "content": [{"type": "text", "text": "t"}]}},
    {"type": "search_result", "title": "t", "content": [{"type": "text", "text": "t"}]},
    {"type": "tool_reference", "tool_name": "t"},
]
TEMPLATES = [
    {
        **{"model": "m", "max_tokens": 5, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["x"]},
        **{"metadata": {}, "thinking": {"type": "enabled", "budget_tokens": 5}, "temperature": 1.0, "top_k": 1},
        **{"tools": [TOOL], "tool_choice": {"type": "tool", "name": "run"}, "output_config": {"effort": "low"}},
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "u"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "", "signature": "s"},
                    {"type": "tool_use", "id": "i", "name": "run", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "i", "content": RESULT}]},
        ],
    },
    {
        **{"model": "m", "instructions": "i", "max_output_tokens": 5, "temperature": 1, "metadata": {}, "include": []},
        **{"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "run"}, "parallel_tool_calls": True},
        **{"text": {"format": {"type": "json_schema", "name": "n", "schema": {}}}, "reasoning": {"effort": "low"}},
        **{"store": True, "previous_response_id": None, "top_logprobs": 3, "stream": False},
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "u"}]},
            {"type": "reasoning", "summary": [{"text": "t"}], "content": [], "encrypted_content": "gyre1.x"},
            {"type": "function_call", "call_id": "c", "name": "run", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "t"}]},
            {"type": "item_reference", "id": "i"},
        ],
    },
    {
        **{"model": "m", "tools": [{"type": "custom", "name": "put", "format": {"definition": "d"}}, *SPACES]},
        **{"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "put"}]}},
        "input": [
            {"type": "additional_tools", "tools": [FUNCTION]},
            {"type": "custom_tool_call", "call_id": "c", "name": "put", "namespace": "n", "input": "t"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_file", "filename": "f"}]},
            {"type": "local_shell_call", "call_id": "c", "action": {}},
            {"type": "tool_search_call", "call_id": "c", "arguments": {}},
            {"type": "tool_search_output", "call_id": "c", "tools": SPACES},
            {"type": "message", "role": "user", "content": "x"},
        ],
    },
    {
        **{"model": "m", "max_tokens": 5, "n": 1, "seed": 1, "stop": ["x"], "stop_token_ids": [1], "logit_bias": {}},
        **{"tools": [{"type": "function", "function": {"name": "run"}}], "tool_choice": "auto", "stream_options": {}},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "t"}]},
            {"role": "assistant", "content": None, "tool_calls": [call("run", {})], "reasoning_content": "r"},
            {"role": "tool", "tool_call_id": "c", "content": "x"},
        ],
    },
]


def places(value: Any, at: tuple = ()) -> list[tuple]:
    """Where every part of a body is."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, part in inner for place in places(part, (*at, key)))]


def mutated(body: dict, place: tuple, value: Any, drop: bool = False) -> dict:
    """A copy of a body in which one part is another value, or is missing."""
    copy = json.loads(json.dumps(body))
    at = copy
    for key in place[:-1]:
        at = at[key]
    if drop:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    return copy


@st.composite
def bodies(draw, templates=TEMPLATES) -> tuple[int, dict]:
    """A body of a dialect in which a few parts are something else."""
    which = draw(st.integers(0, len(templates) - 1))
    body = templates[which]
    for _ in range(draw(st.integers(1, 3))):
        if found := places(body)[1:]:
            place = draw(st.sampled_from(found))
            body = mutated(body, place, draw(nothing_special), draw(st.integers(0, 3)) == 0)
    return which, body

"""Requests of every dialect become the same chat, or are refused with a word of where."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.proxy.dialects import errors, hidden
from gyre.proxy.dialects.errors import Invalid
from gyre.proxy.dialects.intake import Intake
from gyre.proxy.dialects.messages import to_chat
from gyre.proxy.dialects.openai import OpenAiCall
from gyre.proxy.dialects.reading import decode
from gyre.proxy.dialects.responses import joined
from gyre.proxy.dialects.responses_answer import ResponseCall
from gyre.proxy.dialects.responses_store import Store
from tests.proxy.bodies import FUNCTION, TOOL
from tests.proxy.told_engine import call

HI = [{"role": "user", "content": "hi"}]


# -- Anthropic: requests -----------------------------------------------------------------------------------------------
def message(**body: Any) -> dict:
    return to_chat({"model": "m", "max_tokens": 10, "messages": HI, **body}, 1000)


def test_a_conversation_with_tools_becomes_a_chat():
    chat = message(
        system=[
            {"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "good"},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "list"}, {"type": "text", "text": "it"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "any"},
                    {"type": "redacted_thinking", "data": "any"},
                    {"type": "text", "text": "I "},
                    {"type": "text", "text": "look"},
                    {"type": "tool_use", "id": "t1", "name": "run", "input": {"cmd": "ls", "é": [1]}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "a"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "b", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "t3"},
                    {"type": "text", "text": "now?"},
                ],
            },
        ],
        tools=[TOOL],
    )
    assert chat["messages"] == [
        {"role": "system", "content": "be\ngood"},
        {"role": "user", "content": "list\nit"},
        {
            "role": "assistant",
            "content": "I look",
            "reasoning": "hm",
            "tool_calls": [call("run", '{"cmd":"ls","é":[1]}', "t1")],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "a"},
        {"role": "tool", "tool_call_id": "t2", "content": "b"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": "now?"},
    ]
    function = {"name": "run", "description": "runs", "parameters": TOOL["input_schema"]}
    assert chat["tools"] == [{"type": "function", "function": function}] and "tool_choice" not in chat


def test_images_stay_where_a_user_sends_them():
    url = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    data = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    text = {"type": "text", "text": "see"}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text, data]}
    chat = message(messages=[{"role": "user", "content": [text, url]}, {"role": "user", "content": [result]}])
    pictures = [
        {"type": "image_url", "image_url": {"url": u}} for u in ("http://x/y.png", "data:image/png;base64,AA==")
    ]
    assert chat["messages"] == [
        {"role": "user", "content": [text, pictures[0]]},
        {"role": "tool", "tool_call_id": "t", "content": "see"},
        {"role": "user", "content": [pictures[1]]},
    ]


@pytest.mark.parametrize(
    "choice, wanted",
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "run"}, {"tool_choice": {"type": "function", "function": {"name": "run"}}}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
    ],
)
def test_choices_of_tools(choice, wanted):
    chat = message(tools=[TOOL], tool_choice=choice)
    assert {key: chat[key] for key in ("tool_choice", "parallel_tool_calls") if key in chat} == wanted


def test_options_of_a_message():
    chat = message(
        max_tokens=32_000, stop_sequences=["x"], temperature=0.5, top_p=0.9, top_k=3, metadata={"user_id": "u"}
    )
    assert chat["max_tokens"] == 1000 and chat["stop"] == ["x"]
    assert (chat["temperature"], chat["top_p"], chat["top_k"]) == (0.5, 0.9, 3)
    assert message(thinking={"type": "disabled"})["reasoning_effort"] == "none"
    assert "chat_template_kwargs" not in message(thinking={"type": "adaptive"})
    thinks = message(thinking={"type": "enabled", "budget_tokens": 2000}, chat_template_kwargs={"thinking": "much"})
    assert thinks["chat_template_kwargs"] == {"enable_thinking": True, "thinking": "much"}
    assert "reasoning_effort" not in thinks
    assert message(output_config={"effort": "low"})["reasoning_effort"] == "low"
    form = {"type": "json_schema", "schema": {"type": "object"}}
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    assert message(output_config={"format": form})["response_format"] == wanted
    begun = message(messages=[*HI, {"role": "assistant", "content": "The"}])
    assert begun["continue_final_message"] is True and begun["add_generation_prompt"] is False


@pytest.mark.parametrize(
    "body, where",
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.source"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "walk"}}, "tool_choice.name"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"stop_sequences": ["a", 1]}, "stop_sequences.1"),
        ({"system": [{"type": "image"}]}, "system.0"),
    ],
)
def test_messages_that_are_refused_say_where(body, where):
    with pytest.raises(Invalid) as caught:
        message(**body)
    assert caught.value.param == where and where in caught.value.message


# -- Responses: requests -----------------------------------------------------------------------------------------------


def response(store: Store | None = None, **body: Any) -> dict:
    return ResponseCall({"model": "m", "input": "hi", **body}, 1000, store or Store()).chat


def test_items_become_a_chat():
    chat = response(
        instructions="be good",
        input=[
            {"role": "developer", "content": "rules"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look"}]},
            {"type": "function_call", "call_id": "c1", "name": "run", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "run", "arguments": '{"a":1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "a"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": hidden.seal("so")},
            {"type": "message", "role": "assistant", "content": "done"},
            {"role": "user", "content": "more"},
        ],
        tools=[FUNCTION],
        max_output_tokens=5000,
    )
    assert chat["messages"] == [
        {"role": "system", "content": "be good"},
        {"role": "developer", "content": "rules"},
        {"role": "user", "content": "list"},
        {
            "role": "assistant",
            "content": "I look",
            "reasoning": "hm",
            "tool_calls": [call("run", "{}", "c1"), call("run", '{"a":1}', "c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a"},
        {"role": "tool", "tool_call_id": "c2", "content": "b"},
        {"role": "assistant", "content": "done", "reasoning": "so"},
        {"role": "user", "content": "more"},
    ]
    assert chat["tools"] == [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]
    assert chat["max_tokens"] == 1000


def test_two_turns_of_the_assistant_stay_two():
    said = [{"role": "assistant", "content": text} for text in "ab"]
    assert joined(said) == said
    call_first = {"role": "assistant", "content": None, "tool_calls": [call("run", "{}")]}
    assert joined([call_first, said[0]]) == [call_first, said[0]]


@pytest.mark.parametrize(
    "body, where",
    [
        ({"input": None}, "input"),
        ({"tools": [{"name": "x"}]}, "tools.0.type"),
        ({"tools": [{"type": "custom"}]}, "tools.0.name"),
        ({"tools": [{"type": "namespace", "name": "x", "tools": [{"type": "function"}]}]}, "tools.0.tools.0.name"),
        ({"input": [{"type": "custom_tool_call", "name": "x"}]}, "input.0.input"),
        ({"input": [{"type": "computer_call_output"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 100}, "top_logprobs"),
    ],
)
def test_responses_that_are_refused_say_where(body, where):
    with pytest.raises(Invalid) as caught:
        response(**body)
    assert caught.value.param == where


# -- errors and bodies ----------------------------------------------------------------------------------------------
LONG = "This model's maximum context length is 512 tokens. However, your prompt contains {} input tokens, which exceeds"


@pytest.mark.parametrize(
    "text, context",
    [
        (LONG.format(600), (600, 512)),
        (LONG.format("at least 513"), (513, 512)),
        (
            "This model's maximum context length is 512 tokens. However, your prompt contains 9999 characters (more "
            "than 2044 characters, which is the upper bound for 511 input tokens).",
            (512, 512),
        ),
        ("Input length (600) exceeds model's maximum context length (512).", (600, 512)),
        ("max_tokens must be at least 1, got 0.", (512, 512)),
        ("temperature must be non-negative", None),
    ],
)
def test_a_full_context_is_said_as_each_dialect_says_it(text, context):
    body = json.dumps({"error": {"message": text, "type": "BadRequestError", "param": None, "code": 400}}).encode()
    error = errors.from_engine(400, body, 512)
    assert error.context == context
    said = errors.openai(error)["error"]
    assert said["code"] == ("context_length_exceeded" if context else None) and said["message"] == text
    shape = errors.anthropic(error, "req_1")
    assert shape["error"]["type"] == "invalid_request_error" and shape["request_id"] == "req_1"
    wanted = f"prompt is too long: {context[0]} tokens > {context[1]} maximum" if context else text
    assert shape["error"]["message"] == wanted


@pytest.mark.parametrize("body", [b"", b"\xff", b"plain words", b"[]", b'{"error": 3}', b'{"error": {"message": 3}}'])
def test_an_engines_odd_error_is_an_error_still(body):
    assert errors.openai(errors.from_engine(400, body, 512))["error"]["message"]


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_hidden_reasoning_comes_back(text):
    clean = text.encode("utf-8", "replace").decode()
    assert hidden.unseal(hidden.seal(text), Intake()) == clean and hidden.signature(text)


def test_hidden_reasoning_that_is_none_of_ours_is_nothing():
    bomb = hidden.seal("x" * (hidden.MAX_CHARACTERS + 1))
    for sealed in ("", "x", "gyre1.", "gyre1.####", "gyre1.AAAA", "gyre1.é", hidden.seal("text")[:-4], bomb):
        assert hidden.unseal(sealed, Intake()) == ""


def test_the_last_of_two_equal_keys_counts():
    assert decode(b'{"a": 1, "a": 2}') == {"a": 2}


def test_reasoning_has_one_name_for_engines():
    body = {"messages": [{"role": "assistant", "content": "x", "reasoning_content": "hm"}]}
    assert OpenAiCall(body).chat["messages"][0]["reasoning"] == "hm"

"""What a request asks, what engines are asked for it, and how pieces of an answer add up."""

from array import array

import pytest

from gyre.proxy import chat
from gyre.proxy.chat import BadRequest, Choice, parse
from gyre.proxy.recorder import Span

ASK = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    "extra, continuable",
    [
        ({}, True),
        ({"temperature": 0.3, "seed": 1, "stop": "x", "logit_bias": {"1": 2}, "max_tokens": 4}, True),
        ({"presence_penalty": 0.0, "n": 1, "tool_choice": "none", "tools": [{}]}, True),
        ({"response_format": {"type": "text"}, "stream_options": None}, True),
        ({"frequency_penalty": 1}, False),
        ({"n": 2}, False),
        ({"tools": [{}]}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"structured_outputs": {"regex": "a"}}, False),
        ({"bad_words": ["x y"]}, False),
        ({"something_new": 1}, False),
    ],
)
def test_what_can_be_continued(extra, continuable):
    assert parse({**ASK, **extra}).continuable is continuable
    assert not parse({**ASK, **extra}, parsed=True).continuable


@pytest.mark.parametrize(
    "extra, masked",
    [
        ({}, ""),
        ({"temperature": 0.5, "top_p": 1, "top_k": -1, "seed": 4, "stop": ["a"]}, ""),
        ({"temperature": 0}, "greedy"),
        ({"top_p": 0.99}, "truncated"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"logit_bias": {"5": 1}}, "constrained"),
        ({"min_tokens": 2}, "constrained"),
        ({"temperature": 0.009}, "greedy"),
        ({"temperature": 0.01}, ""),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, ""),
        ({"tools": [{}], "tool_choice": "auto", "parallel_tool_calls": True}, ""),
        ({"tools": [{}], "tool_choice": "none"}, ""),
        ({"tools": [{}], "tool_choice": None}, ""),
        ({"tools": [{}], "tool_choice": "required"}, "constrained"),
        ({"tools": [{}], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "constrained"),
        ({"tools": [{}, {"function": {"name": "f", "strict": True}}]}, "constrained"),
        ({"tools": [{"function": {"name": "f", "strict": False}}]}, ""),
        ({"tools": [{}], "parallel_tool_calls": False}, "constrained"),
    ],
)
def test_what_can_be_trained_on(extra, masked):
    assert parse({**ASK, **extra}).masked == masked


def test_nothing_is_left_to_an_engines_defaults():
    body = chat.first_leg(parse({**ASK, "model": "m", "stream_options": {"include_usage": True}, "top_k": None}))
    assert body["temperature"] == 1.0 and body["top_p"] == 1.0 and body["top_k"] == 0 and body["min_p"] == 0.0
    assert body["stream"] and body["logprobs"] and body["return_token_ids"] and body["top_logprobs"] == 0
    assert "model" not in body and "stream_options" not in body


def test_a_continuation_has_the_room_that_is_left():
    prompt, kept = array("i", [1, 2, 3]), array("i", [4, 5])
    body = chat.continuation(parse({**ASK, "max_tokens": 10, "min_tokens": 3}), prompt, kept, 100)
    assert body["prompt"] == [1, 2, 3, 4, 5] and body["max_tokens"] == 8 and body["min_tokens"] == 1
    assert chat.continuation(parse(ASK), prompt, kept, 100)["max_tokens"] == 95
    assert chat.continuation(parse({**ASK, "max_tokens": 500}), prompt, kept, 100)["max_tokens"] == 95


def test_tool_calls_come_in_pieces():
    choice = Choice()
    for delta in (
        {"role": "assistant", "content": ""},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"x": '}}]},
        {"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}], "content": None},
    ):
        choice.merge(delta)
    choice.finish("tool_calls")
    choice.sample(Span(0, 0, 0), [1, 2], [-0.5, -0.25])
    answer = chat.response(parse({**ASK, "return_token_ids": True}), {"id": "i"}, array("i", [7]), [choice])
    message = answer["choices"][0]["message"]
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == [
        ("a", "f", '{"x": 1}'),
        ("b", "g", "{}"),
    ]
    assert message["reasoning"] == "hm" and answer["choices"][0]["token_ids"] == [1, 2]
    assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


def test_completions_logprobs_become_chats():
    piece = {"logprobs": {"tokens": ["a"], "token_logprobs": [-0.5], "top_logprobs": [{"b": -0.1, "a": -0.5}]}}
    values, entries = chat.completion_logprobs(piece, 1)
    assert values == [-0.5] and entries[0]["token"] == "a" and entries[0]["bytes"] == [97]
    assert [top["token"] for top in entries[0]["top_logprobs"]] == ["b"]


def test_a_bad_request_says_what_is_bad():
    with pytest.raises(BadRequest, match="temperature"):
        parse({**ASK, "temperature": []})

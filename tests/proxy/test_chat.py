"""What a request asks, what engines are asked for it, and how pieces of an answer add up."""

import json
from array import array

import pytest

from gyre.proxy import answer, chat
from gyre.proxy.answer import Choice, Differs
from gyre.proxy.chat import BadRequest, Progress, parse
from gyre.proxy.encoding import encode
from gyre.proxy.recorder import Span
from gyre.proxy.sound import Unsound
from gyre.splice import Extension, History

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
        ({"tools": [{}]}, True),
        ({"tools": [{}], "tool_choice": "auto", "include_reasoning": False}, True),
        ({"tools": [{}], "tool_choice": "required"}, False),
        ({"tools": [{"function": {"name": "f", "strict": True}}]}, False),
        ({"vllm_xargs": {"a": 1}}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"structured_outputs": {"regex": "a"}}, False),
        ({"bad_words": ["x y"]}, False),
        ({"something_new": 1}, False),
    ],
)
def test_what_can_be_continued(extra, continuable):
    assert parse({**ASK, **extra}).continuable_under(None) is continuable
    assert not parse({**ASK, **extra}).continuable_under(True)


TOOL = {"type": "function", "function": {"name": "f", "strict": True}}


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [TOOL]},
        {"tools": [TOOL], "parallel_tool_calls": False},
        {"tools": [TOOL], "tool_choice": "required"},
    ],
)
def test_an_engine_that_says_how_it_samples_is_believed(extra):
    asked = parse({**ASK, **extra})
    assert asked.masked_under(None) == asked.masked_under(True) == "constrained" and asked.masked_under(False) == ""
    assert asked.continuable_under(False)
    assert parse({**ASK, **extra, "top_p": 0.5}).masked_under(False) == "truncated"
    assert parse(ASK).masked_under(True) == "constrained" and parse(ASK).masked_under(None) == ""
    assert not parse({**ASK, **extra, "something_new": 1}).continuable_under(False)


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
        ({"thinking_token_budget": 5}, "unknown option"),
        ({"watermarking": True}, "unknown option"),
        ({"vllm_xargs": {"a": 1}}, "unknown option"),
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 2}}, "unknown option"),
        ({"guided_json": {}}, "unknown option"),
        ({"something_new": None, "cache_salt": "x", "truncate_prompt_tokens": 5}, ""),
    ],
)
def test_what_can_be_trained_on(extra, masked):
    assert parse({**ASK, **extra}).masked_under(None) == masked


def test_nothing_is_left_to_an_engines_defaults():
    body = chat.leg(parse({**ASK, "model": "m", "stream_options": {"include_usage": True}, "top_k": None}), Progress())
    assert body["temperature"] == 1.0 and body["top_p"] == 1.0 and body["top_k"] == 0 and body["min_p"] == 0.0
    assert body["stream"] and body["logprobs"] and body["return_token_ids"] and body["top_logprobs"] == 0
    assert "model" not in body and "stream_options" not in body


def test_what_is_no_clients_to_say_is_not_passed_on():
    mine = {"vllm_xargs": {"gyre": "x", "other": 1}, "kv_transfer_params": {"gyre": {"address": "elsewhere"}}}
    body = chat.leg(parse({**ASK, **mine}), Progress())
    assert body["vllm_xargs"] == {"other": 1} and "kv_transfer_params" not in body
    body = chat.leg(parse({**ASK, **mine}), Progress(prompt=array("i", [1]), handoff={"address": "a"}))
    assert Extension.decode(body["vllm_xargs"]["gyre"]).prompt.tolist() == [1] and body["vllm_xargs"]["other"] == 1
    assert body["kv_transfer_params"] == {"gyre": {"address": "a"}}


def test_a_further_leg_is_the_same_request_with_what_it_has_become():
    asked = parse({**ASK, "max_tokens": 10, "min_tokens": 3, "seed": 7})
    first = chat.leg(asked, Progress(history=History(array("i", [1, 2]), 1, (1, "d"), ("x",))))
    assert Extension.decode(first.pop("vllm_xargs")["gyre"]).history.sequence.tolist() == [1, 2]
    body = chat.leg(asked, Progress(prompt=array("i", [1, 2, 3]), kept=array("i", [4, 5])))
    extension = Extension.decode(body.pop("vllm_xargs")["gyre"])
    assert extension.prompt.tolist() == [1, 2, 3] and extension.kept.tolist() == [4, 5] and extension.history is None
    assert body.pop("seed") != first.pop("seed") == 7 and body == first


PLAIN = {"prompt": "once"}


@pytest.mark.parametrize("prompt", ["once", "", [1, 2], ["once"], [[1, 2]]])
def test_a_plain_completion_has_one_prompt(prompt):
    asked = chat.parse_completion({"prompt": prompt, "logprobs": 0, "n": 2, "best_of": 2, "echo": False})
    assert not asked.is_chat and asked.logprobs and asked.path == "/v1/completions" and asked.choices == 2
    body = chat.leg(asked, Progress())
    assert body["prompt"] in (prompt, prompt[:1] and prompt[0]) and body["logprobs"] == 0
    assert not {"best_of", "echo", "suffix"} & body.keys()
    asked = chat.parse_completion({"prompt": prompt, "best_of": 1, "echo": False, "suffix": ""})
    assert asked.continuable and not asked.masked_under(None)


@pytest.mark.parametrize(
    "extra, word",
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": "all"}, "logprobs"),
        ({"n": 99}, "n must"),
    ],
)
def test_completions_that_could_not_be_recorded_are_refused(extra, word):
    with pytest.raises(BadRequest, match=word):
        chat.parse_completion({**PLAIN, **extra})


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
    given = answer.response(parse({**ASK, "return_token_ids": True}), {"id": "i"}, array("i", [7]), [choice])
    message = given["choices"][0]["message"]
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == [
        ("a", "f", '{"x": 1}'),
        ("b", "g", "{}"),
    ]
    assert message["reasoning"] == "hm" and given["choices"][0]["token_ids"] == [1, 2]
    assert given["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


def test_a_bad_request_says_what_is_bad():
    with pytest.raises(BadRequest, match="temperature"):
        parse({**ASK, "temperature": []})
    with pytest.raises(BadRequest, match="echo"):
        parse({**ASK, "echo": True})
    assert "echo" not in chat.leg(parse({**ASK, "echo": False}), Progress())


CALL = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}


def resumed(*deltas):
    """A choice of which these deltas were shown, with one token, before another engine began."""
    choice = Choice()
    choice.sample(Span(0, 0, 0), [5], [-0.5])
    for delta in deltas:
        choice.merge(delta)
    choice.begin_leg(shown=True)
    return choice


def arguments(text):
    return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]}


def test_only_what_goes_beyond_what_was_shown_is_shown():
    choice = resumed({"reasoning": "hm", "content": "so"}, {"tool_calls": [CALL]}, arguments('{"x'))
    assert choice.sample(Span(1, 0, 0), [5, 6], [0.0, -0.25]) == 1
    assert choice.merge({"reasoning": "h"}) == {} and choice.merge({"reasoning": "m, yes"}) == {"reasoning": ", yes"}
    assert choice.merge({"content": "so be"}) == {"content": " be"}
    assert choice.merge({"tool_calls": [{**CALL, "id": "b"}]}) == {}
    assert choice.merge(arguments('{"x": 1')) == arguments('": 1')
    assert choice.again is None, "from here on it is passed on as it comes"
    assert choice.merge({"tool_calls": [{**CALL, "index": 1, "id": "c"}]}) == {
        "tool_calls": [{**CALL, "index": 1, "id": "c"}]
    }
    choice.finish("tool_calls")
    assert [call["id"] for call in choice.message["tool_calls"]] == ["a", "c"]
    assert choice.sampled.tolist() == [5, 6] and choice.logprobs.tolist() == [-0.5, -0.25]


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "No"},
        {"reasoning": "oh"},
        {"tool_calls": [{**CALL, "function": {"name": "g", "arguments": ""}}]},
        {"tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1"}}]},
    ],
)
def test_what_was_shown_is_never_taken_back(delta):
    choice = resumed({"reasoning": "hm", "content": "so"}, {"tool_calls": [CALL]}, arguments('{"x'))
    choice.sample(Span(1, 0, 0), [5], [0.0])
    with pytest.raises(Differs):
        choice.merge(delta)


def test_an_answer_that_ends_before_what_was_shown_may_lack_white_space_only():
    choice = resumed({"content": "so\n"})
    choice.sample(Span(1, 0, 0), [5], [0.0])
    assert choice.merge({"content": "so"}) == {}
    choice.finish("stop")
    choice = resumed({"content": "so it is"})
    choice.sample(Span(1, 0, 0), [5], [0.0])
    choice.merge({"content": "so"})
    with pytest.raises(Differs):
        choice.finish("stop")


def test_other_tokens_than_those_kept_are_no_answer():
    with pytest.raises(Unsound):
        resumed().sample(Span(1, 0, 0), [6], [0.0])
    with pytest.raises(Unsound):
        resumed().finish("stop")


@pytest.mark.parametrize("value", [1 << 70, -(1 << 70), "half \ud800", {"b": [1 << 64], "a": "é"}, 0.1, None])
def test_whatever_a_client_may_send_is_encoded(value):
    assert json.loads(encode({"a": value})) == {"a": value}
    assert encode({"b": value, "a": 1}, ordered=True) == encode({"a": 1, "b": value}, ordered=True)

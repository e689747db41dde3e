"""Answers come back in the shapes of the packages' own types, whole and as events alike, and can be given back."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.proxy.dialects.errors import ApiError, Invalid
from gyre.proxy.dialects.intake import Intake
from gyre.proxy.dialects.messages import to_chat
from gyre.proxy.dialects.messages_answer import MessageCall
from gyre.proxy.dialects.responses_answer import ResponseCall
from gyre.proxy.dialects.responses_store import Store
from tests.proxy.bodies import FUNCTION, texts
from tests.proxy.told_engine import call, deltas

HI = [{"role": "user", "content": "hi"}]


def message(**body: Any) -> dict:
    """The chat that a message's request becomes."""
    return to_chat({"model": "m", "max_tokens": 10, "messages": HI, **body}, 1000)


def response(store: Store | None = None, **body: Any) -> dict:
    """The chat that a response's request becomes."""
    return ResponseCall({"model": "m", "input": "hi", **body}, 1000, store or Store()).chat


HEAD = {"id": "chatcmpl-7", "created": 5, "model": "m"}
COUNTS = {"usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}}
SAID = {
    "reasoning": "let me see",
    "content": "I look",
    "tool_calls": [call("run", {"cmd": "ls"}), call("run", {}, "c2")],
}


def whole(said: dict, finish: str, stopped_by: Any = None) -> dict:
    choice = {"index": 0, "message": {"role": "assistant", **said}, "finish_reason": finish, "stop_reason": stopped_by}
    return {**HEAD, "object": "chat.completion", "choices": [choice], **COUNTS}


def pieces(parts: list[dict], finish: str, stopped_by: Any = None) -> list[dict]:
    found = [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
    found += [{"index": 0, "delta": part, "finish_reason": None} for part in parts]
    found.append({"index": 0, "delta": {}, "finish_reason": finish, "stop_reason": stopped_by})
    chunks = [{**HEAD, "object": "chat.completion.chunk", "choices": [choice]} for choice in found]
    chunks[0]["prompt_token_ids"] = [1, 2, 3, 4, 5]
    return [*chunks, {**HEAD, "choices": [], **COUNTS}]


def told(made: Any, chunks: list[dict]) -> list[dict]:
    events = [event for chunk in chunks for event in made.events(chunk)] + made.end()
    assert all(name == data["type"] for name, data in events)
    return [json.loads(json.dumps(data)) for _, data in events]


def message_of(events: list[dict]) -> dict:
    """What a client of Anthropic's makes of events."""
    found: dict = {}
    for event in events:
        match event["type"]:
            case "message_start":
                found = event["message"]
            case "content_block_start":
                assert event["index"] == len(found["content"])
                found["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                block, delta = found["content"][event["index"]], event["delta"]
                for key, into in (("text", "text"), ("thinking", "thinking"), ("partial_json", "json")):
                    block[into] = block.get(into, "") + delta.get(key, "")
                block["signature"] = delta.get("signature", block.get("signature"))
            case "message_delta":
                found |= {**event["delta"], "usage": event["usage"]}
    for block in found["content"]:
        keys = {"text": ("text",), "thinking": ("thinking", "signature"), "tool_use": ("id", "name", "input")}
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"] or "{}")
        for key in set(block) - {"type", *keys[block["type"]]}:
            del block[key]
    return found


def test_a_message_as_events_has_the_order_that_clients_expect():
    made = MessageCall({"max_tokens": 9, "messages": HI, "stream": True}, 100)
    events = told(made, pieces(list(deltas(SAID)), "tool_calls"))
    kinds = [event["type"] for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_delta"]
    assert kinds == [
        "message_start",
        *(block[0], "ping", *block[1:], "content_block_delta", "content_block_stop"),  # with its signature
        *(*block, "content_block_stop"),
        *(*block, "content_block_stop"),
        *(*block, "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert events[0]["message"]["usage"]["input_tokens"] == 5 and events[0]["message"]["content"] == []
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    anthropic = pytest.importorskip("anthropic.types")
    from pydantic import TypeAdapter

    adapter = TypeAdapter(anthropic.RawMessageStreamEvent)
    for event in events:
        if event["type"] != "ping":
            adapter.validate_python(event)


def test_a_response_as_events_is_what_the_package_expects():
    responses = pytest.importorskip("openai.types.responses")
    made = ResponseCall({"input": "hi", "tools": [FUNCTION], "stream": True}, 100, Store())
    events = told(made, pieces(list(deltas(SAID)), "tool_calls"))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    known = {
        get_args(one.model_fields["type"].annotation): one
        for one in get_args(get_args(responses.ResponseStreamEvent)[0])
    }
    for event in events:
        known[(event["type"],)].model_validate(event)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:2] == ["created", "in_progress"] and kinds[-1] == "completed"
    opened = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    closed = [event["output_index"] for event in events if event["type"] == "response.output_item.done"]
    assert opened == closed == [0, 1, 2, 3]
    assert events[-1]["response"]["output"] == [e["item"] for e in events if e["type"] == "response.output_item.done"]


@pytest.mark.parametrize(
    "finish, stopped_by, calls, anthropic, status",
    [
        ("stop", None, False, ("end_turn", None), "completed"),
        ("stop", 151645, False, ("end_turn", None), "completed"),
        ("stop", "END", False, ("stop_sequence", "END"), "completed"),
        ("length", None, False, ("max_tokens", None), "incomplete"),
        ("length", None, True, ("max_tokens", None), "incomplete"),
        ("tool_calls", None, True, ("tool_use", None), "completed"),
        ("stop", None, True, ("tool_use", None), "completed"),
    ],
)
def test_why_an_answer_ended(finish, stopped_by, calls, anthropic, status):
    said = SAID if calls else {"content": "x"}
    body = {"max_tokens": 9, "messages": HI}
    plain = MessageCall(body, 100).answer(whole(said, finish, stopped_by))
    assert (plain["stop_reason"], plain["stop_sequence"]) == anthropic
    streamed = message_of(told(MessageCall(body, 100), pieces(list(deltas(said)), finish, stopped_by)))
    assert (streamed["stop_reason"], streamed["stop_sequence"]) == anthropic
    made = ResponseCall({"input": "hi"}, 100, Store()).answer(whole(said, finish, stopped_by))
    assert made["status"] == status
    assert made["incomplete_details"] == ({"reason": "max_output_tokens"} if status == "incomplete" else None)


def test_an_answer_without_words_still_has_a_block():
    body = {"max_tokens": 9, "messages": HI}
    assert MessageCall(body, 100).answer(whole({}, "stop"))["content"] == [{"type": "text", "text": ""}]
    assert message_of(told(MessageCall(body, 100), pieces([], "stop")))["content"] == [{"type": "text", "text": ""}]
    assert ResponseCall({"input": "hi"}, 100, Store()).answer(whole({}, "stop"))["output"] == []


def test_arguments_that_are_no_object_are_not_lost():
    body = {"max_tokens": 9, "messages": HI}
    for text, wanted in (("{broken", {"INVALID_JSON": "{broken"}), ("[1]", {"INVALID_JSON": "[1]"}), ("", {})):
        given = whole({"tool_calls": [call("run", text)]}, "tool_calls")
        content = MessageCall(body, 100).answer(given)["content"]
        assert content[0]["input"] == wanted
        back = message(messages=[*HI, {"role": "assistant", "content": content}])["messages"][1]
        assert back["tool_calls"] == [call("run", text or "{}")]


@pytest.mark.parametrize("thinking", [None, {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}])
def test_thinking_comes_back_signed(thinking):
    body = {"max_tokens": 9, "messages": HI, "thinking": thinking}
    said = MessageCall(body, 100).answer(whole(SAID, "tool_calls"))["content"]
    assert said[0]["thinking"] == "let me see" and said[0]["signature"]
    chat = message(messages=[*HI, {"role": "assistant", "content": said}])
    assert chat["messages"][1]["reasoning"] == "let me see"


def test_thinking_may_be_hidden_or_unseen():
    body = {"max_tokens": 9, "messages": HI, "thinking": {"type": "adaptive", "display": "omitted"}}
    said = MessageCall(body, 100).answer(whole(SAID, "tool_calls"))["content"]
    assert said[0]["type"] == "thinking" and said[0]["thinking"] == ""
    assert message(messages=[*HI, {"role": "assistant", "content": said}])["messages"][1]["reasoning"] == "let me see"
    streamed = message_of(told(MessageCall(body, 100), pieces(list(deltas(SAID)), "tool_calls")))
    assert streamed["content"] == said
    body["thinking"] = {"type": "disabled"}
    assert MessageCall(body, 100).answer(whole(SAID, "tool_calls"))["content"][0]["type"] == "text"


calls = st.lists(st.dictionaries(texts, st.integers() | texts, max_size=3), max_size=3)


@st.composite
def answers(draw) -> tuple[dict, list[dict]]:
    """A message, and the pieces it comes in."""
    said: dict = {}
    for key in ("reasoning", "content"):
        if text := draw(texts):
            said[key] = text
    if made := draw(calls):
        said["tool_calls"] = [call(f"f{i}", json.dumps(one), f"c{i}") for i, one in enumerate(made)]
    parts: list[dict] = []
    for key in ("reasoning", "content"):
        rest = said.get(key, "")
        while rest:
            cut = draw(st.integers(1, len(rest)))
            parts.append({key: rest[:cut]})
            rest = rest[cut:]
    for index, one in enumerate(said.get("tool_calls", ())):
        function, first = one["function"], draw(st.booleans())
        head = {**function} if first else {"name": function["name"]}
        parts.append({"tool_calls": [{**one, "index": index, "function": head}]})
        rest = "" if first else function["arguments"]
        while rest:
            cut = draw(st.integers(1, len(rest)))
            parts.append({"tool_calls": [{"index": index, "function": {"arguments": rest[:cut]}}]})
            rest = rest[cut:]
    return said, parts


@given(answers(), st.sampled_from(["stop", "length"]))
@settings(max_examples=60, deadline=None)
def test_whole_and_streamed_answers_are_the_same(drawn, finish):
    said, parts = drawn
    body = {"max_tokens": 9, "messages": HI}
    assert message_of(told(MessageCall(body, 100), pieces(parts, finish))) == MessageCall(body, 100).answer(
        whole(said, finish)
    )
    streamed = told(ResponseCall({"input": "hi"}, 100, Store()), pieces(parts, finish))[-1]["response"]
    assert streamed == ResponseCall({"input": "hi"}, 100, Store()).answer(whole(said, finish))


@given(answers())
@settings(max_examples=60, deadline=None)
def test_what_is_given_back_is_what_was_said(drawn):
    """An answer in any dialect, given back as history, is the message that the engine said."""
    said, _ = drawn
    wanted = json.loads(json.dumps({"role": "assistant", "content": None, **said}))
    if "tool_calls" not in said:
        wanted["content"] = wanted["content"] or ""
    content = MessageCall({"max_tokens": 9, "messages": HI}, 100).answer(whole(said, "stop"))["content"]
    back = message(messages=[*HI, {"role": "assistant", "content": content}, *HI])["messages"][1]
    for one in (wanted, back):
        for made in one.get("tool_calls", ()):
            made["function"]["arguments"] = json.loads(made["function"]["arguments"])
    assert back == wanted
    store = Store()
    first = ResponseCall({"input": "hi"}, 100, store).answer(whole(said, "stop"))
    chained = response(store, previous_response_id=first["id"], input="go on")["messages"]
    assert chained[0] == HI[0] and chained[-1] == {"role": "user", "content": "go on"}
    replayed = response(store, input=[*HI, *first["output"], {"role": "user", "content": "go on"}])["messages"]
    if first["output"]:
        assert replayed == chained


# -- the store ---------------------------------------------------------------------------------------------------------
def stored(kept: Store, number: int, **body: Any) -> dict:
    given = {**whole({"content": f"a{number}"}, "stop"), "id": f"chatcmpl-{number}"}
    return ResponseCall({"input": f"q{number}", **body}, 100, kept).answer(given)


def test_a_conversation_is_the_chain_of_its_responses():
    store = Store()
    stored(store, 1, instructions="only for this one")
    stored(store, 2, previous_response_id="resp_1")
    stored(store, 3, store=False)
    texts = [m["content"] for m in store.conversation("resp_2", Intake())]
    assert texts == ["q1", "a1", "q2", "a2"]
    with pytest.raises(ApiError):
        store.get("resp_3")
    assert store.get("resp_2").input == [{"id": "item_resp_2_0", "type": "message", "role": "user", "content": "q2"}]
    refers = response(store, input=[{"type": "item_reference", "id": "msg_2_0"}, {"role": "user", "content": "x"}])
    assert refers["messages"][0] == {"role": "assistant", "content": "a2"}
    store.delete("resp_1")
    with pytest.raises(Invalid, match="resp_1"):
        store.conversation("resp_2", Intake())
    with pytest.raises(ApiError):
        store.delete("resp_1")


def test_the_store_is_bounded():
    store = Store(most=3)
    for number in range(10):
        stored(store, number)
        if number == 8:
            store.get("resp_6")
    assert [n for n in range(10) if n in {int(key[5:]) for key in store._kept}] == [6, 8, 9]
    assert all(
        int(key.split("_")[1 if key.startswith("msg") else 2]) in (6, 8, 9) for key in [*store._answered, *store._given]
    )
    small = Store(most_bytes=10)
    stored(small, 1)
    assert not small._kept and not small._answered and not small._given and small._bytes == 0


def test_deleting_a_response_takes_nothing_of_another():
    """Clients send old items again, under the ids they had; and what was answered is not theirs to change."""
    store = Store()
    answered = stored(store, 1)["output"][0]
    again = [{"type": "message", "role": "user", "content": f"q{n}", "id": "mine"} for n in (1, 1, 2)]
    forged = {**answered, "content": [{"type": "output_text", "text": "another"}]}
    for number in (2, 3):
        refers = [{"type": "item_reference", "id": "mine"}] if number == 3 else []
        stored(store, number, input=[*again, forged, *refers])
    stored(store, 4, input=[{"role": "user", "content": "x", "id": [1]}, {"role": "user", "content": "x", "id": 5}])
    for number in (4, 3):
        store.delete(f"resp_{number}")
        assert store.item(answered["id"]) is answered and store.item("mine")["content"] == "q2"
    store.delete("resp_1")
    assert store.item(answered["id"])["content"][0]["text"] == "another"
    store.delete("resp_2")
    for name in ("mine", answered["id"]):
        with pytest.raises(Invalid):
            store.item(name)
    assert not store._answered and not store._given

"""What agents send beyond what any model can be told is left out, and no request of theirs grows beyond bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.proxy.dialects import hidden
from gyre.proxy.dialects.errors import ApiError
from gyre.proxy.dialects.intake import Intake
from gyre.proxy.dialects.messages import to_chat
from gyre.proxy.dialects.responses import joined
from gyre.proxy.dialects.responses_answer import ResponseCall
from gyre.proxy.dialects.responses_store import Store
from gyre.proxy.dialects.responses_tools import CustomInput
from gyre.proxy.limits import Room
from tests.proxy.bodies import FUNCTION, TOOL
from tests.proxy.told_engine import call, deltas

HI = [{"role": "user", "content": "hi"}]
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
}
SPACE = {"type": "namespace", "name": "mcp__files", "description": "d", "tools": [FUNCTION, {**PATCH, "name": "put"}]}
SEARCH = {"type": "web_search", "external_web_access": True}


def message(intake: Intake | None = None, **body: Any) -> dict:
    return to_chat({"model": "m", "max_tokens": 10, "messages": HI, **body}, 1000, intake)


def response(intake: Intake | None = None, store: Store | None = None, **body: Any) -> dict:
    return ResponseCall({"model": "m", "input": "hi", **body}, 1000, store or Store(), intake).chat


def names(chat: dict) -> list[str]:
    return [tool["function"]["name"] for tool in chat.get("tools", ())]


# -- tools -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "web_search"}, {"type": "auto"}])
def test_anthropics_own_tools_are_left_out(choice):
    intake = Intake()
    own = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    chat = message(intake, tools=[own, {"type": "secret_tool"}], tool_choice=choice)
    assert "tools" not in chat and "tool_choice" not in chat
    assert intake.left_out == {"web_search", "another kind"}
    assert names(message(tools=[own, TOOL, {**TOOL, "type": "new", "name": "x"}], tool_choice=choice)) == ["run", "x"]


@pytest.mark.parametrize("choice", ["auto", "required", SEARCH, {"type": "allowed_tools", "tools": [SEARCH]}])
def test_openais_own_tools_are_left_out(choice):
    intake = Intake()
    chat = response(intake, tools=[SEARCH, {"type": "local_shell"}], tool_choice=choice, parallel_tool_calls=True)
    assert not chat.keys() & {"tools", "tool_choice", "parallel_tool_calls"}
    assert intake.left_out == {"web_search", "local_shell"}


def test_custom_tools_and_namespaces_become_functions():
    chat = response(tools=[FUNCTION, PATCH, SPACE], tool_choice={"type": "custom", "name": "apply_patch"})
    assert names(chat) == ["run", "apply_patch", "mcp__files__run", "mcp__files__put"]
    function = chat["tools"][1]["function"]
    assert function["description"].startswith("Edits files.") and function["description"].endswith("start: x")
    assert list(function["parameters"]["properties"]) == function["parameters"]["required"] == ["input"]
    assert chat["tool_choice"] == {"type": "function", "function": {"name": "apply_patch"}}


def test_allowed_tools_restrict_the_list():
    allowed = [{"type": "custom", "name": "apply_patch"}, {"type": "function", "name": "gone"}, SEARCH]
    choice = {"type": "allowed_tools", "mode": "required", "tools": allowed}
    chat = response(tools=[FUNCTION, PATCH, SEARCH], tool_choice=choice)
    assert names(chat) == ["apply_patch"] and chat["tool_choice"] == "required"


# -- calls of custom tools ---------------------------------------------------------------------------------------------
TEXT = '*** Begin Patch\n+é "x"\n'
SAID = {
    "content": "I edit.",
    "tool_calls": [
        call("apply_patch", {"input": TEXT}),
        call("mcp__files__put", "no object", "c2"),
        call("mcp__files__run", "{}", "c3"),
    ],
}


def test_calls_of_custom_tools_come_back_as_such_and_can_be_given_back():
    body, store = {"input": "hi", "tools": [PATCH, SPACE]}, Store()
    choice = {"message": {"role": "assistant", **SAID}, "finish_reason": "tool_calls"}
    output = ResponseCall(body, 100, store).answer({"id": "chatcmpl-1", "model": "m", "choices": [choice]})["output"]
    kinds = ["message", "custom_tool_call", "custom_tool_call", "function_call"]
    assert [item["type"] for item in output] == kinds
    assert (output[1]["name"], output[1]["input"], output[1]["call_id"]) == ("apply_patch", TEXT, "call_1")
    assert (output[2]["namespace"], output[2]["name"], output[2]["input"]) == ("mcp__files", "put", "no object")
    assert (output[3]["namespace"], output[3]["name"], output[3]["arguments"]) == ("mcp__files", "run", "{}")

    made = ResponseCall({**body, "stream": True}, 100, Store())
    chunks = [{"id": "chatcmpl-1", "model": "m", "choices": [{"delta": delta}]} for delta in deltas(SAID)]
    events = [event for chunk in chunks for _, event in made.events(chunk)] + [event for _, event in made.end()]
    assert events[-1]["response"]["output"] == output
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    for item in output[1:3]:
        said = [e for e in events if "custom_tool_call_input" in e["type"] and e["item_id"] == item["id"]]
        assert "".join(event.get("delta", "") for event in said) == said[-1]["input"] == item["input"]
        assert len(said) == (3 if item["input"] == TEXT else 2)

    results = [
        {"type": "custom_tool_call_output", "call_id": "call_1", "output": "Done!"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "no"}]},
        {"type": "function_call_output", "call_id": "c3", "output": "ok"},
    ]
    calls = [*SAID["tool_calls"]]
    calls[1] = call("mcp__files__put", {"input": "no object"}, "c2")
    wanted = [
        *HI,
        {"role": "assistant", "content": "I edit.", "tool_calls": calls},
        *(
            {"role": "tool", "tool_call_id": name, "content": text}
            for name, text in (("call_1", "Done!"), ("c2", "no"), ("c3", "ok"))
        ),
    ]
    sent = response(input=[*HI, *output, *results])["messages"]
    by_id = response(store=store, previous_response_id="resp_1", input=results)["messages"]
    for messages in (sent, by_id):
        for one in (*messages, *wanted):
            for made in one.get("tool_calls", ()):
                if isinstance(made["function"]["arguments"], str):
                    made["function"]["arguments"] = json.loads(made["function"]["arguments"])
        assert messages == wanted


FIND = {"type": "tool_search", "execution": "client", "description": "finds", "parameters": {"type": "object"}}


def test_tools_that_come_with_the_input_are_told_and_called():
    found = {"type": "tool_search_output", "call_id": "t", "execution": "client", "tools": [SPACE]}
    asked = {"type": "tool_search_call", "call_id": "t", "execution": "client", "arguments": {"query": "files"}}
    sent = [{"type": "additional_tools", "role": "developer", "tools": [PATCH, FUNCTION]}, *HI, asked, found]
    body = {"input": sent, "tools": [FIND, FUNCTION, {"type": "tool_search", "execution": "server"}]}
    made = ResponseCall(body, 100, Store())
    assert sorted(names(made.chat)) == ["apply_patch", "mcp__files__put", "mcp__files__run", "run", "tool_search"]
    assert made.chat["messages"] == [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call("tool_search", '{"query":"files"}', "t")]},
        {"role": "tool", "tool_call_id": "t", "content": "found: mcp__files__run, mcp__files__put"},
    ]
    said = {"tool_calls": [call("tool_search", {"query": "x"}), call("mcp__files__run", "{}", "c2")]}
    choice = {"message": said, "finish_reason": "tool_calls"}
    output = made.answer({"id": "chatcmpl-1", "model": "m", "choices": [choice]})["output"]
    assert (output[0]["type"], output[0]["arguments"]) == ("tool_search_call", {"query": "x"})
    assert (output[1]["namespace"], output[1]["name"]) == ("mcp__files", "run")


@given(st.text(), st.booleans(), st.lists(st.integers(0, 60), max_size=6))
@settings(max_examples=200, deadline=None)
def test_the_input_of_a_custom_tool_comes_as_the_model_writes_it(text, plain, cuts):
    text = text.encode("utf-8", "replace").decode()
    arguments = json.dumps({"input": text}, ensure_ascii=not plain)
    ends = sorted({min(cut, len(arguments)) for cut in (*cuts, len(arguments))})
    made = CustomInput()
    found = [made.feed(arguments[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    assert "".join(found) == text and made.end() == "" and made.text == text


@pytest.mark.parametrize(
    "arguments, text",
    [
        ("", ""),
        ("rm x", "rm x"),
        ('"rm x"', "rm x"),
        ('{"input": 3}', '{"input": 3}'),
        ('{"other": "x"}', '{"other": "x"}'),
        ('{"input": "a\\nb', "a\nb"),
        ('{"input": "a\\ud83d', "a"),
        ('{"input": "a\\q"}', "a"),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"input": "a\\udc00b"}', "a"),
        ('{"other": 1, "input": "a"}', "a"),
        ('{"input": "a", "input": "b"}', "a"),
    ],
)
def test_arguments_of_another_shape_are_an_input_still(arguments, text):
    made = CustomInput()
    assert made.feed(arguments) + made.end() == made.text == text


# -- what cannot be shown ----------------------------------------------------------------------------------------------
def test_what_a_message_cannot_show_is_a_word_on_it():
    intake = Intake()
    pdf = {"type": "document", "title": "a.pdf", "source": {"type": "base64", "media_type": "application/pdf"}}
    inside = [{"type": "text", "text": "b"}, {"type": "image", "source": {"type": "url", "url": "u"}}]
    result = [
        {"type": "tool_reference", "tool_name": "Grep"},
        {"type": "document", "source": {"type": "text", "data": "a"}},
        {"type": "document", "source": {"type": "content", "content": inside}},
        {"type": "search_result", "title": "t", "source": "s", "content": inside[:1]},
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
    ]
    own = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, {"type": "text", "text": "so"}]
    chat = message(
        intake,
        messages=[
            {"role": "user", "content": [pdf, {"type": "text", "text": "read"}]},
            {"role": "assistant", "content": own},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": result}]},
        ],
    )
    shown = "[tool_reference: Grep: not shown here]\na\nb\nb\n[image: not shown here]"
    assert chat["messages"] == [
        {"role": "user", "content": "[document: a.pdf: not shown here]\nread"},
        {"role": "assistant", "content": "so"},
        {"role": "tool", "tool_call_id": "t", "content": shown},
    ]
    assert intake.left_out == {"document", "tool_reference", "server_tool_use", "another kind"}


def test_what_a_response_cannot_show_is_left_out():
    intake = Intake()
    shell = {"type": "exec", "command": ["ls"], "env": {}}
    chat = response(
        intake,
        input=[
            {"type": "compaction", "encrypted_content": "x"},
            {"type": "web_search_call", "id": "w", "status": "completed"},
            {"type": "local_shell_call", "call_id": "c", "action": shell, "status": "completed"},
            {"type": "local_shell_call_output", "id": "c", "output": "a"},
            {"role": "user", "content": [{"type": "input_file", "filename": "a.pdf"}, {"type": "input_image"}]},
        ],
    )
    assert chat["messages"] == [
        {"role": "assistant", "content": None, "tool_calls": [call("local_shell", json.dumps(shell), "c")]}
        | {"tool_calls": chat["messages"][0]["tool_calls"]},
        {"role": "tool", "tool_call_id": "c", "content": "a"},
        {"role": "user", "content": "[input_file: a.pdf: not shown here]\n[input_image: not shown here]"},
    ]
    (made,) = chat["messages"][0]["tool_calls"]
    assert made["function"]["name"] == "local_shell" and json.loads(made["function"]["arguments"]) == shell
    assert intake.left_out == {"compaction", "web_search", "input_file", "another kind"}


# -- bounds ------------------------------------------------------------------------------------------------------------
def test_what_is_packed_counts_as_large_as_it_is():
    sealed = hidden.seal("a" * (4 << 20))
    packed = {"type": "redacted_thinking", "data": sealed}
    signed = {"type": "thinking", "thinking": "", "signature": sealed}
    thought = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    for make in (
        lambda intake: message(intake, messages=[{"role": "assistant", "content": [packed] * 60}, *HI]),
        lambda intake: message(intake, messages=[{"role": "assistant", "content": [signed] * 60}, *HI]),
        lambda intake: response(intake, input=[thought] * 60),
    ):
        with Room().hold(Room()) as grow, pytest.raises(ApiError) as caught:
            make(Intake(grow))
        assert caught.value.status == 413


def test_what_is_escaped_counts_as_an_engine_is_sent_it():
    told: list[int] = []
    hidden.unseal(hidden.seal("\x01" * 100), Intake(told.append))
    assert sum(told) >= 600


def test_what_is_referred_to_counts_every_time():
    store = Store()
    store.add(
        {"id": "r", "output": []},
        [{"role": "user", "content": "b" * (1 << 20)}],
        [{**HI[0], "id": "x"} | {"content": "b" * (1 << 20)}],
    )
    for body in ({"input": [{"type": "item_reference", "id": "x"}] * 100}, {"previous_response_id": "r"}):
        told: list[int] = []
        response(Intake(told.append), store, **body)
        assert sum(told) > (1 << 20) * (100 if "input" in body else 1)
    with Room().hold(Room()) as grow, pytest.raises(ApiError):
        response(Intake(grow), store, input=[{"type": "item_reference", "id": "x"}] * 100)


def test_a_turn_in_many_pieces_takes_no_longer_for_it():
    """With a copy for every piece this would be hours."""
    thoughts = [{"role": "assistant", "content": None, "reasoning": "hm"}] * 200_000
    calls = [{"role": "assistant", "content": None, "tool_calls": [call("run", "{}")]}] * 200_000
    (message,) = joined([*thoughts, *calls])
    assert len(message["reasoning"]) == 400_000 and len(message["tool_calls"]) == 200_000

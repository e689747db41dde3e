"""Scripts of answers, and a real scripted engine behind its gate: what it says, how it is cut, goes on, is spliced."""

import asyncio
import json
from array import array
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre import models
from gyre.cell.engine_client import EngineProcess, EngineSettings
from gyre.cell.scripted_engine import ScriptedAnswer
from gyre.cell.stand_in_request import Asked
from gyre.cell.stand_in_script import parse, share_of
from gyre.cell.stand_in_text import ENDS, decode, render
from gyre.errors import UserError
from gyre.splice import HEADER, Extension, History, PromptNote, digest

SECRET = "scripted-test"
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def call(arguments):
    return {"name": "bash", "arguments": arguments}


#: The arguments of the second answer are not as a template would write them.
LINES = [
    {"turn": 0, "task": "repair", "content": "First I look: é€😀.", "tool_calls": [call({"command": "ls 漢"})]},
    {"turn": 1, "task": "repair", "tool_calls": [call('{"command":"cat a"}'), {"name": "bash"}]},
    {"task": "repair", "last": "passed", "content": "It is repaired."},
    {"task_regex": "^think( hard)?$", "reasoning": "Let me see.", "content": "So."},
    {"task": "cut", "content": "in the mid", "finish_reason": "length"},
    {"share": 0.5, "task": "which", "content": "one"},
    {"task": "which", "content": "other"},
]
SCRIPT = "\n".join(json.dumps(line) for line in LINES)


def user(text):
    return {"role": "user", "content": text}


def asked(body, execution=0, max_context=4096):
    body = body if isinstance(body, dict) else {"messages": body}
    return Asked(body, "messages" in body, max_context, execution)


# -- scripts -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "text, words",
    [
        ("", "has no answers; write one JSON object a line"),
        ('{"content": "a"}\n{"content" "b"}', "line 2: not JSON"),
        ("[1]", "line 1: not an object"),
        ('{"contents": "a"}', "line 1: unknown key 'contents'; did you mean content?"),
        ('{"xyz": "a"}', "line 1: unknown key 'xyz'; use task"),
        ('\n\n{"content": 3}', "line 3: content must be a text, not 3"),
        ('{"turn": true, "content": "a"}', "turn must be a number, not true"),
        ('{"turn": -1, "content": "a"}', "turn counts the answers before this one"),
        ('{"share": 0, "content": "a"}', "share must be above 0"),
        ('{"turn": 0}', "an answer that says nothing"),
        ('{"content": "a", "finish_reason": "eos"}', "finish_reason must be one of stop, length, tool_calls"),
        ('{"content": "a", "finish_reason": "tool_calls"}', "does not fit an answer without tool_calls"),
        ('{"tool_calls": [{"name": ""}]}', "tool_calls[0]: name must be a text"),
        ('{"tool_calls": [{"name": "a", "arguments": 3}]}', "tool_calls[0]: arguments must be an object"),
        ('{"tool_calls": [{"function": {}}]}', "tool_calls[0] must be an object of name, arguments"),
        ('{"task_regex": "(", "content": "a"}', "task_regex is no regular expression"),
    ],
)
def test_a_script_with_a_fault_says_which_line(text, words):
    with pytest.raises(UserError) as caught:
        parse(text, "answers.jsonl")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith("engine.scripted.answers: answers.jsonl")


def test_the_first_line_whose_conditions_hold_is_the_answer():
    script = parse(SCRIPT, "answers.jsonl")
    talk = [{"role": "system", "content": "repair"}, user([{"type": "text", "text": "please repair this"}])]
    assert script.line(asked(talk)).number == 1
    talk += [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "1 failed"}]
    assert script.line(asked(talk)).number == 2
    talk += [{"role": "assistant", "content": "b"}, {"role": "tool", "content": "1 passed"}]
    assert script.line(asked(talk)).number == 3
    with pytest.raises(ValueError, match="no line of answers.jsonl answers turn 2 of the task 'please repair this'"):
        script.line(asked([*talk[:-1], user("and?")]))
    assert script.line(asked([user("think hard")])).number == 4
    assert script.line(asked({"prompt": "I cut it"})).number == 5
    numbers = [script.line(asked([user("which?")], execution)).number for execution in range(100)]
    assert 48 <= numbers.count(6) <= 52 and numbers.count(6) + numbers.count(7) == 100
    assert [share_of(n) < 0.5 for n in range(100)] == [number == 6 for number in numbers]


@given(st.lists(st.integers(1, 9), max_size=200), st.integers(0, 40), st.sampled_from(["", "€", '漢"}', "look"]))
def test_pieces_add_up_to_the_answer_however_it_is_cut(steps, limit, stop):
    line = parse(SCRIPT, "a").line(asked([user("repair")]))
    body = {"messages": [user("repair")], "stream": True, "stop": stop}
    answer = ScriptedAnswer(asked(body | ({"max_tokens": limit} if limit else {})), line)
    whole, pieces = answer.delta(0, answer.length), {}
    ends = [min(sum(steps[: n + 1]), answer.length) for n in range(len(steps))]
    for begin, end in zip([0, *ends], [*ends, answer.length], strict=True):
        for key, value in answer.delta(begin, end).items() if begin < end else ():
            if key == "tool_calls":
                (call,) = value
                known = pieces.setdefault(key, [{**call, "function": {**call["function"], "arguments": ""}}])[0]
                known["function"]["arguments"] += call["function"]["arguments"]
            else:
                pieces[key] = pieces.get(key, "") + value
    assert pieces == whole
    tokens = answer.tokens(0, answer.length)
    assert decode([t for t in tokens if t not in ENDS]).startswith(whole.get("content", ""))
    assert (tokens[-1] in ENDS) == (answer.finish_reason == "tool_calls")


# -- the engine --------------------------------------------------------------------------------------------------------
class Engine:
    """One engine that is open, and requests to it."""

    def __init__(self, answers, log, rate=1e5):
        self.loop = asyncio.new_event_loop()
        model = models.resolve("gyre:timed")
        pace = {"tokens_per_second": rate, "slowdown": 0.0, "sleep_seconds": 0.0, "wake_seconds": 0.0}
        settings = EngineSettings(
            model=str(model), secret=SECRET, max_context=4096, slots=8, timed=pace, scripted=str(answers)
        )
        self.process = self.run(EngineProcess.start(settings, log))
        self.run(self.process.ready(60))
        self.run(self.process.load(model))
        self.run(self.process.open(1, 7))

    def run(self, work):
        return self.loop.run_until_complete(work)

    async def _post(self, path, body, execution):
        head = {"Authorization": f"Bearer {SECRET}", "X-Gyre-Execution": str(execution), "X-Gyre-Epoch": "1"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(self.process.url + path, json=body, headers=head) as response,
        ):
            return response.status, response.headers, await response.text()

    def post(self, path, body, execution=0):
        status, headers, text = self.run(self._post(path, body, execution))
        return status, headers, json.loads(text)

    def stream(self, messages, extension=None, **more):
        """(the message, token ids, the first event, the note, number of events)."""
        body = {"messages": messages, "stream": True, "return_token_ids": True, "logprobs": True, **more}
        if extension is not None:
            body["vllm_xargs"] = {"gyre": extension.encode()}
        status, headers, text = self.run(self._post("/v1/chat/completions", body, 0))
        assert status == 200, text
        *events, done = [block.removeprefix("data: ") for block in text.strip().split("\n\n")]
        assert done == "[DONE]"
        events = [json.loads(event) for event in events]
        message, tokens = {}, []
        for event in events:
            for choice in event["choices"]:
                assert len(choice["token_ids"]) == len(choice["logprobs"]["content"])
                tokens += choice["token_ids"]
                merge(message, choice["delta"])
        message["finish_reason"] = events[-1]["choices"][0]["finish_reason"] if events[-1]["choices"] else None
        return message, tokens, events, PromptNote.decode(headers[HEADER])

    def stop(self):
        self.run(self.process.stop())
        self.loop.close()


def merge(message, delta):
    for key, value in delta.items():
        if key == "tool_calls":
            for call in value:
                calls = message.setdefault(key, [])
                if len(calls) == call["index"]:
                    calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for name, text in call["function"].items():
                    calls[call["index"]]["function"][name] += text
        else:
            message[key] = message.get(key, "") + value


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    directory = tmp_path_factory.mktemp("scripted")
    (directory / "answers.jsonl").write_text(SCRIPT)
    engine = Engine(directory / "answers.jsonl", directory / "engine.log")
    try:
        yield engine
    finally:
        engine.stop()


def test_a_conversation_with_tools_plain_and_streamed(engine):
    maps = Path(f"/proc/{engine.process.pid}/maps").read_text()
    assert "libtorch" not in maps and "/vllm" not in maps
    messages = [user("repair it")]
    status, _, plain = engine.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS})
    (choice,) = plain["choices"]
    assert status == 200 and choice["finish_reason"] == "tool_calls"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"command": "ls 漢"}
    message, tokens, events, note = engine.stream(messages, tools=TOOLS, stream_options={"include_usage": True})
    assert {key: message[key] for key in choice["message"]} == choice["message"]
    assert sum("tool_calls" in c["delta"] for e in events for c in e["choices"]) > 2, "calls come in several pieces"
    prompt = render(messages, TOOLS)
    assert events[0]["prompt_token_ids"] == prompt
    assert note == PromptNote((len(prompt), digest(prompt)), False, 0, False)
    assert events[-1]["usage"]["completion_tokens"] == len(tokens) == plain["usage"]["completion_tokens"]
    assert tokens[-1] in ENDS and decode(tokens).startswith(message["content"])
    _, _, counted = engine.post("/v1/chat/completions/render", {"messages": messages, "tools": TOOLS})
    assert counted["token_ids"] == prompt
    thought, *_ = engine.stream([user("think")])
    assert (thought["reasoning"], thought["content"], thought["finish_reason"]) == ("Let me see.", "So.", "stop")


def test_known_tokens_take_the_place_of_what_a_client_wrote_anew(engine):
    said = {"role": "assistant", "content": "a"}
    before = [user("repair it"), said, user("go on")]
    message, tokens, events, note = engine.stream(before)
    prompt = events[0]["prompt_token_ids"]
    after = [*before, {"role": "assistant", "tool_calls": message["tool_calls"]}, {"role": "tool", "content": "passed"}]
    assert render(after)[: len(prompt + tokens)] != prompt + tokens, "else this shows nothing"
    history = History(array("i", prompt + tokens), len(tokens), note.rendered)
    _, _, events, note = engine.stream(after, Extension(history=history))
    assert events[0]["prompt_token_ids"][: len(prompt + tokens)] == prompt + tokens
    assert note.spliced and note.drift and note.rendered[0] == len(render(after))
    _, _, events, note = engine.stream(after)
    assert not note.spliced and events[0]["prompt_token_ids"] == render(after)


def test_an_answer_goes_on_from_what_is_kept_and_is_told_whole(engine):
    messages = [user("repair it")]
    whole, tokens, events, _ = engine.stream(messages)
    prompt = array("i", events[0]["prompt_token_ids"])
    for kept in (1, 15, 16, 60, len(tokens)):
        extension = Extension(prompt=prompt, kept=array("i", tokens[:kept]))
        assert engine.stream(messages, extension)[:2] == (whole, tokens)
    cut, *_ = engine.stream(messages, Extension(prompt, array("i", tokens[:8])), max_tokens=8)
    assert (cut["content"], cut["finish_reason"]) == ("First I ", "length")
    body = {"messages": messages, "vllm_xargs": {"gyre": Extension(prompt, array("i", [1, 2])).encode()}}
    status, _, answer = engine.post("/v1/chat/completions", body)
    assert status == 400 and "not the beginning of line 1" in answer["error"]["message"]


def test_stop_strings_lengths_and_completions(engine):
    stopped, tokens, events, _ = engine.stream([user("think")], stop=["S", "no"])
    assert stopped.get("content") is None and stopped["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["stop_reason"] == "S" and decode(tokens).endswith("S")
    status, _, answer = engine.post("/v1/completions", {"prompt": "cut", "logprobs": 1, "return_token_ids": True})
    (choice,) = answer["choices"]
    assert (status, choice["text"], choice["finish_reason"]) == (200, "in the mid", "length")
    assert len(choice["logprobs"]["top_logprobs"]) == len(choice["token_ids"]) == 10


@pytest.mark.parametrize(
    "body, words",
    [
        ({"messages": [user("nothing of the kind")]}, "answers turn 0 of the task 'nothing of the kind'"),
        ({"messages": [user("x" * 5000)]}, "maximum context length is 4096 tokens. However, your prompt contains 50"),
        ({"messages": []}, "at least one message"),
        ({"messages": [user(3)]}, "content must be a text"),
        ({"messages": [user("think")], "vllm_xargs": {"gyre": "[]"}}, "must be a JSON object"),
        ({"messages": [user("think")], "max_tokens": 0}, "max_tokens must be at least 1"),
        ({"messages": [user("think")], "max_tokens": float("inf")}, "OverflowError"),
        ([], "TypeError"),
    ],
)
def test_what_cannot_be_answered_is_refused(engine, body, words):
    status, _, answer = engine.post("/v1/chat/completions", body)
    assert status == 400 and words in answer["error"]["message"]


def test_an_engine_without_its_script_says_so(tmp_path):
    async def start():
        settings = EngineSettings(model="", secret=SECRET, timed={}, scripted=str(tmp_path / "nowhere.jsonl"))
        process = await EngineProcess.start(settings, tmp_path / "engine.log")
        try:
            await process.ready(60)
        finally:
            await process.stop()

    with pytest.raises(UserError, match=r"refused its settings: .*cannot read .*nowhere.jsonl: No such file"):
        asyncio.run(start())

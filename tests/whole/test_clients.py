"""Real clients, unmodified, each in a conversation with tools: through the real proxy, before a scripted engine."""

import asyncio
import json
import sys
import threading

import anthropic
import openai
import pytest

from gyre import models
from gyre.cell.engine_client import EngineProcess, EngineSettings
from gyre.child import Child
from gyre.proxy.recorder import read_records

pytestmark = pytest.mark.whole

SECRET = "clients-test"
MODEL = "policy"
QUESTION = "Which is warmer, Zürich or 東京?"
#: Arguments as a model may write them, which is not how a client or a template writes them anew.
LINES = [
    {
        "turn": 0,
        "content": "I look both up.",
        "tool_calls": [
            {"name": "weather", "arguments": '{"city":"Zürich",  "unit":"C"}'},
            {"name": "weather", "arguments": '{"city": "東京"}'},
        ],
    },
    {"turn": 1, "last": "31", "tool_calls": [{"name": "note", "arguments": '{"text":"東京 \\u00e9 \\"31\\""}'}]},
    {"turn": 2, "last": "noted", "content": "東京 is warmer: 31 °C."},
]
FINAL = LINES[-1]["content"]
LONG = '東京 "漢" ' * 100  # 1700 tokens, 0.85 s
MOVED = {"task": "at length", "content": "Well.", "tool_calls": [{"name": "note", "arguments": {"text": LONG}}]}
ARGUMENTS = [[json.loads(call["arguments"]) for call in line.get("tool_calls", ())] for line in LINES]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "text": {"type": "string"}}}
TOOLS = ("weather", "note")


def use(name, arguments):
    """What a tool says."""
    return {"Zürich": "12", "東京": "31"}[arguments["city"]] if name == "weather" else "noted"


class Place:
    """An engine, a proxy, and an event loop for both in a thread: clients block, as they do in a harness."""

    def __init__(self, directory):
        self.directory = directory
        self.number = 0
        self._epoch = 0
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.run(self._start())

    def run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    async def _start(self):
        model, script = models.resolve("gyre:timed"), self.directory / "answers.jsonl"
        script.write_text("".join(json.dumps(line) + "\n" for line in (MOVED, *LINES)))
        pace = {"tokens_per_second": 2000.0, "slowdown": 0.0, "sleep_seconds": 0.0, "wake_seconds": 0.0}
        settings = EngineSettings(
            model=str(model), secret=SECRET, max_context=8192, slots=8, timed=pace, scripted=str(script)
        )
        self._engine = await EngineProcess.start(settings, self.directory / "engine.log")
        command = [sys.executable, "-m", "gyre.proxy.server"]
        self._proxy = await Child.spawn("proxy", command, self.directory / "proxy.log")
        started = await self._proxy.call("start", secret=SECRET, max_context=8192, model=MODEL)
        self.url = f"http://127.0.0.1:{started['port']}"
        await self._engine.ready(60)
        await self._engine.load(model)
        await self._open()

    async def _open(self):
        self._epoch += 1
        await self._engine.open(self._epoch, 0)
        route = {"url": self._engine.url, "epoch": self._epoch, "policy": 0}
        await self._proxy.call("routes", version=self._epoch, engines={"0": route}, moves={})

    def leave_and_come_back(self):
        """End what the engine works on, and serve again as another cell would."""
        self.run(self._engine.close())
        self.run(self._open())

    def register(self):
        """A new execution's number and token."""
        self.number += 1
        path = str(self.directory / f"{self.number}.records")
        execution = {"execution": self.number, "try_number": 1, "token": f"token-{self.number}"}
        self.run(self._proxy.call("register", **execution, engine=0, record_path=path))
        return self.number, f"token-{self.number}"

    def close(self, number):
        """Its counts and records."""
        counts = self.run(self._proxy.call("close", execution=number, try_number=1))
        return counts, read_records(self.directory / f"{number}.records")

    def stop(self):
        self.run(self._proxy.stop())
        self.run(self._engine.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = Place(tmp_path_factory.mktemp("clients"))
    try:
        yield place
    finally:
        place.stop()


@pytest.fixture
def execution(place):
    """(url, token); what was recorded is one conversation of three answers, each going on from the tokens before."""
    number, token = place.register()
    yield place.url, token
    counts, records = place.close(number)
    assert (counts["requests"], counts["answered"], counts["lost"]) == (3, 3, 0)
    assert len(records) == 3 and all(record.trainable for record in records)
    for one, following in zip(records, records[1:], strict=False):
        known = [*one.prompt, *one.sampled]
        assert list(following.prompt[: len(known)]) == known, "tokens were written anew"
    assert "Traceback" not in (place.directory / "proxy.log").read_text()


# -- openai ------------------------------------------------------------------------------------------------------------
def chat_answer(client, messages, stream):
    """(the message as it goes into the next request, finish reason)."""
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in TOOLS]
    asked = {"model": MODEL, "messages": messages, "tools": tools}
    if not stream:
        choice = client.chat.completions.create(**asked).choices[0]
    else:
        with client.chat.completions.stream(**asked) as events:
            kinds = [event.type for event in events]
            choice = events.get_final_completion().choices[0]
        assert kinds.count("chunk") > 3
    return choice.message.model_dump(exclude_none=True, exclude={"parsed"}), choice.finish_reason


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_openai_chat(execution, stream):
    url, token = execution
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)
    messages = [{"role": "system", "content": "Use tools."}, {"role": "user", "content": QUESTION}]
    for line, arguments in zip(LINES, ARGUMENTS, strict=True):
        message, reason = chat_answer(client, messages, stream)
        messages.append(message)
        assert reason == ("tool_calls" if arguments else "stop")
        assert (message.get("content") or "") == line.get("content", "")
        calls = message.get("tool_calls") or []
        assert [json.loads(call["function"]["arguments"]) for call in calls] == arguments
        for call in calls:
            name, given = call["function"]["name"], json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(given, indent=1, sort_keys=True)  # as some clients do
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": use(name, given)})
    assert messages[-1]["content"] == FINAL


def test_a_call_of_a_tool_goes_on_elsewhere_in_one_stream(place):
    number, token = place.register()
    client = openai.OpenAI(base_url=f"{place.url}/v1", api_key=token, max_retries=0)
    tools = [{"type": "function", "function": {"name": "note", "parameters": SCHEMA}}]
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Note it at length."}], "tools": tools}
    arguments, moves = 0, 0
    with client.chat.completions.stream(**asked) as events:
        for event in events:
            arguments += event.type == "tool_calls.function.arguments.delta"
            if moves < 2 and arguments > 5 + 20 * moves:
                place.leave_and_come_back()
                moves += 1
        answer = events.get_final_completion().choices[0]
    (call,) = answer.message.tool_calls
    assert (answer.message.content, answer.finish_reason, moves) == ("Well.", "tool_calls", 2)
    assert json.loads(call.function.arguments) == {"text": LONG}
    counts, (record,) = place.close(number)
    assert (counts["rerouted"], counts["continued"], counts["restarted"]) == (1, 1, 0)
    assert [span.epoch for span in record.spans] == sorted({span.epoch for span in record.spans})
    assert len(record.spans) == record.legs == 3 and record.trainable


def response(client, asked, stream):
    if not stream:
        return client.responses.create(**asked)
    with client.responses.stream(**asked) as events:
        assert sum(event.type.endswith(".delta") for event in events) > 3
        return events.get_final_response()


@pytest.mark.parametrize("stored", [False, True], ids=["sent again", "by id"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_openai_responses(execution, stream, stored):
    url, token = execution
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)
    tools = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in TOOLS]
    asked = {"model": MODEL, "tools": tools, "instructions": "Use tools.", "store": stored}
    given = [{"role": "user", "content": QUESTION}]
    for arguments in ARGUMENTS:
        answer = response(client, {**asked, "input": given}, stream)
        assert answer.status == "completed"
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == arguments
        said = [{"type": "function_call_output", "call_id": call.call_id} for call in calls]
        for item, call in zip(said, calls, strict=True):
            item["output"] = use(call.name, json.loads(call.arguments))
        if stored:
            asked["previous_response_id"], given = answer.id, said
        else:
            given = [*given, *(item.to_dict() for item in answer.output), *said]
    assert answer.output_text == FINAL


# -- anthropic ---------------------------------------------------------------------------------------------------------
def message(client, asked, stream):
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        assert sum(event.type == "content_block_delta" for event in events) > 3
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_anthropic_messages(execution, stream):
    url, token = execution
    client = anthropic.Anthropic(base_url=url, api_key=token, max_retries=0)
    tools = [{"name": name, "input_schema": SCHEMA} for name in TOOLS]
    asked = {
        "model": MODEL,
        "system": "Use tools.",
        "tools": tools,
        "messages": [{"role": "user", "content": QUESTION}],
    }
    for arguments in ARGUMENTS:
        counted = client.messages.count_tokens(**asked).input_tokens
        answer = message(client, {**asked, "max_tokens": 1000}, stream)
        assert counted > 100 and answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) > 100
        assert answer.stop_reason == ("tool_use" if arguments else "end_turn")
        uses = [block for block in answer.content if block.type == "tool_use"]
        assert [block.input for block in uses] == arguments
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": use(block.name, block.input)} for block in uses
        ]
        asked["messages"] += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    assert [block.text for block in answer.content if block.type == "text"] == [FINAL]

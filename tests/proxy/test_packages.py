"""The openai and anthropic packages, as they are, hold conversations with tools through a proxy."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.proxy.bodies import FUNCTION, TOOL
from tests.proxy.fake_engine import FakeEngine
from tests.proxy.stand import stand
from tests.proxy.told_engine import ToldEngine, call

LOOK = {"reasoning": "I have to look", "content": "Looking.", "tool_calls": [call("run", {"cmd": "ls -a"})]}
BOTH = {"tool_calls": [call("run", {"cmd": "cat a"}, "call_2"), call("run", {"cmd": "cat b"}, "call_3")]}
DONE = {"content": "There are two files."}
OUTPUTS = {"call_1": "a b", "call_2": "x", "call_3": "y"}

#: What the engine is asked last, whatever dialect the client speaks.
CONVERSATION = [
    {"role": "user", "content": "What is here?"},
    {"role": "assistant", **LOOK},
    {"role": "tool", "tool_call_id": "call_1", "content": "a b"},
    {"role": "assistant", "content": None, **BOTH},
    {"role": "tool", "tool_call_id": "call_2", "content": "x"},
    {"role": "tool", "tool_call_id": "call_3", "content": "y"},
]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def plain(messages: list[dict]) -> list[dict]:
    """Messages with their arguments as values, and without what only some dialects say."""
    found = []
    for message in json.loads(json.dumps(messages)):
        for one in message.get("tool_calls") or ():
            one["function"]["arguments"] = json.loads(one["function"]["arguments"])
            one.pop("index", None)
        found.append({key: value for key, value in message.items() if value not in (None, [], "")})
    return found


def conversation(tmp_path, converse) -> None:
    """Let a client converse with a scripted engine, and see what the engine was asked at the end."""

    async def scenario():
        engine = ToldEngine(0, messages=[LOOK, BOTH, DONE])
        async with stand(tmp_path, engine) as it:
            assert await converse(it.url) == "There are two files."
            assert plain(engine.bodies[-1]["messages"]) == plain(CONVERSATION)
            assert all(body["stream"] and body["tools"] for body in engine.bodies)
            counts = await it.proxy.close(1, 1)
        assert counts["answered"] == 3 and len(it.records()) == 3

    run(scenario())


@pytest.mark.parametrize("streaming", [False, True])
def test_anthropic(tmp_path, streaming):
    anthropic = pytest.importorskip("anthropic")

    async def converse(url: str) -> str:
        messages: list = [{"role": "user", "content": "What is here?"}]
        async with anthropic.AsyncAnthropic(base_url=url, api_key="token-1", max_retries=0) as client:
            while True:
                asked = {"model": "policy", "max_tokens": 500, "messages": messages, "tools": [TOOL]}
                if streaming:
                    async with client.messages.stream(**asked) as stream:
                        answer = await stream.get_final_message()
                else:
                    answer = await client.messages.create(**asked)
                assert answer.usage.input_tokens == 5 and answer.usage.output_tokens > 0
                messages.append({"role": "assistant", "content": answer.content})
                if answer.stop_reason != "tool_use":
                    return answer.content[-1].text
                uses = [block for block in answer.content if block.type == "tool_use"]
                results = [{"type": "tool_result", "tool_use_id": u.id, "content": OUTPUTS[u.id]} for u in uses]
                messages.append({"role": "user", "content": results})

    conversation(tmp_path, converse)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("chained", [False, True])
def test_openai_responses(tmp_path, streaming, chained):
    openai = pytest.importorskip("openai")

    async def converse(url: str) -> str:
        given: list = [{"role": "user", "content": "What is here?"}]
        before = openai.omit
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="token-1", max_retries=0) as client:
            while True:
                asked = {"model": "policy", "input": given, "tools": [FUNCTION], "previous_response_id": before}
                if streaming:
                    async with client.responses.stream(**asked) as stream:
                        answer = await stream.get_final_response()
                else:
                    answer = await client.responses.create(**asked)
                calls = [item for item in answer.output if item.type == "function_call"]
                if not calls:
                    return answer.output_text
                if chained:
                    given, before = [], answer.id
                    assert (await client.responses.retrieve(answer.id)).id == answer.id
                else:
                    given = [*given, *answer.output]
                for one in calls:
                    output = OUTPUTS[one.call_id]
                    given.append({"type": "function_call_output", "call_id": one.call_id, "output": output})

    conversation(tmp_path, converse)


@pytest.mark.parametrize("streaming", [False, True])
def test_openai_chat(tmp_path, streaming):
    openai = pytest.importorskip("openai")
    tools = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]

    async def converse(url: str) -> str:
        messages: list = [{"role": "user", "content": "What is here?"}]
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="token-1", max_retries=0) as client:
            while True:
                asked = {"model": "policy", "messages": messages, "tools": tools}
                if streaming:
                    async with client.chat.completions.stream(**asked) as stream:
                        answer = (await stream.get_final_completion()).choices[0]
                else:
                    answer = (await client.chat.completions.create(**asked)).choices[0]
                said = answer.message.model_dump(exclude_none=True)
                messages.append(
                    {key: said[key] for key in ("role", "content", "reasoning", "tool_calls") if key in said}
                )
                if answer.finish_reason != "tool_calls":
                    return answer.message.content
                for one in answer.message.tool_calls:
                    messages.append({"role": "tool", "tool_call_id": one.id, "content": OUTPUTS[one.id]})

    conversation(tmp_path, converse)


def test_completions_and_counts(tmp_path):
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")

    async def scenario():
        async with stand(tmp_path, engine := ToldEngine(0, tell=lambda body: DONE)) as it:
            async with openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="token-1", max_retries=0) as client:
                whole = await client.completions.create(model="policy", prompt="Here", max_tokens=9)
                stream = await client.completions.create(model="policy", prompt="Here", max_tokens=9, stream=True)
                streamed = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
                assert whole.choices[0].text == streamed == DONE["content"]
                with pytest.raises(openai.NotFoundError) as unknown:
                    await client.completions.create(model="gpt-5", prompt="Here")
                assert unknown.value.code == "model_not_found"
                assert (await client.models.retrieve("policy")).id == "policy"
            async with anthropic.AsyncAnthropic(base_url=it.url, auth_token="token-1", max_retries=0) as client:
                counted = await client.messages.count_tokens(
                    model="policy", system="x", messages=[{"role": "user", "content": "y"}], tools=[TOOL]
                )
                assert counted.input_tokens == 2 and engine.rendered[0]["tools"]
                assert [model.id async for model in client.models.list()] == ["policy"]
                assert (await client.models.retrieve("policy")).max_input_tokens == 4096
            assert (await it.proxy.close(1, 1))["requests"] == 2

    run(scenario())


def test_errors_are_the_packages_own(tmp_path):
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    long = "This model's maximum context length is 512 tokens. However, your prompt contains 600 input tokens, which"
    refusal = {"error": {"message": long, "type": "BadRequestError", "param": None, "code": 400}}
    hi = [{"role": "user", "content": "hi"}]

    async def scenario():
        engine = ToldEngine(0, refusal=(400, refusal))
        async with stand(tmp_path, engine) as it:
            async with openai.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="token-1", max_retries=0) as client:
                for asked in (
                    client.chat.completions.create(model="policy", messages=hi),
                    client.chat.completions.create(model="policy", messages=hi, stream=True),
                    client.responses.create(model="policy", input="hi"),
                    client.responses.create(model="policy", input="hi", stream=True),
                    client.completions.create(model="policy", prompt="hi"),
                ):
                    with pytest.raises(openai.BadRequestError) as caught:
                        await asked
                    assert caught.value.code == "context_length_exceeded" and "600 input tokens" in str(caught.value)
                with pytest.raises(openai.BadRequestError, match="there are no tools to use"):
                    await client.responses.create(model="policy", input="hi", tool_choice="required")
            async with anthropic.AsyncAnthropic(base_url=it.url, api_key="token-1", max_retries=0) as client:
                asked = {"model": "policy", "max_tokens": 9, "messages": hi}
                for awaited in (
                    client.messages.create(**asked),
                    client.beta.messages.create(**asked),
                    client.messages.create(**asked, stream=True),
                    client.messages.count_tokens(model="policy", messages=hi),
                ):
                    with pytest.raises(
                        anthropic.BadRequestError, match="prompt is too long: 600 tokens > 512 maximum"
                    ) as caught:
                        await awaited
                    assert caught.value.type == "invalid_request_error" and caught.value.request_id
                with pytest.raises(anthropic.NotFoundError):
                    await client.messages.create(**{**asked, "model": "claude"})
            async with anthropic.AsyncAnthropic(base_url=it.url, api_key="other", max_retries=0) as client:
                with pytest.raises(anthropic.AuthenticationError):
                    await client.messages.create(**asked)

    run(scenario())


@pytest.mark.parametrize("dialect", ["anthropic", "responses", "chat"])
def test_a_stream_that_fails_says_so_in_its_dialect(tmp_path, dialect):
    """No engine ends the answer in time, after words were shown: the stream ends with an error, not in silence."""
    package = pytest.importorskip("anthropic" if dialect == "anthropic" else "openai")

    async def scenario():
        engine = FakeEngine(0, length=200, delay=0.02)
        async with stand(tmp_path, engine, request_timeout=1.0) as it:
            if dialect == "anthropic":
                client = package.AsyncAnthropic(base_url=it.url, api_key="token-1", max_retries=0)
                asked = {"model": "policy", "max_tokens": 900, "messages": [{"role": "user", "content": "hi"}]}
                stream = await client.messages.create(**asked, stream=True)
            else:
                client = package.AsyncOpenAI(base_url=f"{it.url}/v1", api_key="token-1", max_retries=0)
                if dialect == "responses":
                    stream = await client.responses.create(model="policy", input="hi", stream=True)
                else:
                    messages = [{"role": "user", "content": "hi"}]
                    stream = await client.chat.completions.create(model="policy", messages=messages, stream=True)
            events = []
            if dialect == "responses":
                events = [event async for event in stream]
                assert events[-1].type == "response.failed" and events[-1].response.error.code == "server_error"
            else:
                with pytest.raises(package.APIError):
                    async for event in stream:
                        events.append(event)
            assert len(events) > 3
            await client.close()
            assert (await it.proxy.close(1, 1))["lost"] == 1

    run(scenario())

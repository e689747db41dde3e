"""What is sampled under more than its request says is not trained on, and starts over: the engine says which it is."""

import asyncio
import json

import pytest

from tests.proxy.fake_engine import END, FakeEngine, Fault
from tests.proxy.stand import stand, text_of

STRICT = [{"type": "function", "function": {"name": "run", "strict": True, "parameters": {}}}]
ASK = {"messages": [{"role": "user", "content": "hello"}]}
TEXT = "a plain answer, long enough"


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def answers(it, streaming):
    async def ask(body):
        if streaming:
            return text_of((await it.ask_stream(body))[0])
        return (await it.ask(body))[1]["choices"][0]["message"]["content"]

    return ask


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "tools, says, free",
    [
        ({"tools": STRICT}, False, True),
        ({"tools": STRICT, "tool_choice": "auto", "parallel_tool_calls": False}, False, True),
        ({"tools": STRICT}, None, False),
        ({"tools": STRICT}, True, False),
        ({}, True, False),
        ({}, None, True),
        ({"something_new": 1}, True, False),
    ],
)
def test_the_engine_decides_where_it_says_so(tmp_path, tools, says, free, streaming):
    async def scenario():
        engines = [FakeEngine(rank, says=lambda _: TEXT, constrained=says) for rank in range(2)]
        engines[0].faults = [Fault("moved", 0), Fault("moved", 5), Fault("drop", 3)]
        async with stand(tmp_path, *engines) as it:
            assert await answers(it, streaming)({**ASK, **tools}) == TEXT
            counts = await it.proxy.close(1, 1)
        (record,) = it.records()
        assert record.sampled.tolist() == [*TEXT.encode(), END] and record.legs == 4
        assert record.trainable is free and record.masked == ("" if free else "constrained")
        assert (counts["continued"], counts["restarted"]) == ((1, 0) if free else (0, 1))

    run(scenario())


def test_a_stream_is_shown_as_it_comes_once_the_engine_says_that_it_can_go_on(tmp_path):
    async def scenario():
        engine = FakeEngine(0, says=lambda _: TEXT, constrained=False, faults=[Fault("stall", 5)])
        async with stand(tmp_path, engine) as it:
            async with it.post({**ASK, "tools": STRICT, "stream": True}) as response:
                async for line in response.content:
                    if line.startswith(b"data: ") and text_of([json.loads(line[6:])]) == "a":
                        break
            await it.proxy.close(1, 1)

    run(scenario())


@pytest.mark.parametrize("streaming", [False, True])
def test_engines_that_say_different_things(tmp_path, streaming):
    """What was shown goes on; what any engine of them constrained is not trained on."""

    async def scenario():
        first = FakeEngine(0, says=lambda _: TEXT, constrained=False, faults=[Fault("moved", 4)])
        second = FakeEngine(1, says=lambda _: TEXT, constrained=True, faults=[Fault("moved", 4)])
        async with stand(tmp_path, first, second) as it:
            asked = asyncio.create_task(answers(it, streaming)({**ASK, "tools": STRICT}))
            while first.faults or first.live:
                await asyncio.sleep(0.001)
            await it.routes({0: None}, {1: 1})
            assert await asked == TEXT
        (record,) = it.records()
        assert record.sampled.tolist() == [*TEXT.encode(), END] and record.masked == "constrained"

    run(scenario())

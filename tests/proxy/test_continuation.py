"""Answers with reasoning and calls of tools go on elsewhere, and a client sees one uninterrupted stream."""

import asyncio
import json
import random

import pytest

from gyre.splice import Extension
from tests.proxy.fake_engine import FakeEngine, Fault, render
from tests.proxy.stand import finish_of, joined, stand, text_of

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {}}}]
ASK = {"messages": [{"role": "user", "content": "do it"}], "tools": TOOLS}
SAID = (
    "<think>Erst nachsehen, 漢 dann <so></think>Gut, é<ich\n"
    '<tool_call>{"name": "run", "arguments": {"b": "x {y}} 😀", "a":  [1, {"c": "é"}]}}</tool_call>'
    '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
)
CALLS = [("run", '{"b": "x {y}} 😀", "a":  [1, {"c": "é"}]}'), ("look", "{}")]


def run(coroutine, seconds=30):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


def engines(count, **options):
    return [
        FakeEngine(rank, says=lambda _: SAID, pairs=True, parses=True, replay=5, **options) for rank in range(count)
    ]


WHOLE = ("Erst nachsehen, 漢 dann <so>", "Gut, é<ich\n", CALLS, ["tool_calls"])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_moves_anywhere_leave_the_answer_as_it_is(tmp_path, seed, streaming):
    """Several moves in one answer, some of them in the middle of a call's arguments."""
    draw = random.Random(seed)

    async def scenario():
        faults = [Fault(draw.choice(["moved", "drop", "error"]), draw.randrange(45)) for _ in range(draw.randint(1, 5))]
        engine = engines(1, faults=faults, per_chunk=draw.choice([1, 2, 7]))[0]
        prompt = render(ASK["messages"], TOOLS)
        async with stand(tmp_path, engine) as it:
            body = {**ASK, "logprobs": True, "return_token_ids": True}
            if streaming:
                events, _ = await it.ask_stream(body)
                found = joined(events)
                choices = [c for event in events for c in event["choices"]]
                tokens = [token for c in choices for token in c.get("token_ids") or ()]
                entries = [entry for c in choices for entry in (c.get("logprobs") or {"content": []})["content"]]
                assert found[:4] == WHOLE and len({event["id"] for event in events}) == 1
                assert tokens == engine.answer(prompt) and len(entries) == len(tokens)
                assert events[0]["prompt_token_ids"] == prompt
                assert found[4] == ["call-0-0", "call-0-1"], "of the leg that showed them"
            else:
                choice = (await it.ask(body))[1]["choices"][0]
                message = choice["message"]
                calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]]
                assert (message["reasoning"], message["content"], calls, [choice["finish_reason"]]) == WHOLE
                assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == len(engine.answer(prompt))
            counts = await it.proxy.close(1, 1)
        assert counts["lost"] == counts["restarted"] == 0 and counts["rerouted"] == 1
        (record,) = it.records()
        assert record.prompt.tolist() == prompt and record.sampled.tolist() == engine.answer(prompt)
        assert 0.0 not in record.logprobs[1:], "what a replay says of log-probabilities is not taken"
        assert record.trainable and sum(span.tokens for span in record.spans) == len(record.sampled)
        kept = [Extension.decode(body["vllm_xargs"]["gyre"]).kept for body in engine.bodies if "vllm_xargs" in body]
        assert all(record.sampled[: len(one)] == one for one in kept)

    run(scenario())


def test_an_answer_that_would_go_on_differently_is_lost_with_its_reason(tmp_path):
    """The second engine parses nothing: what was shown as reasoning would be shown again as text."""

    async def scenario():
        first, second = engines(2)
        first.faults, second.parses = [Fault("moved", 40)], False
        async with stand(tmp_path, first, second) as it:
            asked = asyncio.create_task(it.ask_stream(ASK))
            while first.faults:
                await asyncio.sleep(0.001)
            await it.routes({0: None}, {1: 1})
            events, _ = await asked
            assert events[-1]["error"]["code"] == "engine_failed" and "than was shown" in events[-1]["error"]["message"]
            shown = joined(events[:-1])
            assert WHOLE[0].startswith(shown[0]) and WHOLE[1].startswith(shown[1]), "nothing of the other text"
            counts = await it.proxy.close(1, 1)
            assert counts["lost"] == 1 and "engine 1" in counts["fault"]
        assert not it.records()[0].trainable, "no client got it whole"

    run(scenario())


def test_what_one_engine_has_begun_another_does_not_refuse(tmp_path, monkeypatch):
    monkeypatch.setattr("gyre.proxy.relay.MAX_FAILURES", 3)

    async def scenario():
        (engine,) = engines(1, faults=[Fault("moved", 9), Fault("400"), Fault("moved", 3), *[Fault("400")] * 3])
        async with stand(tmp_path, engine) as it:
            status, reply = await it.ask(ASK)
            assert status == 502 and "refused with 400" in reply["error"]["message"] and len(engine.bodies) == 6
            engine.faults = [Fault("moved", 9), Fault("400")]
            assert (await it.ask(ASK))[0] == 200
            engine.faults = [Fault("refused"), Fault("400")]
            assert (await it.ask(ASK))[0] == 400, "none had begun: it may well be the client's fault"
            counts = await it.proxy.close(1, 1)
        assert (counts["lost"], counts["answered"], counts["refused"]) == (1, 1, 1)

    run(scenario())


def test_reasoning_that_is_hidden_stays_hidden_and_is_known_all_the_same(tmp_path):
    async def scenario():
        (engine,) = engines(1, faults=[Fault("moved", 9)])
        async with stand(tmp_path, engine) as it:
            events, _ = await it.ask_stream({**ASK, "include_reasoning": False})
            assert joined(events)[:3] == ("", *WHOLE[1:3])
            message = (await it.ask({**ASK, "include_reasoning": False}))[1]["choices"][0]["message"]
            assert "reasoning" not in message
            await it.ask({**ASK, "messages": [*ASK["messages"], message, {"role": "user", "content": "on"}]})
            assert engine.bodies[-1]["messages"][1]["reasoning"] == WHOLE[0]
            assert (await it.proxy.close(1, 1))["spliced"] == 1

    run(scenario())


# -- plain completions -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("prompt", ["once upon", [111, 110]])
def test_plain_completions_are_recorded_and_go_on_too(tmp_path, prompt, streaming):
    async def scenario():
        engine = FakeEngine(0, faults=[Fault("moved", 6), Fault("moved", 4)])
        ids = [*prompt.encode()] if isinstance(prompt, str) else prompt
        tokens = engine.answer(ids)
        text = bytes(tokens[:-1]).decode()
        async with stand(tmp_path, engine) as it:
            body = {"prompt": [prompt], "logprobs": 1, "return_token_ids": True, "stream": streaming}
            async with it.post(body, path="/v1/completions") as response:
                assert response.status == 200, await response.text()
                if streaming:
                    lines = [line[6:].strip() async for line in response.content if line.startswith(b"data: ")]
                    assert lines.pop() == b"[DONE]"
                    pieces = [json.loads(line) for line in lines]
                else:
                    pieces = [await response.json()]
            choices = [choice for piece in pieces for choice in piece["choices"]]
            assert "".join(choice["text"] for choice in choices) == text and pieces[0]["object"] == "text_completion"
            assert [token for choice in choices for token in choice.get("token_ids") or ()] == tokens
            assert choices[0]["prompt_token_ids"] == ids and choices[-1]["finish_reason"] == "stop"
            logprobs = [c["logprobs"] for c in choices if c["logprobs"]]
            assert sum(len(one["token_logprobs"]) for one in logprobs) == len(tokens)
            assert all(len(one["tokens"]) == len(one["top_logprobs"]) for one in logprobs)
            counts = await it.proxy.close(1, 1)
        assert counts["continued"] == 1 and counts["restarted"] == 0
        (record,) = it.records()
        assert record.prompt.tolist() == ids and record.sampled.tolist() == tokens and record.trainable

    run(scenario())


# -- where requests go -----------------------------------------------------------------------------------------------
def test_an_engine_is_told_where_the_keys_and_values_are(tmp_path):
    async def scenario():
        first, second = FakeEngine(0, kv="shm:a", policy=3, faults=[Fault("moved", 6)]), FakeEngine(1, kv="shm:b")
        async with stand(tmp_path, first, second) as it:
            ask = {"messages": [{"role": "user", "content": "a"}]}
            asked = asyncio.create_task(it.ask(ask))
            while first.faults:
                await asyncio.sleep(0.001)
            await it.routes({0: None}, {1: 1})
            message = (await asked)[1]["choices"][0]["message"]
            assert "kv_transfer_params" not in first.bodies[0]
            source = {"gyre": {"address": "shm:a", "epoch": 1, "policy": 3}}
            assert second.bodies[0]["kv_transfer_params"] == source
            await it.ask({"messages": [*ask["messages"], message, {"role": "user", "content": "b"}]})
            assert "kv_transfer_params" not in second.bodies[1], "it is there already"
            first.open(2)
            await it.routes({0: first}, {1: 0})
            await it.ask(ask)
            assert first.bodies[-1]["kv_transfer_params"]["gyre"]["address"] == "shm:b"
            second.kv = ""
            await it.routes({1: second}, {1: 1})
            await it.ask(ask)
            assert "kv_transfer_params" not in second.bodies[-1]

    run(scenario())


def test_an_engine_is_not_flooded_and_who_waits_is_held_in_order(tmp_path):
    async def scenario():
        engine, other = FakeEngine(0, slots=3), FakeEngine(1, slots=3)
        async with stand(tmp_path, engine, other) as it:
            engine.gate.clear()
            for n in range(2, 10):
                await it.register(n, 0)
            asks = []
            for n in range(1, 10):
                asks.append(asyncio.create_task(it.ask({"messages": [{"role": "user", "content": str(n)}]}, n)))
                await asyncio.sleep(0.01)
            while (await it.proxy.totals())["engines"].get("0", {}).get("waiting") != 6:
                await asyncio.sleep(0.01)
            totals = await it.proxy.totals()
            assert totals["engines"] == {"0": {"live": 3, "unanswered": 3, "waiting": 6}}
            assert len(engine.bodies) == 3 and totals["held"] >= 6 and (await it.proxy.held(9, 1))["now"]
            asks[3].cancel()  # a client that leaves while it waits
            await it.routes({}, {9: 1})  # and one that is sent elsewhere
            assert (await asks[8])[0] == 200 and len(other.bodies) == 1
            engine.gate.set()
            replies = await asyncio.gather(*asks, return_exceptions=True)
            assert [reply[0] for i, reply in enumerate(replies) if i != 3] == [200] * 8
            assert [body["messages"][0]["content"] for body in engine.bodies] == ["1", "2", "3", "5", "6", "7", "8"]
            assert engine.peak <= 7 and (await it.proxy.totals())["engines"] == {}, "every reservation is released"
            await it.routes({0: None})
            held = asyncio.create_task(it.ask(ASK, 1))
            await asyncio.sleep(0.1)
            assert (await it.proxy.held(1, 1))["now"], "an engine without a route is waited for, not replaced"
            await it.routes({0: engine})
            assert (await held)[0] == 200

    run(scenario())


def test_texts_of_streams_end_once(tmp_path):
    async def scenario():
        async with stand(tmp_path, *engines(1)) as it:
            events, _ = await it.ask_stream({**ASK, "tools": None})
            assert finish_of(events) == ["stop"] and SAID.partition("</think>")[2] == text_of(events)

    run(scenario())

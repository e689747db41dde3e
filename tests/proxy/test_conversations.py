"""Conversations through clients that write calls of tools anew: one sample each, of exactly the tokens sampled."""

import asyncio
import json

import pytest

from gyre.trajectories.sampling import from_records
from tests.proxy.fake_engine import FakeEngine, Fault
from tests.proxy.stand import joined, stand

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {}}}]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def tool_turns(text):
    """What a model says, turn by turn, whose arguments no client writes the same way."""
    turn = text.count("<|im_start|>user") + text.count("<|im_start|>tool\n")
    arguments = f'{{"line":{turn},"text" : "é\\u00e9 {turn}",  "more": {{"z":1.0,"a":[ ]}}}}'
    return f'<think>turn {turn}</think>Now {turn}.\n<tool_call>{{"name": "run", "arguments": {arguments}}}</tool_call>'


async def converse(it, turns, ask, drop_reasoning=True):
    """A client that reads calls and writes them anew."""
    messages = [{"role": "user", "content": "begin"}]
    for turn in range(turns):
        message = await ask({"messages": messages, "tools": TOOLS})
        calls = [
            {"id": f"mine-{turn}", "type": "function", "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True, indent=1)}}
            for call in message["tool_calls"]
        ]  # fmt: skip
        again = {"role": "assistant", "content": message["content"].strip(), "tool_calls": calls}
        if not drop_reasoning:
            again["reasoning"] = message["reasoning"]
        messages += [again, {"role": "tool", "tool_call_id": f"mine-{turn}", "content": f"result {turn}"}]


def plain(it):
    async def ask(body):
        return (await it.ask(body))[1]["choices"][0]["message"]

    return ask


def streamed(it):
    async def ask(body):
        reasoning, content, calls, _, identities = joined((await it.ask_stream(body))[0])
        calls = [
            {"id": i, "function": {"name": n, "arguments": a}} for i, (n, a) in zip(identities, calls, strict=True)
        ]
        return {"reasoning": reasoning, "content": content, "tool_calls": calls}

    return ask


@pytest.mark.parametrize("way", [plain, streamed])
@pytest.mark.parametrize("moves", [False, True])
def test_twenty_turns_through_a_client_that_writes_arguments_anew_are_one_sample(tmp_path, way, moves):
    async def scenario():
        engine = FakeEngine(0, says=tool_turns, pairs=True, parses=True, kv="")
        if moves:
            engine.faults = [Fault("moved", 5 + turn % 30) for turn in range(30)]
        async with stand(tmp_path, engine) as it:
            await converse(it, 20, way(it))
            counts = await it.proxy.close(1, 1)
        records = it.records()
        assert len(records) == 20 and all(record.spliced for record in records[1:])
        assert counts["spliced"] == 19 == counts["drifted"] and counts["forked"] == counts["lost"] == 0
        assert counts["drift_tokens"] == sum(record.drift for record in records) > 19
        (sample,) = from_records(records, 1, 0)
        last = records[-1]
        assert sample.tokens.tolist() == [*last.prompt, *last.sampled], "it is what the engine saw in the end"
        assert sample.trained.sum() == sum(len(record.sampled) for record in records), "and every sampled token in it"
        pairs = sum(token >= 1000 for token in sample.tokens[sample.trained])
        assert pairs > 100 and pairs == sum(token >= 1000 for token in sample.tokens), "none is encoded anew"

    run(scenario())


def test_a_template_that_drops_reasoning_wins_and_forks(tmp_path):
    async def scenario():
        engine = FakeEngine(0, says=tool_turns, parses=True)
        async with stand(tmp_path, engine) as it:

            async def ask(body):
                return await plain(it)({**body, "chat_template_kwargs": {"drop_thinking": True}})

            await converse(it, 4, ask)
            counts = await it.proxy.close(1, 1)
        assert counts["forked"] == 3 and counts["spliced"] == counts["drifted"] == 0
        samples = from_records(it.records(), 1, 0)
        assert len(samples) == 4 and sum(s.trained.sum() for s in samples) == counts["tokens"]
        assert [(r.spliced, r.rendered[0]) for r in it.records()] == [(False, len(r.prompt)) for r in it.records()]

    run(scenario())


def test_a_changed_answer_forks_below_the_last_one_that_is_known(tmp_path):
    async def scenario():
        engine = FakeEngine(0, says=lambda text: f"number {text.count('user')}", pairs=True)
        async with stand(tmp_path, engine) as it:
            messages = [{"role": "user", "content": "a"}]
            for _ in range(3):
                message = (await it.ask({"messages": messages}))[1]["choices"][0]["message"]
                messages += [message, {"role": "user", "content": "b"}]
            messages[3] = {"role": "assistant", "content": "other words"}
            await it.ask({"messages": messages[:5]})
            counts = await it.proxy.close(1, 1)
        assert counts["spliced"] == 3 and counts["forked"] == 1
        assert sorted(len(s) for s in from_records(it.records(), 1, 0)) == sorted(
            len(r.prompt) + len(r.sampled) for r in it.records()[2:]
        )

    run(scenario())


def test_conversations_side_by_side_do_not_mix(tmp_path):
    async def scenario():
        engine = FakeEngine(0, says=tool_turns, pairs=True, parses=True, delay=0.0005)
        async with stand(tmp_path, engine) as it:

            def as_agent(name):
                async def ask(body):
                    system = {"role": "system", "content": f"you are {name}"}
                    return await plain(it)({**body, "messages": [system, *body["messages"]]})

                return ask

            await asyncio.gather(*(converse(it, 5, as_agent(name)) for name in "xyz"))
            counts = await it.proxy.close(1, 1)
        assert counts["spliced"] == 12 and counts["forked"] == 0
        assert len(from_records(it.records(), 1, 0)) == 3

    run(scenario())


def test_several_choices_are_several_nodes(tmp_path):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            ask = {"messages": [{"role": "user", "content": "a"}]}
            choices = (await it.ask({**ask, "n": 3}))[1]["choices"]
            for choice in choices:
                await it.ask({"messages": [*ask["messages"], choice["message"], {"role": "user", "content": "b"}]})
            counts = await it.proxy.close(1, 1)
        assert counts["spliced"] == 3 and counts["forked"] == 0 and counts["requests"] == 4
        assert len(from_records(it.records(), 1, 0)) == 3

    run(scenario())


# -- other dialects --------------------------------------------------------------------------------------------------
async def messages_turns(post, turns):
    """Anthropic's; the client sends back what it got, its input written anew."""
    messages = [{"role": "user", "content": "begin"}]
    tools = [{"name": "run", "input_schema": {"type": "object"}}]
    for turn in range(turns):
        reply = await post("/v1/messages", {"max_tokens": 900, "messages": messages, "tools": tools})
        for block in reply["content"]:
            if block["type"] == "tool_use":
                block["input"], identity = dict(sorted(block["input"].items())), block["id"]
        result = {"type": "tool_result", "tool_use_id": identity, "content": f"result {turn}"}
        messages += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": [result]}]


async def responses_turns(post, turns):
    """OpenAI's responses, without anything kept by the server."""
    items = [{"role": "user", "content": "begin"}]
    tools = [{"type": "function", "name": "run", "parameters": {"type": "object"}}]
    for turn in range(turns):
        reply = await post("/v1/responses", {"input": items, "tools": tools, "store": False})
        identity = next(item["call_id"] for item in reply["output"] if item["type"] == "function_call")
        result = {"type": "function_call_output", "call_id": identity, "output": f"result {turn}"}
        items += [*reply["output"], result]


@pytest.mark.parametrize("converse_in", [messages_turns, responses_turns])
def test_every_dialect_is_one_conversation_to_the_engine(tmp_path, converse_in):
    async def scenario():
        faults = [Fault("moved", 11 + turn) for turn in range(5)]
        engine = FakeEngine(0, says=tool_turns, pairs=True, parses=True, faults=faults)
        async with stand(tmp_path, engine) as it:

            async def post(path, body):
                async with it.post(body, path=path) as response:
                    reply = await response.json()
                    assert response.status == 200, reply
                    return reply

            await converse_in(post, 6)
            counts = await it.proxy.close(1, 1)
        assert counts["spliced"] == counts["drifted"] == 5 and counts["forked"] == counts["restarted"] == 0
        (sample,) = from_records(it.records(), 1, 0)
        assert sample.trained.sum() == counts["tokens"]

    run(scenario())


def test_a_fault_of_the_history_takes_no_answer_away(tmp_path, monkeypatch, caplog):
    said = "what a client said"

    def broken(*_, **__):
        raise KeyError(said)

    async def scenario():
        async with stand(tmp_path, FakeEngine(0, says=lambda _: "yes")) as it:
            ask = {"messages": [{"role": "user", "content": "so?"}]}
            with monkeypatch.context() as patch:
                patch.setattr("gyre.proxy.history.History.add", broken)
                assert (await it.ask(ask))[0] == 200
            answer = {"role": "assistant", "content": "yes"}
            assert (await it.ask(ask))[0] == 200
            on = [*ask["messages"], answer, {"role": "user", "content": "on"}]
            assert (await it.ask({"messages": on}))[0] == 200
            counts = await it.proxy.close(1, 1)
        assert counts["answered"] == 3 and counts["lost"] == 0 and counts["spliced"] == 1
        assert len(it.records()) == 3 and all(record.trainable for record in it.records())
        assert "KeyError" in caplog.text and said not in caplog.text

    run(scenario())

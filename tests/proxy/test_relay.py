"""Every request gets exactly one complete answer (invariant 7), whatever happens to engines meanwhile."""

import asyncio

import pytest

from gyre.splice import Extension
from tests.proxy.fake_engine import FakeEngine, Fault, answer, render
from tests.proxy.plain import ASK, PROMPT, TEXT, TOKENS, check_record, run
from tests.proxy.stand import finish_of, stand, text_of


def test_plain_answer_and_its_record(tmp_path):
    async def scenario():
        engine = FakeEngine(0, policy=3)
        async with stand(tmp_path, engine) as it:
            status, reply = await it.ask({**ASK, "max_tokens": 500})
            assert status == 200
            choice = reply["choices"][0]
            assert choice["message"] == {"role": "assistant", "content": TEXT}
            assert choice["finish_reason"] == "stop" and choice["logprobs"] is None and "token_ids" not in choice
            assert reply["usage"]["prompt_tokens"] == len(PROMPT)
            assert reply["usage"]["completion_tokens"] == len(TOKENS)
            assert reply["model"] == "policy" and reply["object"] == "chat.completion"
            sent = engine.bodies[0]
            assert sent["temperature"] == 1.0 and sent["top_p"] == 1.0 and sent["top_k"] == 0 and "model" not in sent
            counts = await it.proxy.close(1, 1)
        assert (counts["requests"], counts["lost"], counts["rerouted"], counts["continued"]) == (1, 0, 0, 0)
        assert counts["tokens"] == len(TOKENS) and counts["oldest_version"] == 3 and counts["masked"] == {}
        (record,) = it.records()
        check_record(record)
        assert record.trainable and record.sampling["temperature"] == 1.0 and record.finish_reason == "stop"
        assert list(record.versions()) == [3] * len(TOKENS)

    run(scenario())


def test_streamed_answer(tmp_path):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            events, _ = await it.ask_stream({**ASK, "stream_options": {"include_usage": True}, "logprobs": True})
            assert text_of(events) == TEXT and finish_of(events) == ["stop"]
            assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert events[-1]["usage"]["completion_tokens"] == len(TOKENS) and events[-1]["choices"] == []
            shown = [
                e
                for event in events
                for c in event["choices"]
                for e in (c.get("logprobs") or {"content": []})["content"]
            ]
            assert len(shown) == len(TOKENS)
            assert len({event["id"] for event in events}) == 1

    run(scenario())


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("how", ["moved", "drop", "error", "nan"])
@pytest.mark.parametrize("cut", range(0, len(TOKENS), 3))
def test_continues_after_a_cut_anywhere(tmp_path, cut, how, streaming):
    async def scenario():
        first = FakeEngine(0, policy=1, faults=[Fault(how, cut)])
        second = FakeEngine(1, policy=2)
        async with stand(tmp_path, first, second) as it:
            moved = asyncio.create_task(move_when_cut(it, first))
            if streaming:
                events, _ = await it.ask_stream(ASK)
                assert text_of(events) == TEXT and finish_of(events) == ["stop"]
            else:
                status, reply = await it.ask(ASK)
                assert status == 200 and reply["choices"][0]["message"]["content"] == TEXT
            await moved
            counts = await it.proxy.close(1, 1)
        (record,) = it.records()
        check_record(record)
        assert counts["lost"] == 0 and counts["requests"] == 1 and counts["rerouted"] == 1
        assert counts["continued"] == (cut > 0) and counts["restarted"] == 0
        assert [(s.engine, s.policy, s.tokens) for s in record.spans] == [
            span for span in [(0, 1, cut), (1, 2, len(TOKENS) - cut)] if span[2]
        ]
        assert record.legs == 2

    async def move_when_cut(it, first):
        while first.faults or first.live:
            await asyncio.sleep(0.001)
        await it.routes({0: None}, {1: 1})

    run(scenario())


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("cut", [1, 5, 9, 14, 20])
def test_stop_strings_over_a_cut(tmp_path, cut, streaming):
    async def scenario():
        stop = TEXT[8:12]
        first, second = FakeEngine(0, faults=[Fault("moved", cut)]), FakeEngine(1)
        async with stand(tmp_path, first, second) as it:
            await it.routes(moves={1: 0})
            ask = {**ASK, "stop": [stop, "never"]}
            if streaming:
                events, _ = await it.ask_stream(ask)
                assert text_of(events) == TEXT[:8] and finish_of(events) == ["stop"]
            else:
                _, reply = await it.ask(ask)
                assert reply["choices"][0]["message"]["content"] == TEXT[:8]
                assert reply["choices"][0]["stop_reason"] == stop
            await it.proxy.close(1, 1)
        (record,) = it.records()
        check_record(record, TOKENS[: len(TEXT[:12].encode())])

    run(scenario())


def test_held_without_a_route_then_answered(tmp_path, monkeypatch):
    monkeypatch.setattr("gyre.proxy.front.KEEP_ALIVE_SECONDS", 0.2)

    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            await it.routes({0: None})
            asked = asyncio.create_task(it.ask_stream(ASK))
            await asyncio.sleep(1.3)
            assert (await it.proxy.held(1, 1))["now"]
            await it.routes()
            events, comments = await asked
            assert text_of(events) == TEXT and comments >= 1
            held = await it.proxy.held(1, 1)
            assert held["seconds"] == pytest.approx(1.3, abs=0.4) and not held["now"]
            counts = await it.proxy.close(1, 1)
        assert counts["rerouted"] == 0 and counts["held_seconds"] > 1

    run(scenario())


def test_parked_in_a_gate_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr("gyre.proxy.relay.PARKED_SECONDS", 0.05)

    async def scenario():
        engine = FakeEngine(0)
        async with stand(tmp_path, engine) as it:
            engine.gate.clear()
            asked = asyncio.create_task(it.ask(ASK))
            await asyncio.sleep(0.3)
            engine.policy = 7
            engine.gate.set()
            assert (await asked)[0] == 200
            counts = await it.proxy.close(1, 1)
        assert counts["held_seconds"] >= 0.2 and counts["oldest_version"] == 7
        assert it.records()[0].spans[0].policy == 7

    run(scenario())


def test_an_engine_that_lost_its_route_and_says_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr("gyre.proxy.executions.LEAVE_SECONDS", 0.1)

    async def scenario():
        first, second = FakeEngine(0, faults=[Fault("stall", 6)]), FakeEngine(1)
        async with stand(tmp_path, first, second) as it:
            asked = asyncio.create_task(it.ask(ASK))
            await asyncio.sleep(0.2)
            await it.routes({0: None}, {1: 1})
            _, reply = await asked
            assert reply["choices"][0]["message"]["content"] == TEXT
            await asyncio.sleep(0.05)
            assert first.live == 0 and first.cancelled == 1

    run(scenario())


def test_refusals_under_an_old_epoch_are_retried_until_the_route_comes(tmp_path):
    async def scenario():
        engine = FakeEngine(0)
        async with stand(tmp_path, engine) as it:
            engine.open(epoch=2)
            asked = asyncio.create_task(it.ask(ASK))
            await asyncio.sleep(0.3)
            assert 2 <= len(engine.bodies) < 15, "it must try again, and not in a busy loop"
            await it.routes()
            assert (await asked)[0] == 200

    run(scenario())


def test_an_engine_that_cannot_be_reached_is_waited_for(tmp_path):
    async def scenario():
        engine = FakeEngine(0)
        async with stand(tmp_path, engine) as it:
            await engine.stop()
            asked = asyncio.create_task(it.ask(ASK))
            await asyncio.sleep(0.5)
            await engine.start()
            assert (await asked)[0] == 200
            assert (await it.proxy.close(1, 1))["lost"] == 0

    run(scenario())


def test_reasoning_that_is_not_wanted_is_sampled_and_recorded_all_the_same(tmp_path):
    async def scenario():
        engine = FakeEngine(0)
        async with stand(tmp_path, engine) as it:
            assert (await it.ask({**ASK, "include_reasoning": False}))[0] == 200
            assert "include_reasoning" not in engine.bodies[0]

    run(scenario())


def test_an_answer_that_was_cut_at_its_length_is_whole(tmp_path):
    async def scenario():
        first = FakeEngine(0, faults=[Fault("moved", 6)])
        async with stand(tmp_path, first) as it:
            _, reply = await it.ask({**ASK, "max_tokens": 6})
            # The fake ends with `length` in the same piece as the sixth token, so cut before that piece.
            assert reply["choices"][0]["finish_reason"] == "length"
            first.faults = [Fault("moved", 4)]
            events, _ = await it.ask_stream({**ASK, "max_tokens": 6})
            assert finish_of(events) == ["length"] and events[0]["id"]
            await it.proxy.close(1, 1)
        assert [r.sampled.tolist() for r in it.records()] == [TOKENS[:6], TOKENS[:6]]

    run(scenario())


@pytest.mark.parametrize("extra", [{"presence_penalty": 0.5}, {"response_format": {"type": "json_object"}}])
@pytest.mark.parametrize("streaming", [False, True])
def test_what_cannot_be_carried_over_starts_over(tmp_path, extra, streaming):
    async def scenario():
        engine = FakeEngine(0, faults=[Fault("moved", 7)])
        async with stand(tmp_path, engine) as it:
            if streaming:
                events, _ = await it.ask_stream({**ASK, **extra})
                assert text_of(events) == TEXT and finish_of(events) == ["stop"]
            else:
                assert (await it.ask({**ASK, **extra}))[1]["choices"][0]["message"]["content"] == TEXT
            counts = await it.proxy.close(1, 1)
        assert counts["restarted"] == 1 and counts["continued"] == 0 and counts["rerouted"] == 1
        (record,) = it.records()
        check_record(record)
        assert not record.trainable and record.masked in ("penalties", "constrained")

    run(scenario())


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_greedy_and_truncated_tokens_are_recorded_but_masked(tmp_path, sampling):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            await it.ask({**ASK, **sampling})
            counts = await it.proxy.close(1, 1)
        assert sum(counts["masked"].values()) == counts["tokens"] == len(TOKENS)
        assert not it.records()[0].trainable

    run(scenario())


def test_continuation_keeps_the_sampling_and_changes_the_seed(tmp_path):
    async def scenario():
        engine = FakeEngine(0, faults=[Fault("moved", 8)])
        async with stand(tmp_path, engine) as it:
            sampling = {"temperature": 0.7, "seed": 5, "max_tokens": 30, "top_k": 3, "logit_bias": {"5": 1.0}}
            await it.ask({**ASK, **sampling})
            first, second = engine.bodies
            extension = Extension.decode(second["vllm_xargs"]["gyre"])
            assert extension.prompt.tolist() == PROMPT and extension.kept.tolist() == TOKENS[:8]
            assert second["messages"] == ASK["messages"] and second["max_tokens"] == 30 and "vllm_xargs" not in first
            assert second["temperature"] == 0.7 and second["top_k"] == 3 and second["logit_bias"] == {"5": 1.0}
            assert first["seed"] == 5 and second["seed"] != 5

    run(scenario())


def test_a_client_that_hangs_up_cancels_its_engine(tmp_path):
    async def scenario():
        engine = FakeEngine(0, delay=0.05)
        async with stand(tmp_path, engine) as it:
            async with it.post({**ASK, "stream": True}) as response:
                await response.content.readline()
                await asyncio.sleep(0.2)
                response.close()
            await asyncio.sleep(0.2)
            assert engine.live == 0 and engine.cancelled == 1
            counts = await it.proxy.close(1, 1)
        assert counts["abandoned"] == 1 and counts["lost"] == 0
        (record,) = it.records()
        assert not record.trainable and record.masked == "abandoned" and len(record.sampled) > 0

    run(scenario())


def test_closing_an_execution_ends_its_requests(tmp_path):
    async def scenario():
        engine = FakeEngine(0, delay=0.05)
        async with stand(tmp_path, engine) as it:
            asked = asyncio.create_task(it.ask(ASK))
            await asyncio.sleep(0.2)
            counts = await it.proxy.close(1, 1)
            assert counts["abandoned"] == 1 and counts["lost"] == 0 and counts["tokens"] > 0
            with pytest.raises(Exception, match=r"disconnected|reset"):
                await asked
            await asyncio.sleep(0.1)
            assert engine.live == 0
            assert (await it.ask(ASK))[0] == 401

    run(scenario())


def test_many_streams_while_engines_come_and_go(tmp_path):
    async def scenario():
        engines = [FakeEngine(rank, delay=0.002, length=60) for rank in range(3)]
        async with stand(tmp_path, *engines) as it:
            for n in range(2, 33):
                await it.register(n, n % 3)
            bodies = {n: {"messages": [{"role": "user", "content": f"number {n}"}]} for n in range(1, 33)}
            asked = {n: asyncio.create_task(it.ask_stream(body, n)) for n, body in bodies.items()}
            for turn in range(9):
                await asyncio.sleep(0.05)
                leaving, staying = engines[turn % 3], engines[(turn + 1) % 3]
                moves = dict.fromkeys(range(1, 33), staying.rank)
                await it.routes({leaving.rank: None}, moves)
                leaving.close()
                await asyncio.sleep(0.02)
                assert leaving.live == 0, "invariant 6"
                leaving.open(leaving.epoch + 1)
                await it.routes({leaving.rank: leaving})
            for n, task in asked.items():
                events, _ = await task
                tokens = answer(render(bodies[n]["messages"]), 60)
                assert text_of(events) == bytes(tokens[:-1]).decode() and finish_of(events) == ["stop"]
                counts = await it.proxy.close(n, 1)
                assert counts["lost"] == 0 and counts["requests"] == 1
                (record,) = it.records(n)
                assert record.sampled.tolist() == tokens and record.trainable

    run(scenario())

"""Bad requests get a correct error, no token works beyond its execution, and the proxy still serves afterwards."""

import asyncio
import json
import sys

import pytest

from gyre.child import Child
from gyre.proxy import limits
from gyre.proxy.dialects import hidden
from tests.proxy.fake_engine import SECRET, FakeEngine, Fault
from tests.proxy.stand import stand
from tests.proxy.support import ASK, AUTH, run, silence

BAD = [
    b"{not json",
    b"\xff\xfe",
    b"",
    b"[" * 100_000,
    b'{"a":' * 2000,
    b"[]",
    b"{}",
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"messages": [{"role": "user", "content": "\xed\xa0\x80"}]}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
    b'{"messages": [{"role": "user", "content": "x"}], "metadata": ' + b'{"a":' * 200 + b"1" + b"}" * 201,
    *(
        json.dumps(body).encode()
        for body in (
            {"messages": []},
            {"messages": "hello"},
            {"messages": [3]},
            {"messages": [{"content": "no role"}]},
            {"messages": [{"role": "user", "content": 3}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]},
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]},
            {**ASK, "temperature": "hot"},
            {**ASK, "temperature": True},
            {**ASK, "stream": "yes"},
            {**ASK, "n": 0},
            {**ASK, "n": 10_000},
            {**ASK, "stop": [1]},
            {**ASK, "stream_options": 3},
            {**ASK, "max_tokens": "9"},
            {**ASK, "model": 9},
            {**ASK, "seed": "x"},
            {**ASK, "tools": [3]},
            {**ASK, "tools": [{"function": 3}]},
            {**ASK, "stop_token_ids": ["x"]},
            {**ASK, "kv_transfer_params": {}},
            {**ASK, "top_k": 10**30},
            {**ASK, "temperature": -(10**300)},
            {**ASK, "repetition_penalty": 1e-300},
        )
    ),
]


def test_bad_bodies_are_400(tmp_path, caplog):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            for body in BAD:
                async with it.post(body) as response:
                    assert response.status == 400, body[:100]
                    error = (await response.json())["error"]
                    assert error["type"] == "invalid_request_error" and error["message"], body[:100]
            assert (await it.ask(ASK))[0] == 200
            assert len(it.engines[0].bodies) == 1

    with silence(caplog):
        run(scenario())


def test_keys_paths_and_methods(tmp_path, caplog):
    paths = [
        "/v1/nothing",
        "//v1/chat/completions",
        "/v1//chat/completions",
        "/v1/../v1/chat/completions",
        "/V1/models",
    ]
    paths += [
        "/v1/%63hat/completions",
        "/v1/chat/completions/",
        "/v1/chat/completions/render",
        "/gyre/close",
        "/metrics",
    ]

    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            from yarl import URL

            for headers in ({}, {"Authorization": "Bearer nope"}, {"Authorization": f"Bearer {SECRET}"}):
                async with it.client.post(it.url + "/v1/chat/completions", json=ASK, headers=headers) as response:
                    assert response.status == 401
                    assert (await response.json())["error"]["code"] == "invalid_api_key"
            for headers in (AUTH, {"x-api-key": "token-1"}, {"authorization": "bearer no", "X-API-KEY": "token-1"}):
                async with it.client.get(it.url + "/v1/models", headers=headers) as response:
                    assert response.status == 200
            for path in paths:
                url = URL(it.url + path, encoded=True)
                async with it.client.post(url, json=ASK, headers=AUTH) as response:
                    assert response.status == 404 and "error" in await response.json(), path
            for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS"):
                url = it.url + "/v1/chat/completions"
                async with it.client.request(method, url, headers=AUTH) as response:
                    assert response.status == 405 and response.headers["Allow"] == "POST"
            for method in ("GET", "HEAD"):
                async with it.client.request(method, it.url + "/") as response:
                    assert response.status == 200
            assert (await it.ask(ASK))[0] == 200

    with silence(caplog):
        run(scenario())


def test_models_in_both_shapes(tmp_path):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0), model="Qwen3", models=["gpt-*"]) as it:
            async with it.client.get(it.url + "/v1/models", headers=AUTH) as response:
                given = await response.json()
                assert given["data"][0]["id"] == "Qwen3" and given["data"][0]["max_model_len"] == 4096
            headers = {"x-api-key": "token-1", "anthropic-version": "2023-06-01"}
            async with it.client.get(it.url + "/v1/models", headers=headers) as response:
                given = await response.json()
                assert given["data"][0]["type"] == "model" and given["has_more"] is False
            for name, status in (("Qwen3", 200), ("policy", 200), ("gpt-5", 200), ("a/b", 404), ("Qwen", 404)):
                async with it.client.get(f"{it.url}/v1/models/{name}", headers=AUTH) as response:
                    assert response.status == status, name
                status_of_chat, reply = await it.ask({**ASK, "model": name})
                assert status_of_chat == status
                assert status == 200 or reply["error"]["code"] == "model_not_found"
            assert (await it.ask(ASK))[0] == 200  # no name at all: the model that there is

    run(scenario())


def test_an_engines_refusal_is_passed_on(tmp_path):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0, faults=[Fault("400"), Fault("400"), Fault("closed")])) as it:
            for streaming in (False, True):
                status, reply = await it.ask({**ASK, "stream": streaming})
                assert status == 400 and reply["error"]["message"] == "so it is"
                assert reply["error"]["type"] == "invalid_request_error"
            assert (await it.ask(ASK))[0] == 410
            counts = await it.proxy.close(1, 1)
        assert counts["lost"] == 0 and counts["requests"] == 3 and counts["abandoned"] == 1
        assert it.records() == []

    run(scenario())


def test_a_request_that_takes_too_long_is_lost_and_says_so(tmp_path):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0), request_timeout=0.3) as it:
            await it.routes({0: None})
            status, reply = await it.ask(ASK)
            assert status == 504 and reply["error"]["code"] == "timeout"
            assert (await it.proxy.close(1, 1))["lost"] == 1

    run(scenario())


def test_a_token_lives_as_long_as_its_execution(tmp_path):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            await it.register(2)
            assert (await it.ask(ASK, n=2))[0] == 200
            await it.proxy.close(2, 1)
            assert (await it.ask(ASK, n=2))[0] == 401
            assert (await it.ask(ASK))[0] == 200

    run(scenario())


def test_requests_at_once_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "REQUESTS_OF_EXECUTION", 2)

    async def scenario():
        engine = FakeEngine(0)
        async with stand(tmp_path, engine) as it:
            await it.register(2)
            engine.gate.clear()
            waiting = [asyncio.ensure_future(it.ask(ASK)) for _ in range(2)]
            while len(engine.bodies) < 2:
                await asyncio.sleep(0.01)
            status, reply = await it.ask(ASK)
            assert status == 429 and reply["error"]["type"] == "rate_limit_error"
            other = asyncio.ensure_future(it.ask(ASK, n=2))
            engine.gate.set()
            assert [(await one)[0] for one in (*waiting, other)] == [200, 200, 200]
            assert (await it.ask(ASK))[0] == 200

    run(scenario())


def test_the_child_process_and_the_openai_package(tmp_path):
    openai = pytest.importorskip("openai")

    async def scenario():
        engine = await FakeEngine(0).start()
        child = await Child.spawn("proxy", [sys.executable, "-m", "gyre.proxy.server"], tmp_path / "proxy.log")
        port = (await child.call("start", secret=SECRET, max_context=4096))["port"]
        await child.call("routes", version=1, engines={"0": engine.entry()}, moves={})
        record_path = str(tmp_path / "r")
        await child.call("register", execution=1, try_number=1, token="t", engine=0, record_path=record_path)
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="t")
        plain = await client.chat.completions.create(model="policy", **ASK)
        stream = await client.chat.completions.create(model="policy", stream=True, **ASK)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert streamed == plain.choices[0].message.content and plain.usage.total_tokens > 10
        assert [model.id async for model in client.models.list()] == ["policy"]
        bad = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="other")
        with pytest.raises(openai.AuthenticationError):
            await bad.chat.completions.create(model="policy", **ASK)
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="other", **ASK)
        assert (await child.call("totals"))["executions"] == 1
        assert (await child.call("close", execution=1, try_number=1))["requests"] == 2
        await client.close()
        await bad.close()
        await child.stop()
        await engine.stop()
        assert "Traceback" not in (tmp_path / "proxy.log").read_text()

    run(scenario())


def test_what_one_execution_holds_leaves_room_for_others(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(limits, "BYTES_OF_EXECUTION", 3000)
    large = {"messages": [{"role": "user", "content": "x" * 2000}]}

    async def scenario():
        engine = FakeEngine(0)
        async with stand(tmp_path, engine) as it:
            await it.register(2)
            engine.gate.clear()
            waiting = [asyncio.ensure_future(it.ask(large, n)) for n in (1, 2)]
            while len(engine.bodies) < 2:
                await asyncio.sleep(0.01)
            status, reply = await it.ask(large)
            assert status == 429 and reply["error"]["code"] == "rate_limit_exceeded"
            engine.gate.set()
            assert [(await one)[0] for one in waiting] == [200, 200]
            assert (await it.ask(large))[0] == 200

    with silence(caplog):
        run(scenario())


def test_what_a_body_unpacks_or_refers_to_counts(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(limits, "MAX_BODY", 100_000)
    sealed = hidden.seal("a" * 60_000)
    blocks = [{"type": "redacted_thinking", "data": sealed}] * 2
    thoughts = [{"type": "reasoning", "summary": [], "encrypted_content": sealed}] * 2
    messages = [{"role": "assistant", "content": blocks}, *ASK["messages"]]
    long = {"role": "user", "content": "a" * 60_000, "id": "long", "type": "message"}
    reference = {"type": "item_reference", "id": "long"}

    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:

            async def asked(path, body):
                async with it.post(body, path=path) as response:
                    return response.status, await response.json()

            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                assert (await asked(path, {"max_tokens": 5, "messages": messages}))[0] == 413
            assert (await asked("/v1/responses", {"input": thoughts}))[0] == 413
            status, first = await asked("/v1/responses", {"input": [long]})
            assert status == 200
            assert (await asked("/v1/responses", {"input": [reference]}))[0] == 200
            after = {"previous_response_id": first["id"]}
            assert (await asked("/v1/responses", {"input": "more", **after}))[0] == 200
            for body in ({"input": [reference] * 2}, {"input": [reference], **after}):
                assert (await asked("/v1/responses", body))[0] == 413
            assert (await it.ask(ASK))[0] == 200

    with silence(caplog):
        run(scenario())


def test_what_is_left_out_is_logged_once(tmp_path, caplog):
    body = {"input": "hi", "tools": [{"type": "web_search"}, {"type": "private words"}]}

    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            await it.register(2)
            for n in (1, 1, 2):
                async with it.post(body, n, path="/v1/responses") as response:
                    assert response.status == 200

    with silence(caplog):
        run(scenario())
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert [line.split(":")[0] for line in said] == ["execution 1", "execution 2"]
    assert all("another kind, web_search" in line for line in said) and "private" not in caplog.text


def test_who_asks_for_a_websocket_is_told_at_once_that_there_is_none(tmp_path):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            headers = {**AUTH, "Upgrade": "websocket", "Connection": "Upgrade"}
            async with it.client.get(it.url + "/v1/responses", headers=headers) as response:
                assert response.status == 426
            assert (await it.ask(ASK))[0] == 200

    run(scenario())

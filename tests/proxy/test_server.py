"""Bad requests get a correct error, no token works beyond its execution, and the proxy still serves afterwards."""

import asyncio
import json
import sys

import pytest

from gyre.child import Child
from tests.proxy.fake_engine import SECRET, FakeEngine, Fault
from tests.proxy.stand import stand

ASK = {"messages": [{"role": "user", "content": "hello"}]}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


BAD = [
    b"{not json",
    b"\xff\xfe",
    b"[" * 100_000,
    b"[]",
    b"{}",
    json.dumps({"messages": []}).encode(),
    json.dumps({"messages": "hello"}).encode(),
    json.dumps({**ASK, "temperature": "hot"}).encode(),
    json.dumps({**ASK, "temperature": True}).encode(),
    json.dumps({**ASK, "stream": "yes"}).encode(),
    json.dumps({**ASK, "n": 0}).encode(),
    json.dumps({**ASK, "n": 10_000}).encode(),
    json.dumps({**ASK, "stop": [1]}).encode(),
    json.dumps({**ASK, "stream_options": 3}).encode(),
    json.dumps({**ASK, "max_tokens": "9"}).encode(),
    json.dumps({**ASK, "model": 9}).encode(),
]


@pytest.mark.parametrize("body", BAD)
def test_bad_bodies_are_400(tmp_path, body):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            async with it.post(body) as response:
                assert response.status == 400
                error = (await response.json())["error"]
                assert error["type"] == "invalid_request_error" and error["message"]
            assert (await it.ask(ASK))[0] == 200

    run(scenario())


def test_keys_paths_and_sizes(tmp_path, monkeypatch):
    monkeypatch.setattr("gyre.proxy.server.MAX_BODY", 10_000)

    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            for headers in ({}, {"Authorization": "Bearer nope"}, {"Authorization": f"Bearer {SECRET}"}):
                async with it.client.post(it.url + "/v1/chat/completions", json=ASK, headers=headers) as response:
                    assert response.status == 401
                    assert (await response.json())["error"]["code"] == "invalid_api_key"
            async with it.post(ASK, path="/v1/nothing") as response:
                assert response.status == 404 and "error" in await response.json()
            async with it.post(b"x" * 20_000) as response:
                assert response.status == 413 and "error" in await response.json()
            headers = {"Authorization": "Bearer token-1"}
            async with it.client.get(it.url + "/v1/models", headers=headers) as response:
                assert (await response.json())["data"][0]["id"] == "policy"
            async with it.client.get(it.url + "/v1/models/a/b", headers={"x-api-key": "token-1"}) as response:
                assert (await response.json())["id"] == "a/b"
            assert (await it.ask(ASK))[0] == 200

    run(scenario())


def test_an_engines_refusal_is_passed_on(tmp_path):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0, faults=[Fault("400"), Fault("400"), Fault("closed")])) as it:
            for streaming in (False, True):
                status, reply = await it.ask({**ASK, "stream": streaming})
                assert status == 400 and reply["error"]["message"] == "so it is"
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
        plain = await client.chat.completions.create(model="m", **ASK)
        stream = await client.chat.completions.create(model="m", stream=True, **ASK)
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert streamed == plain.choices[0].message.content and plain.usage.total_tokens > 10
        assert [model.id async for model in client.models.list()] == ["policy"]
        bad = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="other")
        with pytest.raises(openai.AuthenticationError):
            await bad.chat.completions.create(model="m", **ASK)
        assert (await child.call("totals"))["executions"] == 1
        assert (await child.call("close", execution=1, try_number=1))["requests"] == 2
        await client.close()
        await bad.close()
        await child.stop()
        await engine.stop()
        assert "Traceback" not in (tmp_path / "proxy.log").read_text()

    run(scenario())

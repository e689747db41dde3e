"""Bad requests get a correct error, no token works beyond its execution, and the proxy still serves afterwards."""

import asyncio
import contextlib
import json
import logging
import sys

import pytest

from gyre.child import Child
from gyre.proxy import limits
from tests.proxy.fake_engine import SECRET, FakeEngine, Fault
from tests.proxy.stand import stand

ASK = {"messages": [{"role": "user", "content": "hello"}]}
AUTH = {"Authorization": "Bearer token-1"}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


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
        )
    ),
]


@contextlib.contextmanager
def silence(caplog):
    """Nothing here is a fault of the proxy's, and no secret is ever logged."""
    caplog.set_level(logging.DEBUG)
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
    assert "token-1" not in caplog.text and SECRET not in caplog.text


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


# -- bytes on a connection ---------------------------------------------------------------------------------------------
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token-1\r\n"
BODY = json.dumps(ASK).encode()
GOOD = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


async def say(it, *parts: bytes, half: bool = False) -> bytes:
    """Everything that the proxy answers to these bytes until it closes, or for a moment."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(it.url.rsplit(":", 1)[1]))
    answer = b""
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.01)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                while data := await reader.read(65536):
                    answer += data
                    if b"\r\n\r\n" in answer and (b"chatcmpl" in answer or b"error" in answer):
                        break
    except ConnectionError:
        pass
    finally:
        writer.close()
    return answer


ODD = {
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03": b"400",
    b"GET\r\n\r\n": b"400",
    b"FOO BAR BAZ\r\n\r\n": b"400",
    b"POST /v1/chat/completions HTTP/9.9\r\n\r\n": b"400",
    HEAD + b"Content-Length: nine\r\n\r\n": b"400",
    HEAD + b"Content-Length: -1\r\n\r\n": b"400",
    HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc": b"400",
    HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": b"400",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n": b"400",
    HEAD + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc": b"400",
    HEAD + b"X: " + b"x" * 40_000 + b"\r\n\r\n": b"431",
    HEAD + b"x: y\r\n" * 300 + b"\r\n": b"431",
    b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\n\r\n": b"431",
    b"GET http://example.com/v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token-1\r\n\r\n": b"404",
    b"GET /v1/models/%zz%00 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token-1\r\n\r\n": b"404",
    b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n": b"40",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n": b"401",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n": b"401",
}


def test_what_is_no_request_gets_an_error(tmp_path, caplog):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            for data, status in ODD.items():
                answer = await say(it, data)
                assert answer.startswith(b"HTTP/1."), data[:80]
                assert answer.split(b" ", 2)[1].startswith(status), (data[:80], answer[:300])
                assert b'{"error":{' in answer, (data[:80], answer[:300])
                assert b"x" * 50 not in answer
            assert b"200 OK" in await say(it, GOOD)

    with silence(caplog):
        run(scenario())


def test_a_huge_body_is_refused_before_it_is_read(tmp_path, caplog):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            declared = HEAD + b"Content-Length: 104857600\r\n\r\n"
            answer = await say(it, declared)
            assert b" 413 " in answer and b"onnection: close" in answer
            answer = await say(it, HEAD + b"Expect: 100-continue\r\nContent-Length: 104857600\r\n\r\n")
            assert b" 413 " in answer and b"100 Continue" not in answer
            length = b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY)
            answer = await say(it, HEAD + length, BODY)
            assert answer.startswith(b"HTTP/1.1 100 Continue") and b"200 OK" in answer
            async with it.post(b"x" * (100 << 20)) as response:
                assert response.status == 413 and "error" in await response.json()
            async with it.client.post(it.url + "/v1/messages", data=b"x" * (33 << 20), headers=AUTH) as response:
                assert response.status == 413 and (await response.json())["error"]["type"] == "request_too_large"
            assert (await it.ask(ASK))[0] == 200

    with silence(caplog):
        run(scenario())


def test_a_body_without_a_length_is_bounded_too(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(limits, "MAX_BODY", 100_000)

    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            chunk = b"8000\r\n" + b"x" * 0x8000 + b"\r\n"
            answer = await say(it, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[chunk] * 8)
            assert b" 413 " in answer
            assert (await it.ask(ASK))[0] == 200

    with silence(caplog):
        run(scenario())


def test_slow_clients_are_told_and_let_go(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.2)

    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            for data in (b"", HEAD, HEAD + b"Content-Length: 100\r\n\r\nabc"):
                answer = await say(it, data)
                assert b" 408 " in answer and b'"code":"timeout"' in answer, data
            assert (await it.ask(ASK))[0] == 200

    with silence(caplog):
        run(scenario())


def test_a_client_that_hangs_up_frees_the_engine(tmp_path, caplog):
    async def scenario():
        engine = FakeEngine(0, delay=0.05, length=400)
        async with stand(tmp_path, engine) as it:
            for body in (ASK, {**ASK, "stream": True}):
                data = json.dumps(body).encode()
                _, writer = await asyncio.open_connection("127.0.0.1", int(it.url.rsplit(":", 1)[1]))
                writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
                while not engine.live:
                    await asyncio.sleep(0.01)
                writer.transport.abort()
                while engine.live:
                    await asyncio.sleep(0.01)
            while (await it.proxy.totals())["requests"]:
                await asyncio.sleep(0.01)
            counts = await it.proxy.close(1, 1)
            assert counts["abandoned"] == 2 and counts["lost"] == 0

    with silence(caplog):
        run(scenario())


def test_a_client_that_stops_reading_is_let_go(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(limits, "WRITE_BUFFER", 4096)

    async def scenario():
        engine = FakeEngine(0, length=40_000, per_chunk=50)
        async with stand(tmp_path, engine) as it:
            data = json.dumps({**ASK, "stream": True, "logprobs": True}).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", int(it.url.rsplit(":", 1)[1]), limit=1024)
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(data) + data)
            await reader.read(100)
            while not (await it.proxy.totals())["requests"]:
                await asyncio.sleep(0.01)
            while (await it.proxy.totals())["requests"]:
                await asyncio.sleep(0.05)
            assert (await it.ask({**ASK, "max_tokens": 5}))[0] == 200
            assert (await it.proxy.close(1, 1))["abandoned"] == 1
            writer.close()

    with silence(caplog):
        run(scenario())


def test_pipelined_requests_are_answered_in_order(tmp_path):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            models = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer token-1\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", int(it.url.rsplit(":", 1)[1]))
            writer.write(models + GOOD + models)
            answer = b""
            while answer.count(b"HTTP/1.1 200 OK") < 3 or not answer.endswith(b"}"):
                answer += await reader.read(65536)
            assert answer.index(b"max_model_len") < answer.index(b"chatcmpl") < answer.rindex(b"max_model_len")
            writer.close()

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

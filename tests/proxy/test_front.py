"""What comes over a connection, whatever it is, gets an error or an answer, in bounded time and room."""

import asyncio
import contextlib
import gzip
import json

import pytest

from gyre.proxy import front, limits
from tests.proxy.fake_engine import FakeEngine, Fault
from tests.proxy.stand import stand
from tests.proxy.support import ASK, AUTH, run, silence

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


def test_compressed_bodies_are_bounded_by_what_they_hold(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(limits, "MAX_BODY", 1 << 20)

    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            for data, status in ((BODY, b" 200 "), (b" " * (8 << 20), b" 413 ")):
                packed = gzip.compress(data)
                length = b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
                assert status in await say(it, HEAD + length + packed)

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


def test_who_hangs_up_in_the_middle_of_a_request_is_forgotten(tmp_path, caplog):
    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            for data in (HEAD[:40], HEAD, HEAD + b"Content-Length: 100\r\n\r\nabc"):
                _, writer = await asyncio.open_connection("127.0.0.1", int(it.url.rsplit(":", 1)[1]))
                writer.write(data)
                await asyncio.sleep(0.05)
                writer.transport.abort()
            while (await it.proxy.totals())["requests"]:
                await asyncio.sleep(0.01)
            assert (await it.ask(ASK))[0] == 200
            assert (await it.proxy.close(1, 1))["requests"] == 1

    with silence(caplog):
        run(scenario())


PATIENT = {
    "/v1/chat/completions": (ASK, b": waiting"),
    "/v1/responses": ({"input": "hello"}, b": waiting"),
    "/v1/messages": ({**ASK, "max_tokens": 900}, b"event: ping"),
}


@pytest.mark.parametrize("path", PATIENT)
def test_a_stream_without_words_is_kept_alive(tmp_path, monkeypatch, path):
    monkeypatch.setattr(front, "KEEP_ALIVE_SECONDS", 0.1)
    body, words = PATIENT[path]

    async def scenario():
        async with stand(tmp_path, FakeEngine(0, faults=[Fault("stall", 3)])) as it:
            async with it.post({**body, "stream": True}, path=path) as response:
                answer = b""
                while answer.count(words) < 3:
                    answer += await response.content.readany()
                assert response.status == 200 and answer.count(b"data: ") > 1

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


def test_connections_are_bounded(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 3)

    async def scenario():
        async with stand(tmp_path, FakeEngine(0)) as it:
            port = int(it.url.rsplit(":", 1)[1])
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            assert b" 503 " in await say(it, GOOD)
            for _, writer in held:
                writer.close()
            while (await it.ask(ASK))[0] != 200:
                await asyncio.sleep(0.01)

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


def test_a_sign_of_life_is_no_second_answer(tmp_path):
    """It is decided on, and then the engine's refusal comes, all before it is written."""

    async def scenario():
        engine = FakeEngine(0)
        async with stand(tmp_path, engine) as it:
            engine.gate.clear()
            asked = asyncio.ensure_future(it.ask({**ASK, "stream": True}))
            while not engine.bodies:
                await asyncio.sleep(0.01)
            (stream,) = it.proxy._service._streams
            stream._last -= 2 * front.KEEP_ALIVE_SECONDS
            (connection,) = it.proxy._connections._all
            connection.data_received(b"HTTP/1.1 400 Bad\r\nContent-Length: 2\r\n\r\n{}")
            it.proxy._service.keep_alive()
            assert (await asked)[0] == 400
            await asyncio.sleep(0)
            assert not stream.begun
            assert (await it.proxy.totals())["requests"] == 0
            engine.gate.set()
            assert (await it.ask(ASK))[0] == 200  # over the same connection

    run(scenario())


class Slow:
    """In place of a response: it begins when it is told to."""

    def __init__(self):
        self.prepared, self.ready, self.data, self.begun = False, asyncio.Event(), b"", 0

    async def prepare(self, request):
        self.begun += 1
        self.prepared = True  # as aiohttp has it: before the headers are written
        await self.ready.wait()

    async def write(self, data):
        self.data += data

    async def write_eof(self):
        self.data += b"end"


def slow_stream():
    stream = front.EventStream(None, {}, lambda: None)
    stream._response = Slow()
    return stream, stream._response


def test_words_that_were_cut_off_come_with_the_next():
    async def scenario():
        stream, response = slow_stream()
        ping = asyncio.ensure_future(stream.keep_alive())
        await asyncio.sleep(0)
        for number in (1, 2):
            cut = asyncio.ensure_future(stream.send([(None, {"n": number})]))
            await asyncio.sleep(0)
            cut.cancel()
        response.ready.set()
        await stream.send([(None, {"n": 3})])
        await ping
        await stream.end(b"last")
        words = b": waiting\n\n" + b"".join(b'data: {"n":%d}\n\n' % n for n in (1, 2, 3))
        assert response.data == words + b"lastend" and response.begun == 1

    run(scenario())


def test_a_sign_of_life_that_waited_is_not_written_once_it_is_over():
    async def scenario():
        stream, response = slow_stream()
        async with stream._starting:
            ping = asyncio.ensure_future(stream.keep_alive())
            await asyncio.sleep(0)
            stream.close()
        await ping
        assert not response.begun

    run(scenario())

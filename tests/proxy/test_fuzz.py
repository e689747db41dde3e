"""Whatever is sent gets a correct answer or a correct error, nothing in the log, and the proxy serves on."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.proxy.dialects import errors
from gyre.proxy.dialects.errors import Invalid
from gyre.proxy.dialects.messages_answer import MessageCall
from gyre.proxy.dialects.openai import OpenAiCall
from gyre.proxy.dialects.responses_answer import ResponseCall
from gyre.proxy.dialects.responses_store import Store
from tests.proxy.bodies import TEMPLATES, bodies
from tests.proxy.stand import stand
from tests.proxy.told_engine import ToldEngine, call

PATHS = ["/v1/messages", "/v1/responses", "/v1/chat/completions", "/v1/completions", "/v1/messages/count_tokens"]
OWN_PATHS = [PATHS[0], PATHS[1], PATHS[1], PATHS[2]]
SAID = {"reasoning": "hm", "content": "text", "tool_calls": [call("run", {"cmd": "ls"})]}
HEAD = {"id": "chatcmpl-1", "created": 1, "model": "m"}
FAST = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@given(bodies())
@settings(max_examples=300, deadline=None)
def test_any_body_is_understood_or_refused(drawn):
    which, body = drawn
    makers = [
        lambda: MessageCall(body, 100),
        *[lambda: ResponseCall(body, 100, Store())] * 2,
        lambda: OpenAiCall(body),
    ]
    try:
        chat = makers[which]().chat
    except Invalid as error:
        assert error.message and errors.openai(error)["error"]["message"]
        return
    for one in chat["messages"]:
        assert isinstance(one["role"], str) and isinstance(one.get("content"), str | list | None)
        for made in one.get("tool_calls") or ():
            assert isinstance(made["function"]["name"], str) and isinstance(made["function"]["arguments"], str)
    if which in (1, 2):
        made = ResponseCall(body, 100, Store())
        made.answer({**HEAD, "choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]})


# -- against a proxy that runs -----------------------------------------------------------------------------------------
class Running:
    """A proxy and an engine in a thread of their own."""

    def __init__(self, tmp_path) -> None:
        self._loop = asyncio.new_event_loop()
        self._done = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(tmp_path),))
        self._thread.start()
        assert self._ready.wait(20)

    async def _serve(self, tmp_path) -> None:
        async with stand(tmp_path, ToldEngine(0, tell=lambda body: SAID), models=["m"]) as self.it:
            self._ready.set()
            await self._done.wait()

    def close(self) -> None:
        """Stop both."""
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join()
        self._loop.close()

    def post(self, path: str, data: bytes) -> tuple[int, str, bytes]:
        """Status, kind of content, and content of the answer to a body."""

        async def ask() -> tuple[int, str, bytes]:
            async with self.it.post(data, path=path, timeout=aiohttp.ClientTimeout(20)) as response:
                return response.status, response.content_type, await response.read()

        return asyncio.run_coroutine_threadsafe(ask(), self._loop).result(30)

    def send(self, data: bytes) -> bytes:
        """What is answered to bytes on a connection, after which nothing more comes."""
        with socket.create_connection(("127.0.0.1", int(self.it.url.rsplit(":", 1)[1])), timeout=20) as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while piece := connection.recv(65536):
                    answer += piece
            except ConnectionError:
                pass
            return answer


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    it = Running(tmp_path_factory.mktemp("proxy"))
    yield it
    status, _, data = it.post("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "still there?"}]}')
    it.close()
    assert status == 200 and json.loads(data)["choices"][0]["message"]["content"] == "text"


@pytest.fixture
def quiet(caplog):
    caplog.set_level(logging.INFO)
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING or record.exc_info]
    assert "token-1" not in caplog.text


def demand_correct(path: str, status: int, kind: str, data: bytes) -> None:
    """An answer, or an error in the shape of the path's dialect."""
    assert status in (200, 400, 404), (status, data)
    if kind == "text/event-stream":
        events = [line for line in data.split(b"\n\n") if line]
        assert status == 200 and all(b"data: " in event for event in events)
        assert path.startswith("/v1/messages") or path == "/v1/responses" or events[-1] == b"data: [DONE]"
        return
    body = json.loads(data)
    if status == 200:
        assert body.get("id") or body.get("input_tokens")
    elif path.startswith("/v1/messages"):
        assert body["type"] == "error" and body["error"]["message"] and body["request_id"].startswith("req_")
        assert body["error"]["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"} and body["error"]["message"]


@given(bodies(), st.sampled_from(PATHS), st.sampled_from([None, True, False]))
@FAST
def test_bodies_of_the_wrong_shape(running, quiet, drawn, path, stream):
    which, body = drawn
    if path in PATHS[:3]:
        path = OWN_PATHS[which]
    if stream is not None:
        body = {**body, "stream": stream}
    demand_correct(path, *running.post(path, json.dumps(body).encode("utf-8", "surrogatepass")))


@st.composite
def broken(draw) -> bytes:
    """The bytes of a body with some of them changed, or any bytes."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=200))
    data = bytearray(json.dumps(draw(st.sampled_from(TEMPLATES))).encode())
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(
            st.binary(max_size=3) | st.sampled_from([b"[", b'"', b"\\ud800"])
        )
    return bytes(data)


@given(broken(), st.sampled_from(PATHS))
@FAST
def test_bodies_that_are_broken(running, quiet, data, path):
    demand_correct(path, *running.post(path, data))


GOOD = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nX-Api-Key: token-1\r\nContent-Length: 2\r\n\r\n{}"


@given(st.integers(0, len(GOOD)), st.integers(0, 4), st.binary(max_size=6) | st.just(b"\r\n\r\n"))
@FAST
def test_requests_that_are_broken(running, quiet, at, cut, more):
    answer = running.send(GOOD[:at] + more + GOOD[at + cut :])
    if answer:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/") and head.split(b" ")[1] in (b"200", b"400", b"401", b"404", b"405"), answer
        assert b"Traceback" not in body and (head.split(b" ")[1] == b"200" or b"error" in body)

"""HTTP to engines: answers that come in any pieces, answers that are none, and connections that are used again."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.proxy import connections
from gyre.proxy.connections import Connection, Connections, Lost

HEAD = b"HTTP/1.1 200 OK\r\nX-Gyre-Policy: 3\r\nTransfer-Encoding: chunked\r\n\r\n"


class Transport:
    """What a connection writes to."""

    def __init__(self) -> None:
        self.written = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


def chunked(pieces: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece) + b"0\r\n\r\n"


def fed(pieces: list[bytes], closed: bool = False) -> tuple[int, bytes, bool]:
    """Status and body of an answer that comes in these pieces, and whether its connection can be used again."""

    async def run() -> tuple[int, bytes, bool]:
        owner, transport = Connections(), Transport()
        connection = Connection(owner, ("engine", 1))
        connection.connection_made(transport)  # type: ignore[arg-type]
        asking = asyncio.ensure_future(connection.ask(b"POST / HTTP/1.1\r\n\r\n", b""))
        await asyncio.sleep(0)
        for piece in pieces:
            connection.data_received(piece)
        if closed:
            connection.connection_lost(None)
        else:
            asyncio.get_running_loop().call_later(0.2, connection.connection_lost, ConnectionResetError("no more"))
        await asking
        status, body = connection.status, await connection.read_all(1 << 20)
        connection.close()
        return status, body, connection.usable()

    return asyncio.run(run())


@st.composite
def cut(draw, data: bytes) -> list[bytes]:
    """Bytes in pieces."""
    places = sorted(draw(st.sets(st.integers(1, len(data) - 1), max_size=12)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@settings(max_examples=150, deadline=None)
@given(st.data(), st.lists(st.binary(max_size=40), max_size=6))
def test_chunks_come_in_any_pieces(data, pieces):
    sent = HEAD + chunked(pieces)
    assert fed(data.draw(cut(sent))) == (200, b"".join(pieces), True)


@settings(max_examples=50, deadline=None)
@given(st.data(), st.binary(max_size=60))
def test_a_body_of_a_known_length_comes_in_any_pieces(data, body):
    sent = b"HTTP/1.1 409 Conflict\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    assert fed(data.draw(cut(sent))) == (409, body, True)


@settings(max_examples=50, deadline=None)
@given(st.data(), st.binary(max_size=60))
def test_a_body_may_end_with_its_connection(data, body):
    sent = b"HTTP/1.0 200 OK\r\n\r\n" + body
    assert fed(data.draw(cut(sent)), closed=True) == (200, body, False)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.binary(max_size=200))
def test_whatever_comes_is_an_answer_or_lost(data, noise):
    sent = draw_spoilt(data, HEAD + chunked([b"data: {}\n\n", noise]))
    with contextlib.suppress(Lost):
        fed(data.draw(cut(sent)), closed=True)


def draw_spoilt(data, sent: bytes) -> bytes:
    at = data.draw(st.integers(0, len(sent) - 1))
    return sent[:at] + data.draw(st.binary(max_size=6)) + sent[data.draw(st.integers(at, len(sent) - 1)) :]


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        HEAD + b"-5\r\nabc",
        HEAD + b"\r\nabc",
        HEAD + b"z\r\nabc",
        HEAD + b"3\r\nabcd\r\n",
        HEAD + b"1" * 400,
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (1 << 17),
        HEAD + b"5\r\nab",
    ],
)
def test_what_is_no_http_is_lost(sent):
    with pytest.raises(Lost):
        fed([sent], closed=True)


@pytest.mark.parametrize("more", [b"HTTP/1.1 200 OK", b"\r\n"])
@pytest.mark.parametrize("answer", [HEAD + chunked([b"abc"]), b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"])
def test_more_than_an_answer_spoils_the_connection_alone(answer, more):
    assert fed([answer + more], closed=True) == (200, b"abc", False)


class Engine:
    """A server that answers every request with the next of its answers; `None` closes the connection."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.connections = self.left = 0
        self.requests: list[bytes] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append(head + await reader.readexactly(length))
                if (answer := self.answers.pop(0)) is None:
                    break
                writer.write(answer)
        self.left += 1
        writer.close()


def test_connections_are_used_again_and_let_go(monkeypatch):
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.1)

    async def ask(owner: Connections, url: str, whole: bool = False) -> bytes:
        connection = await owner.post(url, "/v1/x", {"A": "b"}, b"body")
        try:
            return await (connection.read() if whole else connection.read_all(100))
        finally:
            connection.close(whole)

    async def run() -> None:
        open_ended = HEAD + b"2\r\nab\r\n"
        engine = Engine(HEAD + chunked([b"one"]), HEAD + chunked([b"two"]), open_ended, HEAD + chunked([b"four"]), None)
        engine.answers += [HEAD + chunked([b"five"]), open_ended, HEAD + chunked([b"six"]), None]
        server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        owner = Connections()
        assert await ask(owner, url) == b"one"
        assert await ask(owner, url) == b"two"
        assert engine.connections == 1
        port = url.rpartition(":")[2]
        asked = f"POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nA: b\r\nContent-Length: 4\r\n\r\nbody"
        assert engine.requests == [asked.encode()] * 2
        # An answer that is whole, whose stream ends a little later.
        assert await ask(owner, url, whole=True) == b"ab"
        engine.writers[0].write(b"0\r\n\r\n")
        await asyncio.sleep(0.05)
        assert await ask(owner, url) == b"four"
        assert engine.connections == 1
        # The engine closes the one that was kept, as it may do at any time: another one takes the request.
        assert await ask(owner, url) == b"five"
        assert engine.connections == 2
        # One that is left in the middle of an answer is broken, and the engine sees it.
        connection = await owner.post(url, "/v1/x", {}, b"")
        connection.close()
        assert await ask(owner, url) == b"six"
        assert engine.connections == 3
        await asyncio.sleep(0.15)
        owner.look()
        await asyncio.sleep(0.05)
        assert engine.left == 3
        with pytest.raises(Lost) as lost:  # a new one that is closed in place of an answer
            await ask(owner, url)
        assert lost.value.reached
        server.close()
        await server.wait_closed()
        with pytest.raises(Lost) as lost:
            await ask(owner, url)
        assert not lost.value.reached

    asyncio.run(run())

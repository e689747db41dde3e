"""The gate in front of a toy server: what is admitted, refused, parked, cancelled and counted."""

import asyncio
import contextlib
import json

import pytest

from gyre.cell.gate import Gate, prompt_notes
from gyre.errors import WeightsMismatch
from gyre.splice import HEADER, PromptNote

SECRET = "key"


class ToyControl:
    """An engine that remembers what it was asked."""

    def __init__(self, server):
        self.server = server
        self.calls = []
        self.fault = None

    async def drain(self):
        assert not self.server.working, "the gate must not drain before its live requests ended"
        self.calls.append("drain")

    async def resume(self):
        if self.fault:
            raise self.fault
        self.calls.append("resume")

    async def sleep(self):
        self.calls.append("sleep")
        return {"slept": True}

    async def wake(self, tags):
        self.calls.append(("wake", tags))
        return {}

    async def load(self, path, checksum, snapshot):
        if self.fault:
            raise self.fault
        self.calls.append(("load", path, checksum, snapshot))
        return {"checksum": "c"}

    async def memory(self):
        return {"bytes": {}}

    def tokens(self):
        return 7

    def unfinished(self):
        return 0


class ToyServer:
    """Answers after `released`; a stream sends one event before that. Stubborn ones ignore a disconnect."""

    def __init__(self):
        self.released = asyncio.Event()
        self.working = 0
        self.seen = []
        self.stubborn = False

    async def __call__(self, scope, receive, send):
        self.working += 1
        try:
            await self._serve(scope, receive, send)
        finally:
            self.working -= 1

    async def _serve(self, scope, receive, send):
        message = await receive()
        body = json.loads(message["body"] or b"{}")
        self.seen.append((scope["path"], body))
        stream = body.get("stream", False)
        kind = b"text/event-stream; charset=utf-8" if stream else b"application/json"
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
        if stream:
            await send(start)
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        waiting = {asyncio.ensure_future(self.released.wait())}
        if not self.stubborn:
            waiting.add(asyncio.ensure_future(receive()))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        if self.released.is_set():
            if not stream:
                await send(start)
            await send({"type": "http.response.body", "body": b"data: 2\n\n" if stream else b"{}", "more_body": False})


class Client:
    """Calls an ASGI application."""

    def __init__(self, app):
        self.app = app

    async def call(self, method, path, body=None, headers=None, leave=None):
        """Returns (status, headers, body) of the answer; `leave` is an event after which the client is gone."""
        messages = [{"type": "http.request", "body": json.dumps(body or {}).encode(), "more_body": False}]
        sent = []

        async def receive():
            if messages:
                return messages.pop()
            await (leave or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message):
            sent.append(message)

        given = {"authorization": f"Bearer {SECRET}"} | (headers or {})
        raw = [(k.encode(), v.encode()) for k, v in given.items() if v is not None]
        scope = {"type": "http", "method": method, "path": path, "headers": raw, "asgi": {"spec_version": "2.4"}}
        await self.app(scope, receive, send)
        if not sent:
            return None, {}, b""
        assert sent[0]["type"] == "http.response.start"
        assert [m.get("more_body", False) for m in sent[1:]][-1:] == [False]
        return sent[0]["status"], dict(sent[0]["headers"]), b"".join(m.get("body", b"") for m in sent[1:])

    async def admin(self, name, /, **arguments):
        status, _, body = await self.call("POST", f"/gyre/{name}", arguments)
        return status, json.loads(body)

    def chat(self, execution=1, epoch=3, leave=None, **body):
        headers = {"x-gyre-execution": str(execution), "x-gyre-epoch": str(epoch)}
        return asyncio.ensure_future(self.call("POST", "/v1/chat/completions", body, headers, leave))


@contextlib.asynccontextmanager
async def opened():
    server = ToyServer()
    control = ToyControl(server)
    gate = Gate(server, secret=SECRET, rank=5, control=control)
    client = Client(gate)
    assert await client.admin("open", epoch=3, policy=2) == (200, gate.status())
    yield gate, server, control, client
    assert gate.status()["live"] == 0 and server.working == 0


def kind(answer):
    return answer[0], json.loads(answer[2])["error"]["type"]


async def until(condition):
    for _ in range(200):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come about")


def test_an_admitted_request_passes_unchanged_and_is_counted():
    async def scenario():
        async with opened() as (gate, server, _, client):
            request = client.chat(prompt="x")
            await until(lambda: gate.status()["live"] == 1)
            await asyncio.sleep(0.05)
            server.released.set()
            status, headers, body = await request
            assert (status, body) == (200, b"{}")
            assert (headers[b"x-gyre-policy"], headers[b"x-gyre-engine"]) == (b"2", b"5")
            assert server.seen == [("/v1/chat/completions", {"prompt": "x"})]
            status = gate.status()
            assert (status["requests"], status["tokens"], status["live"]) == (1, 7, 0)
            assert 0.05 <= status["busy_seconds"] < 0.5
            await asyncio.sleep(0.05)
            assert gate.status()["busy_seconds"] == status["busy_seconds"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "headers", "expected"),
    [
        ("GET", "/health", {"authorization": None}, 200),
        ("GET", "/gyre/status", {"authorization": None}, 401),
        ("POST", "/v1/completions", {"authorization": "Bearer kez"}, 401),
        ("POST", "/v1/completions", {}, 400),  # no execution, no epoch
        ("POST", "/v1/completions", {"x-gyre-execution": "one", "x-gyre-epoch": "3"}, 400),
        ("POST", "/v1/completions", {"x-gyre-execution": "1", "x-gyre-epoch": "2"}, 409),
        ("POST", "/v1/completions", {"x-gyre-execution": "1", "x-gyre-epoch": "4"}, 409),
        ("POST", "/sleep", {}, 404),
        ("POST", "/collective_rpc", {}, 404),
        ("POST", "/inference/v1/generate", {}, 404),
        ("GET", "/v1/completions", {}, 404),
        ("GET", "/v1/models", {}, 200),
        ("POST", "/gyre/nothing", {}, 404),
        ("POST", "/gyre/open", {}, 400),
    ],
)
def test_who_gets_where(method, path, headers, expected):
    async def scenario():
        async with opened() as (_, server, _, client):
            server.released.set()
            status, _, _ = await client.call(method, path, {}, headers)
            assert status == expected
            assert bool(server.seen) == (expected == 200)

    asyncio.run(scenario())


def test_close_ends_live_work_before_it_says_zero():
    async def scenario():
        async with opened() as (gate, server, control, client):
            plain, stream = client.chat(), client.chat(stream=True)
            await until(lambda: server.working == 2)
            assert await client.admin("close") == (200, {"live": 0})
            assert server.working == 0 and control.calls == ["resume", "drain"]
            assert kind(await plain) == (409, "gyre_moved")
            status, _, body = await stream
            assert (status, body) == (200, b'data: 1\n\nevent: gyre\ndata: {"moved": true}\n\n')
            assert kind(await client.chat()) == (409, "gyre_moved")  # also under the epoch that was
            assert gate.status()["state"] == "closed"

    asyncio.run(scenario())


def test_close_does_not_depend_on_a_server_that_listens(monkeypatch):
    monkeypatch.setattr("gyre.cell.gate.DISCONNECT_SECONDS", 0.05)

    async def scenario():
        async with opened() as (_, server, _, client):
            server.stubborn = True
            request = client.chat(stream=True)
            await until(lambda: server.working == 1)
            assert await client.admin("close") == (200, {"live": 0})
            assert b"event: gyre" in (await request)[2]

    asyncio.run(scenario())


def test_a_client_that_leaves_frees_its_place():
    async def scenario():
        async with opened() as (gate, server, _, client):
            leave = asyncio.Event()
            request = client.chat(leave=leave)
            await until(lambda: server.working == 1)
            leave.set()
            assert await request == (None, {}, b"")
            assert gate.status()["live"] == 0

    asyncio.run(scenario())


def test_hold_parks_and_admit_serves_under_the_new_policy():
    async def scenario():
        async with opened() as (gate, server, _, client):
            live = client.chat()
            await until(lambda: server.working == 1)
            assert await client.admin("hold") == (200, {"live": 0})
            assert kind(await live) == (409, "gyre_moved")
            leave = asyncio.Event()
            parked, left = client.chat(), client.chat(leave=leave)
            closed_one = client.chat(execution=8)
            await until(lambda: gate.status()["parked"] == 3)
            leave.set()
            assert (await left)[0] is None
            assert (await client.admin("load", path="p", checksum="c", snapshot=4))[0] == 200
            assert (await client.admin("closed", n=[8]))[0] == 200
            server.released.set()
            assert (await client.admin("admit", policy=3))[0] == 200
            status, headers, _ = await parked
            assert (status, headers[b"x-gyre-policy"]) == (200, b"3")
            assert kind(await closed_one) == (409, "gyre_execution_closed")

    asyncio.run(scenario())


def test_parked_requests_are_refused_when_the_gate_closes():
    async def scenario():
        async with opened() as (gate, _, _, client):
            await client.admin("hold")
            parked = client.chat()
            await until(lambda: gate.status()["parked"] == 1)
            await client.admin("close")
            assert kind(await parked) == (409, "gyre_moved")
            status, answer = await client.admin("hold")
            assert (status, answer["error"]["type"]) == (409, "gyre_conflict")

    asyncio.run(scenario())


def test_a_closed_execution_is_cancelled_alone_and_refused_from_then_on():
    async def scenario():
        async with opened() as (gate, server, _, client):
            mine, streaming, other = client.chat(execution=1), client.chat(execution=1, stream=True), client.chat(2)
            await until(lambda: server.working == 3)
            await client.admin("closed", n=[1])
            assert kind(await mine) == (409, "gyre_execution_closed")
            assert (await streaming)[2].endswith(b'event: gyre\ndata: {"moved": false, "closed": true}\n\n')
            assert kind(await client.chat(execution=1)) == (409, "gyre_execution_closed")
            assert gate.status()["live"] == 1
            server.released.set()
            assert (await other)[0] == 200

    asyncio.run(scenario())


def test_operations_that_need_quiet_are_refused_while_open():
    async def scenario():
        async with opened() as (_, _, control, client):
            operations = {"sleep": {}, "wake": {"tags": ["weights"]}, "load": {"path": "p"}, "admit": {"policy": 1}}
            for name, arguments in operations.items():
                status, answer = await client.admin(name, **arguments)
                assert (status, answer["error"]["type"]) == (409, "gyre_conflict")
            await client.admin("close")
            assert await client.admin("sleep") == (200, {"slept": True})
            assert (await client.admin("wake", tags=["weights"]))[0] == 200
            assert (await client.admin("load", path="p"))[0] == 200
            assert control.calls[-2:] == [("wake", ["weights"]), ("load", "p", None, None)]

    asyncio.run(scenario())


def test_faults_have_names_and_leave_the_gate_as_it_was():
    async def scenario():
        async with opened() as (gate, _, control, client):
            await client.admin("close")
            control.fault = WeightsMismatch("snapshot 4 was altered")
            status, answer = await client.admin("load", path="p")
            assert (status, answer["error"]) == (
                409,
                {"type": "gyre_weights_mismatch", "message": "snapshot 4 was altered"},
            )
            control.fault = RuntimeError("no memory")
            status, answer = await client.admin("open", epoch=4, policy=2)
            assert (status, answer["error"]["type"]) == (500, "gyre_fault")
            assert (gate.state, gate.epoch) == ("closed", 3)

    asyncio.run(scenario())


def test_a_burst_of_requests_and_role_changes_loses_none():
    async def scenario():
        async with opened() as (gate, server, _, client):
            answers = []

            async def one(n):
                for _ in range(20):
                    request = client.chat(n, epoch=gate.epoch, stream=bool(n % 2))
                    status, _, body = await request
                    answers.append(status == 409 or b"event: gyre" in body or body.endswith((b"data: 2\n\n", b"{}")))
                    await asyncio.sleep(0)

            async def moves():
                for epoch in range(4, 40):
                    await asyncio.sleep(0.001)
                    server.released.set() if epoch % 2 else server.released.clear()
                    assert await client.admin("close") == (200, {"live": 0})
                    assert server.working == 0
                    await client.admin("open", epoch=epoch, policy=epoch)
                    if epoch % 3 == 0:
                        assert await client.admin("hold") == (200, {"live": 0})
                        await client.admin("admit", policy=epoch)
                server.released.set()

            await asyncio.gather(moves(), *(one(n) for n in range(12)))
            assert len(answers) == 240 and all(answers)

    asyncio.run(scenario())


class Raw:
    """A request whose body comes in given pieces, and whose answer is kept message by message."""

    def __init__(self, app, *pieces, headers=(), path="/v1/completions"):
        self.sent = []
        self.pieces = list(pieces)
        given = {"authorization": f"Bearer {SECRET}", "x-gyre-execution": "1", "x-gyre-epoch": "3", **dict(headers)}
        raw = [(k.encode(), v.encode()) for k, v in given.items()]
        scope = {"type": "http", "method": "POST", "path": path, "headers": raw, "asgi": {}}
        self.done = asyncio.ensure_future(app(scope, self.receive, self.send))

    async def receive(self):
        if not self.pieces:
            await asyncio.Event().wait()
        body = self.pieces.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(self.pieces) or body == b"more"}

    async def send(self, message):
        self.sent.append(message)

    async def answer(self):
        await self.done
        return self.sent[0]["status"], json.loads(self.sent[1]["body"])["error"]["type"]


@pytest.mark.parametrize(
    ("path", "headers", "pieces"),
    [
        ("/v1/completions", {}, [b"1" * 20, b"2" * 21]),
        ("/v1/completions", {"content-length": "41"}, []),
        ("/v1/completions", {"content-length": "9" * 5000}, []),
        ("/gyre/closed", {}, [b"1" * 41]),
    ],
)
def test_a_body_that_is_too_large_is_told_so(monkeypatch, path, headers, pieces):
    monkeypatch.setattr("gyre.cell.gate.BODY_LIMIT", 40)
    monkeypatch.setattr("gyre.cell.gate.ADMIN_BODY_LIMIT", 40)

    async def scenario():
        async with opened() as (_, server, _, client):
            assert await Raw(client.app, *pieces, headers=headers, path=path).answer() == (413, "gyre_large_body")
            assert not server.seen

    asyncio.run(scenario())


def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("gyre.cell.gate_answer.BODY_SECONDS", 0.05)

    async def scenario():
        async with opened() as (_, server, _, client):
            assert await Raw(client.app, b"more").answer() == (408, "gyre_slow_body")
            assert not server.seen

    asyncio.run(scenario())


def test_more_requests_than_a_gate_keeps_are_refused(monkeypatch):
    monkeypatch.setattr("gyre.cell.gate.REQUEST_LIMIT", 2)

    async def scenario():
        async with opened() as (gate, server, _, client):
            await client.admin("hold")
            parked = [client.chat(), client.chat()]
            await until(lambda: gate.status()["parked"] == 2)
            assert kind(await client.chat()) == (503, "gyre_busy")
            server.released.set()
            await client.admin("admit", policy=2)
            assert [(await request)[0] for request in parked] == [200, 200]
            assert (await client.chat())[0] == 200

    asyncio.run(scenario())


async def serve_stream(send, *events):
    kind = (b"content-type", b"text/event-stream; charset=utf-8")
    await send({"type": "http.response.start", "status": 200, "headers": [kind]})
    for event in events:
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.mark.parametrize(
    ("first", "status"),
    [
        (b'data: {"error": {"message": "too long", "code": 400}}\n\n', 400),
        (b'data: {"error": {"message": "too long", "code": 200}}\n\n', 200),
        (b'data: {"error": 5}\n\n', 200),
        (b'data: {"error": {"message"\n\n', 200),
        (b'data: {"choices": []}\n\n', 200),
    ],
)
def test_a_stream_that_begins_with_an_error_is_a_refusal(first, status):
    async def app(scope, receive, send):
        await serve_stream(send, first, b"data: [DONE]\n\n")

    async def scenario():
        client = Client(Gate(app, secret=SECRET, rank=5, control=ToyControl(ToyServer())))
        await client.admin("open", epoch=3, policy=2)
        got, headers, body = await client.chat(stream=True)
        assert got == status
        refused = status == 400
        assert body == (first[6:].strip() if refused else first + b"data: [DONE]\n\n")
        assert headers[b"content-type"] == (b"application/json" if refused else b"text/event-stream; charset=utf-8")
        assert headers[b"x-gyre-engine"] == b"5"

    asyncio.run(scenario())


def test_what_an_engine_says_of_a_prompt_goes_with_the_answer():
    """Also when it says it only after the answer's start, and to each request its own."""

    async def app(scope, receive, send):
        body = json.loads((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.01)
        if length := body["length"]:
            prompt_notes.get().append(PromptNote((length, "d"), True, length))
        await send({"type": "http.response.body", "body": b"{}", "more_body": False})

    async def scenario():
        client = Client(Gate(app, secret=SECRET, rank=5, control=ToyControl(ToyServer())))
        await client.admin("open", epoch=3, policy=2)
        answers = await asyncio.gather(*(client.chat(length=n) for n in range(4)))
        notes = [headers.get(HEADER.encode()) for _, headers, _ in answers]
        assert notes[0] is None
        assert [PromptNote.decode(n.decode()) for n in notes[1:]] == [PromptNote((n, "d"), True, n) for n in (1, 2, 3)]

    asyncio.run(scenario())

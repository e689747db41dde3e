"""The feeder over HTTP: claims of several, claims that wait, what is refused, and what it says of bad requests."""

import asyncio
import json
import urllib.error
import urllib.request
from dataclasses import replace

import numpy as np
import pytest

from gyre.errors import ChildFailed, StreamConflict
from gyre.run_dir import RunDir
from gyre.training import feeder as module
from gyre.training.feeder import Feeder
from gyre.training.packing import Row
from gyre.training.stream import Claims
from tests.training.cells import SECRET, make_config, make_sample

CORE = (0, 1)


class Endpoint:
    def __init__(self):
        self.events = []

    def emit(self, event):
        self.events.append(event)

    def of(self, kind):
        return [event for event in self.events if event["type"] == kind]


@pytest.fixture
def world(tmp_path, monkeypatch):
    """Runs a scenario: a coroutine function of a feeder, its endpoint, and a factory of clients."""
    rows = {}
    monkeypatch.setattr(module, "rows_of", lambda run_dir, config, group, executions: (rows[group], [1.0]))

    def run(scenario, **train):
        async def main():
            endpoint = Endpoint()
            feeder = Feeder(RunDir(tmp_path).create(), make_config(**train), endpoint)
            url = (await feeder.start(SECRET, "127.0.0.1"))["url"]
            clients = []

            def client(member=CORE, secret=SECRET):
                clients.append(Claims(url, secret, member))
                return clients[-1]

            try:
                await asyncio.wait_for(scenario(feeder, endpoint, client), 30)
            finally:
                for one in clients:
                    one.close()
                await feeder.stop()

        asyncio.run(main())

    run.rows = rows
    return run


def of_length(n: int, group: int, length: int) -> Row:
    sample = make_sample(n, group)
    fitted = {name: np.resize(getattr(sample, name), length) for name in ("tokens", "logprobs", "versions")}
    trained, temperatures = np.zeros(length, bool), np.ones(length, np.float32)
    trained[-1], fitted["versions"][-1], fitted["logprobs"][-1] = True, 0, -1.0
    return Row(replace(sample, **fitted, trained=trained, temperatures=temperatures), 1.0)


def test_a_claim_of_several_and_one_whose_answer_was_lost(world):
    world.rows[1] = [of_length(n, 1, 50) for n in range(5)]  # each is a micro-step of its own

    async def scenario(feeder, endpoint, client):
        await feeder.feed(1, [0])
        await feeder.begin(1, 1)
        claims = client()

        async def claim(*arguments, **more):
            return await asyncio.to_thread(claims.claim, 1, *arguments, **more)

        first = await claim([], want=2)
        assert first.word == "step" and [step.id for step in first.steps] == [1, 2] and first.unfinished == 2
        again = await claim([], want=2)  # it did not hear of them
        assert [step.id for step in again.steps] == [1, 2]
        assert all((a.tokens == b.tokens).all() for a, b in zip(first.steps, again.steps, strict=True))
        more = await claim([1], holding=[2], want=2, wait=False)
        assert [step.id for step in more.steps] == [3, 4] and more.unfinished == 3
        rest = await claim([2, 3], [4], 9)
        assert [step.id for step in rest.steps] == [5]
        done = await claim([4, 5])
        assert (done.word, done.steps, done.unfinished) == ("closed", [], 0)
        assert endpoint.of("taken") == [{"type": "taken", "group": 1, "update": 1}]
        assert endpoint.of("stream")[-1]["finished"] == 5 and endpoint.of("stream")[-1]["dry"]

    world(scenario, micro_tokens=96)


def test_a_claim_waits_for_work_unless_it_says_not_to(world):
    world.rows[1] = [of_length(1, 1, 20)]

    async def scenario(feeder, endpoint, client):
        await feeder.begin(1, 1)
        claims = client()
        hasty = await asyncio.to_thread(claims.claim, 1, [], wait=False)
        assert hasty.word == "wait"
        patient = asyncio.create_task(asyncio.to_thread(claims.claim, 1, []))
        await asyncio.sleep(0.05)
        await feeder.feed(1, [0])
        assert len((await patient).steps) == 1

    world(scenario)


def test_what_waits_for_more_is_given_when_the_update_ends_short(world):
    world.rows |= {group: [of_length(group, group, 20)] for group in range(4)}

    async def scenario(feeder, endpoint, client):
        claims = client()
        await feeder.begin(1, 20)
        for group in range(4):
            await feeder.feed(group, [group])
        assert (await asyncio.to_thread(claims.claim, 1, [], wait=False)).word == "wait"  # 80 of 96 tokens
        assert [event["group"] for event in endpoint.of("taken")] == [0, 1, 2, 3]
        patient = asyncio.create_task(asyncio.to_thread(claims.claim, 1, []))
        await asyncio.sleep(0.05)
        await feeder.close_short(1)
        step = (await patient).steps[0]
        assert len(step.tokens) == 80
        assert (await asyncio.to_thread(claims.claim, 1, [step.id])).word == "closed"

    world(scenario)


def test_nothing_is_leased_to_a_connection_that_is_gone(world):
    world.rows |= {1: [of_length(1, 1, 20)]}

    async def scenario(feeder, endpoint, client):
        await feeder.begin(1, 1)
        claims = client()
        url = claims._url
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        body = json.dumps(
            {"update": 1, "rank": 1, "incarnation": 1, "finished": [], "holding": [], "want": 1, "wait": True}
        )
        head = (
            f"POST /claim HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write((head + body).encode())
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await writer.wait_closed()
        await asyncio.sleep(0.05)
        await feeder.feed(1, [0])
        await asyncio.sleep(0.05)
        assert (await asyncio.to_thread(claims.claim, 1, [], wait=False)).word == "step"

    world(scenario)


def test_a_sample_over_the_limit_is_left_out_and_said_to_be(world):
    world.rows |= {
        1: [of_length(1, 1, 101), of_length(2, 1, 100)],
        2: [of_length(3, 2, 200), of_length(4, 2, 300)],
    }

    async def scenario(feeder, endpoint, client):
        await feeder.begin(1, 2)
        told = [await feeder.feed(group, [0]) for group in (1, 2)]
        assert [(one["rows"], one["refused"], one["tokens"]) for one in told] == [(1, 1, 100), (0, 2, 0)]
        refused = [(e["group"], e["execution"], e["tokens"], e["limit"]) for e in endpoint.of("refused")]
        assert refused == [(1, 1, 101, 100), (2, 3, 200, 100), (2, 4, 300, 100)]
        claims = client()
        answer = await asyncio.to_thread(claims.claim, 1, [])
        assert [len(step.tokens) for step in answer.steps] == [100]  # longer than the budget, it comes alone
        assert (await asyncio.to_thread(claims.claim, 1, [1])).word == "closed"
        assert [event["group"] for event in endpoint.of("taken")] == [1, 2]
        settled = await asyncio.to_thread(claims.settle, 1, {CORE: [1]}, True)
        assert settled["ok"] and settled["numbers"]["groups"] == 2 and settled["numbers"]["fill"] == 0

    world(scenario, micro_tokens=96, sample_limit=100)


def test_the_limit_is_that_of_the_model_where_none_is_given():
    config = make_config()
    assert Feeder(None, config, Endpoint())._limit == config.model.max_context


def test_a_barred_member_is_told_so(world):
    world.rows[1] = [of_length(n, 1, 50) for n in range(2)]

    async def scenario(feeder, endpoint, client):
        await feeder.begin(1, 1)
        await feeder.feed(1, [0])
        core, other = client(), client((1, 4))
        mine = await asyncio.to_thread(other.claim, 1, [])
        await asyncio.to_thread(core.bar, 1, (1, 4), "silent")
        assert (await asyncio.to_thread(other.claim, 1, [1])).word == "barred"
        assert await asyncio.to_thread(core.barred, 1) == {(1, 4)}
        assert endpoint.of("barred") == [
            {"type": "barred", "update": 1, "rank": 1, "incarnation": 4, "reason": "silent"}
        ]
        back = await asyncio.to_thread(core.claim, 1, [], want=2)
        assert sorted(step.id for step in back.steps) == [1, 2] and mine.steps[0].id == 1
        with pytest.raises(StreamConflict, match="does not hold"):
            await asyncio.to_thread(core.claim, 1, [7])

    world(scenario)


BODIES = {
    "": "Expecting value",
    "[1]": "not a JSON object",
    "{}": "is missing",
    '{"update": true}': "update is not of type int",
    '{"update": 1, "rank": 0, "incarnation": 1, "finished": ["1"], "holding": [], "want": 1, "wait": true}': "finished",
    '{"update": 1, "rank": 0, "incarnation": 1, "finished": [], "holding": [], "want": 0, "wait": true}': "want is 0",
    '{"update": 1, "rank": 0, "incarnation": 1, "finished": [], "holding": [], "want": 1, "wait": 1}': "wait",
}
SETTLE = {
    '{"update": 1, "core": [0], "ledgers": [], "final": true}': "core",
    '{"update": 1, "core": [0, 1], "ledgers": [[0, 1]], "final": true}': "ledger",
    '{"update": 1, "core": [0, 1], "ledgers": [[0, 1, 2]], "final": true}': "micro-steps",
    '{"update": 1, "core": [0, 1], "ledgers": [[0, 1, []], [0, 1, []]], "final": true}': "two ledgers",
}


def test_malformed_requests_are_refused_with_a_line_that_says_why(world):
    async def scenario(feeder, endpoint, client):
        await feeder.begin(1, 1)
        url = client()._url.geturl()

        def post(path, body, secret=SECRET):
            request = urllib.request.Request(url + path, body.encode(), {"Authorization": f"Bearer {secret}"})
            try:
                with urllib.request.urlopen(request, timeout=10) as response:
                    return response.status, response.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        for path, bodies in (("/claim", BODIES), ("/settle", SETTLE), ("/bar", {"{}": ""}), ("/barred", {"1": ""})):
            for body, why in bodies.items():
                status, text = await asyncio.to_thread(post, path, body)
                assert status == 400 and why in text and "\n" not in text, (path, body, text)
        for guess in ("guess", "gu\xe9ss"):
            assert (await asyncio.to_thread(post, "/claim", "{}", guess))[0] == 401
        with pytest.raises(StreamConflict, match="refused /barred: 409"):
            await asyncio.to_thread(client().barred, 9)
        with pytest.raises(StreamConflict, match="401"):
            await asyncio.to_thread(client(secret="guess").claim, 1, [])

    world(scenario)


def test_an_answer_that_cannot_be_read_is_the_feeders_fault(world, monkeypatch):
    world.rows[1] = [of_length(1, 1, 20)]
    monkeypatch.setattr(module, "encode_all", lambda steps: b"\x09" + bytes(7) + b"nonsense!")

    async def scenario(feeder, endpoint, client):
        await feeder.begin(1, 1)
        await feeder.feed(1, [0])
        with pytest.raises(ChildFailed, match="cannot be read"):
            await asyncio.to_thread(client().claim, 1, [])

    world(scenario)

"""A real timed engine behind the gate: its pace, its answers, its weights; and the clock it goes by."""

import asyncio
import contextlib
import json
import time
from pathlib import Path

import aiohttp
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gyre import models
from gyre.cell.engine_client import EngineProcess, EngineSettings
from gyre.cell.pace import Pace
from gyre.checksum import checksum
from gyre.errors import ChildFailed, UserError, WeightsMismatch

SECRET = "timed-test"
MESSAGES = [{"role": "user", "content": "go on"}]
RATE = 200.0


# -- the clock ---------------------------------------------------------------------------------------------------------
@given(st.lists(st.floats(0.001, 0.7), min_size=1, max_size=60), st.integers(1, 5), st.floats(0, 2))
def test_a_request_has_what_its_time_is_worth_however_often_it_is_asked(steps, live, slowdown):
    pace = Pace(50.0, slowdown)
    stints = [pace.begin(10**6, 100.0) for _ in range(live)]
    now = 100.0
    for step in steps:
        now += step
        counts = {pace.tokens(stint, now) for stint in stints}
        assert len(counts) == 1
        exact = (now - 100.0) * 50.0 / (1 + slowdown * (live - 1))
        assert exact - 1.001 <= counts.pop() <= exact + 0.001
        nth = pace.tokens(stints[0], now) + 1
        assert now - 1e-6 <= pace.due(stints[0], nth) <= now + 1.001 / pace.speed


def test_whoever_comes_slows_the_others_down_from_then_on():
    pace = Pace(10.0, 1.0)
    first = pace.begin(100, 0.0)
    second = pace.begin(100, 2.0)
    assert (pace.tokens(first, 4.0), pace.tokens(second, 4.0)) == (30, 10)
    pace.end(4.0)
    assert pace.tokens(first, 5.0) == 40
    assert pace.due(first, 100) == pytest.approx(11.0)


# -- the engine --------------------------------------------------------------------------------------------------------
class Engine:
    """One engine that has weights, and calls to it."""

    def __init__(self, model, log, **timed):
        self.loop = asyncio.new_event_loop()
        self.model = model
        pace = {"tokens_per_second": RATE, "slowdown": 0.0, "sleep_seconds": 0.0, "wake_seconds": 0.0, **timed}
        settings = EngineSettings(model=str(model), secret=SECRET, rank=3, max_context=512, slots=8, timed=pace)
        begun = time.monotonic()
        self.process = self.run(EngineProcess.start(settings, log))
        self.run(self.process.ready(60))
        self.started_in = time.monotonic() - begun
        self.session = self.run(self._session())
        self.epoch = 0

    async def _session(self):
        return aiohttp.ClientSession(headers={"Authorization": f"Bearer {SECRET}"})

    def run(self, work):
        return self.loop.run_until_complete(work)

    async def open(self):
        await self.process.load(self.model)
        self.epoch += 1
        await self.process.open(self.epoch, 7)

    async def stream(self, path, body, take=None):
        """(token ids, last event, seconds); `take` is called with the number of tokens so far."""
        headers = {"X-Gyre-Execution": "1", "X-Gyre-Epoch": str(self.epoch)}
        body = {"stream": True, "return_token_ids": True, "logprobs": 0 if "prompt" in body else True, **body}
        begun, tokens, last = time.monotonic(), [], b""
        async with self.session.post(self.process.url + path, json=body, headers=headers) as response:
            assert response.status == 200 and response.headers["X-Gyre-Policy"] == "7"
            async for line in response.content:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:]).get("choices", [{}])
                    tokens += choice.get("token_ids", [])
                    assert len(logprobs_of(choice)) == len(choice.get("token_ids", []))
                    if take:
                        take(len(tokens))
                last = line if line.strip() else last
        return tokens, last.strip(), time.monotonic() - begun

    def chat(self, count, **more):
        return self.stream("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": count, **more})

    def stop(self):
        self.run(self.session.close())
        self.run(self.process.stop())
        self.loop.close()


def logprobs_of(choice):
    given = choice.get("logprobs") or {}
    return given.get("token_logprobs") or [entry["logprob"] for entry in given.get("content") or []]


@pytest.fixture(scope="module")
def model():
    return models.resolve("gyre:timed")


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    engine = Engine(model, tmp_path_factory.mktemp("timed") / "engine.log")
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture
def opened(engine):
    engine.run(engine.open())
    yield engine
    assert engine.run(engine.process.close()) == 0


def test_it_starts_soon_and_without_the_heavy_libraries(engine):
    assert engine.started_in < 15, "about a second where nothing else runs"
    maps = Path(f"/proc/{engine.process.pid}/maps").read_text()
    assert "libtorch" not in maps and "/vllm" not in maps


def test_answers_take_their_time_and_no_longer(opened):
    async def three():
        return await asyncio.gather(opened.chat(60), opened.chat(100), opened.chat(160))

    for (tokens, last, seconds), count in zip(opened.run(three()), (60, 100, 160), strict=True):
        assert (len(tokens), last) == (count, b"data: [DONE]")
        assert count / RATE - 0.01 < seconds < count / RATE + 0.3
    assert opened.run(opened.process.status())["tokens"] >= 320


def test_live_requests_slow_each_other_down(model, tmp_path):
    shared = Engine(model, tmp_path / "log", slowdown=1.0)
    try:
        shared.run(shared.open())

        async def two():
            return await asyncio.gather(shared.chat(40), shared.chat(80))

        (_, _, first), (_, _, second) = shared.run(two())
        assert 0.39 < first < 0.7 and 0.59 < second < 0.9  # 80 tokens at 200/s shared; then 40 alone
    finally:
        shared.stop()


def test_an_answer_goes_on_after_a_move_as_if_there_had_been_none(opened):
    whole, _, _ = opened.run(opened.chat(60))
    prompt = [257, *b"user\ngo on", 258, 10, 257, *b"assistant\n"]

    async def moved():
        asking = asyncio.ensure_future(opened.chat(60))
        await asyncio.sleep(0.15)
        assert await opened.process.close() == 0
        return await asking

    kept, last, _ = opened.run(moved())
    assert 10 <= len(kept) < 60 and json.loads(last.removeprefix(b"data: ")) == {"moved": True}
    opened.run(opened.open())
    body = {"prompt": [*prompt, *kept], "max_tokens": 60 - len(kept)}
    rest, last, _ = opened.run(opened.stream("/v1/completions", body))
    assert kept + rest == whole and last == b"data: [DONE]"


def test_plain_answers_and_refusals(opened):
    async def post(body, path="/v1/chat/completions"):
        headers = {"X-Gyre-Execution": "1", "X-Gyre-Epoch": str(opened.epoch)}
        async with opened.session.post(opened.process.url + path, json=body, headers=headers) as response:
            return response.status, await response.json()

    status, answer = opened.run(post({"messages": MESSAGES, "max_tokens": 5, "n": 2}))
    assert status == 200 and [choice["finish_reason"] for choice in answer["choices"]] == ["length"] * 2
    assert {len(choice["message"]["content"]) for choice in answer["choices"]} == {5}
    assert answer["usage"]["completion_tokens"] == 10
    for wrong in ({"messages": MESSAGES, "max_tokens": 0}, {}, {"messages": 3}, [], {"messages": MESSAGES * 99}):
        assert opened.run(post(wrong))[0] == 400
    assert opened.run(post({"prompt": "x"}, "/tokenize"))[0] == 404


def test_many_answers_cost_little_of_a_core(opened):
    process = psutil.Process(opened.process.pid)

    async def eight():
        await asyncio.gather(*(opened.chat(300, n=1) for _ in range(8)))

    before, begun = sum(process.cpu_times()[:2]), time.monotonic()
    opened.run(eight())
    share = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - begun)
    assert share < 0.25, f"{share:.2f} of a core for 8 answers at {RATE:g} tokens a second each"


def test_weights_are_loaded_verified_and_given_back(engine, model, tmp_path):
    process, run = engine.process, engine.run
    tensors = load_file(model / "model.safetensors")
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        tensors = {key: tensor.to(dtype) for key, tensor in tensors.items()}
        save_file(tensors, tmp_path / name)
        expected = checksum(tensors.items())
        assert run(process.load(tmp_path / name, expected, 4))["checksum"] == expected
    with pytest.raises(WeightsMismatch, match="announced was"):
        run(process.load(tmp_path / "f32", expected, 5))
    with pytest.raises(ChildFailed, match="cannot serve"):
        run(process.open(50, 1))
    run(process.close())
    run(process.sleep())
    assert run(process.memory())["bytes"] == {"weights": 0, "kv": 0}
    with pytest.raises(ChildFailed, match="wake it"):
        run(process.load(model))
    with pytest.raises(UserError, match="unknown tags"):
        run(process.wake(["all"]))
    run(process.wake(["weights"]))
    run(process.load(model))
    run(process.wake(["kv_cache"]))
    assert run(process.memory())["bytes"] == {"weights": 4096, "kv": 4096}


def test_moves_take_the_configured_time(model, tmp_path):
    slow = Engine(model, tmp_path / "log", sleep_seconds=0.3, wake_seconds=0.2)
    try:
        for call, least in ((slow.process.sleep, 0.3), (lambda: slow.process.wake(["weights", "kv_cache"]), 0.2)):
            begun = time.monotonic()
            slow.run(call())
            assert least <= time.monotonic() - begun < least + 0.5
    finally:
        slow.stop()


def test_it_ends_with_its_supervisor(model, tmp_path):
    orphan = Engine(model, tmp_path / "log")
    pid = orphan.process.pid
    orphan.process._writer.close()
    orphan.run(asyncio.sleep(0.05))  # the loop closes it
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(10)
    orphan.stop()
    assert not psutil.pid_exists(pid)

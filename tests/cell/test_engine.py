"""A real engine with the tiny model: what it records, refuses, cancels, releases and loads."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import aiohttp
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gyre import models
from gyre.cell import engine_process
from gyre.cell.engine_client import EngineProcess, EngineSettings
from gyre.cell.engine_process import ZYGOTE_VARIABLE
from gyre.cell.zygote import listen, peer_user
from gyre.checksum import checksum
from gyre.errors import ChildFailed, UserError, WeightsMismatch

SECRET = "engine-test"
PROMPT = [257, *b"user\nsay aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", 258, 10, 257, *b"assistant\n"]
LONG = {"max_tokens": 430, "ignore_eos": True, "stream": True}


def settings(path, **changes):
    """Settings of a small engine; float32, because outputs are compared with transformers'."""
    args = {"kv-cache-memory-bytes": "32M"}
    own = {"rank": 3, "dtype": "float32", "max_context": 512, "slots": 4, "args": args}
    return EngineSettings(model=str(path), secret=SECRET, **{**own, **changes})


class Engine:
    """One engine for all tests, and the loop it lives in."""

    def __init__(self, path, log):
        self.path = path
        self.log = log
        self.loop = asyncio.new_event_loop()
        self.epoch = 0
        self.process = self.run(EngineProcess.start(self.settings(), log))
        self.stages = []
        self.run(self.process.ready(180, self.stages.append))
        self.session = self.run(self._session())

    def settings(self):
        return settings(self.path)

    async def _session(self):
        return aiohttp.ClientSession(headers={"Authorization": f"Bearer {SECRET}"})

    def run(self, work):
        return self.loop.run_until_complete(work)

    async def open(self, policy=0):
        self.epoch += 1
        await self.process.open(self.epoch, policy)

    def headers(self, execution=1, epoch=None):
        return {"X-Gyre-Execution": str(execution), "X-Gyre-Epoch": str(self.epoch if epoch is None else epoch)}

    async def post(self, body, path="/v1/completions", **who):
        url = self.process.url + path
        async with self.session.post(url, json={"model": "gyre", **body}, headers=self.headers(**who)) as response:
            return response.status, response.headers, await response.read()

    async def complete(self, prompt=PROMPT, **body):
        """(token ids, log-probabilities, usage) of one completion; greedy unless said otherwise."""
        body = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, **body}
        body |= {"prompt": prompt, "logprobs": 0, "return_token_ids": True}
        status, headers, data = await self.post(body)
        assert status == 200, data
        answer = json.loads(data)
        choice = answer["choices"][0]
        assert choice["prompt_token_ids"] == prompt
        return choice["token_ids"], choice["logprobs"]["token_logprobs"], answer["usage"]

    def stop(self):
        self.run(self.session.close())
        self.run(self.process.stop())
        self.loop.close()


@pytest.fixture(scope="module")
def tiny():
    return models.resolve("gyre:tiny")


@pytest.fixture(scope="module")
def engine(tiny, tmp_path_factory, fork_server):
    engine = Engine(tiny, tmp_path_factory.mktemp("engine") / "engine.log")
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture
def opened(engine):
    """The engine with an open gate, and closed with nothing live afterwards."""
    engine.run(engine.open())
    yield engine
    assert engine.run(engine.process.close()) == 0


def reference(path, ids, temperature=1.0):
    """Log-probabilities that transformers gives to every token of `ids` after the first."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, -1)


def assert_sampled_by(path, prompt, tokens, logprobs, temperature=1.0, greedy=True):
    expected = reference(path, prompt + tokens, temperature)[len(prompt) - 1 :]
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert torch.allclose(chosen, torch.tensor(logprobs), atol=1e-4)
    if greedy:
        assert expected.argmax(-1).tolist() == tokens


@pytest.fixture(scope="module")
def other(tiny, tmp_path_factory):
    """A model directory with other weights, as a snapshot after some training would have."""
    directory = tmp_path_factory.mktemp("other")
    for file in tiny.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).symlink_to(file)
    generator = torch.Generator().manual_seed(5)
    weights = load_file(tiny / "model.safetensors")
    weights = {name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in weights.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def trainers_checksum(path):
    return checksum(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())


def test_it_tells_how_far_it_is(engine):
    assert "loading the model" in engine.stages or len(engine.stages) >= 1
    assert engine.process.alive and engine.process.url.startswith("http://127.0.0.1:")


def test_token_ids_and_processed_log_probabilities(opened):
    async def scenario():
        tokens, logprobs, _ = await opened.complete()
        assert_sampled_by(opened.path, PROMPT, tokens, logprobs)
        tokens, logprobs, _ = await opened.complete(temperature=0.5, seed=1)
        assert_sampled_by(opened.path, PROMPT, tokens, logprobs, temperature=0.5, greedy=False)
        before = (await opened.process.status())["tokens"]
        await opened.complete(temperature=1, seed=1, max_tokens=5)
        assert (await opened.process.status())["tokens"] == before + 5

    opened.run(scenario())


def test_chat_streams_ids_and_renders_them(opened):
    async def scenario():
        messages = [{"role": "user", "content": "say " + "a" * 48}]
        _, _, data = await opened.post({"messages": messages}, "/v1/chat/completions/render")
        assert json.loads(data)["token_ids"] == PROMPT
        body = {"messages": messages, "stream": True, "logprobs": True, "return_token_ids": True, "max_tokens": 8}
        status, headers, data = await opened.post(body | {"temperature": 0}, "/v1/chat/completions")
        assert (status, headers["X-Gyre-Engine"], headers["X-Gyre-Policy"]) == (200, "3", "0")
        chunks = [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]
        ids = [i for c in chunks for choice in c["choices"] for i in choice.get("token_ids") or []]
        assert chunks[0]["prompt_token_ids"] == PROMPT
        assert ids == (await opened.complete(max_tokens=8, ignore_eos=False))[0]
        recorded = [choice.get("logprobs") for c in chunks for choice in c["choices"]]
        assert sum(len(r["content"]) for r in recorded if r) == len(ids)

    opened.run(scenario())


def test_requests_of_another_epoch_and_foreign_paths_are_refused(opened):
    async def scenario():
        status, _, data = await opened.post({"prompt": PROMPT}, epoch=opened.epoch + 1)
        assert (status, json.loads(data)["error"]["type"]) == (409, "gyre_moved")
        for path in ("/sleep", "/pause", "/collective_rpc", "/inference/v1/generate", "/update_weights"):
            assert (await opened.post({}, path))[0] == 404
        async with aiohttp.ClientSession() as stranger:
            async with stranger.get(opened.process.url + "/health") as response:
                assert response.status == 200
            async with stranger.get(opened.process.url + "/v1/models") as response:
                assert response.status == 401

    opened.run(scenario())


def test_closing_cancels_inside_the_engine(engine):
    async def scenario():
        await engine.open()
        streams = [asyncio.ensure_future(engine.post({"prompt": PROMPT + [65 + n], **LONG})) for n in range(3)]
        while (await engine.process.status())["tokens"] < 15 + engine.tokens_before:  # all three have begun
            await asyncio.sleep(0.02)
        plain = asyncio.ensure_future(engine.post({"prompt": PROMPT, **LONG, "stream": False}))
        queued = [asyncio.ensure_future(engine.post({"prompt": PROMPT, **LONG})) for _ in range(3)]  # 4 slots
        while (await engine.process.status())["live"] < 7:
            assert not any(stream.done() for stream in streams)
            await asyncio.sleep(0.01)
        started = time.monotonic()
        assert await engine.process.close() == 0
        assert time.monotonic() - started < 10
        tokens = (await engine.process.status())["tokens"]
        for answer in await asyncio.gather(*streams):
            assert answer[2].endswith(b'event: gyre\ndata: {"moved": true}\n\n') and b"[DONE]" not in answer[2]
            assert b'"finish_reason":"abort"' not in answer[2]
        for answer in [await plain, *await asyncio.gather(*queued)]:
            assert answer[0] == 409 or answer[2].endswith(b'{"moved": true}\n\n')
        await asyncio.sleep(0.3)
        assert (await engine.process.status())["tokens"] == tokens
        await engine.open()
        _, _, _ = await engine.complete(max_tokens=2)  # a step, after which vLLM's own gauges are true
        async with engine.session.get(engine.process.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        gauges = [line for line in lines if line.startswith(names)]
        assert len(gauges) == 2 and all(float(line.split()[-1]) == 0 for line in gauges)
        assert await engine.process.close() == 0

    engine.tokens_before = engine.run(engine.process.status())["tokens"]
    engine.run(scenario())


def test_a_closed_execution_is_cut_off(opened):
    async def scenario():
        await opened.process.hold()
        mine = asyncio.ensure_future(opened.post({"prompt": PROMPT, **LONG}, execution=7))
        other = asyncio.ensure_future(opened.complete(max_tokens=60))
        while (await opened.process.status())["parked"] < 2:
            await asyncio.sleep(0.01)
        await opened.process.admit(0)  # both are live from the same moment
        await opened.process.closed([7])
        status, _, data = await mine
        assert status == 409 or b"event: gyre" in data
        status, _, data = await opened.post({"prompt": PROMPT}, execution=7)
        assert (status, json.loads(data)["error"]["type"]) == (409, "gyre_execution_closed")
        assert len((await other)[0]) == 60

    opened.run(scenario())


def test_a_held_gate_parks_requests_and_a_sync_changes_what_they_get(opened, other):
    async def scenario():
        assert await opened.process.hold() == 0
        parked = asyncio.ensure_future(opened.complete())
        while (await opened.process.status())["parked"] < 1:
            await asyncio.sleep(0.01)
        await opened.process.load(other, trainers_checksum(other), 1)
        assert not parked.done()
        await opened.process.admit(1)
        tokens, logprobs, _ = await parked
        assert_sampled_by(other, PROMPT, tokens, logprobs)  # with vLLM's tied output layer packed again
        assert (await opened.process.status())["policy"] == 1
        await opened.process.hold()
        result = await opened.process.load(opened.path / "model.safetensors", snapshot=2)
        assert (result["checksum"], result["snapshot"]) == (trainers_checksum(opened.path), 2)
        await opened.process.admit(2)
        tokens, logprobs, _ = await opened.complete()
        assert_sampled_by(opened.path, PROMPT, tokens, logprobs)

    opened.run(scenario())


def test_a_loaded_engine_keeps_nothing_of_the_snapshot(opened, other, tmp_path):
    """The slot that a snapshot lies in is recycled for a later one while the engine serves."""

    async def scenario():
        slot = tmp_path / "slot.safetensors"
        slot.write_bytes((opened.path / "model.safetensors").read_bytes())
        await opened.process.hold()
        await opened.process.load(slot, trainers_checksum(opened.path), 1)
        await opened.process.admit(1)
        before = await opened.complete()
        with open(slot, "r+b") as file:
            file.write((other / "model.safetensors").read_bytes())
        after = await opened.complete(PROMPT[:1] + PROMPT)  # nothing of it is cached
        assert_sampled_by(opened.path, PROMPT[:1] + PROMPT, after[0], after[1])
        assert_sampled_by(opened.path, PROMPT, before[0], before[1])

    opened.run(scenario())


def test_a_load_empties_the_prefix_cache(opened):
    async def scenario():
        prompt = PROMPT + PROMPT
        await opened.complete(prompt)
        _, _, usage = await opened.complete(prompt)
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 64
        await opened.process.hold()
        await opened.process.load(opened.path)
        await opened.process.admit(0)
        _, _, usage = await opened.complete(prompt)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0

    opened.run(scenario())


def test_sleep_releases_the_bytes_and_waking_brings_back_the_same_engine(engine):
    async def scenario():
        await engine.open()
        before = await engine.complete()
        await engine.process.close()
        awake = await engine.process.memory()
        assert awake["bytes"]["kv"] == 32 << 20
        assert awake["bytes"]["weights"] >= 119_232 * 4
        asleep = await engine.process.sleep()
        assert asleep["bytes"] == {"weights": 0, "kv": 0}
        with pytest.raises(ChildFailed, match="missing since it slept"):
            await engine.open()
        with pytest.raises(ChildFailed, match="wake it before a load"):
            await engine.process.load(engine.path)
        assert await engine.process.close() == 0  # also asleep
        assert 0 < (await engine.process.wake(["weights"]))["bytes"]["weights"] < awake["bytes"]["weights"]
        with pytest.raises(ChildFailed, match="contents"):
            await engine.open()
        result = await engine.process.load(engine.path, trainers_checksum(engine.path), 0)
        assert result["checksum"] == trainers_checksum(engine.path)
        assert (await engine.process.wake(["kv_cache"]))["bytes"] == awake["bytes"]
        await engine.open()
        after = await engine.complete()
        assert after[0] == before[0]
        assert torch.allclose(torch.tensor(after[1]), torch.tensor(before[1]), atol=1e-6)
        await engine.process.close()

    engine.run(scenario())


def test_an_altered_or_incomplete_snapshot_is_named_and_not_served(engine, other, tmp_path):
    async def scenario():
        announced = trainers_checksum(other)
        weights = load_file(other / "model.safetensors")
        name = "model.layers.1.mlp.down_proj.weight"
        altered = {**weights, name: weights[name].clone()}
        altered[name][3, 5] += 1e-3
        save_file(altered, tmp_path / "altered.safetensors")
        with pytest.raises(WeightsMismatch, match="snapshot 4 at .*altered"):
            await engine.process.load(tmp_path / "altered.safetensors", announced, 4)
        with pytest.raises(ChildFailed, match="contents"):
            await engine.open()
        save_file({n: t for n, t in weights.items() if n != name}, tmp_path / "short.safetensors")
        with pytest.raises((WeightsMismatch, ChildFailed)):
            await engine.process.load(tmp_path / "short.safetensors", announced, 5)
        with pytest.raises(WeightsMismatch, match="snapshot 6"):  # a sync that was dropped: old weights, new word
            await engine.process.load(engine.path, announced, 6)
        with pytest.raises(ChildFailed, match="no snapshot at"):
            await engine.process.load(tmp_path / "none.safetensors", announced, 7)
        await engine.process.load(engine.path, trainers_checksum(engine.path), 0)
        await engine.open()
        tokens, logprobs, _ = await engine.complete()
        assert_sampled_by(engine.path, PROMPT, tokens, logprobs)
        await engine.process.close()

    engine.run(scenario())


SUPERVISOR = """
import asyncio, json, sys
from pathlib import Path
from gyre.cell import engine_process
from gyre.cell.engine_client import EngineProcess, EngineSettings
async def main():
    settings = EngineSettings.decode(sys.argv[1])
    engine = await EngineProcess.start(settings, Path(sys.argv[2]))
    if settings.fork_server:
        await engine.ready(180)
    while not engine.pid:
        await asyncio.sleep(0.01)
    servers = [server.pid for server, _ in engine_process._servers]
    words = {"pid": engine.pid, "directory": str(engine._directory), "servers": servers, "url": engine.url}
    print(json.dumps(words), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def supervisor(path, log, fork_server=None):
    """A process that starts an engine, without the session's fork server: on its own, or with another."""
    command = [sys.executable, "-c", SUPERVISOR, settings(path, fork_server=fork_server).encode(), str(log)]
    env = {name: value for name, value in os.environ.items() if name != ZYGOTE_VARIABLE}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def family(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []


def gone(processes, seconds=5.0):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def test_an_engine_of_its_own_ends_with_its_supervisor_however_early(tiny, tmp_path):
    with supervisor(tiny, tmp_path / "engine.log") as parent:
        words = json.loads(parent.stdout.readline())
        time.sleep(1)  # in the middle of its imports
        processes = family(words["pid"])
        assert processes and not words["servers"]
        parent.kill()
        assert gone(processes), (tmp_path / "engine.log").read_text()[-2000:]
    assert not Path(words["directory"]).exists()


def test_a_forked_engine_outlives_its_fork_server_but_not_its_supervisor(tiny, tmp_path):
    with supervisor(tiny, tmp_path / "engine.log", f"test-{os.getpid()}") as parent:
        words = json.loads(parent.stdout.readline())
        processes = family(words["pid"])
        (server,) = words["servers"]
        assert len(processes) == 2 and processes[0].ppid() == server
        os.kill(server, signal.SIGKILL)
        time.sleep(0.2)
        with urllib.request.urlopen(words["url"] + "/health", timeout=5) as response:
            assert response.status == 200
        segments = engine_process.shared_segments(words["pid"])
        parent.kill()
        assert gone(processes), (tmp_path / "engine.log").read_text()[-2000:]
    assert not Path(words["directory"]).exists()
    assert not [path for path in segments if path.exists()]


def test_a_fork_server_ends_with_its_owner(tiny, tmp_path):
    program = "import sys; from gyre.cell.engine_process import start_server as start\n"
    program += "print(start(sys.argv[1], sys.argv[2]).pid, flush=True); sys.stdin.read()"
    address = f"@gyre-test-{os.getpid()}"
    command = [sys.executable, "-c", program, address, str(tmp_path / "log")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        servers = family(int(owner.stdout.readline()))
        assert servers
        with pytest.raises(OSError, match="in use"):
            listen(address)
        owner.kill()
        assert gone(servers)
    listen(address).close()  # its name is free again


def test_many_that_ask_for_a_fork_server_get_the_same_one(monkeypatch, tmp_path):
    async def scenario():
        program = "import socket, sys; socket.socket(fileno=int(sys.argv[3])).accept()[0].recv(1)"
        command = [sys.executable, "-c", program]
        popen = subprocess.Popen
        monkeypatch.setattr(subprocess, "Popen", lambda words, **options: popen(command + words[1:], **options))
        address, servers = f"@gyre-test-{os.getpid()}", len(engine_process._servers)
        asked = [engine_process._named_server(address, tmp_path / "log") for _ in range(5)]
        for connection in await asyncio.gather(*asked):
            assert peer_user(connection) == os.getuid()
            connection.close()
        ((server, _),) = engine_process._servers[servers:]
        server.kill()
        server.wait()

    asyncio.run(scenario())


def test_refused_settings_are_a_users_error(tiny, tmp_path, fork_server):
    async def scenario():
        bad = settings(tiny, args={"no-such-flag": 3})
        engine = await EngineProcess.start(bad, tmp_path / "engine.log")
        try:
            with pytest.raises(UserError, match="no-such-flag"):
                await engine.ready(180)
            assert await engine.wait() == 2
            assert not engine.alive
        finally:
            await engine.stop()

    asyncio.run(scenario())


def test_settings_that_a_fork_cannot_have_start_an_engine_of_its_own(tiny, tmp_path, fork_server, monkeypatch, caplog):
    async def own(environment, sock, output, program):
        raise OSError(f"started {program} with {environment['OMP_NUM_THREADS']} threads")

    async def scenario():
        engine = await EngineProcess.start(settings(tiny, env={"OMP_NUM_THREADS": "2"}), tmp_path / "engine.log")
        try:
            with pytest.raises(ChildFailed, match="started gyre.cell.engine with 2 threads"):
                await engine.ready(180)
            assert "the engine starts on its own" in caplog.text and not engine.alive
        finally:
            await engine.stop()

    monkeypatch.setattr(engine_process, "own", own)
    asyncio.run(scenario())


def test_an_engine_whose_core_died_ends_with_a_fault(tiny, tmp_path, fork_server):
    async def scenario():
        engine = await EngineProcess.start(settings(tiny), tmp_path / "engine.log")
        try:
            await engine.ready(180)
            (core,) = psutil.Process(engine.pid).children()
            core.kill()
            assert await asyncio.wait_for(engine.wait(), 30) == 1
            with pytest.raises(ChildFailed):
                await engine.status()
        finally:
            await engine.stop()

    asyncio.run(scenario())


@pytest.mark.full
def test_sharded_weights_have_the_same_checksum_and_leave_no_shared_memory(tiny, other, tmp_path):
    async def scenario():
        args = {"distributed-executor-backend": "mp", "tensor-parallel-size": 2, "kv-cache-memory-bytes": "32M"}
        engine = await EngineProcess.start(settings(tiny, args=args), tmp_path / "engine.log")
        try:
            await engine.ready(300)
            processes, segments = family(engine.pid), engine_process.shared_segments(engine.pid)
            assert len(processes) >= 4 and segments
            await engine.load(other, trainers_checksum(other), 1)
            assert (await engine.sleep())["bytes"] == {"weights": 0, "kv": 0}
            await engine.wake(["weights"])
            await engine.load(tiny, trainers_checksum(tiny), 2)
        finally:
            await engine.stop()
        assert gone(processes) and not [path for path in segments if path.exists()]

    asyncio.run(scenario())


def test_stopping_leaves_no_process_no_memory_and_no_socket(engine):
    processes = family(engine.process.pid)
    directory = engine.process._directory
    started = time.monotonic()
    engine.run(engine.process.stop())
    assert time.monotonic() - started < 5
    assert engine.run(engine.process.wait()) == 0
    assert gone(processes, 1) and not directory.exists()
    assert not engine.process.alive

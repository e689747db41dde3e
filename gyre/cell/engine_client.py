"""The supervisor's side of an engine: its settings, its process, and calls to its gate. Imports no engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from gyre.cell import engine_process
from gyre.child import kill_group
from gyre.errors import EXIT_USER, ChildFailed, UserError, WeightsMismatch

Message = dict[str, Any]

#: Seconds that an admin call may take unless its caller says otherwise.
CALL_SECONDS = 60.0
LOAD_SECONDS = 600.0

_LINE_LIMIT = 1 << 20
_PATH_LIMIT = 107  # bytes of a Unix socket's path
_SOCKET_NAME = 36  # bytes: vLLM's are UUIDs


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with.

    `model` is a directory; `max_context` and `slots` are in tokens and requests; `gpus` 0 runs on the CPU, more than
    one shards the model over them. `args` are further vLLM flags without their dashes, which win over Gyre's own.
    `scratch` is a node-local directory. `fork_server` is a name that this run's engines on a node have in common: on
    CPUs they are then forks of one process that has imported vLLM (also where GYRE_ZYGOTE has the address of one).
    `timed` is how fast an engine without a model is (`gyre.config.TimedEngineConfig`); None for vLLM. `scripted` is the
    file of the answers that it replays; None for a timed one. `kv` is how KV blocks are handed off:
    `transport`, `limit` in bytes, `timeout` in seconds; None where they are not.
    """

    model: str
    secret: str
    rank: int = 0
    served_name: str = "gyre"
    dtype: str = "bfloat16"
    max_context: int = 4096
    slots: int = 4
    gpus: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    seed: int = 0
    scratch: str | None = None
    fork_server: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    timed: dict[str, float] | None = None
    scripted: str | None = None
    kv: dict[str, Any] | None = None

    @property
    def program(self) -> str:
        """The module that is this engine."""
        if self.timed is None:
            return "gyre.cell.engine"
        return "gyre.cell.timed_engine" if self.scripted is None else "gyre.cell.scripted_engine"

    def encode(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, line: str | bytes) -> EngineSettings:
        """The settings of an encoded line."""
        return cls(**json.loads(line))


def environment(settings: EngineSettings) -> dict[str, str]:
    """Environment that an engine must be born with: threads and platform are fixed when its libraries load."""
    env = {
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_HOST_IP": "127.0.0.1",  # a cell's GPUs are on one node
        "VLLM_SERVER_DEV_MODE": "0",
    }
    return env | ({} if settings.gpus else engine_process.cpu_environment()) | settings.env


def _socket_directory(scratch: str | None) -> Path:
    """A directory for the engine's temporary files, whose path leaves room for the names of Unix sockets."""
    if scratch is not None and len(os.fsencode(scratch)) > _PATH_LIMIT - len("/gyre-engine-12345678/") - _SOCKET_NAME:
        scratch = "/tmp"
    return Path(tempfile.mkdtemp(prefix="gyre-engine-", dir=scratch))


class EngineProcess:
    """A running engine. Start it, wait until it is `ready`, and stop it always."""

    def __init__(self, settings: EngineSettings, log_path: Path) -> None:
        self.settings = settings
        self.log_path = log_path
        self.url = ""
        self.kv: str | None = None  # where it leaves KV blocks for other engines
        self._process: engine_process.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._session: aiohttp.ClientSession | None = None
        self._ready: asyncio.Future[None] | None = None
        self._on_progress: Callable[[str], None] = lambda what: None
        self._stage = "starting"
        self._directory: Path | None = None
        self._output = -1
        self._segments: set[Path] = set()  # shared memory, to be removed where the engine cannot do it itself

    @classmethod
    async def start(cls, settings: EngineSettings, log_path: Path) -> EngineProcess:
        """Start an engine, its output appended to `log_path`; returns at once (see `ready`)."""
        engine = cls(settings, log_path)
        engine._output = os.open(log_path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        engine._directory = _socket_directory(settings.scratch)
        engine._ready = asyncio.get_running_loop().create_future()
        engine._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {settings.secret}"}, timeout=aiohttp.ClientTimeout(total=None)
        )
        engine._reading = asyncio.create_task(engine._live(), name="read engine")
        return engine

    async def _live(self) -> None:
        """Start the process, and follow its own words until its end."""
        assert self._ready is not None
        ours, theirs = socket.socketpair()
        reader, self._writer = await asyncio.open_connection(sock=ours, limit=_LINE_LIMIT)
        directory = str(self._directory)
        mine = {"TMPDIR": directory, "VLLM_RPC_BASE_PATH": directory}
        env = {**os.environ, **environment(self.settings), **mine}
        try:
            with theirs:
                if not self.settings.gpus and self.settings.timed is None:
                    if engine_process.has_server(self.settings.fork_server):
                        self._tell("waiting for the fork server of this node")
                    server_log = self.log_path.with_name(f"zygote-{socket.gethostname()}.log")
                    self._process = await engine_process.forked(
                        env, theirs, self._output, self.settings.fork_server, server_log
                    )
                self._process = self._process or await engine_process.own(
                    env, theirs, self._output, self.settings.program
                )
            self._writer.write(self.settings.encode().encode() + b"\n")
            await self._read(reader)
            if not self._ready.done():
                self._ready.set_exception(await self._why())
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(ChildFailed(f"the engine could not be started: {error}"))
        finally:
            if not self._ready.done():
                self._ready.cancel()
            elif not self._ready.cancelled():
                self._ready.exception()  # seen, also where nobody waits

    async def _read(self, reader: asyncio.StreamReader) -> None:
        assert self._ready is not None
        with contextlib.suppress(ConnectionError, ValueError):
            while line := await reader.readline():
                event = json.loads(line)["event"]
                if event["type"] == "ready":
                    self.url, self.kv = event["url"], event.get("kv")
                    self._segments = await asyncio.to_thread(engine_process.shared_segments, self.pid)
                    if not self._ready.done():
                        self._ready.set_result(None)
                else:
                    self._tell(event["what"])

    def _tell(self, stage: str) -> None:
        self._stage = stage
        self._on_progress(stage)

    async def _why(self) -> Exception:
        """The exception for an engine that ended before it was ready."""
        code = await self.wait()
        if code == EXIT_USER:
            return UserError(f"the engine refused its settings: {self._last_line()}; see {self.log_path}")
        return ChildFailed(f"the engine ended with exit code {code} while {self._stage}: {self._last_line()}")

    def _last_line(self) -> str:
        with contextlib.suppress(OSError):
            lines = self.log_path.read_bytes()[-8192:].decode(errors="replace").strip().splitlines()
            return lines[-1] if lines else "it said nothing"
        return "it has no log"

    @property
    def pid(self) -> int:
        """Process id, which is also its group's; 0 before there is a process."""
        return self._process.pid if self._process is not None else 0

    @property
    def alive(self) -> bool:
        """Whether the process runs, or is about to."""
        if self._process is None:
            return self._ready is not None and not self._ready.done()
        return self._process.returncode is None

    async def ready(self, timeout: float, on_progress: Callable[[str], None] = lambda what: None) -> None:
        """Wait until the engine serves; its gate is closed then.

        Raises:
            UserError: it refuses its settings.
            ChildFailed: it ended, or took more than `timeout` seconds.
        """
        assert self._ready is not None
        self._on_progress = on_progress
        on_progress(self._stage)
        try:
            await asyncio.wait_for(asyncio.shield(self._ready), timeout)
        except TimeoutError as error:
            raise ChildFailed(f"the engine took more than {timeout:g} s, and is still {self._stage}") from error

    async def wait(self) -> int:
        """Wait for the process's end; returns its exit code."""
        while self._process is None and self._reading is not None and not self._reading.done():
            await asyncio.sleep(0.05)
        if self._process is None:
            raise ChildFailed("the engine was never started")
        return await self._process.wait()

    async def stop(self, grace: float = 5.0) -> None:
        """End the engine and its whole group: SIGTERM, and after `grace` seconds SIGKILL. May be called again."""
        if self._process is None and self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._process is not None:
            if self.alive and grace > 0:
                with contextlib.suppress(ProcessLookupError):
                    self._process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), grace)
            kill_group(self._process.pid)
            await self._process.wait()
            engine_process.remove_segments(self._segments)
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
        if self._session is not None:
            await self._session.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._output >= 0:
            os.close(self._output)
            self._output = -1

    # -- calls to the gate -------------------------------------------------------------------------------------------
    async def _call(self, method: str, name: str, timeout: float = CALL_SECONDS, /, **arguments: Any) -> Message:
        """One admin call.

        Raises:
            WeightsMismatch, UserError: as the gate says.
            ChildFailed: the engine is gone, refused, or did not answer in time.
        """
        if self._session is None or not self.url:
            raise ChildFailed(f"engine: {name}: it is not ready")
        data = json.dumps(arguments).encode() if method == "POST" else None
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.request(method, f"{self.url}/gyre/{name}", data=data, timeout=limit) as response:
                answer = await response.json()
        except TimeoutError as error:
            raise ChildFailed(f"engine: {name} took more than {timeout:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise ChildFailed(f"engine: {name}: {type(error).__name__}: {error}") from error
        if response.status == 200:
            return answer
        fault = answer["error"]
        kinds = {"gyre_weights_mismatch": WeightsMismatch, "gyre_user_error": UserError}
        if fault["type"] in kinds:
            raise kinds[fault["type"]](fault["message"])
        raise ChildFailed(f"engine: {name}: {fault['message']} ({fault['type']})")

    async def open(self, epoch: int, policy: int) -> Message:
        """Serve requests of `epoch`; the engine holds policy version `policy`."""
        return await self._call("POST", "open", epoch=epoch, policy=policy)

    async def hold(self, timeout: float = CALL_SECONDS) -> int:
        """Park new requests and cancel live ones; returns the number still live, which is 0."""
        return (await self._call("POST", "hold", timeout))["live"]

    async def admit(self, policy: int) -> Message:
        """Let parked requests in, under a policy version."""
        return await self._call("POST", "admit", policy=policy)

    async def close(self, timeout: float = CALL_SECONDS) -> int:
        """Refuse new requests and cancel live ones; returns the number still live, which is 0."""
        return (await self._call("POST", "close", timeout))["live"]

    async def closed(self, n: list[int]) -> None:
        """Refuse requests of these executions from now on, and cancel those that are live."""
        await self._call("POST", "closed", n=n)

    async def status(self) -> Message:
        """{state, epoch, policy, live, unfinished, parked, requests, tokens, busy_seconds}."""
        return await self._call("GET", "status")

    async def export(self, timeout: float = CALL_SECONDS) -> Message:
        """Copy out the KV blocks that other engines may want, after a `close`; returns {blocks, bytes, seconds}."""
        return await self._call("POST", "export", timeout)

    async def sleep(self) -> Message:
        """Release weights and KV memory."""
        return await self._call("POST", "sleep", LOAD_SECONDS)

    async def wake(self, tags: list[str]) -> Message:
        """Bring back the memory of ``weights`` or ``kv_cache``; weights then need a `load`."""
        return await self._call("POST", "wake", LOAD_SECONDS, tags=tags)

    async def load(
        self, path: str | Path, checksum: str | None = None, snapshot: int | None = None, timeout: float = LOAD_SECONDS
    ) -> Message:
        """Replace the weights by a snapshot's; returns {checksum, snapshot, seconds}.

        Raises:
            WeightsMismatch: the engine's parameters do not have `checksum` then; it will not open until a load fits.
        """
        return await self._call("POST", "load", timeout, path=str(path), checksum=checksum, snapshot=snapshot)

    async def memory(self) -> Message:
        """{bytes: {weights, kv}} in bytes, over all of the engine's workers; with handoffs also handoff."""
        return await self._call("GET", "memory")

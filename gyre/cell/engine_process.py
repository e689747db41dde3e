"""Processes of engines, as their supervisor sees them: started by itself, or forked for it (`gyre.cell.zygote`)."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from gyre.cell.zygote import PACKET, fixed
from gyre.errors import EXIT_FAULT

log = logging.getLogger(__name__)

#: Unix socket of a fork server that outlives runs (a test session's); it wins over a run's own.
ZYGOTE_VARIABLE = "GYRE_ZYGOTE"

_PATH_LIMIT = 100  # bytes that the system allows a Unix socket's path, roughly

# Fork servers that this process started, and their sockets: they end when these close, at the latest with it.
_servers: list[tuple[subprocess.Popen[bytes], socket.socket]] = []


class Process(Protocol):
    """What the client needs of a process, of the kind that asyncio's subprocesses have."""

    @property
    def pid(self) -> int:
        """Process id, which is also its group's."""

    @property
    def returncode(self) -> int | None:
        """Exit code, once it has ended."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    async def wait(self) -> int:
        """Wait for its end; returns the exit code."""


async def own(environment: dict[str, str], sock: socket.socket, output: int) -> Process:
    """Start an engine in a process of its own; `sock` is its end of a socket pair, `output` its log."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gyre.cell.engine",
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**environment, "GYRE_CHILD_FD": str(sock.fileno())},
        pass_fds=(sock.fileno(),),
        start_new_session=True,
    )


async def forked(environment: dict[str, str], sock: socket.socket, output: int, shared: Path | None) -> Process | None:
    """Have a fork server make an engine; None where there is none that could.

    The server is that of GYRE_ZYGOTE, else the one of `shared`, a directory that the run's ranks on this node have in
    common; whoever is first starts it there.
    """
    path = os.environ.get(ZYGOTE_VARIABLE)
    try:
        if path:
            server = await _connect(Path(path))
        elif shared is not None:
            server = await _shared_server(shared)
        else:
            return None
        return await _fork(server, environment, sock, output)
    except (OSError, ValueError) as error:
        log.warning("no fork server (%s: %s); the engine starts on its own", type(error).__name__, error)
        return None


async def _connect(path: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(server, str(path))
    except BaseException:
        server.close()
        raise
    return server


async def _shared_server(shared: Path) -> socket.socket:
    path = shared / "zygote.sock"
    if len(os.fsencode(path)) > _PATH_LIMIT:
        raise OSError(f"{path} is too long for a socket")
    while True:
        try:
            return await _connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            _start_if_first(shared, path)
            await asyncio.sleep(0.1)


def _start_if_first(shared: Path, path: Path) -> None:
    """Start the fork server unless another rank does; the server holds the lock as long as it lives."""
    with open(shared / "zygote.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return
        start_server(path, shared / "zygote.log", (lock.fileno(),))


def start_server(path: Path, log_path: Path, keep: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """Start a fork server at a Unix socket; it ends with this process, and inherits the descriptors `keep`."""
    ours, theirs = socket.socketpair()
    with theirs, open(log_path, "ab") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "gyre.cell.zygote", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **cpu_environment(), "GYRE_CHILD_FD": str(theirs.fileno())},
            pass_fds=(theirs.fileno(), *keep),
            start_new_session=True,
        )
    _servers.append((server, ours))
    return server


def cpu_environment() -> dict[str, str]:
    """What engines on CPUs, and so their fork server, must be born with."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # what lets the CPU build keep its worker in the engine's process
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",  # vLLM compiles one function of its sampler even when told to be eager: 17 s
    }


async def _fork(server: socket.socket, environment: dict[str, str], sock: socket.socket, output: int) -> Process:
    loop = asyncio.get_running_loop()
    try:
        greeting = json.loads(await loop.sock_recv(server, PACKET) or b"null")  # comes once it has imported
        if greeting is None:
            raise OSError("it ended")
        if greeting["environment"] != (mine := fixed(environment)):
            raise ValueError(f"it has {greeting['environment']}, but the engine needs {mine}")
        words = json.dumps({"environment": environment}).encode()
        socket.send_fds(server, [words], [sock.fileno(), output])
        answer = json.loads(await loop.sock_recv(server, PACKET) or b"null")
        if answer is None:
            raise OSError("it ended")
        return _Forked(answer["pid"], server)
    except BaseException:
        server.close()
        raise


class _Forked:
    """An engine that is another process's child: its end is seen on a pidfd, its exit code comes from the server."""

    def __init__(self, pid: int, server: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._pidfd: int | None = None
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)
        self._ending = asyncio.ensure_future(self._end())

    def terminate(self) -> None:
        if self._pidfd is not None and self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    async def wait(self) -> int:
        return await asyncio.shield(self._ending)

    async def _end(self) -> int:
        loop = asyncio.get_running_loop()
        code = EXIT_FAULT  # where the server is gone and nobody knows
        try:
            if data := await loop.sock_recv(self._server, PACKET):
                code = json.loads(data)["code"]
        except OSError:
            pass
        if self._pidfd is not None:
            ended = loop.create_future()
            loop.add_reader(self._pidfd, lambda: ended.done() or ended.set_result(None))
            try:
                await ended
            finally:
                loop.remove_reader(self._pidfd)
                os.close(self._pidfd)
                self._pidfd = None
        self._server.close()
        self.returncode = code
        return code

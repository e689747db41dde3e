"""Processes of engines, as their supervisor sees them: started by itself, or forked for it (`gyre.cell.zygote`)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Protocol

from gyre.cell.zygote import PACKET, fixed, listen, peer_user, system_address
from gyre.errors import EXIT_FAULT

log = logging.getLogger(__name__)

#: Address of a fork server that outlives runs (a test session's); it wins over a run's own.
ZYGOTE_VARIABLE = "GYRE_ZYGOTE"

# Fork servers that this process started, and their sockets: they end when these close, at the latest with it.
_servers: list[tuple[subprocess.Popen[bytes], socket.socket]] = []


#: Shared memory that vLLM and its libraries make and, when they are killed, leave behind.
_SEGMENTS = ("psm_", "vllm", "nccl-", "torch_", "sem.")


def shared_segments(pid: int) -> set[Path]:
    """Shared-memory segments that a process and its descendants have mapped, of the kinds that an engine makes."""
    import psutil

    found: set[Path] = set()
    try:
        family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return found
    for member in family:
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{member}/maps").read_text().splitlines()
            names = {line.rpartition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line}
            found |= {Path("/dev/shm", name) for name in names if name.startswith(_SEGMENTS) and "/" not in name}
    return found


def remove_segments(segments: set[Path]) -> None:
    """Remove segments that are still there."""
    for path in segments:
        path.unlink(missing_ok=True)


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


async def own(environment: dict[str, str], sock: socket.socket, output: int, program: str) -> Process:
    """Start an engine's module in a process of its own; `sock` is its end of a socket pair, `output` its log."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        program,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env={**environment, "GYRE_CHILD_FD": str(sock.fileno())},
        pass_fds=(sock.fileno(),),
        start_new_session=True,
    )


def has_server(name: str | None) -> bool:
    """Whether `forked` would ask one."""
    return bool(name or os.environ.get(ZYGOTE_VARIABLE))


async def forked(
    environment: dict[str, str], sock: socket.socket, output: int, name: str | None, log_path: Path
) -> Process | None:
    """Have a fork server make an engine; None where there is none that could.

    The server is that of GYRE_ZYGOTE, else the one called `name` on this node, which whoever asks first starts, with
    its output in `log_path`.
    """
    address = os.environ.get(ZYGOTE_VARIABLE)
    try:
        if address:
            return await _fork(await _connect(address), environment, sock, output)
        if name:
            return await _fork(await _named_server(f"@gyre-{os.getuid()}-{name}", log_path), environment, sock, output)
    except (OSError, ValueError) as error:
        log.warning("no fork server (%s: %s); the engine starts on its own", type(error).__name__, error)
    return None


async def _connect(address: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(server, system_address(address))
        if peer_user(server) != os.getuid():  # it would be told this run's secrets
            raise OSError(f"{address} belongs to another user")
    except BaseException:
        server.close()
        raise
    return server


async def _named_server(address: str, log_path: Path) -> socket.socket:
    """Connect to a server, and start it if it is not there: its name is taken by one only."""
    try:
        return await _connect(address)
    except ConnectionRefusedError:
        with contextlib.suppress(OSError):
            start_server(address, log_path)
        return await _connect(address)


def start_server(address: str, log_path: Path) -> subprocess.Popen[bytes]:
    """Start a fork server at a path or a ``@name``; it ends with this process.

    Raises:
        OSError: another server is there.
    """
    ours, theirs = socket.socketpair()
    with theirs, listen(address) as listener, open(log_path, "ab") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "gyre.cell.zygote", str(listener.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **cpu_environment(), "GYRE_CHILD_FD": str(theirs.fileno())},
            pass_fds=(theirs.fileno(), listener.fileno()),
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

"""Children of a supervisor: JSON lines over a socket pair, and a lifetime tied to the parent's.

The parent calls operations and gets one reply each; the child may emit events at any time. Whatever computes (trainer,
feeder, proxy) is such a child, so that its supervisor always answers, can time it out and can restart it. When either
side dies the other notices at once: the socket closes, and the kernel kills a child whose parent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gyre.errors import ChildFailed, UserError

log = logging.getLogger(__name__)

_FD_VARIABLE = "GYRE_CHILD_FD"
_PR_SET_PDEATHSIG = 1
_LINE_LIMIT = 64 << 20

Message = dict[str, Any]


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends. To be called early in a child."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os._exit(1)


def kill_group(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a whole process group; it may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)


class Child:
    """The parent's end of a running child."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, log_path: Path, on_event: Callable[[Message], None]
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._process = process
        self._on_event = on_event
        self._pending: dict[int, asyncio.Future[Message]] = {}
        self._next = 0
        self._reader_task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    @classmethod
    async def spawn(
        cls,
        name: str,
        command: list[str],
        log_path: Path,
        on_event: Callable[[Message], None] = lambda message: None,
        env: dict[str, str] | None = None,
    ) -> Child:
        """Start a process in its own group with its output appended to `log_path`, in this environment and `env`."""
        ours, theirs = socket.socketpair()
        with open(log_path, "ab") as output, theirs:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(env or {}), _FD_VARIABLE: str(theirs.fileno())},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        return await cls.adopt(name, process, ours, log_path, on_event)

    @classmethod
    async def adopt(
        cls,
        name: str,
        process: asyncio.subprocess.Process,
        ours: socket.socket,
        log_path: Path,
        on_event: Callable[[Message], None] = lambda message: None,
    ) -> Child:
        """The parent's end of a process that was started otherwise; `ours` is this end of its socket pair."""
        child = cls(name, process, log_path, on_event)
        reader, child._writer = await asyncio.open_connection(sock=ours, limit=_LINE_LIMIT)
        child._reader_task = asyncio.create_task(child._read(reader), name=f"read {name}")
        return child

    @property
    def pid(self) -> int:
        """Process id, which is also its group's."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.returncode is None

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                message = json.loads(line)
                if "event" in message:
                    self._on_event(message["event"])
                elif (future := self._pending.pop(message["id"], None)) and not future.done():
                    future.set_result(message)
        except (ConnectionError, ValueError) as error:
            log.warning("%s: %s", self.name, error)
        finally:
            for future in self._pending.values():
                if not future.done():
                    future.set_exception(ChildFailed(f"the {self.name} ended; see {self.log_path}"))
            self._pending.clear()

    async def call(self, operation: str, timeout: float | None = None, **arguments: Any) -> Message:
        """Have the child do something; returns what it answers.

        Raises:
            ChildFailed: the child is gone, refused, or did not answer within `timeout` seconds.
            UserError: the child says that the input is at fault.
        """
        if self._writer is None or self._reader_task is None or self._reader_task.done():
            raise ChildFailed(f"the {self.name} is gone; see {self.log_path}")
        self._next += 1
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending[self._next] = future
        message = {"id": self._next, "operation": operation, "arguments": arguments}
        self._writer.write(json.dumps(message).encode() + b"\n")
        try:
            reply = await asyncio.wait_for(future, timeout)
        except TimeoutError as error:
            raise ChildFailed(f"{self.name}: {operation} took more than {timeout:g} s") from error
        if "user_error" in reply:
            raise UserError(reply["user_error"])
        if "error" in reply:
            raise ChildFailed(f"{self.name}: {operation}: {reply['error']}")
        return reply["result"]

    async def wait(self) -> int:
        """Wait for the process's end; returns its exit code."""
        return await self._process.wait()

    async def stop(self, grace: float = 5.0) -> None:
        """End the child and its whole group: first the closed socket, then SIGTERM, after `grace` seconds SIGKILL."""
        if self._writer is not None:
            self._writer.close()
        if self.alive:
            kill_group(self.pid, signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace)
        kill_group(self.pid)
        with contextlib.suppress(TimeoutError):  # one that the kernel cannot end now must not hold up the rest
            await asyncio.wait_for(self._process.wait(), grace)
        if self._reader_task is not None:
            self._reader_task.cancel()
            await asyncio.gather(self._reader_task, return_exceptions=True)


def _failure(error: BaseException) -> Message:
    if isinstance(error, UserError):
        return {"user_error": str(error)}
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}"}


class Endpoint:
    """The child's end, for a child whose main thread does the work (a trainer). `emit` may be called by any thread."""

    def __init__(self) -> None:
        die_with_parent()
        self._socket = socket.socket(fileno=int(os.environ.pop(_FD_VARIABLE)))
        self._lines = self._socket.makefile("rb")
        self._lock = threading.Lock()

    def _send(self, message: Message) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            self._socket.sendall(data)

    def emit(self, event: Message) -> None:
        """Tell the parent something it did not ask for."""
        self._send({"event": event})

    def serve(self, operations: dict[str, Callable[..., Message | None]]) -> None:
        """Answer calls, one after the other, until the parent closes."""
        while line := self._lines.readline():
            message = json.loads(line)
            try:
                answer = {"result": operations[message["operation"]](**message["arguments"]) or {}}
            except Exception as error:  # every fault of an operation is the caller's to judge
                answer = _failure(error)
            self._send({"id": message["id"], **answer})


class AsyncEndpoint:
    """The child's end, for an asyncio child (feeder, proxy); calls are answered concurrently."""

    def __init__(self) -> None:
        die_with_parent()
        self._socket = socket.socket(fileno=int(os.environ.pop(_FD_VARIABLE)))
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def emit(self, event: Message) -> None:
        """Tell the parent something it did not ask for."""
        self._send({"event": event})

    def _send(self, message: Message) -> None:
        if self._writer is not None:
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def serve(self, operations: dict[str, Callable[..., Awaitable[Message | None]]]) -> None:
        """Answer calls until the parent closes."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=_LINE_LIMIT)
        while line := await reader.readline():
            task = asyncio.create_task(self._answer(json.loads(line), operations))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, message: Message, operations: dict[str, Callable[..., Awaitable[Message | None]]]) -> None:
        try:
            answer = {"result": await operations[message["operation"]](**message["arguments"]) or {}}
        except Exception as error:  # every fault of an operation is the caller's to judge
            answer = _failure(error)
        self._send({"id": message["id"], **answer})

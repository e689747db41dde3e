"""A fork server for engines on CPUs: it imports vLLM once, and each engine is a fork of it.

Nearly all of an engine's start is imports, so several engines of one node start in the time of one, and share its
pages. A fork is as much its supervisor's own as a process it starts itself: the supervisor passes its end of a socket
pair and its log over a Unix socket, and the engine ends when that pair closes. The fork server belongs to one
supervisor and ends with it; engines that are running then go on.

A conversation on the Unix socket: the server says {"environment": ...}, the client sends {"environment": ...} with the
two descriptors, the server answers {"pid": n} and, when the engine has ended, {"code": n}. Other users get no word.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any

from gyre.child import die_with_parent
from gyre.errors import EXIT_FAULT, EXIT_OK

log = logging.getLogger("gyre.zygote")

#: A message is one packet; environments stay far below it.
PACKET = 1 << 18

#: What is fixed when the libraries are loaded; a client whose own differ cannot use a fork.
FIXED = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "VLLM_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE", "LD_PRELOAD")


def fixed(environment: dict[str, str]) -> dict[str, str]:
    """The part of an environment that a fork cannot change any more, and which Python it runs."""
    return {name: environment.get(name, "") for name in FIXED} | {"python": sys.executable}


def listen(address: str) -> socket.socket:
    """A socket for a fork server: at a path, or under a name of the system (``@name``), which no file stands for.

    Raises:
        OSError: another server is there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    previous = os.umask(0o177)
    try:
        listener.bind(system_address(address))
        listener.listen(64)
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(previous)
    return listener


def system_address(address: str) -> str:
    """An address as the system writes it."""
    return "\0" + address[1:] if address.startswith("@") else address


def bound_path(listener: socket.socket) -> Path | None:
    """The file of a listening socket, if it has one."""
    name = listener.getsockname()
    return Path(name) if isinstance(name, str) and name else None


def peer_user(connected: socket.socket) -> int:
    """The user at the other side."""
    size = struct.calcsize("3i")
    return struct.unpack("3i", connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]


class _Engine:
    """A forked engine and the client that asked for it."""

    def __init__(self, pid: int, client: socket.socket) -> None:
        self.pid = pid
        self.client = client


class Zygote:
    """Serves forks; single-threaded, because a fork takes only the thread that makes it."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._engines: dict[int, _Engine] = {}
        self._waiting: set[socket.socket] = set()
        self._stopped = False

    def serve(self, parent: socket.socket | None) -> None:
        """Fork engines until `parent` closes or SIGTERM comes."""
        woken, wake = socket.socketpair()
        for end in (woken, wake):
            end.setblocking(False)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        self._selector.register(woken, selectors.EVENT_READ, lambda: self._reap(woken))
        self._selector.register(self._listener, selectors.EVENT_READ, self._greet)
        if parent is not None:
            self._selector.register(parent, selectors.EVENT_READ, self._stop)
        while not self._stopped:
            for key, _ in self._selector.select():
                key.data()
        if name := bound_path(self._listener):
            name.unlink(missing_ok=True)

    def _stop(self, *_: Any) -> None:
        self._stopped = True

    def _greet(self) -> None:
        client, _ = self._listener.accept()
        if peer_user(client) != os.getuid():
            client.close()
            return
        self._waiting.add(client)
        with contextlib.suppress(OSError):
            client.send(json.dumps({"environment": fixed(dict(os.environ))}).encode())
        self._selector.register(client, selectors.EVENT_READ, lambda: self._hear(client))

    def _hear(self, client: socket.socket) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(client, PACKET, 2)
        except OSError:
            data, descriptors = b"", []
        if client not in self._waiting or len(descriptors) != 2:  # its end, or nonsense
            self._selector.unregister(client)
            self._waiting.discard(client)
            if all(engine.client is not client for engine in self._engines.values()):
                client.close()
            for descriptor in descriptors:
                os.close(descriptor)
            return
        self._waiting.discard(client)
        environment = json.loads(data)["environment"]
        pid = os.fork()
        if pid == 0:
            self._become_engine(environment, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._engines[pid] = _Engine(pid, client)
        with contextlib.suppress(OSError):
            client.send(json.dumps({"pid": pid}).encode())

    def _reap(self, woken: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            woken.recv(4096)
        for pid in list(self._engines):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                client = self._engines.pop(pid).client
                with contextlib.suppress(OSError):
                    client.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
                with contextlib.suppress(KeyError, ValueError):
                    self._selector.unregister(client)
                client.close()

    def _become_engine(self, environment: dict[str, str], sock: int, output: int) -> None:
        """Run an engine in this fork; does not return."""
        code = EXIT_FAULT
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(output, 1)
            os.dup2(output, 2)
            own = os.dup(sock)  # the others, of the server and of its other clients, must not live on here
            os.dup2(own, 3)
            os.closerange(4, os.sysconf("SC_OPEN_MAX"))
            os.environ.clear()
            os.environ.update(environment)
            tempfile.tempdir = None
            from gyre.cell.engine import start

            code = start(socket.socket(fileno=3))
        except BaseException:
            traceback.print_exc()
        finally:
            from gyre.cell.engine import leave

            leave(code)


def load() -> None:
    """Import whatever an engine will, and set it apart from garbage collection, so that forks go on sharing it."""
    import importlib

    from gyre.cell.engine import load_libraries

    load_libraries()
    for name in (
        "vllm.v1.worker.cpu_model_runner",
        "vllm.v1.executor.uniproc_executor",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.model_executor.models.llama",
        "vllm.model_executor.models.qwen3",
        "gyre.cell.engine_worker_cpu",
        "gyre.cell.engine_control",
        "gyre.cell.gate",
        "uvicorn.protocols.http.httptools_impl",
        "psutil",
    ):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def main() -> int:
    """`python -m gyre.cell.zygote ADDRESS`, or the descriptor of a listening socket: import, then serve."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    descriptor = os.environ.pop("GYRE_CHILD_FD", None)
    parent = None
    if descriptor is not None:
        die_with_parent()
        parent = socket.socket(fileno=int(descriptor))
        parent.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # has it gone before the line above?
            parent.recv(1)
            return EXIT_FAULT
    place = sys.argv[1]
    zygote = Zygote(socket.socket(fileno=int(place)) if place.isdigit() else listen(place))
    log.info("importing vLLM")
    load()
    log.info("ready, with %d thread(s)", threading.active_count())
    zygote.serve(parent)
    return EXIT_OK


if __name__ == "__main__":
    from gyre.cell.engine import leave

    leave(main())

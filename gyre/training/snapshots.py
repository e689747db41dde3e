"""Snapshots of the weights: pulled by whoever needs one (`gyre.training.pulling`), and served to other hosts from here.

The server is a child of rank 0, `python -m gyre.training.snapshots`, so the core computes on while it sends. A slot is
read under its shared lock only while a range of it is sent, and a reader that does not take what is sent loses the
connection, so that no slot is held for ever. A slot that was recycled in between is not found by its next request.

    GET /snapshot/<snapshot>/<generation>      Authorization: Bearer <secret>      Range: bytes=<first>-<last>
    GET /lend/<snapshot>/<generation>          to be read over NIXL (`gyre.training.nixl_transport`)
    206 or 200; 401 without the secret, 404 where no slot has it (any more), 416 where it has no such bytes
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import os
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gyre.child import Endpoint
from gyre.errors import WeightsMismatch
from gyre.shared_memory import SHARED, shared_prefix
from gyre.training import nixl_transport
from gyre.training.nixl_transport import Lender
from gyre.training.pulling import Pulled, Source, pull, reach
from gyre.training.slots import Announcement
from gyre.training.snapshot_file import metadata_of, read_header
from gyre.training.transports import time_value

__all__ = ["Announcement", "Pulled", "Server", "Source", "pull", "reach"]

_STALL_SECONDS = 30.0
_LEG = 64 << 20  # bytes that a reader must take within _STALL_SECONDS
_CALL = 4 << 20
_LOAN_SECONDS = 120.0
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})")


class Server:
    """Serves the slots of one attempt over HTTP, one thread per reader; `stall` seconds without progress end one."""

    def __init__(self, prefix: str, secret: str, address: str, port: int = 0, stall: float = _STALL_SECONDS) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = stall  # also of a request that does not come to its end, and between two

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, *_: Any) -> None:
                """Keep quiet: a line per pull is nobody's interest."""

        self._prefix = prefix
        self._lender = Lender()
        self._authorization = f"Bearer {secret}".encode()
        self._stall = stall
        self._server = ThreadingHTTPServer((address, port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{address}:{self._server.server_port}"

    def serve(self) -> None:
        """Serve until the process ends."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        given = request.headers.get("Authorization", "").encode()
        if not hmac.compare_digest(given, self._authorization):
            return request.send_error(401)
        _, kind, *wanted = request.path.split("/")
        wanted_range = _RANGE.fullmatch(request.headers.get("Range", ""))
        if kind == "lend" and not nixl_transport.installed():
            return request.send_error(501, "NIXL is not installed at the core")
        if kind not in ("snapshot", "lend") or len(wanted) != 2 or (descriptor := self._open(wanted)) is None:
            return request.send_error(404)
        try:
            if kind == "lend":
                return self._lend(request, descriptor)
            size = os.fstat(descriptor).st_size
            first, last = map(int, wanted_range.groups()) if wanted_range else (0, -1)
            if not first <= last < size:
                return request.send_error(416)
            request.send_response(206)
            request.send_header("Content-Length", str(last + 1 - first))
            request.send_header("Content-Range", f"bytes {first}-{last}/{size}")
            request.end_headers()
            request.wfile.flush()
            self._send(request.connection, descriptor, first, last + 1)
        except OSError:
            request.close_connection = True  # the reader left, or does not read
        finally:
            os.close(descriptor)

    def _lend(self, request: BaseHTTPRequestHandler, descriptor: int) -> None:
        """Lend a slot, whose lock is held, until the reader closes the connection or time is over."""
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        body = json.dumps(self._lender.lend(path)).encode()
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)
        request.close_connection = True
        request.connection.settimeout(_LOAN_SECONDS)
        request.connection.recv(1)

    def _send(self, connection: socket.socket, descriptor: int, begin: int, end: int) -> None:
        """Send part of a file, from the page cache to the socket.

        Raises:
            OSError: the reader is gone or too slow.
        """
        connection.settimeout(None)  # the kernel waits, and not this thread after every little piece
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, time_value(self._stall))
        due, leg = time.monotonic() + self._stall, begin + _LEG
        while begin < end:
            begin += os.sendfile(connection.fileno(), descriptor, begin, min(_CALL, end - begin))
            if begin >= leg:
                due, leg = time.monotonic() + self._stall, begin + _LEG
            elif time.monotonic() > due:
                raise TimeoutError("the reader is too slow")
        connection.settimeout(self._stall)

    def _open(self, wanted: list[str]) -> int | None:
        """The slot with this snapshot and generation, under a shared lock; one that is being written is another."""
        for path in SHARED.glob(self._prefix + "slot*"):
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    metadata = metadata_of(read_header(descriptor))
                    if [metadata["snapshot"], metadata["generation"]] == wanted:
                        return descriptor
                except (BlockingIOError, WeightsMismatch):
                    pass
                os.close(descriptor)
        return None


def main() -> None:
    """The weight server, a child of rank 0: start(run_dir, attempt, secret, address, port=0) -> {"url"}."""
    endpoint = Endpoint()

    def start(run_dir: str, attempt: int, secret: str, address: str, port: int = 0) -> dict[str, Any]:
        server = Server(shared_prefix(run_dir, attempt), secret, address, port)
        threading.Thread(target=server.serve, daemon=True).start()
        return {"url": server.url}

    endpoint.serve({"start": start})


if __name__ == "__main__":
    main()

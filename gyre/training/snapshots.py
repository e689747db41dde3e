"""Snapshots of the weights: pulled by whoever needs one, and served to other hosts.

Readers on the core's host map the slot itself (`gyre.training.slots`), under a shared lock that is their lease; the
core computes on meanwhile. Readers on other hosts get a copy over HTTP from `python -m gyre.training.snapshots`, a
child of rank 0 that sends slots with sendfile. Either way the reader checks the snapshot's identity, and its checksum
here or after loading.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import mmap
import os
import tempfile
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from gyre.checksum import checksum as checksum_of
from gyre.child import Endpoint
from gyre.errors import WeightsMismatch
from gyre.store import Store
from gyre.training.slots import SHARED, Announcement, mapped, read_header, remove_shared, shared_prefix

__all__ = ["Announcement", "Pulled", "Server", "pull", "remove_shared", "shared_prefix"]

_CHUNK = 8 << 20


# -- pulling -----------------------------------------------------------------------------------------------------------
class Pulled:
    """A snapshot that can be read, at `path` or here, until `close`: the slot under a lease, or a copy without a name.

    A copy is gone when nobody has it open any more, so whatever dies leaves nothing behind.
    """

    def __init__(self, announcement: Announcement, path: Path, descriptor: int, copied: bool) -> None:
        self.snapshot = announcement.snapshot
        self.checksum = announcement.checksum
        self.path = path
        self.copied = copied
        self._descriptor = descriptor

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The named tensors, mapped; they must not outlive `close`."""
        return mapped(self._descriptor, False)

    def close(self) -> None:
        """Give the lease back, or remove the copy."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Pulled:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pull(
    store: Store,
    snapshot: int,
    scratch: Path | str | None,
    secret: str,
    address: str,
    timeout: float = 120.0,
    verify: bool = False,
) -> Pulled:
    """Get a snapshot: a lease on the slot where the core is on this host (`address`), else a copy over HTTP.

    The copy lies in shared memory, or in `scratch` where that has no room. With `verify` the checksum is computed
    here; without, it is the caller's business to compare it after loading.

    Raises:
        WeightsMismatch: it was not announced in time, has been recycled, or is not what was announced.
    """
    word = store.wait(f"snapshot/{snapshot}", timeout)
    if word is None:
        raise WeightsMismatch(f"snapshot {snapshot} was not announced within {timeout:g} s")
    announcement = Announcement(**json.loads(word))
    pulled = _lease(announcement) if announcement.node == address else None
    if pulled is None:
        pulled = _fetch(announcement, scratch, secret, timeout)
    try:
        if verify and (found := checksum_of(pulled.tensors())) != announcement.checksum:
            raise WeightsMismatch(f"snapshot {snapshot}: checksum {found}, announced {announcement.checksum}")
    except BaseException:
        pulled.close()
        raise
    return pulled


def _identify(descriptor: int, announcement: Announcement) -> None:
    found = read_header(descriptor)[0]["__metadata__"]
    for key in ("snapshot", "generation", "checksum"):
        if found.get(key) != str(getattr(announcement, key)):
            raise WeightsMismatch(f"snapshot {announcement.snapshot} is gone: its slot has {key} {found.get(key)}")


def _lease(announcement: Announcement) -> Pulled | None:
    """The slot itself; None where this process does not see it (a container with a /dev/shm of its own)."""
    path = Path(announcement.path)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _identify(descriptor, announcement)
    except BaseException:
        os.close(descriptor)
        raise
    return Pulled(announcement, path, descriptor, copied=False)


def _nameless(size: int, scratch: Path | str | None) -> int:
    """A file without a name, in shared memory or, where that has no room, in `scratch`; returns its descriptor."""
    status = os.statvfs(SHARED)
    room = scratch is None or status.f_bavail * status.f_frsize > 2 * size
    with tempfile.TemporaryFile(dir=SHARED if room else scratch) as file:
        descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    os.posix_fallocate(descriptor, 0, size)
    return descriptor


def _fetch(announcement: Announcement, scratch: Path | str | None, secret: str, timeout: float) -> Pulled:
    descriptor = _nameless(announcement.bytes, scratch)
    try:
        try:
            _download(announcement, descriptor, secret, timeout)
        except (OSError, http.client.HTTPException) as error:
            raise WeightsMismatch(f"snapshot {announcement.snapshot} from {announcement.url}: {error}") from error
        _identify(descriptor, announcement)
    except BaseException:
        os.close(descriptor)
        raise
    path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")  # good for other processes of this user too
    return Pulled(announcement, path, descriptor, copied=True)


def _download(announcement: Announcement, descriptor: int, secret: str, timeout: float) -> None:
    url = urllib.parse.urlsplit(announcement.url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=timeout)
    try:
        headers = {"Authorization": f"Bearer {secret}"}
        connection.request("GET", f"/snapshot/{announcement.snapshot}/{announcement.generation}", headers=headers)
        response = connection.getresponse()
        if response.status != 200:
            raise http.client.HTTPException(f"{response.status} {response.reason}")
        with mmap.mmap(descriptor, announcement.bytes) as memory, memoryview(memory) as view:
            position = 0
            while position < announcement.bytes:
                got = response.readinto(view[position : position + _CHUNK])
                if not got:
                    raise http.client.IncompleteRead(b"", announcement.bytes - position)
                position += got
    finally:
        connection.close()


# -- serving -----------------------------------------------------------------------------------------------------------
class Server:
    """Serves the slots of one attempt over HTTP, one thread per reader."""

    def __init__(self, prefix: str, secret: str, address: str, port: int = 0) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, *_: Any) -> None:
                """Keep quiet: a line per pull is nobody's interest."""

        self._prefix = prefix
        self._authorization = f"Bearer {secret}"
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
        if request.headers.get("Authorization") != self._authorization:
            request.send_error(401)
            return
        _, kind, *rest = request.path.split("/")
        descriptor = self._open(rest) if kind == "snapshot" and len(rest) == 2 else None
        if descriptor is None:
            request.send_error(404)
            return
        try:
            size = os.fstat(descriptor).st_size
            request.send_response(200)
            request.send_header("Content-Length", str(size))
            request.end_headers()
            request.wfile.flush()
            position = 0
            while position < size:
                position += os.sendfile(request.connection.fileno(), descriptor, position, size - position)
        except OSError:
            request.close_connection = True  # the reader left
        finally:
            os.close(descriptor)

    def _open(self, wanted: list[str]) -> int | None:
        """The slot with this snapshot and generation, under a shared lock."""
        for path in SHARED.glob(self._prefix + "slot*"):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                metadata = read_header(descriptor)[0]["__metadata__"]
                if [metadata["snapshot"], metadata["generation"]] == wanted:
                    return descriptor
            except WeightsMismatch:
                pass
            os.close(descriptor)
        return None


def main() -> None:
    """The weight server, a child of rank 0: start(run_dir, attempt, secret, address, port=0) -> {"url"}."""
    import threading

    endpoint = Endpoint()

    def start(run_dir: str, attempt: int, secret: str, address: str, port: int = 0) -> dict[str, Any]:
        server = Server(shared_prefix(run_dir, attempt), secret, address, port)
        threading.Thread(target=server.serve, daemon=True).start()
        return {"url": server.url}

    endpoint.serve({"start": start})


if __name__ == "__main__":
    main()

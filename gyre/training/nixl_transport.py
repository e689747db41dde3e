"""Snapshots over NIXL, which reads another host's memory by RDMA, where both hosts have it (`pip install nixl`).

The weight server registers a slot and lends it: it holds the slot's lock for as long as the reader's connection stays
open, so the kernel ends the loan of a reader that dies. The reader reads into memory of its own that is registered
once, and copies from there; nobody at the core's host computes anything for it.

    GET /lend/<snapshot>/<generation>      200, {"agent": base64, "address": ..., "bytes": ...}; lent until the end
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import http.client
import importlib.util
import json
import mmap
import os
import threading
import time
import urllib.parse
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gyre.errors import UserError, WeightsMismatch
from gyre.training.slots import Announcement

_STAGE = 32 << 20  # bytes that are read at once
_POLL_SECONDS = 0.0002


def installed() -> bool:
    """Whether NIXL can be used by this process."""
    return importlib.util.find_spec("nixl") is not None


def worth_it(devices: Path = Path("/sys/class/infiniband")) -> bool:
    """Whether this host has NIXL and a device for it: without one the bare socket is faster."""
    return installed() and devices.is_dir() and any(devices.iterdir())


def _agent() -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(f"gyre-{uuid.uuid4().hex}", nixl_agent_config(backends=["UCX"]))


def _address(memory: Any) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Lender:
    """The server's side: slots that are registered, each for as long as its file is the same."""

    def __init__(self) -> None:
        self._agent: Any = None
        self._registered: dict[str, tuple[tuple[int, int], mmap.mmap, Any]] = {}
        self._lock = threading.Lock()

    def lend(self, path: Path) -> dict[str, Any]:
        """What a reader needs to read a slot, whose lock is held for it."""
        with self._lock:
            self._agent = self._agent or _agent()
            found = os.stat(path)
            file = (found.st_ino, found.st_size)
            known = self._registered.get(path.name)
            if known is None or known[0] != file:
                if known is not None:
                    self._agent.deregister_memory(known[2])
                with open(path, "r+b") as slot:  # a device that may read memory wants it writable
                    memory = mmap.mmap(slot.fileno(), 0)
                place = [(_address(memory), len(memory), 0, path.name)]
                self._registered[path.name] = known = (file, memory, self._agent.register_memory(place, "DRAM"))
            agent = base64.b64encode(self._agent.get_agent_metadata()).decode()
            return {"agent": agent, "address": _address(known[1]), "bytes": file[1]}


class Nixl:
    """The reader's side (`gyre.training.transports.Transport`)."""

    threads = False
    piece = 4 << 20

    def __init__(self, announcement: Announcement, secret: str, timeout: float) -> None:
        if not installed():
            raise UserError("network.weights is nixl, which is not installed here; install it, or take auto or socket")
        url = urllib.parse.urlsplit(announcement.url)
        self._name = f"snapshot {announcement.snapshot} from {announcement.url} over NIXL"
        self._timeout = timeout
        self._until = 0
        self._window = range(0)  # bytes of the snapshot that are in the stage
        self._agent: Any = None
        self._loan = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=timeout)
        try:
            path = f"/lend/{announcement.snapshot}/{announcement.generation}"
            self._loan.request("GET", path, headers={"Authorization": f"Bearer {secret}"})
            answer = self._loan.getresponse()
            if answer.status != 200:
                raise WeightsMismatch(f"{self._name}: {answer.status} {answer.reason}")
            lent = json.loads(answer.read())
            self._connect(lent)
        except BaseException as error:
            self.close()
            if isinstance(error, WeightsMismatch) or not isinstance(error, Exception):
                raise
            raise WeightsMismatch(f"{self._name}: {error}") from error  # also NIXL's own kinds, one for each code

    def _connect(self, lent: dict[str, Any]) -> None:
        self._remote, self._bytes = lent["address"], lent["bytes"]
        self._stage = mmap.mmap(-1, min(_STAGE, self._bytes))
        self._agent = _agent()
        self._registered = self._agent.register_memory([(_address(self._stage), len(self._stage), 0, "")], "DRAM")
        self._other = self._agent.add_remote_agent(base64.b64decode(lent["agent"]))

    def expect(self, begin: int, end: int) -> None:
        """Remember how far to read ahead."""
        self._until = end

    def read(self, offset: int, into: Sequence[memoryview]) -> None:
        """Copy what is there, or read more."""
        with memoryview(self._stage) as stage:
            for view in into:
                while view:
                    if offset not in self._window:
                        self._fetch(offset, max(self._until, offset + len(view)))
                    at = offset - self._window.start
                    part = stage[at : at + min(len(view), self._window.stop - offset)]
                    view[: len(part)] = part
                    offset, view = offset + len(part), view[len(part) :]

    def _fetch(self, begin: int, end: int) -> None:
        size = min(end, self._bytes) - begin
        if size <= 0:
            raise WeightsMismatch(f"{self._name}: the slot ends too early")
        size, self._window = min(size, len(self._stage)), range(0)
        agent, handle = self._agent, None
        try:
            own = agent.get_xfer_descs([(_address(self._stage), size, 0)], "DRAM")
            other = agent.get_xfer_descs([(self._remote + begin, size, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", own, other, self._other)
            deadline = time.monotonic() + self._timeout
            state = agent.transfer(handle)
            while state == "PROC" and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                state = agent.check_xfer_state(handle)
        except Exception as error:
            raise WeightsMismatch(f"{self._name}: {error}, at byte {begin}") from error
        finally:
            if handle is not None:
                with contextlib.suppress(Exception):
                    agent.release_xfer_handle(handle)
        if state != "DONE":
            raise WeightsMismatch(f"{self._name}: {state} after {self._timeout:g} s, at byte {begin}")
        self._window = range(begin, begin + size)

    def close(self) -> None:
        """End the loan."""
        self._loan.close()
        if self._agent is not None:
            with contextlib.suppress(Exception):
                self._agent.remove_remote_agent(self._other)
                self._agent.deregister_memory(self._registered)
            self._agent = None

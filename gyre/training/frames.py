"""Words between the lead of a cell and its other workers: a JSON object and raw bytes in one frame, over a socket."""

from __future__ import annotations

import json
import select
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct("!IQ")  # of the object and of the bytes


class Frames:
    """One end of a connected stream socket; for one thread."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, head: dict[str, Any], body: bytes = b"") -> None:
        """Send a frame; blocks while the other end is full.

        Raises:
            OSError: the other end is gone.
        """
        text = json.dumps(head).encode()
        self._socket.sendall(_LENGTHS.pack(len(text), len(body)) + text)
        if body:
            self._socket.sendall(body)

    def receive(self) -> tuple[dict[str, Any], bytes] | None:
        """Wait for the next frame; None where the other end is closed."""
        lengths = self._exactly(_LENGTHS.size)
        if lengths is None:
            return None
        text, body = (self._exactly(size) for size in _LENGTHS.unpack(lengths))
        return None if text is None or body is None else (json.loads(text), bytes(body))

    def ready(self, timeout: float = 0.0) -> bool:
        """Whether a frame (or the end) is there, or begins to come, within so many seconds."""
        return bool(select.select([self._socket], [], [], timeout)[0])

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _exactly(self, size: int) -> bytearray | None:
        data = bytearray(size)
        view, have = memoryview(data), 0
        while have < size:
            try:
                got = self._socket.recv_into(view[have:])
            except ConnectionError:
                return None
            if not got:
                return None
            have += got
        return data

"""What one harness may ask of a proxy that it shares with others. Pure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from gyre.proxy.dialects.errors import ApiError

MAX_BODY = 32 << 20  # bytes of one request
MAX_LINE = 16 << 10  # bytes of a request's first line, and of one header
MAX_HEADERS = 100
MAX_CONNECTIONS = 8192
HEADER_SECONDS = 30.0  # for the first request's headers
IDLE_SECONDS = 75.0  # between requests on a connection, the next one's headers included
BODY_SECONDS = 60.0  # for a body
LINGER_SECONDS = 2.0  # for a client that still sends to take a refusal, before the connection is closed
STALL_SECONDS = 120.0  # in which a client that is answered takes nothing at all
WRITE_BUFFER = 256 << 10  # bytes of answers that wait in the kernel for a client

REQUESTS_OF_EXECUTION = 1024
REQUESTS = 8192
BYTES_OF_EXECUTION = 64 << 20  # bodies of its requests under way, with what they unpack or refer to
BYTES = 512 << 20  # the same of all executions


class Room:
    """How many requests are under way, of each execution and in all, and how large they are."""

    def __init__(self) -> None:
        self.requests = 0
        self.bytes = 0

    @contextlib.contextmanager
    def enter(self, own: Room) -> Iterator[None]:
        """Take a request in; `own` is its execution's. Raises ApiError where there is no room."""
        if own.requests >= REQUESTS_OF_EXECUTION:
            raise ApiError(429, f"this execution has {own.requests} requests under way", code="rate_limit_exceeded")
        if self.requests >= REQUESTS:
            raise ApiError(429, "the proxy has too many requests under way", code="rate_limit_exceeded")
        self.requests += 1
        own.requests += 1
        try:
            yield
        finally:
            self.requests -= 1
            own.requests -= 1

    @contextlib.contextmanager
    def hold(self, own: Room) -> Iterator[Callable[[int], None]]:
        """Keep a body while it comes and is answered: what is given is to be told of every piece of it, in bytes.

        `own` is its execution's. It raises ApiError where the body is too large, or there is no room for it.
        """
        held = 0

        def grow(size: int) -> None:
            nonlocal held
            if held + size > MAX_BODY:
                message = f"the body, with what it unpacks or refers to, is larger than {MAX_BODY} bytes"
                raise ApiError(413, message, code="request_too_large")
            if own.bytes + size > BYTES_OF_EXECUTION:
                message = f"this execution's requests under way are larger than {BYTES_OF_EXECUTION} bytes"
                raise ApiError(429, message, code="rate_limit_exceeded")
            if self.bytes + size > BYTES:
                raise ApiError(429, "the bodies of the requests under way are too large", code="rate_limit_exceeded")
            held += size
            own.bytes += size
            self.bytes += size

        try:
            yield grow
        finally:
            own.bytes -= held
            self.bytes -= held

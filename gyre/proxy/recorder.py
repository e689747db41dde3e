"""Records of model calls: what was in the prompt, what was sampled, how likely, by which policy version.

One file per try, appended to once per call, so that a crash of the host keeps what was written; a last frame that a
crash left unfinished is ignored when reading. A frame is

    header length, payload length, CRC-32 of both   three little-endian uint32
    header                                          JSON: everything that is not an array
    payload                                         prompt tail int32[], sampled int32[], log-probabilities float32[]

A conversation repeats its history in every prompt, so a prompt is stored as the number of tokens it shares with the
sequence (prompt and answer) of one of the calls before it, and the tail after them. Which call that is, whoever writes
has to know (`gyre.proxy.history`): a recorder holds nothing of what it wrote.

A call that cannot be written whole (a full disk) leaves nothing behind; where even that fails, so does `close`, and the
try with it.
"""

from __future__ import annotations

import errno
import json
import os
import struct
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gyre.proxy.encoding import encode
from gyre.splice import from_little, little

_FRAME = struct.Struct("<III")


@dataclass
class Span:
    """Tokens of one answer that one engine sampled under one policy version."""

    engine: int
    epoch: int
    policy: int
    tokens: int = 0


@dataclass
class CallRecord:
    """One model call of an execution. Token ids are int32, log-probabilities (as processed by sampling) float32."""

    prompt: array[int]
    sampled: array[int]
    logprobs: array[float]
    spans: list[Span]
    sampling: dict[str, Any]  # temperature and whatever else the request said about sampling
    trainable: bool  # sampled from the full distribution, temperature applied, and answered to the client
    masked: str = ""  # why it is not trainable
    finish_reason: str | None = None
    started: float = 0.0  # unix seconds
    seconds: float = 0.0
    first_token_seconds: float = 0.0
    held_seconds: float = 0.0
    legs: int = 1  # engine requests it took
    spliced: bool = False  # its prompt begins with recorded ids of an earlier call, prompt and answer
    drift: int = 0  # ids of the prompt that encoding the messages anew would have given otherwise
    rendered: tuple[int, str] = (0, "")  # length and digest of what the messages were rendered to

    def versions(self) -> Iterator[int]:
        """The policy version of each sampled token."""
        for span in self.spans:
            for _ in range(span.tokens):
                yield span.policy


_ARRAYS = ("prompt", "sampled", "logprobs")
_PLAIN = [f.name for f in fields(CallRecord) if f.name not in (*_ARRAYS, "spans")]


class Recorder:
    """Appends the calls of one try to its file."""

    def __init__(self, path: Path | str) -> None:
        self._file = open(path, "wb", buffering=0)
        self._calls = 0
        self._end = 0  # of the last whole frame
        self._torn = False  # there is half a frame after it

    def append(self, record: CallRecord, base: int = -1, shared: int = 0) -> int:
        """Write one call and return its number; it survives this process now, and a power cut once `close` returns.

        Its prompt begins with the first `shared` ids of prompt and answer of call number `base`.

        Raises:
            OSError: it could not be written, and is not in the file.
        """
        if self._torn:
            raise OSError(errno.EIO, "an earlier call is half written")
        header = {name: getattr(record, name) for name in _PLAIN} | {"spans": [vars(span) for span in record.spans]}
        header |= {"base": base if shared else -1, "shared": shared}
        header |= {"tail": len(record.prompt) - shared, "count": len(record.sampled)}
        head = encode(header)
        payload = little(record.prompt[shared:]) + little(record.sampled) + little(record.logprobs)
        frame = _FRAME.pack(len(head), len(payload), zlib.crc32(payload, zlib.crc32(head)))
        self._write(frame + head + payload)
        self._calls += 1
        return self._calls - 1

    def _write(self, frame: bytes) -> None:
        left = memoryview(frame)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError:
            try:
                self._file.seek(self._end)
                self._file.truncate()
            except OSError:
                self._torn = True
            raise
        self._end += len(frame)

    def close(self, durable: bool = True) -> None:
        """Flush to the disk and close; doing it twice is harmless.

        Raises:
            OSError: the records are not on the disk, or end in half of one.
        """
        if self._file.closed:
            return
        with self._file:
            if durable:
                os.fsync(self._file.fileno())
        if self._torn:
            raise OSError(errno.EIO, "the records end in a call that is half written")


def _frames(data: bytes) -> Iterator[tuple[dict[str, Any], bytes]]:
    at = 0
    while at + _FRAME.size <= len(data):
        head_length, payload_length, checksum = _FRAME.unpack_from(data, at)
        start = at + _FRAME.size
        middle, end = start + head_length, start + head_length + payload_length
        if end > len(data) or zlib.crc32(data[start:end]) != checksum:
            return
        yield json.loads(data[start:middle]), data[middle:end]
        at = end


def read_records(path: Path | str, calls: int | None = None) -> list[CallRecord]:
    """The calls of one try, oldest first; none where there is no file.

    Raises:
        ValueError: they are not as many as `calls`, which a closed execution's outcome names.
    """
    records = _read(Path(path))
    if calls is not None and len(records) != calls:
        raise ValueError(f"{path} has {len(records)} whole calls where {calls} were recorded")
    return records


def _read(path: Path) -> list[CallRecord]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    names = {f.name for f in fields(CallRecord)}
    records: list[CallRecord] = []
    for header, payload in _frames(data):
        tail, count = header["tail"], header["count"]
        prompt = from_little("i", payload[: 4 * tail])
        if header["base"] >= 0:
            earlier = records[header["base"]]
            prompt = (earlier.prompt + earlier.sampled)[: header["shared"]] + prompt
        known = {key: value for key, value in header.items() if key in names} | {
            "spans": [Span(**span) for span in header["spans"]],
            "rendered": tuple(header["rendered"]),
        }
        sampled = from_little("i", payload[4 * tail : 4 * (tail + count)])
        logprobs = from_little("f", payload[4 * (tail + count) : 4 * (tail + 2 * count)])
        records.append(CallRecord(prompt=prompt, sampled=sampled, logprobs=logprobs, **known))
    return records
